"""Which tokens survive top-k and top-p, without sorting and without the host?

A row's survivors are all logits above a threshold, and the first few (lower ids) of those that equal it. The threshold
is found by cutting the range of all floats into 16 again and again: eight rounds leave one. Counts (top-k) and weights
(top-p) are summed over chunks of a fixed length in a fixed order, so a row's bits do not depend on the batch.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_gumbel import ordered

CHUNK_TOKENS = 4096
"""Of a row's vocabulary, per program."""
BLOCK_TOKENS = 1024
_ROUNDS = 8
_CUTS = 16
LOWEST = tl.constexpr(-(1 << 31))
_LOWEST = -(1 << 31)
ALL = 1 << 40


@dataclass(frozen=True, slots=True)
class Survivors:
    """Per row: the threshold as `ordered` numbers it, how many equal to it survive, and equals per chunk."""

    threshold: Tensor
    """[rows] int64."""
    quota: Tensor
    """[rows] int64."""
    equals: Tensor
    """[rows, chunks] int64."""

    @classmethod
    def everything(cls, rows: int, chunks: int, device: torch.device) -> Self:
        """Nothing is cut off."""
        return cls(
            torch.full((rows,), _LOWEST, dtype=torch.int64, device=device),
            torch.full((rows,), ALL, dtype=torch.int64, device=device),
            torch.zeros(rows, chunks, dtype=torch.int64, device=device),
        )


def survivors(logits: Tensor, tops: Tensor, asked: Tensor, *, top_k: bool, top_p: bool) -> Survivors:
    """logits: [rows, vocab] fp32.  tops: [rows] fp32, each row's largest.  asked: as gpu_sampler's.

    top_k, top_p: whether any row asks for it.
    """
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK_TOKENS)
    found = Survivors.everything(rows, chunks, logits.device)
    if top_k:
        found = _stage(logits, tops, asked, found, mass=False)
    if top_p:
        found = _stage(logits, tops, asked, found, mass=True)
    return found


def _stage(logits: Tensor, tops: Tensor, asked: Tensor, before: Survivors, *, mass: bool) -> Survivors:
    """Narrow what survived before."""
    rows, chunks = before.equals.shape
    vocabulary, device = logits.shape[1], logits.device

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    after = Survivors(integers(rows), integers(rows), integers(rows, chunks))
    above = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    bounds = integers(_ROUNDS, rows, 3)
    cuts = torch.empty(_ROUNDS, rows, chunks, _CUTS, dtype=torch.float64, device=device)
    common = {"MASS": mass, "CHUNK": CHUNK_TOKENS, "BLOCK": BLOCK_TOKENS}
    size = {"CHUNKS": chunks, "CHUNKS_BLOCK": triton.next_power_of_2(chunks)}
    grid = (rows, chunks)
    if mass:
        _above_kernel[grid](logits, tops, asked, before.threshold, above, before.equals, vocabulary, **common)
    _open_kernel[(rows,)](
        tops, asked, before.threshold, before.quota, above, bounds[0], vocabulary, rows, MASS=mass, **size, num_warps=1
    )
    for turn in range(_ROUNDS):
        last = max(turn - 1, 0)
        _cut_kernel[grid](
            logits, tops, asked, bounds[last], cuts[last], bounds[turn], cuts[turn], vocabulary,
            FIRST=turn == 0, CUTS=_CUTS, **common, **size,
        )  # fmt: skip
    _settle_kernel[(rows,)](bounds[-1], cuts[-1], after.threshold, CUTS=_CUTS, **size, num_warps=1)
    _above_kernel[grid](logits, tops, asked, after.threshold, above, after.equals, vocabulary, **common)
    _quota_kernel[(rows,)](
        tops, asked, bounds[-1], before.threshold, before.quota, after.threshold, above, after.quota,
        MASS=mass, **size, num_warps=1,
    )  # fmt: skip
    return after


@triton.jit
def _temperature(asked: tl.tensor, row: tl.tensor) -> tl.tensor:
    temperature = tl.load(asked + row).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _above_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    asked: tl.tensor,
    thresholds: tl.tensor,
    above: tl.tensor,
    equals: tl.tensor,
    vocabulary: tl.tensor,
    MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Per chunk: the sum over logits above the threshold, and how many equal it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    threshold = tl.load(thresholds + row)
    top = tl.load(tops + row)
    temperature = _temperature(asked, row)
    total = tl.full([BLOCK], 0.0, tl.float64)
    same = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, CHUNK, BLOCK):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
        key = ordered(x)
        inside = token < vocabulary
        value = tl.full([BLOCK], 1.0, tl.float32)
        if MASS:
            value = tl.exp((x - top) / temperature)
        total += tl.where(inside & (key > threshold), value, 0.0).to(tl.float64)
        same += (inside & (key == threshold)).to(tl.int64)
    chunks = tl.num_programs(1)
    tl.store(above + row * chunks + chunk, tl.sum(total, 0))
    tl.store(equals + row * chunks + chunk, tl.sum(same, 0))


@triton.jit
def _open_kernel(
    tops: tl.tensor,
    asked: tl.tensor,
    thresholds: tl.tensor,
    quotas: tl.tensor,
    above: tl.tensor,
    bounds: tl.tensor,
    vocabulary: tl.tensor,
    rows: tl.tensor,
    MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    """Where the threshold can lie, and what must be reached (bits of fp64; 0 if nothing is asked for)."""
    row = tl.program_id(0)
    before = tl.load(thresholds + row)
    highest = ordered(tl.load(tops + row))
    if MASS:
        chunk = tl.arange(0, CHUNKS_BLOCK)
        total = tl.sum(tl.load(above + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)
        top_p = tl.load(asked + rows + row).to(tl.float64, bitcast=True)
        each = tl.exp((_unordered(before) - tl.load(tops + row)) / _temperature(asked, row)).to(tl.float64)
        total += tl.where(before > LOWEST, tl.load(quotas + row).to(tl.float64) * each, 0.0)
        asks = top_p < 1.0
        needed = top_p * total
    else:
        top_k = tl.load(asked + 4 * rows + row)
        asks = (top_k > 0) & (top_k < vocabulary)
        needed = top_k.to(tl.float64)
    tl.store(bounds + row * 3, before)
    tl.store(bounds + row * 3 + 1, tl.where(asks, tl.maximum(highest, before), before))
    tl.store(bounds + row * 3 + 2, tl.where(asks, needed, 0.0).to(tl.int64, bitcast=True))


@triton.jit
def _unordered(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(
    bounds: tl.tensor,
    cuts: tl.tensor,
    row: tl.tensor,
    CUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the threshold still can lie once a round is counted."""
    low = tl.load(bounds + row * 3)
    high = tl.load(bounds + row * 3 + 1)
    needed = tl.load(bounds + row * 3 + 2).to(tl.float64, bitcast=True)
    chunk = tl.arange(0, CHUNKS_BLOCK)[:, None]
    cut = tl.arange(0, CUTS)
    inside = (chunk < CHUNKS) & (low < high)
    sums = tl.sum(tl.load(cuts + (row * CHUNKS + chunk) * CUTS + cut[None, :], mask=inside, other=0.0), 0)
    limit = low + ((high - low) * (cut + 1).to(tl.int64) + CUTS - 1) // CUTS
    is_reached = (sums >= needed) | (limit == low)
    lowest = tl.max(tl.where(is_reached, limit, low), 0)
    highest = tl.min(tl.where(is_reached, high, limit - 1), 0)
    return lowest, tl.maximum(highest, lowest)


@triton.jit
def _cut_kernel(
    logits: tl.tensor,
    tops: tl.tensor,
    asked: tl.tensor,
    last_bounds: tl.tensor,
    last_cuts: tl.tensor,
    bounds: tl.tensor,
    cuts: tl.tensor,
    vocabulary: tl.tensor,
    FIRST: tl.constexpr,
    CUTS: tl.constexpr,
    MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    """Per chunk: the sums over logits of at least each of CUTS thresholds."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if FIRST:
        low = tl.load(bounds + row * 3)
        high = tl.load(bounds + row * 3 + 1)
    else:
        low, high = _narrowed(last_bounds, last_cuts, row, CUTS, CHUNKS, CHUNKS_BLOCK)
        if chunk == 0:
            tl.store(bounds + row * 3, low)
            tl.store(bounds + row * 3 + 1, high)
            tl.store(bounds + row * 3 + 2, tl.load(last_bounds + row * 3 + 2))
    if low < high:
        cut = tl.arange(0, CUTS)
        limit = low + ((high - low) * (cut + 1).to(tl.int64) + CUTS - 1) // CUTS
        top = tl.load(tops + row)
        temperature = _temperature(asked, row)
        total = tl.full([CUTS], 0.0, tl.float64)
        for start in range(0, CHUNK, BLOCK):
            token = chunk * CHUNK + start + tl.arange(0, BLOCK)
            x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            key = tl.where(token < vocabulary, ordered(x), LOWEST).to(tl.int32)
            value = tl.full([BLOCK], 1.0, tl.float32)
            if MASS:
                value = tl.exp((x - top) / temperature)
            counted = tl.where(key[:, None] >= limit.to(tl.int32)[None, :], value[:, None], 0.0)
            total += tl.sum(counted, 0).to(tl.float64)
        tl.store(cuts + (row * CHUNKS + chunk) * CUTS + cut, total)


@triton.jit
def _settle_kernel(
    bounds: tl.tensor,
    cuts: tl.tensor,
    threshold: tl.tensor,
    CUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    low, _ = _narrowed(bounds, cuts, row, CUTS, CHUNKS, CHUNKS_BLOCK)
    tl.store(threshold + row, low)


@triton.jit
def _quota_kernel(
    tops: tl.tensor,
    asked: tl.tensor,
    bounds: tl.tensor,
    before: tl.tensor,
    before_quota: tl.tensor,
    thresholds: tl.tensor,
    above: tl.tensor,
    quota: tl.tensor,
    MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    """How many logits equal to the threshold are still needed."""
    row = tl.program_id(0)
    needed = tl.load(bounds + row * 3 + 2).to(tl.float64, bitcast=True)
    threshold = tl.load(thresholds + row)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    missing = needed - tl.sum(tl.load(above + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)
    if MASS:
        each = tl.exp((_unordered(threshold) - tl.load(tops + row)) / _temperature(asked, row)).to(tl.float64)
        missing = missing / tl.maximum(each, 1e-30)
    count = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)).to(tl.int64), 1)
    earlier = tl.load(before_quota + row)
    count = tl.where(threshold == tl.load(before + row), tl.minimum(count, earlier), count)
    # A row that asks for nothing keeps what it had.
    tl.store(quota + row, tl.where(needed == 0.0, earlier, count))

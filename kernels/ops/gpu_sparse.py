"""How does one GPU program attend for one token: its window, its chosen entries, a sink for every head?

Queries come as their projection made them and leave as the grouped output's products want them: turning to the
position, attention over records as they lie in the cache, turning back and rounding to fp8 are one pass. Elements 2i
and 2i+1 of a head are a rotary pair and, in fp4, one byte; so even and odd elements are separate matrices throughout.

One token is one program with a fixed order of keys, so its bits depend neither on the batch nor on the cut of a prompt.
Varlen: any number of tokens per sequence, drafts too; a padding row's slot is -1, it reads nothing and becomes zeros.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_sparse_hopper
from kernels.ops.gpu_bring import shared_by
from kernels.ops.gpu_formats import (
    IN_PYTHON,
    bf16,
    bf16_pairs,
    dot,
    e2m1_pairs,
    e4m3_pairs,
    e4m3_value,
    fp8_exponent,
    fp8_value,
    high_bf16,
    low_bf16,
    power,
)
from kernels.ops.gpu_fp8 import SpanRows, span_rows
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_launch import check, is_hopper, multiprocessors, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_records import Section
from kernels.ops.quant import MainFp4, WindowFp8, fp8_round_trip
from kernels.ops.rope import rotate_last
from kernels.ops.sparse import attend as attend_twin

SUMS_ASK = False
"""Whether Hopper's warps that sum ask for entries' records, and not those that unpack: if a measurement shows it."""
LEAST_HEADS = 16
"""Rows of the smallest matrix product."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a program goes over its keys, frozen by measurement (docs/performance_v41.md)."""

    keys: int
    """Per product."""
    warps: int
    stages: int


CUT = Cut(keys=32, warps=8, stages=1)
HOPPER = Cut(keys=gpu_sparse_hopper.KEYS, warps=gpu_sparse_hopper.WARPS, stages=1)
"""Of the kernel in Gluon."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Where each token's window keys are: those of the step in a buffer of their own, older ones in the ring.

    All [tokens] int64.
    """

    positions: Tensor
    lowest: Tensor
    """The oldest position that is seen: position - window + 1, or later after bounded replay."""
    begins: Tensor
    """Position of the first token of the sequence in this step, and its row in the step's records."""
    starts: Tensor
    slots: Tensor
    """Window slot; -1 for a padding row."""
    window_tokens: int
    ring_tokens: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """The compressed entries of each token."""

    where: Tensor
    """[tokens, most] int32: block * entries_per_block + place, then -1."""
    counts: Tensor
    """[tokens] int32: of entries that are not -1."""
    main: Section
    entries_per_block: int


def attend(
    queries: Tensor, cos: Tensor, sin: Tensor, own: Tensor, ring: Section, windows: Windows, chosen: Chosen | None,
    sinks: Tensor, *, scale: float,
) -> Tensor:  # fmt: skip
    """Turn queries, attend, turn back and round to fp8: [tokens, heads, size] bf16 -> like it.

    cos, sin: [tokens, pairs] fp32.  own: [step's tokens, record bytes] uint8, window records.  sinks: [heads] fp32.
    """
    _check(queries, own, ring)
    if not runs_kernels(queries):
        return _twin(queries, cos, sin, own, ring, windows, chosen, sinks, scale=scale)
    out = torch.empty_like(queries)
    _launch(queries, (cos, sin), own, ring, windows, chosen, sinks, scale, out, None, 0, None)
    return out


def attend_groups(
    queries: Tensor, cos: Tensor, sin: Tensor, own: Tensor, ring: Section, windows: Windows, chosen: Chosen | None,
    sinks: Tensor, groups: Groups, *, scale: float, span: int, brings: Tensor | None = None,
) -> SpanRows:  # fmt: skip
    """The same, restated for the products of groups of heads: [groups * tokens, a group's heads * size] e4m3.

    groups: of the rows of [tokens, groups], one group after the other.  span: columns under one scale.  brings: bytes
    that the next kernel reads (`gpu_bring.wanted`), asked for by the last programs that run at once, behind their keys.
    """
    tokens, heads, size = queries.shape
    per_group = heads // len(groups.ends)
    fits = span == gpu_sparse_hopper.SPAN and runs_kernels(queries) and _fits_hopper(queries, windows.window_tokens)
    if not fits:
        made = attend(queries, cos, sin, own, ring, windows, chosen, sinks, scale=scale)
        return span_rows(made.view(-1, per_group * size), groups.sources, span=span)
    _check(queries, own, ring)
    rows = tokens * len(groups.ends)
    out = torch.empty(rows, per_group * size, dtype=torch.uint8, device=queries.device)
    scales = torch.empty(per_group * size // span, rows, dtype=torch.float32, device=queries.device)
    restated = out.view(torch.int16), scales, per_group, brings
    _launch(queries, (cos, sin), own, ring, windows, chosen, sinks, scale, *restated)
    return SpanRows(out.view(torch.float8_e4m3fn), scales)


def _check(queries: Tensor, own: Tensor, ring: Section) -> None:
    size = queries.shape[2]
    check(queries.dtype == torch.bfloat16 and queries.is_contiguous(), "queries are bf16, end to end")
    check(size % 64 == 0 and power_of_two(size) == size, "a head's size is a power of two, 64 at least")
    check(own.is_contiguous() and own.shape[1] == ring.record_bytes, "the step's records are the ring's")


def _launch(
    queries: Tensor,
    turn: tuple[Tensor, Tensor],
    own: Tensor,
    ring: Section,
    windows: Windows,
    chosen: Chosen | None,
    sinks: Tensor,
    scale: float,
    out: Tensor,
    spans: Tensor | None,
    per_group: int,
    brings: Tensor | None,
) -> None:
    """spans, per_group, brings: of Hopper's kernel alone."""
    heads, size = queries.shape[1:]
    main = ring if chosen is None else chosen.main
    where, counts = (windows.slots, windows.slots) if chosen is None else (chosen.where, chosen.counts)
    # By the model's shape alone: one kernel for decode and prefill and any number of rows, so bits stay a token's own.
    by_hopper = _fits_hopper(queries, windows.window_tokens)
    kernel, cut = (gpu_sparse_hopper.attend_kernel, HOPPER) if by_hopper else (_attend_kernel, CUT)
    # Older keys than the window's are hidden by `lowest`: whole turns look back a little further.
    reach = tiles(windows.window_tokens, cut.keys) * cut.keys if by_hopper else windows.window_tokens
    more, named = _more(queries, spans, per_group, brings, chosen, reach) if by_hopper else ((), {})
    kernel[(len(queries),)](
        queries.view(torch.int32),
        *turn,
        own,
        ring.pool,
        windows.positions,
        windows.lowest,
        windows.begins,
        windows.starts,
        windows.slots,
        where,
        counts,
        main.pool,
        sinks,
        out if per_group else out.view(torch.int32),
        scale,
        ring.pool.shape[1],
        ring.offset,
        main.pool.shape[1],
        main.offset,
        *more,
        HEADS=heads,
        ROWS=max(power_of_two(heads), LEAST_HEADS),
        SIZE=size,
        PAIRS=turn[0].shape[1],
        WINDOW=reach,
        RING=windows.ring_tokens,
        WINDOW_RECORD=ring.record_bytes,
        MOST=0 if chosen is None else where.shape[1],
        PER_BLOCK=1 if chosen is None else chosen.entries_per_block,
        MAIN_RECORD=main.record_bytes,
        KEYS=cut.keys,
        **named,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def _more(
    queries: Tensor, spans: Tensor | None, per_group: int, brings: Tensor | None, chosen: Chosen | None, reach: int
) -> tuple[tuple[Tensor | int | None, ...], dict[str, int]]:
    """What Hopper's kernel is given behind the others: scales and their rows, what is brought, and its constants."""
    sums_ask = SUMS_ASK and chosen is not None and reach == 2 * HOPPER.keys
    named = {"PER_GROUP": per_group, "BRINGS": brings is not None, "SUMS_ASK": sums_ask}
    rows = None if spans is None else spans.shape[1]
    if brings is None:
        return (spans, rows, None, None, None, None), named
    # Those ask that run last, all at once.
    at_once = multiprocessors(queries.device)
    first = (len(queries) - 1) // at_once * at_once
    share = shared_by((len(queries) - first) * gpu_sparse_hopper.BRINGING, brings)
    return (spans, rows, share.data, share.size, share.piece_bytes, first), named


def _fits_hopper(queries: Tensor, window: int) -> bool:
    """Is this the GPU and are these the dimensions that the kernel in Gluon is made for?"""
    shape = (gpu_sparse_hopper.ROWS, gpu_sparse_hopper.SIZE)
    return is_hopper() and tuple(queries.shape[1:]) == shape and window > gpu_sparse_hopper.KEYS


def _twin(
    queries: Tensor,
    cos: Tensor,
    sin: Tensor,
    own: Tensor,
    ring: Section,
    windows: Windows,
    chosen: Chosen | None,
    sinks: Tensor,
    *,
    scale: float,
) -> Tensor:
    keys, mask = window_keys(own, ring, windows, size=queries.shape[2])
    if chosen is not None:
        entries, hidden = chosen_keys(chosen, size=queries.shape[2])
        keys, mask = torch.cat([keys, entries], dim=1), torch.cat([mask, hidden], dim=1)
    turned = rotate_last(queries.float(), cos, sin).bfloat16().float()
    attended = attend_twin(
        turned, keys, mask.masked_fill(windows.slots[:, None] < 0, float("-inf")), sinks, scale=scale
    )
    back = rotate_last(attended.bfloat16().float(), cos, sin, inverse=True).bfloat16().float()
    return fp8_round_trip(back).bfloat16()


def window_keys(own: Tensor, ring: Section, windows: Windows, *, size: int) -> tuple[Tensor, Tensor]:
    """Every token's window by torch: [tokens, window, size] fp32 and a mask of 0 and -inf [tokens, window]."""
    seen = windows.positions[:, None] - torch.arange(windows.window_tokens, device=own.device)
    is_own = seen >= windows.begins[:, None]
    mine = (windows.starts[:, None] + seen - windows.begins[:, None]).clamp(0, len(own) - 1)
    slots = windows.slots.clamp_min(0)[:, None].expand(seen.shape)
    older = ring.get(slots.flatten(), (seen % windows.ring_tokens).flatten()).view(*seen.shape, -1)
    records = torch.where(is_own[..., None], own[mine], older)
    hidden = seen < windows.lowest[:, None].clamp_min(0)
    values = WindowFp8(size).decode(records.flatten(0, 1)).view(*seen.shape, size)
    return values.masked_fill(hidden[..., None], 0.0), torch.where(hidden, float("-inf"), 0.0)


def chosen_keys(chosen: Chosen, *, size: int) -> tuple[Tensor, Tensor]:
    """Every token's entries by torch: [tokens, most, size] fp32 and a mask of 0 and -inf [tokens, most]."""
    found = chosen.where.long().clamp_min(0)
    blocks, places = found // chosen.entries_per_block, found % chosen.entries_per_block
    records = chosen.main.get(blocks.flatten(), places.flatten())
    hidden = torch.arange(found.shape[1], device=found.device) >= chosen.counts[:, None]
    values = MainFp4(size).decode(records).view(*found.shape, size)
    return values.masked_fill(hidden[..., None], 0.0), torch.where(hidden, float("-inf"), 0.0)


@triton.jit
def _absorb(
    even: tl.tensor,
    odd: tl.tensor,
    seen: tl.tensor,
    q_even: tl.tensor,
    q_odd: tl.tensor,
    acc_even: tl.tensor,
    acc_odd: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
) -> tl.tensor:
    """Take some keys into a running softmax: even, odd [keys, pairs], seen [keys]."""
    scores = dot(q_even, tl.trans(even), tl.zeros((q_even.shape[0], even.shape[0]), tl.float32))
    scores = dot(q_odd, tl.trans(odd), scores) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    shrink = tl.exp(largest - higher)
    weights = tl.exp(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    weights = bf16(weights)
    acc_even = dot(weights, even, acc_even * shrink[:, None])
    acc_odd = dot(weights, odd, acc_odd * shrink[:, None])
    return acc_even, acc_odd, higher, total


@triton.jit
def _record(
    main: tl.tensor,
    where: tl.tensor,
    index: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    offset: tl.tensor,
    PER_BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
) -> tl.tensor:
    """Pointers to the records of some chosen entries."""
    flat = tl.load(where + index, mask=index < count, other=0)
    return main + (flat // PER_BLOCK).to(tl.int64) * stride + offset + (flat % PER_BLOCK) * RECORD


@triton.jit
def _attend_kernel(  # noqa: PLR0915 - one pass over the keys
    queries: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    own: tl.tensor,
    ring: tl.tensor,
    positions: tl.tensor,
    lowest: tl.tensor,
    begins: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    where: tl.tensor,
    counts: tl.tensor,
    main: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    ring_stride: tl.tensor,
    ring_offset: tl.tensor,
    main_stride: tl.tensor,
    main_offset: tl.tensor,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    WINDOW_RECORD: tl.constexpr,
    MOST: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    MAIN_RECORD: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    head = tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)
    key = tl.arange(0, KEYS)
    slot = tl.load(slots + token)
    is_head = (head < HEADS)[:, None]
    place = (token * HEADS + head[:, None]) * HALF + pair[None, :]
    turns = pair >= HALF - PAIRS
    c = tl.load(cos + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=1.0)[None, :]
    s = tl.load(sin + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=0.0)[None, :]
    pairs = tl.load(queries + place, mask=is_head, other=0)
    even, odd = low_bf16(pairs), high_bf16(pairs)
    q_even = bf16(even * c - odd * s).to(tl.bfloat16)
    q_odd = bf16(odd * c + even * s).to(tl.bfloat16)

    largest = tl.load(sinks + head, mask=head < HEADS, other=0.0)
    total = tl.full((ROWS,), 1.0, tl.float32)  # exp(sink - sink)
    acc_even = tl.zeros((ROWS, HALF), tl.float32)
    acc_odd = tl.zeros((ROWS, HALF), tl.float32)

    position, begin = tl.load(positions + token), tl.load(begins + token)
    oldest = tl.maximum(tl.load(lowest + token), 0)
    own_row = tl.load(starts + token) - begin
    for first in range(0, WINDOW, KEYS):
        at = position - (WINDOW - 1) + first + key
        seen = (at >= oldest) & (slot >= 0) & (at <= position)
        ring_record = ring + slot * ring_stride + ring_offset + (at % RING) * WINDOW_RECORD
        record = tl.where(at >= begin, own + (own_row + at) * WINDOW_RECORD, ring_record)
        both = tl.load(record[:, None].to(tl.pointer_type(tl.uint16)) + pair[None, :], mask=seen[:, None], other=0)
        exponent = tl.load(record[:, None] + SIZE + tl.arange(0, SIZE // 32)[None, :], mask=seen[:, None], other=0)
        factor = tl.broadcast_to(power(exponent).to(tl.bfloat16)[:, :, None], (KEYS, SIZE // 32, 16))
        k_even, k_odd = e4m3_pairs(both, tl.reshape(factor, (KEYS, HALF)))
        acc_even, acc_odd, largest, total = _absorb(
            k_even, k_odd, seen, q_even, q_odd, acc_even, acc_odd, largest, total, scale
        )
    if MOST > 0:
        count = tl.where(slot >= 0, tl.load(counts + token), 0)
        group = tl.arange(0, SIZE // 16)
        # Records are fetched one turn ahead, and their places two: the memory's answer takes as long as the products.
        record = _record(main, where + token * MOST, key, count, main_stride, main_offset, PER_BLOCK, MAIN_RECORD)
        seen = key < count
        both = tl.load(record[:, None] + pair[None, :], mask=seen[:, None], other=0)
        bits = tl.load(record[:, None] + HALF + group[None, :], mask=seen[:, None], other=0)
        after = _record(main, where + token * MOST, KEYS + key, count, main_stride, main_offset, PER_BLOCK, MAIN_RECORD)
        # The interpreter takes no loaded value for a bound; keys beyond the count are hidden.
        for first in range(0, MOST if IN_PYTHON else count, KEYS):
            seen = first + key < count
            ahead = (first + KEYS + key < count)[:, None]
            next_both = tl.load(after[:, None] + pair[None, :], mask=ahead, other=0)
            next_bits = tl.load(after[:, None] + HALF + group[None, :], mask=ahead, other=0)
            after = _record(
                main,
                where + token * MOST,
                first + 2 * KEYS + key,
                count,
                main_stride,
                main_offset,
                PER_BLOCK,
                MAIN_RECORD,
            )
            factor = tl.broadcast_to(e4m3_value(bits).to(tl.bfloat16)[:, :, None], (KEYS, SIZE // 16, 8))
            factor = tl.reshape(factor, (KEYS, HALF))
            k_even, k_odd = e2m1_pairs(both, factor, factor)
            acc_even, acc_odd, largest, total = _absorb(
                k_even, k_odd, seen, q_even, q_odd, acc_even, acc_odd, largest, total, scale
            )
            both, bits = next_both, next_bits

    even = bf16(acc_even / total[:, None])
    odd = bf16(acc_odd / total[:, None])
    back_even = bf16(even * c + odd * s)
    back_odd = bf16(odd * c - even * s)
    both_even = tl.reshape(back_even, (ROWS, SIZE // 32, 16))
    both_odd = tl.reshape(back_odd, (ROWS, SIZE // 32, 16))
    factor = power(fp8_exponent(tl.max(tl.maximum(tl.abs(both_even), tl.abs(both_odd)), axis=2)))
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, SIZE // 32, 16)), (ROWS, HALF))
    rounded = bf16_pairs(fp8_value(back_even, factor), fp8_value(back_odd, factor))
    tl.store(out + place, rounded, mask=is_head)

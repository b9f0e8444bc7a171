"""Which token follows each row of logits, decided on the device that made them, without waiting for it?

The rules are those of sampler.py: bias, penalties, mask; temperature; top-k, top-p, min-p; noise of (seed, position,
token); the largest wins, ties go to the lower id. Adjusted logits are rounded to fp32 again; scores and noise are fp64.
A row is decided from that row alone, in chunks of a fixed length: what else is in the batch changes no bit.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_gumbel import gumbel, hash_steps, ordered
from kernels.ops.gpu_truncation import BLOCK_TOKENS, CHUNK_TOKENS, Survivors, survivors

NUM_ASKED = 6
"""Lines of `asked`, each [rows] 8 bytes wide: temperature, top_p, ln min_p (fp64), noise key (uint64), top_k and the
number of logprobs or -1 (int64)."""
NAN, INFINITE, NOTHING_LEFT = 1, 2, 3
"""Why a row has no token."""


@dataclass(frozen=True, slots=True)
class Features:
    """What any row of a batch asks for; what none does costs nothing."""

    noise: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    num_top: int = -1
    """Most logprobs of alternatives that a row wants; -1 if none wants even its own."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes logits before anything else: a list per row, of tokens that a bias or a penalty names."""

    starts: Tensor
    """[rows + 1] int32, into the lists."""
    token_ids: Tensor
    """[n] int32, each at most once per row."""
    bias: Tensor
    """[n] fp64."""
    seen: Tensor
    """[n] int32: 0 not in prompt or answer; 1 + its count in the answer otherwise."""
    penalties: Tensor
    """[rows, 3] fp64: repetition, frequency, presence."""
    coming: Tensor
    """[rows] int32: place in `sampled` of the answer's newest token, which the lists do not know yet, or -1."""
    mask_rows: Tensor
    """[rows] int32: line of `masks`, or -1."""
    masks: Tensor
    """[n, bytes] uint8: allowed tokens, bit 0 of byte 0 is token 0."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device, per row."""

    token_ids: Tensor
    """[rows] int32."""
    problems: Tensor
    """[rows] int32: 0, or why there is no token."""
    logprobs: Tensor
    """[rows, 1 + num_top] fp64: of the token, then of the likeliest; [rows, 0] if nobody wants any."""
    top_ids: Tensor
    """[rows, num_top] int32; -1 where fewer are possible."""


def adjust(logits: Tensor, sampled: Tensor, changes: Adjustments) -> None:
    """Apply bias, penalties and masks in place.  logits: [rows, vocab] fp32.  sampled: tokens of the step before."""
    rows, vocabulary = logits.shape
    block = 256
    _adjust_kernel[(rows,)](
        logits,
        vocabulary,
        sampled,
        changes.starts,
        changes.token_ids,
        changes.bias,
        changes.seen,
        changes.penalties,
        changes.coming,
        BLOCK=block,
        num_warps=4,
    )
    if changes.masks.shape[0]:
        grid = (rows, triton.cdiv(vocabulary, CHUNK_TOKENS))
        _mask_kernel[grid](
            logits, vocabulary, changes.mask_rows, changes.masks, changes.masks.stride(0), CHUNK=CHUNK_TOKENS
        )


def draw(logits: Tensor, asked: Tensor, features: Features, *, out: Tensor | None = None) -> Drawn:
    """One token per row.

    logits: [rows, vocab] fp32, contiguous, adjusted.  asked: [NUM_ASKED, rows] int64, bits of what its lines hold.
    out: where tokens and problems go, [2, at least rows] int32.
    """
    rows, vocabulary = logits.shape
    if asked.shape != (NUM_ASKED, rows) or not (asked.is_contiguous() and logits.is_contiguous()):
        raise ValueError(f"{list(asked.shape)} does not say how to draw from logits of {list(logits.shape)}")
    device, chunks = logits.device, triton.cdiv(vocabulary, CHUNK_TOKENS)
    num_top = max(features.num_top, 0)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    results = empty(2, rows, dtype=torch.int32) if out is None else out
    drawn = Drawn(
        results[0, :rows],
        results[1, :rows],
        empty(rows, 1 + num_top if features.num_top >= 0 else 0, dtype=torch.float64),
        empty(rows, num_top, dtype=torch.int32),
    )
    if not rows:
        return drawn
    best, best_ids = empty(rows, chunks, dtype=torch.float32), empty(rows, chunks, dtype=torch.int32)
    sums, noisy = empty(rows, chunks, dtype=torch.float64), empty(rows, chunks, dtype=torch.float64)
    noisy_ids, tops = empty(rows, chunks, dtype=torch.int32), empty(rows, dtype=torch.float32)
    size = {"CHUNKS": chunks, "CHUNKS_BLOCK": triton.next_power_of_2(chunks)}
    _scan_kernel[(rows, chunks)](
        logits, vocabulary, best, best_ids, sums, SUMS=features.num_top >= 0, CHUNK=CHUNK_TOKENS, BLOCK=BLOCK_TOKENS
    )
    _top_kernel[(rows,)](best, best_ids, tops, drawn.token_ids, drawn.problems, **size, num_warps=1)
    if features.noise:
        truncates = features.top_k or features.top_p
        left = (
            survivors(logits, tops, asked, top_k=features.top_k, top_p=features.top_p)
            if truncates
            else Survivors(tops, tops, sums)  # not read
        )
        _noise_kernel[(rows, chunks)](
            logits, vocabulary, asked, tops, left.threshold, left.quota, left.equals, noisy, noisy_ids, rows,
            TRUNCATES=truncates, MIN_P=features.min_p, CHUNK=CHUNK_TOKENS, BLOCK=BLOCK_TOKENS, **size,
        )  # fmt: skip
        _choose_kernel[(rows,)](asked, noisy, noisy_ids, drawn.token_ids, **size, num_warps=1)
    if features.num_top >= 0:
        _logprob_kernel[(rows,)](
            logits, vocabulary, asked, best, sums, tops, drawn.token_ids, drawn.logprobs, drawn.top_ids, num_top, rows,
            BLOCK=4096, **size, num_warps=8,
        )  # fmt: skip
    return drawn


@triton.jit
def _adjust_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    sampled: tl.tensor,
    starts: tl.tensor,
    token_ids: tl.tensor,
    bias: tl.tensor,
    seen: tl.tensor,
    penalties: tl.tensor,
    coming: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * vocabulary
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    repetition = tl.load(penalties + row * 3)
    frequency = tl.load(penalties + row * 3 + 1)
    presence = tl.load(penalties + row * 3 + 2)
    place = tl.load(coming + row)
    newest = tl.load(sampled + tl.maximum(place, 0), mask=place >= 0, other=-1)
    listed = tl.full([BLOCK], 0, tl.int32)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        token = tl.load(token_ids + at, mask=inside, other=-2)
        known = tl.load(seen + at, mask=inside, other=0)
        is_newest = inside & (token == newest)
        listed += is_newest.to(tl.int32)
        known = tl.where(is_newest, tl.maximum(known, 1) + 1, known)
        x = tl.load(line + token, mask=inside, other=0.0).to(tl.float64) + tl.load(bias + at, mask=inside, other=0.0)
        x = _penalised(x, known, repetition, frequency, presence)
        tl.store(line + token, x.to(tl.float32), mask=inside)
    is_unlisted = (newest >= 0) & (tl.sum(listed, 0) == 0)
    x = tl.load(line + tl.maximum(newest, 0), mask=is_unlisted, other=0.0).to(tl.float64)
    x = _penalised(x, 2, repetition, frequency, presence)
    tl.store(line + tl.maximum(newest, 0), x.to(tl.float32), mask=is_unlisted)


@triton.jit
def _penalised(
    x: tl.tensor, known: tl.tensor, repetition: tl.tensor, frequency: tl.tensor, presence: tl.tensor
) -> tl.tensor:
    x = tl.where(known > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
    count = (known - 1) * 1.0
    return tl.where(known > 1, x - (frequency * count + presence), x)


@triton.jit
def _mask_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    mask_rows: tl.tensor,
    masks: tl.tensor,
    mask_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    line = tl.load(mask_rows + row)
    if line >= 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        byte = tl.load(masks + line.to(tl.int64) * mask_stride + token // 8, mask=inside, other=255).to(tl.int32)
        is_banned = inside & (((byte >> (token % 8)) & 1) == 0)
        banned = tl.full([CHUNK], float("-inf"), tl.float32)
        tl.store(logits + row.to(tl.int64) * vocabulary + token, banned, mask=is_banned)


@triton.jit
def _scan_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    sums: tl.tensor,
    SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Per chunk: the largest logit and its first token (-1 if one is NaN), and the sum of exponentials below it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    line = logits + row.to(tl.int64) * vocabulary
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    holder = tl.full([BLOCK], 2147483647, tl.int32)
    wrong = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        token = chunk * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(line + token, mask=token < vocabulary, other=float("-inf"))
        wrong += (x != x).to(tl.int32)  # noqa: PLR0124 - NaN
        is_larger = (x > largest) | ((x == largest) & (token < holder) & (token < vocabulary))
        largest = tl.where(is_larger, x, largest)
        holder = tl.where(is_larger, token, holder)
    top = tl.max(largest, 0)
    first = tl.min(tl.where(largest == top, holder, 2147483647), 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(best + at, top)
    tl.store(best_ids + at, tl.where(tl.sum(wrong, 0) > 0, -1, first))
    if SUMS:
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(0, CHUNK, BLOCK):
            token = chunk * CHUNK + start + tl.arange(0, BLOCK)
            x = tl.load(line + token, mask=token < vocabulary, other=float("-inf"))
            total += tl.exp(x - safe).to(tl.float64)
        tl.store(sums + at, tl.sum(total, 0))


@triton.jit
def _top_kernel(
    best: tl.tensor,
    best_ids: tl.tensor,
    tops: tl.tensor,
    token_ids: tl.tensor,
    problems: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    largest = tl.load(best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    holder = tl.load(best_ids + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=2147483647)
    top = tl.max(largest, 0)
    is_nan = tl.min(holder, 0) < 0
    first = tl.min(tl.where(largest == top, holder, 2147483647), 0)
    problem = tl.where(is_nan, 1, tl.where(top == float("inf"), 2, tl.where(top == float("-inf"), 3, 0)))
    tl.store(tops + row, top)
    tl.store(problems + row, problem)
    tl.store(token_ids + row, tl.where(problem > 0, 0, first))


@triton.jit
def _noise_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    asked: tl.tensor,
    tops: tl.tensor,
    thresholds: tl.tensor,
    quotas: tl.tensor,
    equals: tl.tensor,
    noisy: tl.tensor,
    noisy_ids: tl.tensor,
    rows: tl.tensor,
    TRUNCATES: tl.constexpr,
    MIN_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    """Per chunk: the largest score with noise among the survivors, and its first token."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(asked + row).to(tl.float64, bitcast=True)
    at = row * CHUNKS + chunk
    best_score = tl.full([BLOCK], float("-inf"), tl.float64)
    best_token = tl.full([BLOCK], 2147483647, tl.int32)
    if temperature > 0.0:
        key = tl.load(asked + 3 * rows + row).to(tl.uint64, bitcast=True)
        top = tl.load(tops + row).to(tl.float64) / temperature
        least = top + tl.load(asked + 2 * rows + row).to(tl.float64, bitcast=True)
        threshold = tl.full([1], 0, tl.int64)
        quota = tl.full([1], 0, tl.int64)
        earlier = tl.full([1], 0, tl.int64)
        if TRUNCATES:
            other = tl.arange(0, CHUNKS_BLOCK)
            before = tl.load(equals + row * CHUNKS + other, mask=other < chunk, other=0)
            earlier += tl.sum(before, 0)
            threshold += tl.load(thresholds + row)
            quota += tl.load(quotas + row)
        for start in range(0, CHUNK, BLOCK):
            token = chunk * CHUNK + start + tl.arange(0, BLOCK)
            inside = token < vocabulary
            x = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=float("-inf"))
            survives = inside & (x > float("-inf"))
            score = x.to(tl.float64) / temperature
            if TRUNCATES:
                number = ordered(x)
                is_equal = inside & (number == threshold)
                rank = earlier + tl.cumsum(is_equal.to(tl.int64), 0) - 1
                survives = survives & ((number > threshold) | (is_equal & (rank < quota)))
                earlier += tl.sum(is_equal.to(tl.int64), 0)
            if MIN_P:
                survives = survives & (score >= least)
            if tl.sum(survives.to(tl.int32), 0) > 0:
                score = tl.where(survives, score + gumbel(hash_steps(key, token)), float("-inf"))
                is_better = score > best_score
                best_score = tl.where(is_better, score, best_score)
                best_token = tl.where(is_better, token, best_token)
    best = tl.max(best_score, 0)
    tl.store(noisy + at, best)
    tl.store(noisy_ids + at, tl.min(tl.where(best_score == best, best_token, 2147483647), 0))


@triton.jit
def _choose_kernel(
    asked: tl.tensor,
    noisy: tl.tensor,
    noisy_ids: tl.tensor,
    token_ids: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if tl.load(asked + row).to(tl.float64, bitcast=True) > 0.0:
        chunk = tl.arange(0, CHUNKS_BLOCK)
        score = tl.load(noisy + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
        token = tl.load(noisy_ids + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=2147483647)
        best = tl.max(score, 0)
        first = tl.min(tl.where(score == best, token, 2147483647), 0)
        tl.store(token_ids + row, first, mask=best > float("-inf"))


@triton.jit
def _logprob_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    asked: tl.tensor,
    best: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    top_ids: tl.tensor,
    num_top: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
) -> None:
    """Log-probabilities at temperature 1 of the token and of the likeliest, which are found one after the other."""
    row = tl.program_id(0)
    wanted = tl.load(asked + 5 * rows + row).to(tl.int32)
    line = logits + row.to(tl.int64) * vocabulary
    out = logprobs + row * (num_top + 1)
    if wanted >= 0:
        chunk = tl.arange(0, CHUNKS_BLOCK)
        top = tl.load(tops + row)
        largest = tl.load(best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
        share = tl.load(sums + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
        total = tl.sum(share * tl.exp((largest - top).to(tl.float64)), 0)
        log_total = top.to(tl.float64) + tl.log(total)
        tl.store(out, tl.load(line + tl.load(token_ids + row)).to(tl.float64) - log_total)
        last = top
        last_id = tl.full([], -1, tl.int32)
        for place in range(wanted):
            value = tl.full([BLOCK], float("-inf"), tl.float32)
            holder = tl.full([BLOCK], 2147483647, tl.int32)
            for start in range(0, vocabulary, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = tl.load(line + token, mask=token < vocabulary, other=float("-inf"))
                is_next = (x < last) | ((x == last) & (token > last_id))
                is_larger = is_next & (x > value)
                value = tl.where(is_larger, x, value)
                holder = tl.where(is_larger, token, holder)
            found = tl.max(value, 0)
            found_id = tl.min(tl.where(value == found, holder, 2147483647), 0)
            is_possible = found > float("-inf")
            tl.store(out + 1 + place, found.to(tl.float64) - log_total)
            tl.store(top_ids + row * num_top + place, tl.where(is_possible, found_id, -1))
            last = found
            last_id = found_id

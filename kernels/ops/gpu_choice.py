"""Which scores of a row are the highest, read 16 bytes a thread at a time?

A row is read once, and the highest of each eight scores is kept. COUNT groups reach the COUNT-th highest maximum, so
COUNT keys do: none below it is among the best. Groups above that bound are fewer than COUNT, and of those at it the
first COUNT hold as many keys of that level as there can be room for: the best are in 2 * COUNT groups, which are few
enough for registers.

A mask that ends anywhere would make the compiler load each score, and each maximum, by itself. So only whole groups are
loaded, of which the last one that a row sees is put right afterwards; maxima lie in whole turns. Thresholds are sought
only between the lowest and the highest maximum, which takes five passes where scores are within a factor of eight of
each other, not eight.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import high_bf16, low_bf16
from kernels.ops.gpu_launch import check, power_of_two, tiles

GROUP = 8
"""Scores of which the highest is looked at first: 16 bytes."""
STEP, WARPS, MOST_REGISTERS = 2048, 8, 128
"""Groups that a turn takes, warps, and registers of a thread: of 256 rows' programs two share a multiprocessor."""
_MOST_TURNS, _MOST_CHOSEN = 1023, 1024
"""A lane counts its turns in ten bits, and has registers for the groups of so many."""


def takes(width: int, count: int) -> bool:
    """Whether rows of so many scores are whole groups, and neither these nor those to be chosen are too many."""
    return width % GROUP == 0 and tiles(width, GROUP * STEP) <= _MOST_TURNS and count <= _MOST_CHOSEN


def select_by_words(scores: Tensor, seen: Tensor, *, count: int) -> Tensor:
    """Indices of the `count` highest of each row, ascending, then -1: as `gpu_index.select`, by the kernel.

    scores: [rows, width] bf16, end to end.  seen: [rows] int32.  Returns [rows, count] int32.
    """
    rows, width = scores.shape
    check(takes(width, count), f"rows of whole groups, of which at most {_MOST_CHOSEN} are chosen")
    step = min(power_of_two(tiles(width, GROUP)), STEP)
    room = tiles(width, GROUP * step) * step
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    maxima = torch.empty(rows, room + power_of_two(2 * count), dtype=torch.int32, device=scores.device)
    if rows:
        _select_by_words_kernel[(rows,)](
            scores.view(torch.int32),
            seen,
            maxima,
            out,
            width,
            room,
            maxima.stride(0),
            COUNT=count,
            COUNT_BLOCK=power_of_two(count),
            LISTED=power_of_two(2 * count),
            GROUP=GROUP,
            STEP=step,
            num_warps=WARPS,
            maxnreg=MOST_REGISTERS,
        )
    return out


@triton.jit
def raised(
    reach: tl.tensor, threshold: tl.tensor, above: tl.tensor, unit: tl.tensor, COUNT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The highest of four thresholds that COUNT keys reach, and how many reach the one above it.

    reach: how many reach each of the upper three, 20 bits each.
    """
    one, two, three = (reach & 0xFFFFF).to(tl.int32), (reach >> 20 & 0xFFFFF).to(tl.int32), (reach >> 40).to(tl.int32)
    level = (one >= COUNT).to(tl.int32) + (two >= COUNT).to(tl.int32) + (three >= COUNT).to(tl.int32)
    higher = tl.where(level == 0, one, tl.where(level == 1, two, three))
    return threshold + level * unit, tl.where(level == 3, above, higher)


@triton.jit
def _higher(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _key(score: tl.tensor) -> tl.tensor:
    """bf16 scores in fp32 as whole numbers in their order, 128..65,535; -inf becomes 0."""
    bits = score.to(tl.int32, bitcast=True) >> 16
    bits = tl.where(bits == -0x8000, 0, bits)  # minus zero equals zero
    key = (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF
    key = tl.where((bits & 0x7FFF) > 0x7F80, 0xFF80, key)  # NaN counts as the highest
    return tl.where(key <= 0x7F, 0, key)


@triton.jit
def _reaching(key: tl.tensor, threshold: tl.tensor, unit: tl.tensor) -> tl.tensor:
    """Whether keys reach each of three thresholds: ones at bits 0, 10 and 20."""
    ones = (key >= threshold + unit).to(tl.int32)
    ones += tl.where(key >= threshold + 2 * unit, 1 << 10, 0)
    return ones + tl.where(key >= threshold + 3 * unit, 1 << 20, 0)


@triton.jit
def _summed(counts: tl.tensor) -> tl.tensor:
    """Three counts of ten bits a lane -> of all lanes, 20 bits each."""
    wide = (counts & 1023).to(tl.int64) + ((counts >> 10 & 1023).to(tl.int64) << 20)
    return tl.sum(wide + ((counts >> 20).to(tl.int64) << 40), axis=0)


@triton.jit
def _first_unit(reach: tl.tensor) -> tl.tensor:
    """The least power of four of which four are more than this."""
    unit = reach * 0 + 1
    while unit * 4 <= reach:
        unit *= 4
    return unit


@triton.jit
def _select_by_words_kernel(  # noqa: PLR0915 - one kernel is one function
    scores: tl.tensor,
    seen: tl.tensor,
    maxima: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    stride: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    NONE: tl.constexpr = -0x7F0080  # two scores of -inf
    WORDS: tl.constexpr = GROUP // 2
    row = tl.program_id(0).to(tl.int64)
    end = tl.maximum(tl.minimum(tl.load(seen + row), width), 0)
    used, whole = tl.cdiv(end, GROUP), end // GROUP
    scores += row * (width // 2)
    maxima += row * stride
    names = maxima + room
    step, word = tl.arange(0, STEP), tl.arange(0, WORDS)
    # Of the last group only some scores are seen, or none.
    last = tl.load(scores + whole * WORDS + word, mask=whole * WORDS + word < width // 2, other=NONE)
    place = whole * GROUP + word * 2
    partial = tl.maximum(
        tl.max(tl.where(place < end, _key(low_bf16(last)), 0), axis=0),
        tl.max(tl.where(place + 1 < end, _key(high_bf16(last)), 0), axis=0),
    )
    lowest, highest = tl.full((STEP,), 0xFFFF, tl.int32), tl.zeros((STEP,), tl.int32)
    first = 0
    while first < used:
        group = first + step
        pairs = tl.load(scores + group[:, None] * WORDS + word[None, :], mask=(group < used)[:, None], other=NONE)
        key = _key(tl.reduce(_higher(low_bf16(pairs), high_bf16(pairs)), 1, _higher))
        key = tl.where(group == whole, partial, key)
        lowest, highest = tl.minimum(lowest, tl.where(group < used, key, 0xFFFF)), tl.maximum(highest, key)
        tl.store(maxima + group, key)
        first += STEP
    top = tl.max(highest, axis=0)
    bound = tl.where(used >= COUNT, tl.min(lowest, axis=0), 0)
    above = 0
    unit = _first_unit(top - bound)
    tl.debug_barrier()  # what other threads stored is read from here on
    while unit > 0:
        counts = tl.zeros((STEP,), tl.int32)
        first = 0
        while first < used:
            counts += _reaching(tl.load(maxima + first + step), bound, unit)
            first += STEP
        bound, above = raised(_summed(counts), bound, above, unit, COUNT)
        unit = unit // 4
    level_before = 0
    above_before = 0
    first = 0
    while first < used:
        group = first + step
        key = tl.load(maxima + group)
        is_level, is_above = ((key == bound) & (key > 0)).to(tl.int32), (key > bound).to(tl.int32)
        both = is_level | (is_above << 16)
        total = tl.sum(both, axis=0)
        both = tl.cumsum(both, axis=0)
        levels, aboves = level_before + (both & 0xFFFF), above_before + (both >> 16)
        taken = (is_above > 0) | ((is_level > 0) & (levels <= COUNT))
        tl.store(names + aboves + tl.minimum(levels, COUNT) - 1, group, mask=taken)
        level_before += total & 0xFFFF
        above_before += total >> 16
        first += STEP
    num = above_before + tl.minimum(level_before, COUNT)
    tl.debug_barrier()
    listed = tl.arange(0, LISTED)
    is_listed = listed < num
    group = tl.load(names + listed, mask=is_listed, other=0)
    pairs = tl.load(scores + group[:, None] * WORDS + word[None, :], mask=is_listed[:, None], other=NONE)
    entry = group[:, None] * GROUP + word[None, :] * 2
    even = tl.where(is_listed[:, None] & (entry < end), _key(low_bf16(pairs)), 0)
    odd = tl.where(is_listed[:, None] & (entry + 1 < end), _key(high_bf16(pairs)), 0)
    # COUNT keys reach the bound, or it is 0.
    threshold = bound
    above = 0
    unit = _first_unit(top - bound)
    while unit > 0:
        counts = tl.sum(_reaching(even, threshold, unit) + _reaching(odd, threshold, unit), axis=1)
        threshold, above = raised(_summed(counts), threshold, above, unit, COUNT)
        unit = unit // 4
    remaining = COUNT - above
    even_level, odd_level = (even == threshold) & (even > 0), (odd == threshold) & (odd > 0)
    evens = even_level.to(tl.int32) | ((even > threshold).to(tl.int32) << 16)
    both = evens + (odd_level.to(tl.int32) | ((odd > threshold).to(tl.int32) << 16))
    of_group = tl.sum(both, axis=1)
    until = tl.cumsum(both, axis=1) + (tl.cumsum(of_group, axis=0) - of_group)[:, None]
    out += row * COUNT
    for side in tl.static_range(2):
        if side == 0:
            key, is_level, met = even, even_level, until - both + evens
        else:
            key, is_level, met = odd, odd_level, until
        taken = (key > threshold) | (is_level & ((met & 0xFFFF) <= remaining))
        places = (met >> 16) + tl.minimum(met & 0xFFFF, remaining) - 1
        tl.store(out + places, entry + side, mask=taken & (places < COUNT))
    found = tl.sum(of_group, axis=0)
    total = (found >> 16) + tl.minimum(found & 0xFFFF, remaining)
    slot = tl.arange(0, COUNT_BLOCK)
    tl.store(out + slot, tl.full((COUNT_BLOCK,), -1, tl.int32), mask=(slot >= total) & (slot < COUNT))

"""Which compressed entries does each query read, on a GPU: scores over packed keys, the best blocks, the best entries?

A program scores ENTRIES keys for up to `QUERIES` tokens of one sequence: keys are unpacked once for all of them. Scores
are bf16, so the best are found by counts alone, exactly, and of equal scores the lower index comes first.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_index_hopper
from kernels.ops.gpu_choice import select_by_words, takes
from kernels.ops.gpu_formats import bf16, dot, e2m1_pairs, high_bf16, low_bf16, power
from kernels.ops.gpu_index_hopper import restated_queries
from kernels.ops.gpu_launch import check, is_hopper, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_records import Section
from kernels.ops.index import best, listed
from kernels.ops.quant import IndexFp4

ENTRIES, CANDIDATES = 64, 128
"""Keys per product, of all entries and of a token's candidates."""
UNITS = 8
"""Products that one program makes."""
HOPPER_UNITS = 16
"""Of the kernel in Gluon. 32 are 1 % faster at most in a decode step of 256 rows, and leave half a GPU idle at one."""
QUERIES = 4
"""Tokens per program: the rows of one sequence's verification step."""
_BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class Keys:
    """One KV source's index keys, and where each sequence's are."""

    data: Section
    scale: Section
    tables: Tensor
    """[spans, blocks] int32 block ids."""
    entries_per_block: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Of a step's tokens."""

    scores: Tensor
    """[tokens, width] bf16; only the entries that a token sees are written."""
    blocks: Tensor | None
    """[tokens, width / block size] bf16: the highest of each block, +inf for the newest."""


def score(
    queries: Tensor, weights: Tensor, keys: Keys, tile_table: Tensor, seen: Tensor, *, width: int, block_size: int = 0
) -> Scores:
    """Sum over heads of weight * relu(query . key) for every entry a token sees, rounded to bf16.

    queries: [tokens, heads, size] bf16, as index records are rounded.  weights: [tokens, heads] fp32.  tile_table:
    [tiles, 3] int32: first token, tokens (QUERIES at most, 0 for padding), span.  seen: [tokens] int32, entries.
    width: a multiple of ENTRIES that no `seen` exceeds.  block_size: of candidate blocks, 0 for none.
    """
    tokens, heads, size = queries.shape
    check(queries.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32, "rows end to end")
    check(width % ENTRIES == 0 and (not block_size or ENTRIES % block_size == 0), f"width is of {ENTRIES}s")
    if not runs_kernels(queries):
        return _score_twin(queries, weights, keys, tile_table, seen, width=width, block_size=block_size)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=queries.device)
    kernel, units, given, named = _way(queries, weights, ENTRIES)
    in_kernel = block_size if kernel is _score_kernel else 0
    blocks = out.new_empty(tokens, width // block_size) if in_kernel else None
    kernel[(len(tile_table), tiles(width, named["ENTRIES"] * units))](
        *given,
        keys.data.pool,
        keys.tables,
        tile_table,
        seen,
        seen,
        out,
        *([out if blocks is None else blocks] if kernel is _score_kernel else []),
        width,
        keys.data.pool.shape[1],
        keys.data.offset,
        keys.scale.offset,
        keys.tables.stride(0),
        HEADS=heads,
        SIZE=size,
        PER_BLOCK=keys.entries_per_block,
        QUERIES=QUERIES,
        UNITS=units,
        CANDIDATES=0,
        BLOCK_SIZE=in_kernel,
        **named,
    )
    if block_size and not in_kernel:
        # Not by the programs that score: across a warp's lanes it takes them a third of their time.
        blocks = gpu_index_hopper.best_of_blocks(out, seen, block_size=block_size)
    return Scores(out, blocks)


def score_candidates(
    queries: Tensor, weights: Tensor, keys: Keys, spans: Tensor, seen: Tensor, candidates: Tensor, *, block_size: int
) -> Tensor:
    """Scores of the entries of each token's own candidate blocks: [tokens, blocks * block_size] bf16, -inf where none.

    spans: [tokens] int32, -1 for padding rows.  candidates: [tokens, blocks] int32, ascending, then -1.
    """
    tokens, heads, size = queries.shape
    width = candidates.shape[1] * block_size
    check(queries.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32, "rows end to end")
    check(width % CANDIDATES == 0, f"candidates are of {CANDIDATES} entries")
    if not runs_kernels(queries):
        return _candidates_twin(queries, weights, keys, spans, seen, candidates, block_size=block_size)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=queries.device)
    kernel, units, given, named = _way(queries, weights, CANDIDATES)
    kernel[(tokens, tiles(width, named["ENTRIES"] * units))](
        *given,
        keys.data.pool,
        keys.tables,
        spans,
        seen,
        candidates,
        out,
        *([out] if kernel is _score_kernel else []),
        width,
        keys.data.pool.shape[1],
        keys.data.offset,
        keys.scale.offset,
        keys.tables.stride(0),
        HEADS=heads,
        SIZE=size,
        PER_BLOCK=keys.entries_per_block,
        QUERIES=1,
        UNITS=units,
        CANDIDATES=candidates.shape[1],
        BLOCK_SIZE=block_size,
        **named,
    )
    return out


def _way(queries: Tensor, weights: Tensor, entries: int) -> tuple[Any, int, tuple[Tensor, Tensor], dict[str, int]]:
    """The kernel that scores, its programs' products, queries and weights as it reads them, and its cut."""
    if _fits_hopper(queries):
        named = {"ENTRIES": gpu_index_hopper.ENTRIES, "num_warps": 4}
        return gpu_index_hopper.score_kernel, HOPPER_UNITS, restated_queries(queries, weights), named
    named = {"ENTRIES": entries, "num_warps": max(min(entries // 16, 4), 1), "num_stages": 2}
    return _score_kernel, UNITS, (queries.view(torch.int32), weights), named


def _fits_hopper(queries: Tensor) -> bool:
    """Is this the GPU and are these the dimensions that the kernel in Gluon is made for?"""
    return is_hopper() and tuple(queries.shape[1:]) == (gpu_index_hopper.HEADS, gpu_index_hopper.SIZE)


SELECT_STEP, SELECT_WARPS = 4096, 8


def select(scores: Tensor, seen: Tensor, *, count: int) -> Tensor:
    """Indices of the `count` highest of each row, ascending, then -1; of equal ones the lower. -inf is never chosen.

    scores: [rows, width] bf16, rows end to end.  seen: [rows] int32: only so many of a row count.  Returns
    [rows, count] int32.
    """
    width = scores.shape[1]
    check(scores.dtype == torch.bfloat16 and scores.is_contiguous(), "scores are bf16, end to end")
    if not runs_kernels(scores):
        hidden = torch.arange(width, device=scores.device) >= seen[:, None]
        return listed(best(scores.float().masked_fill(hidden, float("-inf")), count), count).int()
    if takes(width, count):
        return select_by_words(scores, seen, count=count)
    return select_by_counting(scores, seen, count=count)


def select_by_counting(scores: Tensor, seen: Tensor, *, count: int) -> Tensor:
    """The same by a kernel that goes through a row nine times: of rows of any width, and of any number of them."""
    rows, width = scores.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    _select_kernel[(rows,)](
        scores.view(torch.int16),
        seen,
        out,
        width,
        COUNT=count,
        COUNT_BLOCK=power_of_two(count),
        STEP=min(power_of_two(width), SELECT_STEP),
        num_warps=SELECT_WARPS,
    )
    return out


def locate(
    chosen: Tensor, keys: Keys, spans: Tensor, candidates: Tensor | None = None, *, block_size: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Where chosen entries lie in the cache.

    chosen: [tokens, count] int32, entries, or places in a token's candidate blocks.  Returns the entries themselves,
    block * entries_per_block + place of each (int32, like chosen, then -1), and how many a token has (int32).
    """
    tokens, count = chosen.shape
    if not runs_kernels(chosen):
        found = chosen.long()
        if candidates is not None:
            found = candidates.long().gather(1, found.clamp_min(0) // block_size) * block_size + found % block_size
        block = keys.tables.long()[spans.long().clamp_min(0)[:, None], found.clamp_min(0) // keys.entries_per_block]
        real = (chosen >= 0) & (spans >= 0)[:, None]
        where = torch.where(real, block * keys.entries_per_block + found % keys.entries_per_block, -1)
        return torch.where(real, found, -1).int(), where.int(), real.sum(1).int()
    entries, where = torch.empty_like(chosen), torch.empty_like(chosen)
    counts = torch.empty(tokens, dtype=torch.int32, device=chosen.device)
    _locate_kernel[(tokens,)](
        chosen,
        keys.tables,
        spans,
        chosen if candidates is None else candidates,
        entries,
        where,
        counts,
        keys.tables.stride(0),
        0 if candidates is None else candidates.shape[1],
        COUNT=count,
        BLOCK=power_of_two(count),
        PER_BLOCK=keys.entries_per_block,
        MAPPED=candidates is not None,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
    return entries, where, counts


def _decoded(keys: Keys, span: int, entries: Tensor, size: int) -> Tensor:
    blocks = keys.tables[span].long()[entries // keys.entries_per_block]
    places = entries % keys.entries_per_block
    records = torch.cat([keys.data.get(blocks, places), keys.scale.get(blocks, places)], dim=1)
    return IndexFp4(size).decode(records)


def _score_twin(
    queries: Tensor, weights: Tensor, keys: Keys, tile_table: Tensor, seen: Tensor, *, width: int, block_size: int
) -> Scores:
    out = torch.full((len(queries), width), float("-inf"), device=queries.device)
    for first, count, span in tile_table.tolist():
        for token in range(first, first + count):
            entries = torch.arange(int(seen[token]), device=queries.device)
            products = (queries[token].float() @ _decoded(keys, span, entries, queries.shape[2]).T).relu()
            out[token, : len(entries)] = (products * weights[token, :, None]).sum(0)
    rounded = out.bfloat16()
    if not block_size:
        return Scores(rounded, None)
    highest = rounded.float().view(len(out), -1, block_size).amax(-1).clamp_max(_BF16_MAX)
    newest = (seen[:, None] - 1) // block_size == torch.arange(highest.shape[1], device=out.device)
    return Scores(rounded, highest.masked_fill(newest, float("inf")).bfloat16())


def _candidates_twin(
    queries: Tensor, weights: Tensor, keys: Keys, spans: Tensor, seen: Tensor, candidates: Tensor, *, block_size: int
) -> Tensor:
    entries = candidates.long()[:, :, None] * block_size + torch.arange(block_size, device=queries.device)
    entries = entries.flatten(1)
    out = torch.full(entries.shape, float("-inf"), device=queries.device)
    for token, span in enumerate(spans.tolist()):
        real = (entries[token] >= 0) & (entries[token] < seen[token])
        if span >= 0 and real.any():
            decoded = _decoded(keys, span, entries[token][real], queries.shape[2])
            products = (queries[token].float() @ decoded.T).relu()
            out[token, real] = (products * weights[token, :, None]).sum(0)
    return out.bfloat16()


@triton.jit
def _score_kernel(  # noqa: PLR0915 - one pass over the keys
    queries: tl.tensor,
    weights: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    tile_table: tl.tensor,
    seen: tl.tensor,
    candidates: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    data_offset: tl.tensor,
    scale_offset: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    HALF: tl.constexpr = SIZE // 2
    ROWS: tl.constexpr = QUERIES * HEADS
    if CANDIDATES > 0:
        first = tl.program_id(0).to(tl.int64)
        span = tl.load(tile_table + first)
        num = tl.where(span >= 0, 1, 0)
    else:
        first = tl.load(tile_table + tl.program_id(0) * 3).to(tl.int64)
        num = tl.load(tile_table + tl.program_id(0) * 3 + 1)
        span = tl.load(tile_table + tl.program_id(0) * 3 + 2)
    query = tl.arange(0, QUERIES)
    sees = tl.load(seen + first + query, mask=query < num, other=0)
    most = tl.max(sees, axis=0)
    start = tl.program_id(1) * (ENTRIES * UNITS)
    if CANDIDATES > 0 or start < most:
        row = tl.arange(0, ROWS)
        pair = tl.arange(0, HALF)
        is_row = row // HEADS < num
        pairs = tl.load(queries + (first * HEADS + row[:, None]) * HALF + pair[None, :], mask=is_row[:, None], other=0)
        q_even = tl.trans(low_bf16(pairs).to(tl.bfloat16))
        q_odd = tl.trans(high_bf16(pairs).to(tl.bfloat16))
        factor = tl.load(weights + first * HEADS + row, mask=is_row, other=0.0)
        group = tl.arange(0, SIZE // 32)
        table = tables + tl.maximum(span, 0).to(tl.int64) * table_stride
        for unit in range(UNITS):
            place = start + unit * ENTRIES + tl.arange(0, ENTRIES)
            if CANDIDATES > 0:
                block = tl.load(candidates + first * CANDIDATES + place // BLOCK_SIZE, mask=place < width, other=-1)
                entry = tl.where(block >= 0, block * BLOCK_SIZE + place % BLOCK_SIZE, 0x7FFFFFFF)
            else:
                entry = place
            is_seen = entry < most
            slot = tl.load(table + entry // PER_BLOCK, mask=is_seen, other=0).to(tl.int64) * stride
            inside = entry % PER_BLOCK
            both = tl.load(
                pool + (slot + data_offset + inside * HALF)[:, None] + pair[None, :], mask=is_seen[:, None], other=0
            )
            exponent = tl.load(
                pool + (slot + scale_offset + inside * (SIZE // 32))[:, None] + group[None, :],
                mask=is_seen[:, None],
                other=0,
            )
            scale = tl.broadcast_to(power(exponent).to(tl.bfloat16)[:, :, None], (ENTRIES, SIZE // 32, 16))
            scale = tl.reshape(scale, (ENTRIES, HALF))
            k_even, k_odd = e2m1_pairs(both, scale, scale)
            products = dot(k_even, q_even, tl.zeros((ENTRIES, ROWS), tl.float32))
            products = dot(k_odd, q_odd, products)
            products = tl.maximum(products, 0.0) * factor[None, :]
            summed = bf16(tl.sum(tl.reshape(products, (ENTRIES, QUERIES, HEADS)), axis=2))
            visible = entry[:, None] < sees[None, :]
            summed = tl.where(visible, summed, float("-inf"))
            target = (first + query)[None, :] * width + place[:, None]
            # A padding row's candidates are none: its scores are written, all of them -inf.
            wanted = (query < (1 if CANDIDATES > 0 else num))[None, :] & (place < width)[:, None]
            if CANDIDATES == 0 and BLOCK_SIZE > 0:
                highest = tl.max(tl.reshape(summed, (ENTRIES // BLOCK_SIZE, BLOCK_SIZE, QUERIES)), axis=1)
                highest = tl.minimum(highest, 3.3895313892515355e38)
                block = start // BLOCK_SIZE + unit * (ENTRIES // BLOCK_SIZE) + tl.arange(0, ENTRIES // BLOCK_SIZE)
                highest = tl.where(block[:, None] == ((sees - 1) // BLOCK_SIZE)[None, :], float("inf"), highest)
                there = (first + query)[None, :] * (width // BLOCK_SIZE) + block[:, None]
                real = (query < num)[None, :] & (block < width // BLOCK_SIZE)[:, None]
                tl.store(blocks + there, highest.to(tl.bfloat16), mask=real)
            tl.store(out + target, summed.to(tl.bfloat16), mask=wanted)


@triton.jit
def _ordered(scores: tl.tensor, place: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Scores as whole numbers in their order, 128..65,535; what is hidden or -inf becomes 0."""
    bits = tl.load(scores + place, mask=place < end, other=0xFF80 - 0x10000).to(tl.int32)
    bits = tl.where(bits == -0x8000, 0, bits)  # minus zero equals zero
    key = (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF
    key = tl.where((bits & 0x7FFF) > 0x7F80, 0xFF80, key)  # NaN counts as the highest
    return tl.where(key <= 0x7F, 0, key)


@triton.jit
def _select_kernel(
    scores: tl.tensor,
    seen: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(seen + row), width)
    scores += row * width
    step = tl.arange(0, STEP)
    # The highest threshold that COUNT keys reach, two bits a pass; 0 where there are not so many.
    threshold = 0
    above = 0
    for digit in tl.static_range(8):
        unit = 1 << (14 - 2 * digit)
        # Three counts of ten bits each: a lane meets one key in STEP.
        counts = tl.zeros((STEP,), tl.int32)
        first = 0
        while first < end:
            key = _ordered(scores, first + step, end)
            counts += (key >= threshold + unit).to(tl.int32)
            counts += tl.where(key >= threshold + 2 * unit, 1 << 10, 0)
            counts += tl.where(key >= threshold + 3 * unit, 1 << 20, 0)
            first += STEP
        reach_one, reach_two = tl.sum(counts & 1023, axis=0), tl.sum((counts >> 10) & 1023, axis=0)
        reach_three = tl.sum(counts >> 20, axis=0)
        level = (reach_one >= COUNT).to(tl.int32) + (reach_two >= COUNT).to(tl.int32)
        level += (reach_three >= COUNT).to(tl.int32)
        higher = tl.where(level == 0, reach_one, tl.where(level == 1, reach_two, reach_three))
        above = tl.where(level == 3, above, higher)
        threshold += level * unit
    room = COUNT - above
    level_before = 0
    above_before = 0
    first = 0
    while first < end:
        key = _ordered(scores, first + step, end)
        is_level = ((key == threshold) & (key > 0)).to(tl.int32)
        is_above = (key > threshold).to(tl.int32)
        # Both counts in one scan: a row has fewer than 2^15 of either in a step.
        both = tl.cumsum(is_level | (is_above << 16), axis=0)
        levels, aboves = level_before + (both & 0xFFFF), above_before + (both >> 16)
        taken = (is_above > 0) | ((is_level > 0) & (levels <= room))
        places = aboves + tl.minimum(levels, room) - 1
        tl.store(out + row * COUNT + places, first + step, mask=taken & (places < COUNT))
        level_before += tl.sum(is_level, axis=0)
        above_before += tl.sum(is_above, axis=0)
        first += STEP
    total = above_before + tl.minimum(level_before, room)
    slot = tl.arange(0, COUNT_BLOCK)
    tl.store(out + row * COUNT + slot, tl.full((COUNT_BLOCK,), -1, tl.int32), mask=(slot >= total) & (slot < COUNT))


@triton.jit
def _locate_kernel(
    chosen: tl.tensor,
    tables: tl.tensor,
    spans: tl.tensor,
    candidates: tl.tensor,
    entries: tl.tensor,
    where: tl.tensor,
    counts: tl.tensor,
    table_stride: tl.tensor,
    num_blocks: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    span = tl.load(spans + token).to(tl.int64)
    entry = tl.load(chosen + token * COUNT + slot, mask=slot < COUNT, other=-1)
    real = (entry >= 0) & (span >= 0)
    if MAPPED:
        block = tl.load(candidates + token * num_blocks + entry // BLOCK_SIZE, mask=real, other=0)
        entry = block * BLOCK_SIZE + entry % BLOCK_SIZE
    block = tl.load(tables + span * table_stride + entry // PER_BLOCK, mask=real, other=0)
    place = token * COUNT + slot
    tl.store(entries + place, tl.where(real, entry, -1), mask=slot < COUNT)
    tl.store(where + place, tl.where(real, block * PER_BLOCK + entry % PER_BLOCK, -1), mask=slot < COUNT)
    tl.store(counts + token, tl.sum(real.to(tl.int32), axis=0))

"""How do a step's tokens attend to their paged keys: chunks of prompts and decode tokens alike, with the same bits?

Keys are cut into parts of one length from position 0. Inside a part weights are an online softmax over tiles of
TILE_TOKENS keys; parts are merged in ascending order by one fixed formula. A program either walks all parts of its
queries and merges as it goes, or (few long sequences) several programs share the parts and a second kernel merges them:
the operations on a query's numbers are the same, so neither the batch nor the number of programs changes a bit. Keys
that a query does not see add exact zeros, so it does not matter either which of them a program skips.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import check, power_of_two, runs_kernels
from kernels.ops.gpu_overlap import overlaps, wait_for_earlier
from kernels.ops.gpu_rope_cache import Heads, Paging

TILE_TOKENS = 64
PART_TOKENS = 128
"""Keys of a part: the only length where bits must not depend on the batch."""
LONG_PART_TOKENS = 256
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Shape:
    """How many query rows (tokens x heads of a group) a program takes, and how it runs."""

    rows: int = 64
    warps: int = 4
    stages: int = 3


# Frozen for SM90, measured with bench/gpu_tune.py; every shape gives the same bits (bench/gpu_check.py).
SINGLE = Shape(rows=16, warps=4, stages=3)
"""For single tokens, whose keys are read for the heads of one group only."""
CHUNK = Shape(rows=64, warps=4, stages=2)
"""For consecutive tokens, which share their keys."""


FULL_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""


def part_tokens(num_sequences: int, num_kv_heads: int, context_tokens: int) -> int:
    """The faster length of parts for decode steps whose bits may depend on their batch.

    Long parts are merged half as often; short ones give twice as many programs something to do. Measured on an H200
    (Llama-8B): 8 x 8,192 tokens 7.07 against 7.28 ms a step, 1 x 1,024 tokens 4.83 against 4.72 ms.
    """
    programs = num_sequences * num_kv_heads * (context_tokens // LONG_PART_TOKENS)
    return LONG_PART_TOKENS if programs >= FULL_PROGRAMS else PART_TOKENS


def tokens_per_tile(heads: Heads, shape: Shape) -> int:
    """How many consecutive tokens of one sequence a program takes."""
    group = power_of_two(heads.num_heads // heads.num_kv_heads)
    if group > shape.rows:
        raise ValueError(f"{group} query heads per KV head do not fit {shape.rows} rows")
    return shape.rows // group


def attend(
    queries: Tensor,
    tiles: Tensor,
    heads: Heads,
    paging: Paging,
    *,
    splits: int = 1,
    shape: Shape = CHUNK,
    part: int = PART_TOKENS,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of queries to their sequences' keys, scaled by head_dim ** -0.5.

    queries: [tokens, heads * head_dim] bf16, turned, contiguous.  tiles: [tiles, 4] int32: table row, first token (row
    of queries), number of tokens (at most `tokens_per_tile`), position of the first; 0 tokens is padding, whose output
    row is zeros.  splits: programs that share a tile's keys.  part: keys of a part, a multiple of TILE_TOKENS.
    window: a token sees so many newest positions, its own included; 0 is all.  sinks: [heads] fp32, a learned logit of
    each head that is neither scaled nor of any key: exp(sink) joins the softmax's denominator and gives no value, as in
    gpt-oss.  Keys and values of all positions that a token sees are in the cache; tables may name anything for blocks
    that nobody sees.  Returns [tokens, heads * head_dim] bf16; rows of tokens in no tile are not written.
    """
    check(window >= 0 and part % TILE_TOKENS == 0, f"a window of {window}, parts of {part} tokens")
    check(sinks is None or (list(sinks.shape) == [heads.num_heads] and sinks.dtype == torch.float32), "a sink a head")
    if queries.shape[1] != heads.num_heads * heads.head_dim or tiles.shape[1] != 4 or not tiles.is_contiguous():
        raise ValueError(f"queries {list(queries.shape)} and tiles {list(tiles.shape)} do not fit")
    if not runs_kernels(queries):
        return twin_attend(queries, tiles, heads, paging, window=window, sinks=sinks)
    return _launch_attend(
        queries, tiles, heads, paging, splits=splits, shape=shape, part=part, window=window, sinks=sinks
    )


def twin_attend(
    queries: Tensor, tiles: Tensor, heads: Heads, paging: Paging, *, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """`attend` in plain torch, one query after the other, in fp64."""
    dim, block_tokens = heads.head_dim, paging.block_tokens
    group = heads.num_heads // heads.num_kv_heads
    out = torch.zeros(len(queries), heads.num_heads, dim, dtype=torch.float64, device=queries.device)
    for row, first, count, position in tiles.tolist():
        if not count:
            continue
        blocks = paging.tables[row, : (position + count - 1) // block_tokens + 1].long()
        cached = paging.layer[blocks].double().transpose(0, 1).reshape(2, -1, heads.num_kv_heads, dim)
        for offset in range(count):
            seen = position + offset + 1
            keys, values = cached[:, max(seen - window, 0) if window else 0 : seen]
            q = queries[first + offset].double().view(heads.num_kv_heads, group, dim)
            scores = torch.einsum("kgd,nkd->kgn", q, keys) * dim**-0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(heads.num_kv_heads, group, 1)], -1)
            weights = scores.softmax(-1)[..., : keys.shape[0]]
            out[first + offset] = torch.einsum("kgn,nkd->kgd", weights, values).reshape(heads.num_heads, dim)
    return out.view(len(queries), -1).to(queries.dtype)


def _launch_attend(
    queries: Tensor,
    tiles: Tensor,
    heads: Heads,
    paging: Paging,
    *,
    splits: int,
    shape: Shape,
    part: int,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """`attend` by the kernels, on whatever device the queries are."""
    dim, device, overlap = heads.head_dim, queries.device, overlaps(queries)
    out = torch.empty(len(queries), heads.num_heads * dim, dtype=queries.dtype, device=device)
    most_parts = triton.cdiv(paging.tables.shape[1] * paging.block_tokens, part)
    if window:
        most_parts = min(most_parts, triton.cdiv(window, part) + 1)
    common = {"HEADS": heads.num_heads, "DIM": dim, "PART": part, "WINDOW": window, "SINKS": sinks is not None}
    if splits > 1 and len(tiles) != len(queries):
        raise ValueError("only steps of one token a tile are split")
    part_rows = len(tiles) * heads.num_heads * most_parts if splits > 1 else 0
    partial = torch.empty(part_rows, dim, dtype=torch.float32, device=device)
    sums = torch.empty(part_rows, 2, dtype=torch.float32, device=device)
    if not len(tiles):
        return out
    _attend_kernel[(len(tiles), heads.num_kv_heads, splits)](
        queries,
        tiles,
        paging.layer,
        paging.tables,
        paging.tables.stride(0),
        paging.layer.stride(0),
        paging.layer.stride(1),
        out,
        partial,
        sums,
        sums if sinks is None else sinks,
        most_parts,
        dim**-0.5 * _LOG2_E,
        **common,
        BLOCK_TOKENS=paging.block_tokens,
        KV_HEADS=heads.num_kv_heads,
        GROUP=heads.num_heads // heads.num_kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(heads.num_heads // heads.num_kv_heads),
        ROWS=shape.rows,
        TILE=TILE_TOKENS,
        SPLITS=splits,
        UPCAST=not queries.is_cuda,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if splits > 1:
        _launch_merge(tiles, out, partial, sums, sinks, most_parts, common)
    return out


def _launch_merge(
    tiles: Tensor,
    out: Tensor,
    partial: Tensor,
    sums: Tensor,
    sinks: Tensor | None,
    most_parts: int,
    common: dict[str, int | bool],
) -> None:
    """What several programs made of each tile's keys becomes one row of `out`."""
    overlap, heads, dim = overlaps(out), common["HEADS"], common["DIM"]
    _merge_kernel[(len(tiles), heads)](
        tiles,
        out,
        partial,
        sums,
        sums if sinks is None else sinks,
        most_parts,
        **common,
        AHEAD=8,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=1 if dim <= 64 else 2,
    )


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    # Triton's interpreter multiplies bf16 wrongly.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)


@triton.jit
def _merged(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, part_top: tl.tensor, part_total: tl.tensor, part_acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The one formula by which a part joins those before it; fused multiply-adds are spelled out."""
    new = tl.maximum(top, part_top)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old_scale = tl.exp2(top - safe)
    part_scale = tl.exp2(part_top - safe)
    total = tl.fma(total, old_scale, part_total * part_scale)
    acc = tl.fma(acc, tl.broadcast_to(old_scale[:, None], acc.shape), part_acc * part_scale[:, None])
    return new, total, acc


@triton.jit
def _with_sink(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, sinks: tl.tensor, head: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A sink joins last, as a part of one key whose value is zeros."""
    sink = tl.load(sinks + head, mask=mask, other=0.0) * 1.4426950408889634
    one, none = tl.full(sink.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32)
    top, total, acc = _merged(top, total, acc, sink, one, none)
    return top, total, acc


@triton.jit
def _attend_kernel(  # noqa: C901, PLR0912, PLR0915 - one kernel is one function
    queries: tl.tensor,
    tiles: tl.tensor,
    layer: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    most_parts: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_earlier(OVERLAP)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    table_row = tl.load(tiles + tile * 4).to(tl.int64)
    first_token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    end = tl.where(count > 0, position + count, 0)

    row = tl.arange(0, ROWS)
    token, member = row // GROUP_BLOCK, row % GROUP_BLOCK
    head = kv_head * GROUP + member
    is_query = (token < count) & (member < GROUP)
    dims = tl.arange(0, DIM)
    query_at = (first_token + token).to(tl.int64)[:, None] * (HEADS * DIM) + (head * DIM)[:, None] + dims[None, :]
    q = tl.load(queries + query_at, mask=is_query[:, None], other=0.0)
    last_key = tl.where(is_query, position + token, -1)

    table = tables + table_row * table_stride
    width: tl.constexpr = KV_HEADS * DIM
    keys = layer + kv_head * DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    part_top = tl.full([ROWS], float("-inf"), tl.float32)
    part_total = tl.full([ROWS], 0.0, tl.float32)
    part_acc = tl.full([ROWS, DIM], 0.0, tl.float32)

    ones = tl.full([TILE, 16], 1.0, tl.float32).to(queries.dtype.element_ty)

    begin = 0
    stop = end
    first_part = 0
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(position - (WINDOW - 1), 0)
        begin = lowest // TILE * TILE
        first_part = lowest // PART
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end, PART) - first_part, SPLITS) * PART
        own = first_part * PART + tl.program_id(2) * share
        begin = tl.maximum(begin, own)
        stop = tl.minimum(own + share, end)
    for start in range(begin, stop, TILE):
        key = start + tl.arange(0, TILE)
        if BLOCK_TOKENS >= TILE:
            block = tl.load(table + start // BLOCK_TOKENS).to(tl.int64)
            at = block * block_stride + ((start % BLOCK_TOKENS) + tl.arange(0, TILE)) * width
        else:
            block = tl.load(table + key // BLOCK_TOKENS, mask=key < end, other=0).to(tl.int64)
            at = block * block_stride + (key % BLOCK_TOKENS) * width
        k = tl.load(keys + at[None, :] + dims[:, None])
        scores = _dot(q, k, UPCAST) * scale
        is_seen = key[None, :] <= last_key[:, None]
        is_real = key < end
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > last_key[:, None] - WINDOW)
            is_real = is_real & (key >= lowest)
        scores = tl.where(is_seen, scores, float("-inf"))
        new = tl.maximum(part_top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(part_top - safe)
        weights = weights.to(queries.dtype.element_ty)
        # A sum by the matrix unit: a reduction's order would follow the number of rows and warps.
        part_total = tl.fma(part_total, shrink, tl.max(_dot(weights, ones, UPCAST), 1))
        part_top = new
        # What nobody wrote may be anything, and 0 * NaN is NaN.
        v = tl.load(keys + value_offset + at[:, None] + dims[None, :], mask=is_real[:, None], other=0.0)
        part_acc = part_acc * shrink[:, None]
        if UPCAST:
            part_acc += tl.dot(weights.to(tl.float32), v.to(tl.float32))
        else:
            part_acc = tl.dot(weights, v, part_acc)
        if ((start + TILE) % PART == 0) | (start + TILE >= stop):
            if SPLITS > 1:
                slot = (tile.to(tl.int64) * HEADS + head) * most_parts + (start // PART - first_part)
                tl.store(partial + slot[:, None] * DIM + dims[None, :], part_acc, mask=is_query[:, None])
                tl.store(sums + slot * 2, part_top, mask=is_query)
                tl.store(sums + slot * 2 + 1, part_total, mask=is_query)
            else:
                top, total, acc = _merged(top, total, acc, part_top, part_total, part_acc)
            part_top = tl.full([ROWS], float("-inf"), tl.float32)
            part_total = tl.full([ROWS], 0.0, tl.float32)
            part_acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    if SPLITS == 1:
        if SINKS:
            top, total, acc = _with_sink(top, total, acc, sinks, head, member < GROUP)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        stored = (token < tl.maximum(count, 1)) & (member < GROUP)
        out_at = (first_token + token).to(tl.int64)[:, None] * (HEADS * DIM) + (head * DIM)[:, None] + dims[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=stored[:, None])


@triton.jit
def _merge_kernel(
    tiles: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    most_parts: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_earlier(OVERLAP)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first_token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 2)
    end = tl.where(count > 0, tl.load(tiles + tile * 4 + 3) + 1, 0)
    dims = tl.arange(0, DIM)
    slot = (tile.to(tl.int64) * HEADS + head) * most_parts
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([1, DIM], 0.0, tl.float32)
    one = tl.arange(0, 1)
    parts = tl.cdiv(end, PART)
    if WINDOW > 0:
        parts -= tl.maximum(end - WINDOW, 0) // PART
    for first in range(0, parts, AHEAD):
        for step in tl.static_range(AHEAD):  # their loads do not wait for each other
            part = first + step + one
            inside = part < parts
            # Beyond the end: a part without weight, which changes nothing.
            part_top = tl.load(sums + (slot + part) * 2, mask=inside, other=float("-inf"))
            part_total = tl.load(sums + (slot + part) * 2 + 1, mask=inside, other=0.0)
            part_acc = tl.load(partial + (slot + part)[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
            top, total, acc = _merged(top, total, acc, part_top, part_total, part_acc)
    if SINKS:
        top, total, acc = _with_sink(top, total, acc, sinks, head + one, one < 1)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + first_token * HEADS * DIM + head * DIM + dims[None, :], result.to(out.dtype.element_ty))

"""How do a step's tokens attend to their paged keys: chunks of prompts and decode tokens alike, with the same bits?

Keys are cut into parts of PART_TOKENS from position 0. Inside a part weights are an online softmax over tiles of
TILE_TOKENS keys; parts are merged in ascending order by one fixed formula. A program either walks all parts of its
queries and merges as it goes, or (few long sequences) several programs share the parts and a second kernel merges them:
the operations on a query's numbers are the same, so neither the batch nor the number of programs changes a bit.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import power_of_two, runs_kernels
from kernels.ops.gpu_overlap import overlaps, wait_for_earlier
from kernels.ops.gpu_rope_cache import Heads, Paging

TILE_TOKENS = 64
PART_TOKENS = 128
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


def tokens_per_tile(heads: Heads, shape: Shape) -> int:
    """How many consecutive tokens of one sequence a program takes."""
    group = power_of_two(heads.num_heads // heads.num_kv_heads)
    if group > shape.rows:
        raise ValueError(f"{group} query heads per KV head do not fit {shape.rows} rows")
    return shape.rows // group


def attend(
    queries: Tensor, tiles: Tensor, heads: Heads, paging: Paging, *, splits: int = 1, shape: Shape = CHUNK
) -> Tensor:
    """Causal softmax attention of queries to their sequences' keys, scaled by head_dim ** -0.5.

    queries: [tokens, heads * head_dim] bf16, turned, contiguous.  tiles: [tiles, 4] int32: table row, first token (row
    of queries), number of tokens (at most `tokens_per_tile`), position of the first; 0 tokens is padding, whose output
    row is zeros.  splits: programs that share a tile's keys.  Keys and values of all positions up to a token's own are
    in the cache.  Returns [tokens, heads * head_dim] bf16; rows of tokens in no tile are not written.
    """
    if queries.shape[1] != heads.num_heads * heads.head_dim or tiles.shape[1] != 4 or not tiles.is_contiguous():
        raise ValueError(f"queries {list(queries.shape)} and tiles {list(tiles.shape)} do not fit")
    if not runs_kernels(queries):
        return twin_attend(queries, tiles, heads, paging)
    return _launch_attend(queries, tiles, heads, paging, splits=splits, shape=shape)


def twin_attend(queries: Tensor, tiles: Tensor, heads: Heads, paging: Paging) -> Tensor:
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
            keys, values = cached[:, : position + offset + 1]
            q = queries[first + offset].double().view(heads.num_kv_heads, group, dim)
            weights = (torch.einsum("kgd,nkd->kgn", q, keys) * dim**-0.5).softmax(-1)
            out[first + offset] = torch.einsum("kgn,nkd->kgd", weights, values).reshape(heads.num_heads, dim)
    return out.view(len(queries), -1).to(queries.dtype)


def _launch_attend(
    queries: Tensor, tiles: Tensor, heads: Heads, paging: Paging, *, splits: int = 1, shape: Shape = CHUNK
) -> Tensor:
    """`attend` by the kernels, on whatever device the queries are."""
    dim, device, overlap = heads.head_dim, queries.device, overlaps(queries)
    out = torch.empty(len(queries), heads.num_heads * dim, dtype=queries.dtype, device=device)
    most_parts = triton.cdiv(paging.tables.shape[1] * paging.block_tokens, PART_TOKENS)
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
        most_parts,
        dim**-0.5 * _LOG2_E,
        BLOCK_TOKENS=paging.block_tokens,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        GROUP=heads.num_heads // heads.num_kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(heads.num_heads // heads.num_kv_heads),
        DIM=dim,
        ROWS=shape.rows,
        TILE=TILE_TOKENS,
        PART=PART_TOKENS,
        SPLITS=splits,
        UPCAST=not queries.is_cuda,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if splits > 1:
        _merge_kernel[(len(tiles), heads.num_heads)](
            tiles,
            out,
            partial,
            sums,
            most_parts,
            HEADS=heads.num_heads,
            DIM=dim,
            PART=PART_TOKENS,
            AHEAD=8,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=1 if dim <= 64 else 2,
        )
    return out


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
def _attend_kernel(  # noqa: PLR0915 - one kernel is one function
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
    most_parts: tl.tensor,
    scale: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
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
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end, PART), SPLITS) * PART
        begin = tl.program_id(2) * share
        stop = tl.minimum(begin + share, end)
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
        scores = tl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
        new = tl.maximum(part_top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(part_top - safe)
        weights = weights.to(queries.dtype.element_ty)
        # A sum by the matrix unit: a reduction's order would follow the number of rows and warps.
        part_total = tl.fma(part_total, shrink, tl.max(_dot(weights, ones, UPCAST), 1))
        part_top = new
        # What nobody wrote may be anything, and 0 * NaN is NaN.
        v = tl.load(keys + value_offset + at[:, None] + dims[None, :], mask=(key < end)[:, None], other=0.0)
        part_acc = part_acc * shrink[:, None]
        if UPCAST:
            part_acc += tl.dot(weights.to(tl.float32), v.to(tl.float32))
        else:
            part_acc = tl.dot(weights, v, part_acc)
        if ((start + TILE) % PART == 0) | (start + TILE >= stop):
            if SPLITS > 1:
                slot = (tile.to(tl.int64) * HEADS + head) * most_parts + start // PART
                tl.store(partial + slot[:, None] * DIM + dims[None, :], part_acc, mask=is_query[:, None])
                tl.store(sums + slot * 2, part_top, mask=is_query)
                tl.store(sums + slot * 2 + 1, part_total, mask=is_query)
            else:
                top, total, acc = _merged(top, total, acc, part_top, part_total, part_acc)
            part_top = tl.full([ROWS], float("-inf"), tl.float32)
            part_total = tl.full([ROWS], 0.0, tl.float32)
            part_acc = tl.full([ROWS, DIM], 0.0, tl.float32)
    if SPLITS == 1:
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
    most_parts: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
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
    for first in range(0, parts, AHEAD):
        for step in tl.static_range(AHEAD):  # their loads do not wait for each other
            part = first + step + one
            inside = part < parts
            # Beyond the end: a part without weight, which changes nothing.
            part_top = tl.load(sums + (slot + part) * 2, mask=inside, other=float("-inf"))
            part_total = tl.load(sums + (slot + part) * 2 + 1, mask=inside, other=0.0)
            part_acc = tl.load(partial + (slot + part)[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
            top, total, acc = _merged(top, total, acc, part_top, part_total, part_acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + first_token * HEADS * DIM + head * DIM + dims[None, :], result.to(out.dtype.element_ty))

"""How do a step's queries get their positions, and its keys and values their places in the paged cache?

One pass per token: bias, the norm of query and key heads where a model has it, rotation by halves, and the store of K
and V into the token's block. A token of table row 0 is padding: it is turned like any other and stores nothing.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import runs_kernels
from kernels.ops.gpu_overlap import overlaps, wait_for_earlier


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of projected queries, keys and values is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Paging:
    """One layer's blocks, and which blocks each table row owns."""

    layer: Tensor
    """[num_blocks, 2, block_tokens, kv_heads * head_dim], a strided view of one layer: K at [:, 0], V at [:, 1]."""
    tables: Tensor
    """[table rows, most blocks] int32; row 0 belongs to nobody."""

    @property
    def block_tokens(self) -> int:
        return self.layer.shape[2]


@dataclass(frozen=True, slots=True)
class Turning:
    """What a model does to heads before attention sees them."""

    cos: Tensor
    """[positions, head_dim / 2] fp32."""
    sin: Tensor
    bias: Tensor | None = None
    """[row size] bf16."""
    qk_norm: Tensor | None = None
    """[2, head_dim] bf16: of queries, of keys."""
    eps: float = 0.0


def rope_and_store(
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    heads: Heads,
    turning: Turning,
    paging: Paging,
) -> Tensor:
    """Turn queries and keys, put keys and values into the cache, and return the queries.

    qkv: [tokens, row size] bf16, or [parts, tokens, row size] fp32, which are summed in order; contiguous.
    rows, positions: [tokens] int32: table row and absolute position.
    Returns [tokens, heads * head_dim] bf16.
    """
    if qkv.shape[-1] != heads.row_size or not qkv.is_contiguous() or rows.shape != positions.shape:
        raise ValueError(f"projections {list(qkv.shape)} are not rows of {heads.row_size}")
    if not runs_kernels(qkv):
        return twin_rope_and_store(qkv, rows, positions, heads, turning, paging)
    return _launch_rope_and_store(qkv, rows, positions, heads, turning, paging)


def twin_rope_and_store(
    qkv: Tensor, rows: Tensor, positions: Tensor, heads: Heads, turning: Turning, paging: Paging
) -> Tensor:
    """`rope_and_store` in plain torch."""
    tokens, dim, kind = qkv.shape[-2], heads.head_dim, paging.layer.dtype
    x = qkv.float() if qkv.dim() == 2 else qkv.sum(0)
    x = x if turning.bias is None else x + turning.bias.float()
    split = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = torch.split(x.view(tokens, -1, dim), split, dim=1)
    if turning.qk_norm is not None:
        q, k = (
            each * torch.rsqrt(each.square().mean(-1, keepdim=True) + turning.eps) * weight.float()
            for each, weight in zip((q, k), turning.qk_norm, strict=True)
        )
    at = positions.long()
    cos, sin = turning.cos[at][:, None], turning.sin[at][:, None]

    def turned(each: Tensor) -> Tensor:
        first, second = each.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(kind)

    kept = rows.long() > 0
    blocks = paging.tables[rows.long()[kept], at[kept] // paging.block_tokens].long()
    slots = at[kept] % paging.block_tokens
    paging.layer[blocks, 0, slots] = turned(k)[kept].reshape(len(blocks), -1)
    paging.layer[blocks, 1, slots] = v.to(kind)[kept].reshape(len(blocks), -1)
    return turned(q).reshape(tokens, -1)


def _launch_rope_and_store(
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    heads: Heads,
    turning: Turning,
    paging: Paging,
) -> Tensor:
    """`rope_and_store` by the kernel, on whatever device the rows are."""
    tokens, kind, overlap = qkv.shape[-2], paging.layer.dtype, overlaps(qkv)
    queries = torch.empty(tokens, heads.num_heads * heads.head_dim, dtype=kind, device=qkv.device)
    if not tokens:
        return queries
    half = heads.head_dim // 2
    turned_heads = heads.num_heads + heads.num_kv_heads
    _rope_store_kernel[(tokens, 2)](
        qkv,
        queries,
        rows,
        positions,
        turning.cos,
        turning.sin,
        qkv if turning.bias is None else turning.bias,
        qkv if turning.qk_norm is None else turning.qk_norm,
        turning.eps,
        tokens,
        paging.layer,
        paging.tables,
        paging.tables.stride(0),
        paging.layer.stride(0),
        paging.layer.stride(1),
        BLOCK_TOKENS=paging.block_tokens,
        HEADS=heads.num_heads,
        KV_HEADS=heads.num_kv_heads,
        HALF=half,
        TURNED=triton.next_power_of_2(turned_heads),
        STORED=triton.next_power_of_2(heads.num_kv_heads),
        HALF_BLOCK=triton.next_power_of_2(half),
        BIASED=turning.bias is not None,
        NORMED=turning.qk_norm is not None,
        PARTS=1 if qkv.dim() == 2 else len(qkv),
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4,
    )
    return queries


@triton.jit
def _summed(at: tl.tensor, inside: tl.tensor, part_size: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * part_size, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _rope_store_kernel(
    qkv: tl.tensor,
    queries: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    cos_table: tl.tensor,
    sin_table: tl.tensor,
    bias: tl.tensor,
    qk_norm: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    layer: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    value_offset: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    STORED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_earlier(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = KV_HEADS * 2 * HALF
    row_size: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    block = tl.load(tables + row * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    place = layer + block * block_stride + (position % BLOCK_TOKENS) * width
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    if tl.program_id(1) == 0:  # queries and keys
        head = tl.arange(0, TURNED)[:, None]
        inside = (head < HEADS + KV_HEADS) & (pair < HALF)
        at = head * 2 * HALF + pair
        first = _summed(qkv + token * row_size + at, inside, tokens * row_size, PARTS)
        second = _summed(qkv + token * row_size + at + HALF, inside, tokens * row_size, PARTS)
        if BIASED:
            first += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
            second += tl.load(bias + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            kind = tl.where(head < HEADS, 0, 1) * 2 * HALF + pair
            first = first * scale * tl.load(qk_norm + kind, mask=inside, other=0.0).to(tl.float32)
            second = second * scale * tl.load(qk_norm + kind + HALF, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_table + position * HALF + pair, mask=pair < HALF, other=0.0)
        sin = tl.load(sin_table + position * HALF + pair, mask=pair < HALF, other=0.0)
        straight = (first * cos - second * sin).to(queries.dtype.element_ty)
        crossed = (second * cos + first * sin).to(queries.dtype.element_ty)
        is_query = inside & (head < HEADS)
        query_at = queries + token * (HEADS * 2 * HALF) + at
        tl.store(query_at, straight, mask=is_query)
        tl.store(query_at + HALF, crossed, mask=is_query)
        is_key = inside & (head >= HEADS) & (row > 0)
        at -= HEADS * 2 * HALF
        tl.store(place + at, straight, mask=is_key)
        tl.store(place + at + HALF, crossed, mask=is_key)
    else:
        kv_head = tl.arange(0, STORED)[:, None]
        held = (kv_head < KV_HEADS) & (pair < HALF)
        slot = kv_head * 2 * HALF + pair
        source = (HEADS + KV_HEADS) * 2 * HALF + slot
        low = _summed(qkv + token * row_size + source, held, tokens * row_size, PARTS)
        high = _summed(qkv + token * row_size + source + HALF, held, tokens * row_size, PARTS)
        if BIASED:
            low += tl.load(bias + source, mask=held, other=0.0).to(tl.float32)
            high += tl.load(bias + source + HALF, mask=held, other=0.0).to(tl.float32)
        is_value = held & (row > 0)
        tl.store(place + value_offset + slot, low.to(queries.dtype.element_ty), mask=is_value)
        tl.store(place + value_offset + slot + HALF, high.to(queries.dtype.element_ty), mask=is_value)

"""How do new keys and entries become cache records, in one pass from a projection's output?

Normalised, turned to their positions, quantised and stored where the cache has them: the 528-byte record of a window
key, the 288-byte record of a compressed entry and the 68 bytes of its index key. One record is one program.
Caches are pools of slots, [slots, slot bytes] uint8, with sections at fixed offsets (`kernels.models.v41.layout`).
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.compress import pool_pairs
from kernels.ops.gpu_formats import (
    FP8_FLOOR,
    INDEX_FLOOR,
    MAIN_FLOOR,
    SIXTH,
    bf16,
    e2m1_code,
    e2m1_value,
    e4m3_bits,
    e4m3_value,
    exponents,
    power,
)
from kernels.ops.gpu_launch import check, runs_kernels
from kernels.ops.gpu_quant import norm_twin
from kernels.ops.quant import IndexFp4, MainFp4, WindowFp8
from kernels.ops.rope import rotate_last


@dataclass(frozen=True, slots=True)
class Section:
    """One array of records in every slot of a pool."""

    pool: Tensor
    """[slots, slot bytes] uint8."""
    offset: int
    record_bytes: int

    def put(self, slots: Tensor, places: Tensor, records: Tensor) -> None:
        """Store records by torch, for twins: [n], [n], [n, record_bytes]; negative slots are left out."""
        for slot, place, record in zip(slots.tolist(), places.tolist(), records, strict=True):
            if slot >= 0:
                start = self.offset + place * self.record_bytes
                self.pool[slot, start : start + self.record_bytes] = record

    def get(self, slots: Tensor, places: Tensor) -> Tensor:
        """Records by torch, for twins: [n], [n] -> [n, record_bytes] uint8."""
        starts = slots * self.pool.shape[1] + self.offset + places * self.record_bytes
        return self.pool.view(-1)[starts[:, None] + torch.arange(self.record_bytes, device=self.pool.device)]


def window_records(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> Tensor:
    """A projection's rows as window records, not yet in any ring: [tokens, size] bf16 -> [tokens, record] uint8.

    x: rows may lie apart.  weight: [size] fp32, of the norm.  cos, sin: [tokens, pairs] fp32.
    """
    tokens, size = x.shape
    check(x.dtype == torch.bfloat16 and x.stride(1) == 1 and size % 64 == 0, "rows are bf16, of 64s")
    codec = WindowFp8(size)
    if not runs_kernels(x):
        return codec.encode(rotate_last(norm_twin(x, weight, eps=eps).float(), cos, sin).bfloat16().float())
    out = torch.empty(tokens, codec.record_bytes, dtype=torch.uint8, device=x.device)
    _window_kernel[(tokens,)](
        x,
        weight,
        cos,
        sin,
        out,
        x.stride(0),
        eps,
        SIZE=size,
        PAIRS=cos.shape[1],
        RECORD=codec.record_bytes,
        num_warps=2,
    )
    return out


def store_ring(records: Tensor, ring: Section, tokens: Tensor, slots: Tensor, places: Tensor) -> None:
    """Copy some tokens' records into their rings; a negative slot is a padding row's and is left out.

    records: [n, record bytes] uint8.  tokens, slots, places: [stored] int64.
    """
    check(records.shape[1] == ring.record_bytes and ring.record_bytes % 2 == 0, "records are the ring's, of 2 bytes")
    if not runs_kernels(records):
        ring.put(slots, places, records[tokens])
        return
    if len(tokens):
        sizes = (ring.record_bytes, ring.offset, ring.pool.shape[1])
        unit = torch.int32 if all(size % 4 == 0 for size in sizes) else torch.int16
        wide, pool, size = records.view(unit), ring.pool.view(unit), unit.itemsize
        _ring_kernel[(len(tokens),)](
            wide,
            pool,
            tokens,
            slots,
            places,
            pool.shape[1],
            ring.offset // size,
            RECORD=ring.record_bytes // size,
            BLOCK=triton.next_power_of_2(ring.record_bytes // size),
            num_warps=1,
        )


def compress_entries(
    projected: Tensor,
    ring: Section | None,
    sources: Tensor,
    slots: Tensor,
    places: Tensor,
    weight: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Pool tokens into entries and normalise: the latent of each entry, [entries, size] bf16, before its rotation.

    projected: [tokens, 2 * size] fp32, scores then latents (ratio 2), or [tokens, size], latents alone (ratio 1).
    ring: of a ratio-2 source, records of score and latent of earlier tokens.  sources: [entries, ratio] int64, for
    ratio 2 into the earlier token of each row, then the step's tokens.  slots, places: [rows] of those in the ring.
    """
    entries, size = len(sources), len(weight)
    check(projected.dtype == torch.float32 and projected.is_contiguous(), "projections are fp32, rows end to end")
    if not runs_kernels(projected):
        if ring is None:
            raw = projected[sources[:, 0]]
        else:
            earlier = ring.get(slots, places).view(torch.float32).view(-1, 2, size)
            pairs = torch.cat([earlier, projected.view(-1, 2, size)])[sources]
            raw = pool_pairs(pairs[:, :, 0], pairs[:, :, 1])
        return norm_twin(raw.bfloat16(), weight, eps=eps)
    out = torch.empty(entries, size, dtype=torch.bfloat16, device=projected.device)
    if entries:
        pool = projected if ring is None else ring.pool.view(torch.float32)
        _compress_kernel[(entries,)](
            projected,
            pool,
            sources,
            slots,
            places,
            weight,
            out,
            eps,
            len(slots),
            0 if ring is None else pool.shape[1],
            0 if ring is None else ring.offset // 4,
            SIZE=size,
            PAIRED=ring is not None,
            num_warps=2,
        )
    return out


def store_main(latents: Tensor, cos: Tensor, sin: Tensor, main: Section, blocks: Tensor, places: Tensor) -> None:
    """Turn latents and store them as main records.

    latents: [entries, size] bf16.  cos, sin: [entries, pairs] fp32.  blocks, places: [entries] int64; blocks below 0
    are left out.
    """
    check(latents.dtype == torch.bfloat16 and latents.is_contiguous(), "latents are bf16, rows end to end")
    if not runs_kernels(latents):
        turned = rotate_last(latents.float(), cos, sin).bfloat16().float()
        main.put(blocks, places, MainFp4(latents.shape[1]).encode(turned))
    elif len(latents):
        _main_kernel[(len(latents),)](
            latents,
            cos,
            sin,
            main.pool,
            blocks,
            places,
            main.pool.shape[1],
            main.offset,
            SIZE=latents.shape[1],
            PAIRS=cos.shape[1],
            RECORD=main.record_bytes,
            num_warps=2,
        )


def store_index(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    data: Section,
    scale: Section,
    blocks: Tensor,
    places: Tensor,
    *,
    eps: float,
) -> None:
    """Normalise a projection's rows, turn them and store them as index keys, in their two sections.

    x: [entries, size] bf16.  weight: [size] fp32.  The others as in `store_main`.
    """
    size = x.shape[1]
    check(x.dtype == torch.bfloat16 and x.is_contiguous() and size % 64 == 0, "rows are bf16, end to end, of 64s")
    if not runs_kernels(x):
        turned = rotate_last(norm_twin(x, weight, eps=eps).float(), cos, sin).bfloat16().float()
        records = IndexFp4(size).encode(turned)
        data.put(blocks, places, records[:, : size // 2])
        scale.put(blocks, places, records[:, size // 2 :])
    elif len(x):
        _index_kernel[(len(x),)](
            x,
            weight,
            cos,
            sin,
            data.pool,
            blocks,
            places,
            data.pool.shape[1],
            data.offset,
            scale.offset,
            eps,
            SIZE=size,
            PAIRS=cos.shape[1],
            num_warps=1,
        )


def index_queries(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn index queries and round them as index records are: [tokens, heads, size] bf16 -> like it.

    cos, sin: [tokens, pairs] fp32.
    """
    tokens, heads, size = x.shape
    check(x.dtype == torch.bfloat16 and x.is_contiguous() and size % 64 == 0, "queries are bf16, end to end, of 64s")
    if not runs_kernels(x):
        codec = IndexFp4(size)
        turned = rotate_last(x.float(), cos, sin).bfloat16().float()
        return codec.decode(codec.encode(turned.view(-1, size))).view(x.shape).bfloat16()
    out = torch.empty_like(x)
    _query_kernel[(tokens, heads)](x, cos, sin, out, SIZE=size, PAIRS=cos.shape[1], num_warps=1)
    return out


@triton.jit
def _turned(
    even: tl.tensor,
    odd: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """The last PAIRS pairs turned, rounded to bf16: two [HALF] of fp32."""
    pair = tl.arange(0, HALF) - (HALF - PAIRS)
    turns = pair >= 0
    c = tl.load(cos + row * PAIRS + pair, mask=turns, other=1.0)
    s = tl.load(sin + row * PAIRS + pair, mask=turns, other=0.0)
    return bf16(even * c - odd * s), bf16(odd * c + even * s)


@triton.jit
def _window_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    RECORD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    GROUPS: tl.constexpr = SIZE // 32
    pair = tl.arange(0, HALF)
    even = tl.load(x + row * stride + 2 * pair).to(tl.float32)
    odd = tl.load(x + row * stride + 2 * pair + 1).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(even * even + odd * odd, axis=0) / SIZE + eps)
    even = bf16(even / length * tl.load(weight + 2 * pair))
    odd = bf16(odd / length * tl.load(weight + 2 * pair + 1))
    even, odd = _turned(even, odd, cos, sin, row, HALF, PAIRS)
    even, odd = tl.reshape(even, (GROUPS, 16)), tl.reshape(odd, (GROUPS, 16))
    exponent = exponents(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1), FP8_FLOOR, 448.0)
    scale = tl.broadcast_to(power(exponent)[:, None], (GROUPS, 16))
    place = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 16)[None, :] * 2
    tl.store(out + row * RECORD + place, e4m3_bits(tl.div_rn(even, scale)))
    tl.store(out + row * RECORD + place + 1, e4m3_bits(tl.div_rn(odd, scale)))
    tl.store(out + row * RECORD + SIZE + tl.arange(0, GROUPS), exponent.to(tl.uint8))


@triton.jit
def _ring_kernel(
    records: tl.tensor,
    pool: tl.tensor,
    tokens: tl.tensor,
    slots: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    offset: tl.tensor,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    slot = tl.load(slots + index)
    unit = tl.arange(0, BLOCK)
    mine = (unit < RECORD) & (slot >= 0)
    values = tl.load(records + tl.load(tokens + index) * RECORD + unit, mask=mine)
    tl.store(pool + slot * stride + offset + tl.load(places + index) * RECORD + unit, values, mask=mine)


@triton.jit
def _compress_kernel(
    projected: tl.tensor,
    pool: tl.tensor,
    sources: tl.tensor,
    slots: tl.tensor,
    places: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    PAIRED: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    if PAIRED:
        source = tl.load(sources + 2 * entry)
        second = projected + (tl.load(sources + 2 * entry + 1) - rows) * 2 * SIZE
        is_earlier = source < rows
        row = tl.where(is_earlier, source, 0)
        ring = tl.load(slots + row) * stride + offset + tl.load(places + row) * 2 * SIZE
        own = projected + tl.where(is_earlier, 0, source - rows) * 2 * SIZE
        score0 = tl.load(pool + ring + place, mask=is_earlier, other=0.0)
        score0 += tl.load(own + place, mask=source >= rows, other=0.0)
        latent0 = tl.load(pool + ring + SIZE + place, mask=is_earlier, other=0.0)
        latent0 += tl.load(own + SIZE + place, mask=source >= rows, other=0.0)
        score1, latent1 = tl.load(second + place), tl.load(second + SIZE + place)
        largest = tl.maximum(score0, score1)
        first, last = tl.exp(score0 - largest), tl.exp(score1 - largest)
        total = first + last
        values = (first / total) * latent0 + (last / total) * latent1
    else:
        values = tl.load(projected + tl.load(sources + entry) * SIZE + place)
    values = bf16(values)
    length = tl.sqrt_rn(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(out + entry * SIZE + place, bf16(values / length * tl.load(weight + place)).to(tl.bfloat16))


@triton.jit
def _main_kernel(
    latents: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pool: tl.tensor,
    blocks: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    RECORD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    GROUPS: tl.constexpr = SIZE // 16
    pair = tl.arange(0, HALF)
    even = tl.load(latents + row * SIZE + 2 * pair).to(tl.float32)
    odd = tl.load(latents + row * SIZE + 2 * pair + 1).to(tl.float32)
    even, odd = _turned(even, odd, cos, sin, row, HALF, PAIRS)
    even, odd = tl.reshape(even, (GROUPS, 8)), tl.reshape(odd, (GROUPS, 8))
    largest = tl.maximum(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1), MAIN_FLOOR)
    bits = e4m3_bits(tl.minimum(largest * SIXTH, 448.0))
    reciprocal = tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), e4m3_value(bits))[:, None]
    packed = (e2m1_code(odd * reciprocal) << 4) | e2m1_code(even * reciprocal)
    block = tl.load(blocks + row)
    record = pool + block * stride + offset + tl.load(places + row) * RECORD
    place = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(record + place, packed.to(tl.uint8), mask=tl.broadcast_to(block >= 0, (GROUPS, 8)))
    tl.store(record + HALF + tl.arange(0, GROUPS), bits, mask=tl.broadcast_to(block >= 0, (GROUPS,)))


@triton.jit
def _index_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pool: tl.tensor,
    blocks: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    data_offset: tl.tensor,
    scale_offset: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    GROUPS: tl.constexpr = SIZE // 32
    pair = tl.arange(0, HALF)
    even = tl.load(x + row * SIZE + 2 * pair).to(tl.float32)
    odd = tl.load(x + row * SIZE + 2 * pair + 1).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(even * even + odd * odd, axis=0) / SIZE + eps)
    even = bf16(even / length * tl.load(weight + 2 * pair))
    odd = bf16(odd / length * tl.load(weight + 2 * pair + 1))
    even, odd = _turned(even, odd, cos, sin, row, HALF, PAIRS)
    even, odd = tl.reshape(even, (GROUPS, 16)), tl.reshape(odd, (GROUPS, 16))
    exponent = exponents(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1), INDEX_FLOOR, 6.0)
    scale = tl.broadcast_to(power(exponent)[:, None], (GROUPS, 16))
    packed = (e2m1_code(tl.div_rn(odd, scale)) << 4) | e2m1_code(tl.div_rn(even, scale))
    block, place = tl.load(blocks + row), tl.load(places + row)
    byte = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    data = pool + block * stride + data_offset + place * HALF
    tl.store(data + byte, packed.to(tl.uint8), mask=tl.broadcast_to(block >= 0, (GROUPS, 16)))
    scales = pool + block * stride + scale_offset + place * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales, exponent.to(tl.uint8), mask=tl.broadcast_to(block >= 0, (GROUPS,)))


@triton.jit
def _query_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = SIZE // 2
    GROUPS: tl.constexpr = SIZE // 32
    start = (token * tl.num_programs(1) + head) * SIZE
    pair = tl.arange(0, HALF)
    even = tl.load(x + start + 2 * pair).to(tl.float32)
    odd = tl.load(x + start + 2 * pair + 1).to(tl.float32)
    even, odd = _turned(even, odd, cos, sin, token, HALF, PAIRS)
    even, odd = tl.reshape(even, (GROUPS, 16)), tl.reshape(odd, (GROUPS, 16))
    exponent = exponents(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1), INDEX_FLOOR, 6.0)
    scale = tl.broadcast_to(power(exponent)[:, None], (GROUPS, 16))
    place = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 16)[None, :] * 2
    even = e2m1_value(e2m1_code(tl.div_rn(even, scale))) * scale
    odd = e2m1_value(e2m1_code(tl.div_rn(odd, scale))) * scale
    tl.store(out + start + place, even.to(tl.bfloat16))
    tl.store(out + start + place + 1, odd.to(tl.bfloat16))

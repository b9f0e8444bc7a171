"""How are rows multiplied by fp8 and fp4 weights, each row by its own expert's?

Activations are bf16 values that an fp8 product would see (`gpu_quant`), weights become bf16 in registers: both
exactly, since their scales are powers of two. So a product differs from its definition by the order of fp32 additions
alone, which Hopper's fp8 units, that keep about 14 bits of a sum, could not promise. A dense matrix is one expert that
has every row.

A row's sum runs over its own expert's columns in tiles of 128 in one order, whatever the tile of rows: bits do not
depend on the batch.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import (
    bf16,
    dot,
    e2m1_pairs,
    e4m3_scaled,
    fp8_round_trip,
    power,
)
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_quant import swiglu_twin
from kernels.ops.quant import GROUP, dequantise_fp4_weight, dequantise_fp8_weight
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin

DEPTH = 128
"""Columns per product; fp4 bytes hold values 64 apart in it, so that both nibbles are matrices of their own."""
HALF_DEPTH = DEPTH // 2
Format = Literal["bf16", "fp8", "fp4"]
_NUMBERS = {"bf16": 0, "fp8": 1, "fp4": 2}


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices of one shape, [experts, out, in], as the kernel reads them."""

    format: Format
    data: Tensor
    """bf16 [experts, out, in]; e4m3 bits uint8 like it; or e2m1 pairs uint8 [experts, out, in / 2], repacked."""
    scale: Tensor
    """Biased exponents uint8: fp8 [experts, out / 32, in / 32], fp4 [experts, out, in / 32]; bf16: none."""
    size: int
    """in"""

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def out(self) -> int:
        return self.data.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dense(self, expert: int) -> Tensor:
        """One matrix by torch, [out, in] fp32."""
        if self.format == "bf16":
            return self.data[expert].float()
        scale = self.scale[expert].view(torch.float8_e8m0fnu)
        if self.format == "fp8":
            return dequantise_fp8_weight(self.data[expert].view(torch.float8_e4m3fn), scale)
        return dequantise_fp4_weight(_repacked(self.data[expert], back=True), scale)


def fp8_weights(data: Tensor, scale: Tensor) -> Weights:
    """data: [experts, out, in] e4m3.  scale: [experts, out / 32, in / 32] ue8m0.  Both as a checkpoint stores them."""
    check(data.shape[1] % GROUP == 0 and data.shape[2] % DEPTH == 0, f"a matrix is of 32s by {DEPTH}s")
    return Weights("fp8", data.view(torch.uint8).contiguous(), scale.view(torch.uint8).contiguous(), data.shape[2])


def fp4_weights(data: Tensor, scale: Tensor) -> Weights:
    """data: [experts, out, in / 2] int8, two e2m1 in a byte.  scale: [experts, out, in / 32] ue8m0."""
    check(data.shape[2] * 2 % DEPTH == 0, f"rows are of {DEPTH}s")
    packed = _repacked(data.view(torch.uint8).flatten(0, 1), back=False).view(data.shape)
    return Weights("fp4", packed, scale.view(torch.uint8).contiguous(), data.shape[2] * 2)


def bf16_weights(weights: Weights) -> Weights:
    """The same values in bf16, exactly: twice or four times the bytes, and nothing to unpack."""
    data = torch.stack([weights.dense(expert).bfloat16() for expert in range(weights.experts)])
    return Weights("bf16", data, weights.scale[:0], weights.size)


def _repacked(packed: Tensor, *, back: bool) -> Tensor:
    """Values 2i and 2i + 1 of a byte <-> values i and i + 64 of a tile of 128: [rows, in / 2] uint8, new."""
    rows = len(packed)
    if back:
        tile = packed.view(rows, -1, HALF_DEPTH)
        values = torch.cat([tile & 15, tile >> 4], dim=2).view(rows, -1, 2)
        return values[..., 0] | (values[..., 1] << 4)
    values = torch.stack([packed & 15, packed >> 4], dim=2).view(rows, -1, 2, HALF_DEPTH)
    return (values[:, :, 0] | (values[:, :, 1] << 4)).view(rows, -1)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which expert: positions in order of experts, every expert's end to end."""

    ends: Tensor
    """[experts] int32: position after each expert's last row."""
    sources: Tensor
    """[positions] int32: the row of the input that stands at each position."""
    targets: Tensor
    """[positions] int32: the row of the output it becomes."""
    places: Tensor | None = None
    """[targets] int32: the position of each; where somebody reads rows that were left in the order of positions."""


def interleaved(tokens: int, count: int, device: torch.device) -> Groups:
    """Rows of [tokens, count] by the second index, each of them in the order of tokens."""
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * tokens
    rows = torch.arange(tokens * count, dtype=torch.int32, device=device).view(tokens, count).t().reshape(-1)
    return Groups(ends, rows, rows)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program cuts the work, frozen by measurement (docs/performance_v41.md)."""

    rows: int
    outs: int
    warps: int
    stages: int


FEW = Tile(rows=16, outs=128, warps=4, stages=4)
SOME = Tile(rows=64, outs=128, warps=4, stages=4)
MANY: dict[Format, Tile] = {
    "bf16": Tile(rows=128, outs=128, warps=8, stages=3),
    "fp8": Tile(rows=256, outs=128, warps=8, stages=2),
    "fp4": Tile(rows=128, outs=128, warps=4, stages=3),
}


def tile_for(rows: float, kind: Format) -> Tile:
    """The tile for so many rows an expert."""
    if rows <= FEW.rows:
        return FEW
    return SOME if rows <= SOME.rows else MANY[kind]


def multiply(
    x: Tensor, weights: Weights, groups: Groups, *, num_out: int, tile: Tile | None = None, wide: bool = False
) -> Tensor:
    """Each position's row times its expert's matrix: out[targets[p]] = bf16(weights[expert of p] @ x[sources[p]]).

    x: [rows, in] bf16, as an fp8 product sees it.  wide: leave sums as they are.  Returns [num_out, out] bf16, or fp32
    when `wide`; rows that are no target are garbage.
    """
    check(
        x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == weights.size, "rows are bf16, of the matrix"
    )
    check(weights.size % DEPTH == 0, f"rows are of {DEPTH}s")
    if not runs_kernels(x):
        return _multiply_twin(x, weights, groups, num_out, wide=wide)
    out = torch.empty(num_out, weights.out, dtype=torch.float32 if wide else x.dtype, device=x.device)
    _launch(x, weights, groups, None, out, None, 0.0, tile)
    return out


def multiply_gated(
    x: Tensor,
    weights: Weights,
    groups: Groups,
    factors: Tensor | None,
    *,
    limit: float,
    num_out: int,
    tile: Tile | None = None,
) -> Tensor:
    """Gate and up projections, the clamped SwiGLU and the rounding to fp8 in one pass.

    weights: gate on top of up, [experts, 2 * width, in].  factors: [num_out] fp32, of each output row, or None.
    Returns [num_out, width] bf16, as the next fp8 product sees it; rows that are no target are garbage.
    """
    check(
        x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == weights.size, "rows are bf16, of the matrix"
    )
    check(weights.size % DEPTH == 0 and weights.out % (2 * GROUP) == 0, f"a matrix is of 64s by {DEPTH}s")
    if not runs_kernels(x):
        both = _multiply_twin(x, weights, groups, num_out).float()
        return fp8_round_trip_twin(swiglu_twin(both, factors, limit=limit)).bfloat16()
    out = torch.empty(num_out, weights.out // 2, dtype=x.dtype, device=x.device)
    _launch(x, weights, groups, factors, out, out, limit, tile)
    return out


def _multiply_twin(x: Tensor, weights: Weights, groups: Groups, num_out: int, *, wide: bool = False) -> Tensor:
    dtype = torch.float32 if wide else x.dtype
    out = torch.full((num_out, weights.out), float("nan"), dtype=dtype, device=x.device)
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if start == end:
            continue  # its matrix need not be unpacked
        rows = x[groups.sources[start:end].long()].float()
        out[groups.targets[start:end].long()] = (rows @ weights.dense(expert).T).to(dtype)
        start = end
    return out


def _launch(
    x: Tensor,
    weights: Weights,
    groups: Groups,
    factors: Tensor | None,
    out: Tensor,
    gated: Tensor | None,
    limit: float,
    tile: Tile | None,
) -> None:
    positions, width = len(groups.sources), out.shape[1]
    if not positions:
        return
    cut = tile or tile_for(positions / weights.experts, weights.format)
    outs = min(cut.outs, power_of_two(weights.out))
    num_outs = tiles(width, outs // 2 if gated is not None else outs)
    most_rows = tiles(positions, cut.rows) + min(weights.experts, positions)
    _grouped_kernel[(most_rows * num_outs,)](
        x,
        weights.data,
        weights.scale,
        groups.ends,
        groups.sources,
        groups.targets,
        groups.ends if factors is None else factors,
        out,
        limit,
        width,
        SIZE=weights.size,
        FORMAT=_NUMBERS[weights.format],
        EXPERTS=weights.experts,
        EXPERTS_BLOCK=power_of_two(weights.experts),
        GATED=gated is not None,
        WEIGHED=factors is not None,
        WIDE=out.dtype == torch.float32,
        ROWS=cut.rows,
        OUTS=outs,
        FLIPPED=cut.rows < 64 or weights.format == "fp8",
        DEPTH_HALF=HALF_DEPTH,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


@triton.jit
def _halves(
    data: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    mine: tl.tensor,
    column: tl.tensor,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Two [OUTS, HALF] tiles of a matrix's rows, in bf16: columns from `column` and from `column + HALF`."""
    step = tl.arange(0, HALF)
    is_row = mine[:, None]
    group = step // 32
    if FORMAT == 0:
        place = row[:, None] * SIZE + column + step[None, :]
        low = tl.load(data + place, mask=is_row, other=0.0)
        high = tl.load(data + place + HALF, mask=is_row, other=0.0)
    elif FORMAT == 1:
        place = row[:, None] * SIZE + column + step[None, :]
        exponent = (row // 32)[:, None] * (SIZE // 32) + column // 32 + group[None, :]
        own = power(tl.load(scale + exponent, mask=is_row, other=0))
        theirs = power(tl.load(scale + exponent + HALF // 32, mask=is_row, other=0))
        low = e4m3_scaled(tl.load(data + place, mask=is_row, other=0), own)
        high = e4m3_scaled(tl.load(data + place + HALF, mask=is_row, other=0), theirs)
    else:
        both = tl.load(data + row[:, None] * (SIZE // 2) + column // 2 + step[None, :], mask=is_row, other=0)
        exponent = row[:, None] * (SIZE // 32) + column // 32 + group[None, :]
        own = power(tl.load(scale + exponent, mask=is_row, other=0))
        theirs = power(tl.load(scale + exponent + HALF // 32, mask=is_row, other=0))
        low, high = e2m1_pairs(both, own, theirs)
    return low, high


@triton.jit
def shares_of(
    ends: tl.tensor, num_outs: tl.tensor, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of every expert: where its rows begin and end, how many tiles they make, and how many programs end with it.

    Experts one after the other, and in each, tiles of rows next to each other for one tile of its matrix.
    """
    index = tl.arange(0, EXPERTS_BLOCK)
    known = index < EXPERTS
    end = tl.load(ends + index, mask=known, other=0)
    begin = tl.load(ends + index - 1, mask=known & (index > 0), other=0)
    row_tiles = tl.where(known, tl.cdiv(end - begin, ROWS), 0)
    return begin, end, row_tiles, tl.cumsum(row_tiles, axis=0) * num_outs


@triton.jit
def tile_of(
    program: tl.tensor,
    expert: tl.tensor,
    shares: tl.tuple,
    num_outs: tl.tensor,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A program's tile: its first row, where its expert's rows end, and which tile of the matrix it is."""
    begin, end, row_tiles, last = shares
    mine = tl.arange(0, EXPERTS_BLOCK) == expert
    count = tl.sum(tl.where(mine, row_tiles, 0), axis=0)
    local = program - tl.sum(tl.where(mine, last - row_tiles * num_outs, 0), axis=0)
    first = tl.sum(tl.where(mine, begin, 0), axis=0) + (local % count) * ROWS
    return first, tl.sum(tl.where(mine, end, 0), axis=0), local // count


@triton.jit
def gated(
    values: tl.tensor,
    limit: tl.tensor,
    factors: tl.tensor,
    target: tl.tensor,
    is_mine: tl.tensor,
    WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
) -> tl.tensor:
    """SwiGLU of a tile of interleaved gates and projections, rounded to fp8: [ROWS, OUTS / 2] fp32."""
    pairs = tl.permute(tl.reshape(values, (ROWS, OUTS // 16, 2, 8)), (0, 1, 3, 2))
    gate, up = tl.split(pairs)
    gate = tl.minimum(gate, limit)
    values = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    values = tl.reshape(values, (ROWS, OUTS // 2))
    if WEIGHED:
        values *= tl.load(factors + target, mask=is_mine, other=0.0)[:, None]
    return fp8_round_trip(values, OUTS // 64)


@triton.jit
def _grouped_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    ends: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    result: tl.tensor,
    limit: tl.tensor,
    width: tl.tensor,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    FLIPPED: tl.constexpr,
    DEPTH_HALF: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    num_outs = tl.cdiv(width, OUTS // 2 if GATED else OUTS)
    shares = shares_of(ends, num_outs, EXPERTS, EXPERTS_BLOCK, ROWS)
    expert = tl.sum(((shares[3] <= program) & (tl.arange(0, EXPERTS_BLOCK) < EXPERTS)).to(tl.int32), axis=0)
    if expert < EXPERTS:
        first, stop, out_tile = tile_of(program, expert, shares, num_outs, EXPERTS_BLOCK, ROWS)
        position = first + tl.arange(0, ROWS)
        is_mine = position < stop
        source = tl.load(sources + position, mask=is_mine, other=0).to(tl.int64)
        target = tl.load(targets + position, mask=is_mine, other=0).to(tl.int64)
        out = tl.arange(0, OUTS)
        if GATED:
            # Eight rows of the gate, then the same eight of the projection: one product, and each pair in one thread.
            column = out_tile * (OUTS // 2) + out // 16 * 8 + out % 8
            base = (expert.to(tl.int64) * 2 + out // 8 % 2) * width + column
        else:
            column = out_tile * OUTS + out
            base = expert.to(tl.int64) * width + column
        is_out = column < width
        half = tl.arange(0, DEPTH_HALF)
        low_x = x + source[:, None] * SIZE + half[None, :]
        # Matrix units take no fewer than 64 rows of the first side; fp8 weights are faster there, fp4 on the other.
        acc = tl.zeros((OUTS, ROWS) if FLIPPED else (ROWS, OUTS), tl.float32)
        for depth in range(0, SIZE, 2 * DEPTH_HALF):
            x_low = tl.load(low_x + depth, mask=is_mine[:, None], other=0.0)
            x_high = tl.load(low_x + depth + DEPTH_HALF, mask=is_mine[:, None], other=0.0)
            low, high = _halves(data, scale, base, is_out, depth, SIZE, FORMAT, DEPTH_HALF)
            if FLIPPED:
                acc = dot(high, tl.trans(x_high), dot(low, tl.trans(x_low), acc))
            else:
                acc = dot(x_high, tl.trans(high), dot(x_low, tl.trans(low), acc))
        values = tl.trans(acc) if FLIPPED else acc
        if not WIDE:
            values = bf16(values)
        if GATED:
            values = gated(values, limit, factors, target, is_mine, WEIGHED, ROWS, OUTS)
            column = out_tile * (OUTS // 2) + tl.arange(0, OUTS // 2)
        place = target[:, None] * width + column[None, :]
        tl.store(result + place, values.to(result.dtype.element_ty), mask=is_mine[:, None] & (column < width)[None, :])

"""How is a dense fp8 matrix multiplied on a GPU: by the library, by rows of bf16, or on the fp8 units?

fp8 values under power-of-two scales are bf16 values, so all three compute the same products; only sums differ. Hopper's
fp8 units sum 32 products at a time here, then fp32 takes over with the scales of that group: their limited sums never
grow long. Which is fastest at which row count is measured (docs/performance_v41.md) and frozen in `product`.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import IN_PYTHON, bf16, e4m3_value, power
from kernels.ops.gpu_grouped import Groups, Weights, bf16_weights, fp8_weights, multiply
from kernels.ops.gpu_launch import INTERPRETED, check, power_of_two, runs_kernels, tiles
from kernels.ops.quant import GROUP, dequantise_fp8_rows

LIBRARY_ROWS = 64
"""From so many rows on the library's bf16 product is faster than unpacking fp8 weights for it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A dense matrix, as fp8 and (where rows are many) as the same values in bf16."""

    fp8: Weights
    """One expert."""
    wide: Tensor | None
    """[out, in] bf16."""

    @classmethod
    def of(cls, data: Tensor, scale: Tensor, *, wide: bool) -> Matrix:
        """data: [out, in] e4m3.  scale: [out / 32, in / 32] ue8m0.  wide: keep the bf16 copy too."""
        weights = fp8_weights(data.unsqueeze(0), scale.unsqueeze(0))
        return cls(weights, bf16_weights(weights).data[0] if wide else None)


def every_row(count: int, device: torch.device) -> Groups:
    """One expert that has all rows."""
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return Groups(rows[-1:] + 1, rows, rows)


def product(x: Tensor, matrix: Matrix, rows: Groups) -> Tensor:
    """[tokens, in] bf16, as an fp8 product sees it, times a matrix: [tokens, out] bf16.

    rows: `every_row` of so many, made once.
    """
    if matrix.wide is not None and x.is_cuda and len(x) > LIBRARY_ROWS:
        return torch.mm(x, matrix.wide.t())
    return multiply(x, matrix.fp8, rows, num_out=len(x))


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """How a program of the fp8 units cuts the work."""

    rows: int
    outs: int
    warps: int
    stages: int


FP8_TILE = Fp8Tile(rows=128, outs=128, warps=8, stages=5)


def fp8_product(data: Tensor, exponents: Tensor, weights: Weights, *, tile: Fp8Tile = FP8_TILE) -> Tensor:
    """Quantised rows times an fp8 matrix on the fp8 units: [tokens, out] bf16.

    data: [tokens, in] e4m3, exponents: [tokens, in / 32] uint8, as `quantise_rows` makes them.
    """
    tokens, size = data.shape
    check(weights.format == "fp8" and weights.experts == 1 and size == weights.size, "one fp8 matrix, of these rows")
    if not runs_kernels(data):
        rows = dequantise_fp8_rows(data, exponents.view(torch.float8_e8m0fnu))
        return (rows @ weights.dense(0).T).bfloat16()
    out = torch.empty(tokens, weights.out, dtype=torch.bfloat16, device=data.device)
    # The interpreter has no fp8 products: there the kernel reads the bits itself.
    kind = torch.uint8 if INTERPRETED else torch.float8_e4m3fn
    cut_rows = min(tile.rows, max(power_of_two(tokens), 16))
    _fp8_kernel[(tiles(tokens, cut_rows) * tiles(weights.out, tile.outs),)](
        data.view(kind),
        exponents,
        weights.data.view(kind),
        weights.scale,
        out,
        tokens,
        weights.out,
        SIZE=size,
        ROWS=cut_rows,
        OUTS=tile.outs,
        DEPTH=GROUP,
        GROUPED=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _fp8_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row_tiles, out_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(width, OUTS)
    # Bands of eight tiles of rows go over the outputs together, so that both stay in the cache.
    band = program // (GROUPED * out_tiles)
    high = tl.minimum(row_tiles - band * GROUPED, GROUPED)
    inside = program % (GROUPED * out_tiles)
    row = (band * GROUPED + inside % high) * ROWS + tl.arange(0, ROWS)
    column_out = (inside // high) * OUTS + tl.arange(0, OUTS)
    is_row, is_out = row < tokens, column_out < width
    step = tl.arange(0, DEPTH)
    x_place = x + row.to(tl.int64)[:, None] * SIZE + step[None, :]
    data_place = data + column_out.to(tl.int64)[None, :] * SIZE + step[:, None]
    x_scale_place = x_scale + row.to(tl.int64) * (SIZE // 32)
    scale_place = scale + (column_out // 32) * (SIZE // 32)
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for group in range(SIZE // DEPTH):
        own = tl.load(x_place + group * DEPTH, mask=is_row[:, None], other=0.0)
        theirs = tl.load(data_place + group * DEPTH, mask=is_out[None, :], other=0.0)
        own_scale = power(tl.load(x_scale_place + group, mask=is_row, other=0))
        their_scale = power(tl.load(scale_place + group, mask=is_out, other=0))
        if IN_PYTHON:  # noqa: SIM108 - the choice at compile time must be a statement
            part = tl.dot(e4m3_value(own), e4m3_value(theirs))
        else:
            part = tl.dot(own, theirs)
        acc += part * (own_scale[:, None] * their_scale[None, :])
    place = row.to(tl.int64)[:, None] * width + column_out[None, :]
    tl.store(out + place, bf16(acc).to(tl.bfloat16), mask=is_row[:, None] & is_out[None, :])

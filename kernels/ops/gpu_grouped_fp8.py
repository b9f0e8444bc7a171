"""How are rows multiplied on Hopper's fp8 units by kernels of our own, each row by its own expert's matrix?

Rows and matrices are restated as `gpu_fp8` says; rows have a scale for every span of columns. The units add 32 products
at a time with about 14 bits; after every span fp32 takes over. A row's sum runs over its own expert's columns in one
order, by one cut for every number of rows: bits do not depend on the batch.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import IN_PYTHON, bf16, e4m3_value
from kernels.ops.gpu_fp8 import RowScaled, SpanRows
from kernels.ops.gpu_grouped import Groups, gated, shares_of, tile_of
from kernels.ops.gpu_launch import INTERPRETED, check, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_quant import swiglu_twin
from kernels.ops.quant import GROUP
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin

_SPANS = (256, 128)


def span_of(size: int) -> int:
    """How many columns the fp8 units add up before fp32 takes over: always the same for a matrix.

    With 256 the kernel is a fifth faster than with 128, and its sums are 2e-4 further from exact ones: a tenth of what
    their rounding to bf16 is.  Raises ValueError.
    """
    for span in _SPANS:
        if size % span == 0:
            return span
    raise ValueError(f"rows of {size} values are no multiple of {_SPANS[-1]}")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a program cuts the work."""

    rows: int
    outs: int
    warps: int
    stages: int


CUT = Cut(rows=128, outs=128, warps=8, stages=3)
"""Frozen by measurement (bench/gpu_v41_experts.py), and one for every number of rows."""


def multiply(
    x: SpanRows, weights: RowScaled, groups: Groups, *, num_out: int, cut: Cut = CUT, wide: bool = False
) -> Tensor:
    """Each position's row times its expert's matrix: out[targets[p]] = bf16(weights[expert of p] @ x[p]).

    wide: leave sums as they are.  Returns [num_out, out] bf16, or fp32 when `wide`; others' rows are garbage.
    """
    if not runs_kernels(x.data):
        return _twin(x, weights, groups, num_out, wide=wide)
    dtype = torch.float32 if wide else torch.bfloat16
    out = torch.empty(num_out, weights.out, dtype=dtype, device=x.data.device)
    _launch(x, weights, groups, None, out, 0.0, cut, gated=False)
    return out


def multiply_gated(
    x: SpanRows, weights: RowScaled, groups: Groups, factors: Tensor | None, *, limit: float, cut: Cut = CUT
) -> Tensor:
    """Gate and up projections, the clamped SwiGLU and the rounding to fp8 in one pass.

    weights: gate on top of up, [experts, 2 * width, in].  factors: [slots] fp32, by target, or None.  Returns
    [positions, width] bf16 in the order of positions, as the next fp8 product sees it.
    """
    check(weights.out % (2 * GROUP) == 0, "a matrix has a multiple of 64 rows")
    if not runs_kernels(x.data):
        straight = Groups(groups.ends, groups.targets, torch.arange(len(x.data), device=x.data.device).int())
        both = _twin(x, weights, straight, len(x.data), wide=False).float()
        mine = None if factors is None else factors[groups.targets.long()]
        return fp8_round_trip_twin(swiglu_twin(both, mine, limit=limit)).bfloat16()
    out = torch.empty(len(x.data), weights.out // 2, dtype=torch.bfloat16, device=x.data.device)
    _launch(x, weights, groups, factors, out, limit, cut, gated=True)
    return out


def _twin(x: SpanRows, weights: RowScaled, groups: Groups, num_out: int, *, wide: bool) -> Tensor:
    dtype = torch.float32 if wide else torch.bfloat16
    out = torch.full((num_out, weights.out), float("nan"), dtype=dtype, device=x.data.device)
    rows, start = x.dense(), 0
    for expert, end in enumerate(groups.ends.tolist()):
        if start < end:
            out[groups.targets[start:end].long()] = (rows[start:end] @ weights.dense(expert).T).to(dtype)
        start = end
    return out


def _launch(
    x: SpanRows,
    weights: RowScaled,
    groups: Groups,
    factors: Tensor | None,
    out: Tensor,
    limit: float,
    cut: Cut,
    *,
    gated: bool,
) -> None:
    positions, width = len(x.data), out.shape[1]
    check(x.data.shape[1] == weights.size and weights.size % len(x.scale) == 0, "rows are the matrix's")
    if not positions:
        return
    kind = torch.uint8 if INTERPRETED else torch.float8_e4m3fn
    per_tile = cut.outs // 2 if gated else cut.outs
    most_rows = tiles(positions, cut.rows) + min(weights.experts, positions)
    _fp8_grouped_kernel[(most_rows * tiles(width, per_tile),)](
        x.data.view(kind),
        x.scale,
        weights.data.view(kind),
        weights.scale,
        groups.ends,
        groups.targets,
        groups.ends if factors is None else factors,
        out,
        positions,
        limit,
        width,
        SIZE=weights.size,
        EXPERTS=weights.experts,
        EXPERTS_BLOCK=power_of_two(weights.experts),
        GATED=gated,
        WEIGHED=factors is not None,
        WIDE=out.dtype == torch.float32,
        ROWS=cut.rows,
        OUTS=cut.outs,
        DEPTH=weights.size // len(x.scale),
        WHOLE=width % per_tile == 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


@triton.jit
def fp8_dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """A @ b of e4m3 values, summed by the units."""
    if IN_PYTHON:
        return tl.dot(e4m3_value(a), e4m3_value(b))
    return tl.dot(a, b)


@triton.jit
def _fp8_grouped_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    ends: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    result: tl.tensor,
    positions: tl.tensor,
    limit: tl.tensor,
    width: tl.tensor,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    num_outs = tl.cdiv(width, OUTS // 2 if GATED else OUTS)
    shares = shares_of(ends, num_outs, EXPERTS, EXPERTS_BLOCK, ROWS)
    expert = tl.sum(((shares[3] <= program) & (tl.arange(0, EXPERTS_BLOCK) < EXPERTS)).to(tl.int32), axis=0)
    if expert < EXPERTS:
        first, stop, out_tile = tile_of(program, expert, shares, num_outs, EXPERTS_BLOCK, ROWS)
        position = first + tl.arange(0, ROWS)
        # Rows past the expert's are another's, or the last one again: multiplied, and not stored.
        read = tl.minimum(position, positions - 1)
        out = tl.arange(0, OUTS)
        if GATED:
            # Eight rows of the gate, then the same eight of the projection: one product, and each pair in one thread.
            column = out_tile * (OUTS // 2) + out // 16 * 8 + out % 8
            kept = column if WHOLE else tl.minimum(column, width - 1)
            base = (expert.to(tl.int64) * 2 + out // 8 % 2) * width + kept
        else:
            column = out_tile * OUTS + out
            kept = column if WHOLE else tl.minimum(column, width - 1)
            base = expert.to(tl.int64) * width + kept
        step = tl.arange(0, DEPTH)
        x_at = x + read.to(tl.int64)[:, None] * SIZE + step[None, :]
        data_at = data + base[None, :] * SIZE + step[:, None]
        acc = tl.zeros((ROWS, OUTS), tl.float32)
        scale_at = x_scale + read
        own = tl.load(scale_at)
        for depth in range(0, SIZE, DEPTH):
            scale_at += positions
            rows = tl.load(x_at + depth)
            matrix = tl.load(data_at + depth)
            following = tl.load(scale_at, mask=depth + DEPTH < SIZE, other=0.0)
            acc += fp8_dot(rows, matrix) * own[:, None]
            own = following
        values = acc
        values *= tl.load(scale + base)[None, :]
        if not WIDE:
            values = bf16(values)
        is_mine = position < stop
        target = tl.load(targets + position, mask=is_mine, other=0).to(tl.int64)
        if GATED:
            values = gated(values, limit, factors, target, is_mine, WEIGHED, ROWS, OUTS)
            column = out_tile * (OUTS // 2) + tl.arange(0, OUTS // 2)
            target = position.to(tl.int64)
        place = target[:, None] * width + column[None, :]
        tl.store(result + place, values.to(result.dtype.element_ty), mask=is_mine[:, None] & (column < width)[None, :])

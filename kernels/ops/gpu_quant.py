"""How are rows normalised, gated and rounded to fp8 on their way into a matrix product, in one pass?

What an fp8 product sees of its rows leaves here either as bf16 (fp8 values times powers of two are bf16 values: exact)
or as e4m3 data with a scale exponent for every 32. One row is one program: its bits depend on nothing else.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.elementwise import rms_norm
from kernels.ops.gpu_formats import FP8_FLOOR, bf16, e4m3_bits, exponents, fp8_round_trip, power
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels
from kernels.ops.quant import GROUP, quantise_fp8_rows
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin


def round_fp8(x: Tensor) -> Tensor:
    """What an fp8 product sees of rows: [..., size] bf16 or fp32 -> bf16 of that shape, contiguous."""
    kinds = {torch.bfloat16, torch.float32}
    check(x.dtype in kinds and x.shape[-1] % GROUP == 0, "rows are bf16 or fp32, a multiple of 32 values long")
    if not runs_kernels(x):
        return fp8_round_trip_twin(x.float()).bfloat16()
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.bfloat16, device=x.device)
    block = power_of_two(rows.shape[1])
    _round_kernel[(len(rows),)](rows, out, rows.stride(0), SIZE=rows.shape[1], BLOCK=block, num_warps=_warps(block))
    return out.view(x.shape)


def norm_fp8(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows, and what an fp8 product sees of it: [rows, size] bf16 -> two like it, contiguous.

    x: rows may lie apart.  weight: [size] fp32.
    """
    check(x.dtype == torch.bfloat16 and weight.dtype == torch.float32, "rows are bf16, their weight fp32")
    check(weight.shape == x.shape[1:] and x.shape[1] % GROUP == 0, "the weight has a row's length, a multiple of 32")
    if not runs_kernels(x):
        normed = norm_twin(x, weight, eps=eps)
        return normed, fp8_round_trip_twin(normed.float()).bfloat16()
    normed, rounded = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    block = power_of_two(x.shape[1])
    _norm_kernel[(len(x),)](
        x, weight, normed, rounded, x.stride(0), eps, SIZE=x.shape[1], BLOCK=block, num_warps=_warps(block)
    )
    return normed, rounded


def norm_twin(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm alone, by torch: [rows, size] -> bf16."""
    wide = x.float()
    return rms_norm(wide, weight, eps=eps, out=torch.empty_like(wide)).bfloat16()


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, size] bf16 -> (e4m3 like it, biased scale exponents [rows, size / 32] uint8)."""
    check(x.dtype == torch.bfloat16 and x.shape[1] % GROUP == 0, "rows are bf16, a multiple of 32 values long")
    if not runs_kernels(x):
        data, scale = quantise_fp8_rows(x.float())
        return data, scale.view(torch.uint8)
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), x.shape[1] // GROUP, dtype=torch.uint8, device=x.device)
    block = power_of_two(x.shape[1])
    _quantise_kernel[(len(x),)](x, data, scales, x.stride(0), SIZE=x.shape[1], BLOCK=block, num_warps=_warps(block))
    return data.view(torch.float8_e4m3fn), scales


def swiglu_fp8(gate_up: Tensor, weights: Tensor | None, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up) * weight, as an fp8 product sees it.

    gate_up: [rows, 2 * width] bf16, gate first.  weights: [rows] fp32, or None for ones.  Returns [rows, width] bf16.
    """
    width = gate_up.shape[1] // 2
    check(gate_up.dtype == torch.bfloat16 and width % GROUP == 0, "rows are bf16, halves a multiple of 32 long")
    check(gate_up.is_contiguous(), "rows lie end to end")
    if not runs_kernels(gate_up):
        return fp8_round_trip_twin(swiglu_twin(gate_up.float(), weights, limit=limit)).bfloat16()
    out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    block = power_of_two(width)
    _swiglu_kernel[(len(gate_up),)](
        gate_up,
        gate_up if weights is None else weights,
        out,
        limit,
        SIZE=width,
        WEIGHED=weights is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def swiglu_twin(gate_up: Tensor, weights: Tensor | None, *, limit: float) -> Tensor:
    """The gated activation by torch, unrounded: [rows, 2 * width] fp32 -> [rows, width]."""
    gate, up = gate_up.chunk(2, dim=1)
    gate = gate.clamp(max=limit)
    activated = gate / gate.neg().exp().add(1.0) * up.clamp(-limit, limit)
    return activated if weights is None else activated * weights.unsqueeze(1)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _round_kernel(x: tl.tensor, out: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + place, mask=place < SIZE, other=0.0).to(tl.float32)
    rounded = fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32)
    tl.store(out + row * SIZE + place, tl.reshape(rounded, (BLOCK,)).to(tl.bfloat16), mask=place < SIZE)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    rounded: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mine = place < SIZE
    values = tl.load(x + row * stride + place, mask=mine, other=0.0).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(values * values, axis=0) / SIZE + eps)
    values = bf16(values / length * tl.load(weight + place, mask=mine, other=0.0))
    tl.store(normed + row * SIZE + place, values.to(tl.bfloat16), mask=mine)
    values = fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32)
    tl.store(rounded + row * SIZE + place, tl.reshape(values, (BLOCK,)).to(tl.bfloat16), mask=mine)


@triton.jit
def _quantise_kernel(
    x: tl.tensor, data: tl.tensor, scales: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + place, mask=place < SIZE, other=0.0).to(tl.float32)
    groups = tl.reshape(values, (BLOCK // 32, 32))
    exponent = exponents(tl.max(tl.abs(groups), axis=1), FP8_FLOOR, 448.0)
    bits = e4m3_bits(tl.div_rn(groups, tl.broadcast_to(power(exponent)[:, None], (BLOCK // 32, 32))))
    tl.store(data + row * SIZE + place, tl.reshape(bits, (BLOCK,)), mask=place < SIZE)
    group = tl.arange(0, BLOCK // 32)
    tl.store(scales + row * (SIZE // 32) + group, exponent.to(tl.uint8), mask=group < SIZE // 32)


@triton.jit
def _swiglu_kernel(
    gate_up: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    limit: tl.tensor,
    SIZE: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mine = place < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + place, mask=mine, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + place, mask=mine, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    values = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    if WEIGHED:
        values *= tl.load(weights + row)
    values = fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32)
    tl.store(out + row * SIZE + place, tl.reshape(values, (BLOCK,)).to(tl.bfloat16), mask=mine)

"""How is a sublayer's output added to the residual stream and normalised for the next one, in one pass?"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import runs_kernels
from kernels.ops.gpu_overlap import overlaps, wait_for_earlier


def add_rms_norm(
    added: Tensor | None, residual: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None
) -> Tensor:
    """Add to the residual in place, rounded to its dtype; return its rows at unit root-mean-square times weight.

    residual: [rows, hidden] bf16, contiguous.  added: like it, or [parts, rows, hidden] fp32, summed in order; None
    adds nothing.  bias: added as well.  weight, bias: [hidden] bf16.  Sums are fp32.
    Returns [rows, hidden] bf16.
    """
    if weight.shape != residual.shape[1:] or not residual.is_contiguous():
        raise ValueError(f"rows {list(residual.shape)} do not match a norm of {list(weight.shape)}")
    if added is not None and (added.shape[-2:] != residual.shape or not added.is_contiguous()):
        raise ValueError(f"cannot add {list(added.shape)} to {list(residual.shape)}")
    if not runs_kernels(residual):
        return twin_add_rms_norm(added, residual, weight, eps=eps, bias=bias)
    return _launch_add_rms_norm(added, residual, weight, eps=eps, bias=bias)


def twin_add_rms_norm(
    added: Tensor | None, residual: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None
) -> Tensor:
    """`add_rms_norm` in plain torch."""
    if added is not None:
        total = residual.float() + (added.float() if added.dim() == 2 else added.sum(0))
        residual.copy_(total if bias is None else total + bias.float())
    x = residual.float()
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(residual.dtype)


def _launch_add_rms_norm(
    added: Tensor | None, residual: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None
) -> Tensor:
    """`add_rms_norm` by the kernel, on whatever device the rows are."""
    rows, hidden = residual.shape
    out, overlap = torch.empty_like(residual), overlaps(residual)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            residual if added is None else added,
            residual,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            hidden,
            eps,
            BLOCK=triton.next_power_of_2(hidden),
            PARTS=0 if added is None else 1 if added.dim() == 2 else len(added),
            BIASED=bias is not None,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=8 if hidden > 1024 else 4,
        )
    return out


@triton.jit
def _add_rms_norm_kernel(
    added: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        total = tl.load(added + row + columns, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            at = (row * 0 + rows) * part * hidden + row + columns
            total += tl.load(added + at, mask=inside, other=0.0)
        x += total
        if BIASED:
            x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (x * scale * factor).to(out.dtype.element_ty), mask=inside)

"""How are the two halves of a feed-forward layer joined?"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import runs_kernels
from kernels.ops.gpu_overlap import overlaps, wait_for_earlier

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate_up: [rows, 2 * ffn] bf16, gate first, contiguous.  Computed in fp32.  Returns [rows, ffn] bf16.
    """
    if gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate and up of {list(gate_up.shape)} are not two contiguous halves")
    return _launch_swiglu(gate_up) if runs_kernels(gate_up) else twin_swiglu(gate_up)


def twin_swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def _launch_swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu` by the kernel, on whatever device the rows are."""
    rows, double = gate_up.shape
    ffn = double // 2
    out = torch.empty(rows, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _swiglu_kernel[(rows, triton.cdiv(ffn, _BLOCK))](
            gate_up, out, ffn, BLOCK=_BLOCK, OVERLAP=overlaps(out), launch_pdl=overlaps(out), num_warps=4
        )
    return out


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """fp32 -> fp32; the one place that says in which order."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_kernel(
    gate_up: tl.tensor, out: tl.tensor, ffn: tl.tensor, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < ffn
    gate = tl.load(gate_up + row * 2 * ffn + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn + ffn + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * ffn + columns, silu_times(gate, up).to(out.dtype.element_ty), mask=inside)

"""What happens to each row on its own: normalisation, rotary positions, the gated activation.

A vectorised loop computes its tail with scalar code, so the bits of `silu` or `sigmoid` depend on where in the tensor
an element stands (measured). Only operations whose every element is rounded once (+, -, *, /, sqrt), sums over a fixed
last dimension, and `exp`, which has no scalar tail, are used here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.constants import constant
from kernels.ops.scratch import Scratch

PADDING = 8
"""Columns after a hidden row: the first holds a constant, the rest zeros."""


def rms_norm_padded(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
    """`rms_norm` in three operations, for rows that carry sqrt(size * eps) in the column after them.

    The length of such a row is sqrt(sum of squares + size * eps): the mean, the addition of eps and the root of the
    definition, without a pass for each.
    x: [rows, size + PADDING] fp32.  weight: [size], times sqrt(size).  out: [rows, size].  Returns out.
    """
    torch.div(x[:, :-PADDING], row_length(x), out=out)
    return out.mul_(weight)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
    """Scale each row of x to unit root-mean-square, then by weight.

    x: [..., size] fp32.  weight: broadcasts to x.  out: like x, may be x.  Returns out.
    """
    root = mean_square(x).add_(constant(eps, x.device)).sqrt_()
    return torch.div(x, root, out=out).mul_(weight)


def mean_square(x: Tensor) -> Tensor:
    """Of each row: [..., size] fp32 -> [..., 1], new."""
    length = row_length(x)
    return torch.mul(length, length, out=length).mul_(constant(1.0 / x.shape[-1], x.device))


def row_length(x: Tensor) -> Tensor:
    """Root of the sum of squares of each row: [..., size] fp32 -> [..., 1]."""
    if x.device.type == "cpu":
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return length
    return folded_sum(x.square()).sqrt_().unsqueeze(-1)


def row_sum(x: Tensor) -> Tensor:
    """Sum each row: [..., size] fp32 -> [...]. A row's bits do not depend on how many rows there are.

    On the CPU a sum over the last dimension is such a sum (proven at start-up). A GPU splits a row among threads by the
    shape of the whole tensor; folding is the same additions always.
    """
    if x.device.type != "cpu":
        return folded_sum(x)
    total: Tensor = x.sum(dim=-1)
    return total


def folded_sum(x: Tensor) -> Tensor:
    """Sum each row by adding its second half to its first until one number is left: [..., size] -> [...]."""
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : size - half] += x[..., half:]
        x = folded
    return x.squeeze(-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, scratch: Scratch, out: Tensor) -> Tensor:
    """Rotary position embedding, halves layout: element i turns with element i + size/2.

    x: [tokens, heads, size] fp32.  cos, sin: [tokens, 1, size], each half repeated.  out: like x, not x.  Returns out.
    """
    half = x.shape[-1] // 2
    straight = torch.mul(x, cos, out=scratch.take("rotate.cos", tuple(x.shape)))
    crossed = torch.mul(x, sin, out=scratch.take("rotate.sin", tuple(x.shape)))
    torch.sub(straight[..., :half], crossed[..., half:], out=out[..., :half])
    torch.add(straight[..., half:], crossed[..., :half], out=out[..., half:])
    return out


def swiglu(gate_up: Tensor, *, scratch: Scratch) -> Tensor:
    """silu(gate) * up.

    gate_up: [rows, 2 * ffn] fp32, gate first.  Returns [rows, ffn] fp32, a scratch buffer.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.neg(gate, out=scratch.take("swiglu", tuple(gate.shape)))
    return torch.div(gate, out.exp_().add_(1.0), out=out).mul_(up)

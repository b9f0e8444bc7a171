"""How do the four residual streams of a token feed a sublayer and take its output (manifold hyper-connections)?

The mixing matrix of a token is made doubly stochastic by Sinkhorn's iteration; the weights that mix the streams into a
sublayer's input come from the sublayer before it ("shifted"). Formula: DeepInfer's V4.1 (open source).

A sum over four things is the same three additions in the same order wherever a token stands, so a token's bits do not
depend on its neighbours. Nothing here rounds to bf16; the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.elementwise import row_length

STREAMS = 4
COEFFICIENTS = 2 * STREAMS + STREAMS * STREAMS
"""Rows of a sublayer's mixing weight: pre, post, and the matrix between streams."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one sublayer does with the streams of each token."""

    pre: Tensor
    """[tokens, 4]: mixes the streams into the input of the NEXT sublayer."""
    post: Tensor
    """[tokens, 4]: how much of the output each stream takes."""
    mix: Tensor
    """[tokens, 4, 4]: from stream (first index) to stream (second)."""


def first_pre(num_tokens: int, device: torch.device) -> Tensor:
    """The weights before any sublayer has made some: the first stream alone. [tokens, 4]."""
    pre = torch.zeros(num_tokens, STREAMS, device=device)
    pre[:, 0] = 1.0
    return pre


def mean_square(streams: Tensor) -> Tensor:
    """Of all four streams of a token together: [tokens, 4, hidden] fp32 -> [tokens, 1]."""
    flat = streams.flatten(1)
    return row_length(flat).square_().mul_(1.0 / flat.shape[1])


def coefficients(
    product: Tensor,
    square: Tensor,
    *,
    scale: Tensor,
    base: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> Coefficients:
    """A sublayer's coefficients, from the streams before it.

    product: [tokens, 24] fp32, the flattened streams times the mixing weight.  square: [tokens, 1], their mean_square.
    scale: [3] (pre, post, mix).  base: [24].  eps: of the norm.  hc_eps: keeps every divisor of Sinkhorn above zero.
    """
    tokens = len(product)
    normed = product / (square + eps).sqrt_()
    # Tokens last: then a step of the iteration is one contiguous pass however few tokens there are.
    raw = (normed.mul_(_per_row(scale)).add_(base)).t().contiguous()
    weights = raw[: 2 * STREAMS].neg().exp_().add_(1.0).reciprocal_()
    matrix = _sinkhorn(raw[2 * STREAMS :].view(STREAMS, STREAMS, tokens), hc_eps, iterations)
    return Coefficients(
        pre=(weights[:STREAMS] + hc_eps).t().contiguous(),
        post=(weights[STREAMS:] * 2.0).t().contiguous(),
        mix=matrix.permute(2, 0, 1).contiguous(),
    )


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """A sublayer's input (before its norm): [tokens, 4, hidden], [tokens, 4] -> [tokens, hidden] fp32."""
    mixed = streams[:, 0] * pre[:, :1]
    part = torch.empty_like(mixed)
    for stream in range(1, STREAMS):
        mixed.add_(torch.mul(streams[:, stream], pre[:, stream, None], out=part))
    return mixed


def update(streams: Tensor, output: Tensor, made: Coefficients) -> Tensor:
    """The streams after a sublayer: each takes its share of the output and of every stream.

    streams: [tokens, 4, hidden] fp32, unchanged.  output: [tokens, hidden].  Returns a new [tokens, 4, hidden].
    """
    updated = output.unsqueeze(1) * made.post.unsqueeze(-1)
    part = torch.empty_like(updated)
    for stream in range(STREAMS):
        share = made.mix[:, stream].unsqueeze(-1)
        updated.add_(torch.mul(streams[:, stream].unsqueeze(1), share, out=part))
    return updated


def _per_row(scale: Tensor) -> Tensor:
    """[3] -> [24]: the scale of each coefficient."""
    return torch.cat([scale[0].expand(STREAMS), scale[1].expand(STREAMS), scale[2].expand(STREAMS * STREAMS)])


def _sinkhorn(raw: Tensor, eps: float, iterations: int) -> Tensor:
    """[4, 4, tokens] logits -> rows and columns that sum to about one; the columns are divided last."""
    least = raw.new_tensor(eps)  # a Python number would be made into a tensor at each of the forty additions
    powers = (raw - raw.amax(dim=1, keepdim=True)).exp_()
    matrix = powers.div_(_sum_of_four(powers, dim=1)).add_(least)
    matrix.div_(_sum_of_four(matrix, dim=0).add_(least))
    for _ in range(iterations - 1):
        matrix.div_(_sum_of_four(matrix, dim=1).add_(least))
        matrix.div_(_sum_of_four(matrix, dim=0).add_(least))
    return matrix


def _sum_of_four(x: Tensor, *, dim: int) -> Tensor:
    """x[0] + x[1] + x[2] + x[3] along dim, in this order, the dimension kept.

    On the CPU torch's own sum of four is these additions (a test holds it to that) at half the cost of writing them
    out; a GPU may choose another order by the shape.
    """
    if x.device.type == "cpu":
        return x.sum(dim=dim, keepdim=True)
    first, second, third, fourth = x.unbind(dim)
    return ((first + second).add_(third).add_(fourth)).unsqueeze(dim)

"""How do the four residual streams of a token feed a sublayer and take its output (manifold hyper-connections)?

The mixing matrix of a token is made doubly stochastic by Sinkhorn's iteration; the weights that mix the streams into a
sublayer's input come from the sublayer before it ("shifted"). Formula: DeepInfer's V4.1 (open source).

A sum over four things is the same three additions in the same order wherever a token stands, so a token's bits do not
depend on its neighbours. Nothing here rounds to bf16; the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import elementwise
from kernels.ops.constants import constant

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
    return elementwise.mean_square(streams.flatten(1))


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
    scale: [3] (pre, post, mix), or `spread` of it.  base: [24].  eps: of the norm.  hc_eps: keeps every divisor of
    Sinkhorn above zero.
    """
    device = product.device
    normed = product / (square + constant(eps, device)).sqrt_()
    each = scale if scale.shape[0] == COEFFICIENTS else spread(scale)
    # Tokens last: then a step of the iteration is one contiguous pass however few tokens there are.
    raw = normed.mul_(each).add_(base).t().contiguous()
    weights = raw[: 2 * STREAMS].neg().exp_().add_(constant(1.0, device)).reciprocal_()
    matrix = _sinkhorn(raw[2 * STREAMS :].view(STREAMS, STREAMS, -1), hc_eps, iterations)
    return Coefficients(
        pre=weights[:STREAMS].add_(constant(hc_eps, device)).t().contiguous(),
        post=weights[STREAMS:].mul_(constant(2.0, device)).t().contiguous(),
        mix=matrix.permute(2, 0, 1).contiguous(),
    )


def spread(scale: Tensor) -> Tensor:
    """[3] -> [24]: the scale of each coefficient."""
    return torch.cat([scale[0].expand(STREAMS), scale[1].expand(STREAMS), scale[2].expand(STREAMS * STREAMS)])


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """A sublayer's input (before its norm): [tokens, 4, hidden], [tokens, 4] -> [tokens, hidden] fp32."""
    first, second, third, fourth = (streams * pre.unsqueeze(2)).unbind(1)
    return (first + second).add_(third).add_(fourth)


def update(streams: Tensor, output: Tensor, made: Coefficients) -> Tensor:
    """The streams after a sublayer: each takes its share of the output and of every stream.

    streams: [tokens, 4, hidden] fp32, unchanged.  output: [tokens, hidden].  Returns a new [tokens, 4, hidden].
    """
    updated = output.unsqueeze(1) * made.post.unsqueeze(2)
    part = torch.empty_like(updated)
    for stream, share in zip(streams.unsqueeze(2).unbind(1), made.mix.unsqueeze(3).unbind(1), strict=True):
        updated.add_(torch.mul(stream, share, out=part))
    return updated


def _sinkhorn(raw: Tensor, eps: float, iterations: int) -> Tensor:
    """[4, 4, tokens] logits -> rows and columns that sum to about one; the columns are divided last."""
    powers = (raw - raw.amax(dim=1, keepdim=True)).exp_()
    # Some eighty passes over a few numbers: numpy's calls cost a third of torch's, and both round each operation once.
    return torch.from_numpy(_balanced(powers.cpu().numpy(), eps, iterations)).to(raw.device)


def _balanced(powers: NDArray[np.float32], eps: float, iterations: int) -> NDArray[np.float32]:
    """[4, 4, tokens] -> a new one, whose rows and columns were divided by their sums in turn.

    Sums go over the first dimension, so that a step is one pass whose additions have one order; what is divided is
    written the other way round, for the next sum.  eps: added to every sum, so it lies in a fifth line of both.
    """
    lines: NDArray[np.float32] = np.full((2, STREAMS + 1, *powers.shape[1:]), eps, np.float32)
    by_column, by_row = lines[0], lines[1]
    columns: NDArray[np.float32] = by_column[:STREAMS]
    rows = by_row[:STREAMS]
    sums = np.add.reduce(powers.transpose(1, 0, 2).copy(), 0)
    np.divide(powers, sums[:, None], columns)
    columns += by_column[STREAMS]
    columns_turned, rows_turned = columns.transpose(1, 0, 2), rows.transpose(1, 0, 2)
    for _ in range(iterations - 1):
        np.divide(columns, np.add.reduce(by_column, 0, None, sums), rows_turned)
        np.divide(rows, np.add.reduce(by_row, 0, None, sums), columns_turned)
    np.divide(columns, np.add.reduce(by_column, 0, None, sums), columns)
    return columns

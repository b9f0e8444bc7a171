"""Which experts does a token go to, and with what weights?

Affinity is the root of a softplus; a bias that never enters the weights evens out the load. Formula: DeepInfer's V4.1.

torch's softplus and log may give an element other bits in another place of the tensor, so the logarithm is a series of
additions, multiplications and one division here, each rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.ops.constants import constant

_SERIES_TERMS = 9
"""Terms of the series of atanh: with z of at most 1/3 the tenth is below 2^-31 of the sum."""
_LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token, the strongest first."""

    experts: Tensor
    """[tokens, top_k] int64."""
    weights: Tensor
    """[tokens, top_k] fp32."""


def route(logits: Tensor, bias: Tensor, *, top_k: int, scaling: float) -> Routes:
    """Choose by biased affinity, weigh by the affinity itself; of equal ones the lower expert first.

    logits: [tokens, experts] fp32.  bias: [experts], or [tokens, experts] where tokens have different ones.
    scaling: what a token's weights sum to.
    """
    affinity = softplus(logits).sqrt_()
    order = torch.sort(affinity + bias, dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k].contiguous()
    chosen = affinity.gather(1, experts)
    first, *others = chosen.unbind(1)
    total = first.clone()
    for other in others:
        total.add_(other)
    total.add_(constant(_LEAST_SUM, total.device))
    return Routes(experts, chosen.div_(total.unsqueeze(1)).mul_(constant(scaling, total.device)))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), an element's bits the same wherever it stands: fp32 like x, new.

    max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(u / (u + 2)).
    """
    small = x.contiguous().abs().neg_().exp_()
    two, zero = constant(2.0, x.device), constant(0.0, x.device)
    z = small.div_(small + two)
    square = z * z
    last, *between, first = _factors(x.device)
    series = square * last
    for factor in between:
        series.add_(factor).mul_(square)
    return series.add_(first).mul_(z).mul_(two).add_(x.maximum(zero))


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> tuple[Tensor, ...]:
    """Of the series' terms, the last one's first."""
    return tuple(constant(1.0 / (2 * term - 1), device) for term in range(_SERIES_TERMS, 0, -1))

"""Which experts does a token go to, and with what weights?

Affinity is the root of a softplus; a bias that never enters the weights evens out the load. Formula: DeepInfer's V4.1.

torch's softplus and log may give an element other bits in another place of the tensor, so the logarithm is a series of
additions, multiplications and one division here, each rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    total = chosen[:, :1].clone()
    for slot in range(1, top_k):
        total.add_(chosen[:, slot, None])
    return Routes(experts, chosen.div_(total.add_(_LEAST_SUM)).mul_(scaling))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), an element's bits the same wherever it stands: fp32 like x, new.

    max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(u / (u + 2)).
    """
    small = x.contiguous().abs().neg_().exp_()
    z = small.div_(small + 2.0)
    square = z * z
    series = torch.full_like(z, 1.0 / (2 * _SERIES_TERMS - 1))
    for term in range(_SERIES_TERMS - 1, 0, -1):
        series.mul_(square).add_(1.0 / (2 * term - 1))
    return series.mul_(z).mul_(2.0).add_(x.clamp_min(0.0))

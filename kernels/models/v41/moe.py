"""What does the mixture-of-experts sublayer do with a token?

Every expert multiplies its own tokens only, padded to row counts proven for its matrices, and a token's experts are
added in the order of its slots: who else is in the step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.v41.config import MoeConfig
from kernels.models.v41.matrices import product
from kernels.ops.numerics import Numerics
from kernels.ops.router import Routes, route
from kernels.ops.row_tiles import TiledLinear
from kernels.ops.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's matrices."""

    gate_up: TiledLinear
    """w1 on top of w3: [hidden] -> [2 * width]."""
    down: TiledLinear
    """w2: [width] -> [hidden]."""


class Moe:
    """One layer's router, routed experts and shared expert."""

    def __init__(
        self,
        config: MoeConfig,
        numerics: Numerics,
        *,
        router: TiledLinear,
        bias: Tensor,
        image_bias: Tensor,
        experts: Sequence[Expert],
        shared: Expert,
    ) -> None:
        """router: [hidden] -> [num_experts], on an exact fp32 kernel.  bias, image_bias: [num_experts] fp32."""
        self._config, self._numerics = config, numerics
        self._router, self._bias, self._image_bias = router, bias, image_bias
        self._experts, self._shared = tuple(experts), shared

    @property
    def weights(self) -> tuple[TiledLinear, ...]:
        """Every matrix, the router's first."""
        both = (*self._experts, self._shared)
        return (self._router, *(matrix for each in both for matrix in (each.gate_up, each.down)))

    def __call__(self, x: Tensor, is_image: Tensor | None, scratch: Scratch) -> Tensor:
        """The sublayer's output: [tokens, hidden] fp32, new.

        x: [tokens, hidden] fp32, normed.  is_image: [tokens] bool, tokens that the image bias routes; None = none.
        """
        routes = self.routes(x, is_image)
        rows = self._numerics.fp8(x)
        flat_weights = routes.weights.flatten()
        # Written in full below: every (token, slot) belongs to one expert.
        by_slot = scratch.take("moe.slots", (len(x) * self._config.top_k, x.shape[1]))
        for expert, places in self._assigned(routes):
            tokens = places // self._config.top_k
            by_slot[places] = self._forward(expert, rows[tokens], flat_weights[places].unsqueeze(1))
        slots = by_slot.view(len(x), self._config.top_k, x.shape[1])
        total = slots[:, 0].clone()
        for slot in range(1, self._config.top_k):
            total.add_(slots[:, slot])
        total.add_(self._forward(self._shared, rows, None))
        return self._numerics.bf16(total)

    def routes(self, x: Tensor, is_image: Tensor | None) -> Routes:
        """Experts and weights of each token; arguments as above."""
        logits = product(self._router, x)
        bias = self._bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(1), self._image_bias, self._bias)
        return route(logits, bias, top_k=self._config.top_k, scaling=self._config.scaling)

    def _assigned(self, routes: Routes) -> Iterator[tuple[Expert, Tensor]]:
        """Each expert that has tokens, and its places in the flattened [tokens * top_k], ascending."""
        flat = routes.experts.flatten()
        order = torch.sort(flat, stable=True).indices
        counts = torch.bincount(flat, minlength=len(self._experts)).tolist()
        for expert, places in zip(self._experts, torch.split(order, counts), strict=True):
            if len(places):
                yield expert, places

    def _forward(self, expert: Expert, rows: Tensor, weight: Tensor | None) -> Tensor:
        """w2(silu(min(w1 x, limit)) * clamp(w3 x) * weight): [n, hidden] -> [n, hidden]; fp8 rows where quantised."""
        limit = self._config.swiglu_limit
        gate, up = self._numerics.bf16(product(expert.gate_up, rows)).chunk(2, dim=1)
        gate = gate.clamp(max=limit)  # a copy: exp is safe on whole rows only
        activated = gate / gate.neg().exp_().add_(1.0)
        activated.mul_(up.clamp(-limit, limit))
        if weight is not None:
            activated.mul_(weight)
        return self._numerics.bf16(product(expert.down, self._numerics.fp8(activated)))

"""What does the mixture-of-experts sublayer do with a token?

Every expert multiplies its own tokens only, padded to row counts proven for its matrices, and a token's experts are
added in the order of its slots, the shared one last: who else is in the step changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.models.v41.config import MoeConfig
from kernels.models.v41.matrices import product
from kernels.ops.constants import constant
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


@dataclass(frozen=True, slots=True)
class _Shares:
    """A step's rows in the order of the experts that multiply them."""

    spans: tuple[tuple[Expert, int, int], ...]
    """Each expert that has rows, the first of them, and the end."""
    tokens: Tensor
    """[rows] int64: the token that each is of."""
    places: Tensor
    """[rows] int64: in the flattened [tokens, top_k + 1], ascending for each expert."""

    def product(self, rows: Tensor, matrix_of: Callable[[Expert], TiledLinear]) -> Tensor:
        """Each expert's own rows times its own matrix: [rows, in] -> [rows, out] fp32, new."""
        return torch.cat([product(matrix_of(expert), rows[start:end]) for expert, start, end in self.spans])


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
        tokens, hidden = x.shape
        if not tokens:
            return torch.empty_like(x)
        routes = self.routes(x, is_image)
        shares = self._shared_out(routes)
        flat_weights = torch.nn.functional.pad(routes.weights, (0, 1), value=1.0).flatten()
        rows = scratch.take("moe.rows", (tokens * (self._config.top_k + 1), hidden))
        torch.index_select(self._numerics.fp8(x), 0, shares.tokens, out=rows)
        rows = shares.product(rows, lambda expert: expert.gate_up)
        rows = self._activated(rows, flat_weights[shares.places].unsqueeze(1))
        rows = shares.product(self._numerics.fp8(rows), lambda expert: expert.down)
        by_slot = scratch.take("moe.slots", tuple(rows.shape)).index_copy_(0, shares.places, self._numerics.bf16(rows))
        first, *others = by_slot.view(tokens, -1, hidden).unbind(1)
        total = first.clone()
        for other in others:
            total.add_(other)
        return self._numerics.bf16(total)

    def routes(self, x: Tensor, is_image: Tensor | None) -> Routes:
        """Experts and weights of each token; arguments as above."""
        logits = product(self._router, x)
        bias = self._bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(1), self._image_bias, self._bias)
        return route(logits, bias, top_k=self._config.top_k, scaling=self._config.scaling)

    def _shared_out(self, routes: Routes) -> _Shares:
        """Which expert has which rows: a token has one in each slot, and a last one with the shared expert."""
        chosen = routes.experts.cpu().numpy()
        last = np.full((len(chosen), 1), len(self._experts))
        flat = np.concatenate([chosen, last], axis=1).ravel()
        places = flat.argsort(kind="stable")
        ends = np.bincount(flat, minlength=len(self._experts) + 1).cumsum().tolist()
        spans = zip((*self._experts, self._shared), [0, *ends[:-1]], ends, strict=True)
        return _Shares(
            tuple(span for span in spans if span[1] < span[2]),
            tokens=torch.from_numpy(places // (chosen.shape[1] + 1)).to(routes.experts.device),
            places=torch.from_numpy(places).to(routes.experts.device),
        )

    def _activated(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """silu(min(gate, limit)) * clamp(up) * weight: [n, 2 * width], [n, 1] -> [n, width]."""
        limit = self._config.swiglu_limit
        gate, up = self._numerics.bf16(gate_up).chunk(2, dim=1)
        gate = gate.clamp(max=limit)  # a copy: exp is safe on whole rows only
        activated = gate / gate.neg().exp_().add_(constant(1.0, gate.device))
        return activated.mul_(up.clamp(-limit, limit)).mul_(weights)

"""What does the drafter remember of the main model's tokens? A window of keys per drafter layer, of its features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.models.v41.attention import WindowKeys, normed
from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import Source, product
from kernels.models.v41.step import Step
from kernels.ops.numerics import Numerics


class DraftWindows:
    """The part of the drafter that runs inside the main forward, for every token, also for ones rejected later."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics) -> None:
        """source: of the `mtp.` weights."""
        self._eps, self._numerics, self._first = config.norm_eps, numerics, config.num_layers
        first = source.within("0")
        self._project = first.matrix("main_proj")
        self._norm = first.tensor("main_norm.weight")
        self.keys = tuple(
            WindowKeys(config, source.within(f"{index}.attn"), numerics) for index in range(config.drafter.num_layers)
        )

    def run(self, step: Step, features: Sequence[Tensor]) -> None:
        """Write the rings of all drafter layers, for the tokens that the decoder half stores.

        features: for each target layer [tokens, hidden], the mean of the streams that enter its attention.
        """
        half = step.half
        joined = step.seen("features", torch.cat(list(features), dim=1))[half.stored_tokens]
        cos, sin = step.turn(0)
        turn = cos[half.stored_tokens], sin[half.stored_tokens]
        for index, keys in enumerate(self.encode(joined, turn)):
            ring = step.cache.rings[self._first + index]
            ring.write(half.stored_slots, half.stored_places, ring.encode(keys))

    def encode(self, features: Tensor, turn: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Window keys of each drafter layer: [tokens, targets * hidden] -> [tokens, head_dim] fp32 each."""
        numerics = self._numerics
        main = numerics.bf16(product(self._project, numerics.fp8(features)))
        rows = numerics.fp8(normed(main, self._norm, self._eps, numerics))
        return [keys.run(rows, turn) for keys in self.keys]

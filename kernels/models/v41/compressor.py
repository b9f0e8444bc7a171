"""How do a source layer's tokens become compressed entries, for attention and for the index?"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.v41.attention import normed
from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import Source, product
from kernels.models.v41.plan import Entries
from kernels.models.v41.step import Step
from kernels.ops.compress import pool_pairs
from kernels.ops.numerics import Numerics
from kernels.ops.rope import rotate_last


class Compressor:
    """One KV source: an entry for every token, or for every two."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics, *, layer: int) -> None:
        """source: of the layer's `attn.` weights."""
        self._ratio = config.compress_ratios[layer]
        self._eps, self._numerics, self._layer = config.norm_eps, numerics, layer
        compressor, indexer = source.within("compressor"), source.within("indexer")
        self._latents = compressor.matrix("wkv")
        self._scores = compressor.matrix("wgate") if self._ratio > 1 else None
        self._norm = compressor.tensor("norm.weight")
        self._index = indexer.matrix("wk")
        self._index_norm = indexer.tensor("k_norm.weight")

    def run(self, step: Step, x: Tensor) -> None:
        """Write the entries that these tokens complete.  x: [tokens, hidden] fp32, normalised, of the whole step."""
        numerics, entries = self._numerics, step.plan.entries[self._ratio]
        raw = self._paired(step, x, entries) if self._ratio > 1 else product(self._latents, x[entries.sources[:, 0]])
        if not len(raw):
            return
        latents = normed(numerics.bf16(raw), self._norm, self._eps, numerics)
        index = normed(numerics.bf16(product(self._index, latents)), self._index_norm, self._eps, numerics)
        turn = step.ropes.of(self._ratio).at(entries.positions, step.plan.encoder.last_position)
        step.cache.entries[self._layer].write(
            entries.blocks,
            entries.places,
            numerics.bf16(rotate_last(latents, *turn)),
            numerics.bf16(rotate_last(index, *turn)),
        )

    def _paired(self, step: Step, x: Tensor, entries: Entries) -> Tensor:
        """Pool each pair, whose first token may be one of an earlier step; remember the newest tokens."""
        assert self._scores is not None, "a source of ratio 2 weighs its tokens"
        ring, records = step.plan.pair_ring, step.cache.pairs[self._layer]
        own = torch.stack([product(self._scores, x), product(self._latents, x)], dim=1)
        earlier = records.read(ring.slots, ring.places).view(torch.float32).view(-1, *own.shape[1:])
        records.write(ring.stored_slots, ring.stored_places, own[ring.stored_tokens].view(torch.uint8).flatten(1))
        pairs = torch.cat([earlier, own])[entries.sources]
        return pool_pairs(pairs[:, :, 0], pairs[:, :, 1])

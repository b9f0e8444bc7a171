"""Which compressed entries do a step's tokens read from a layer on, chosen on a GPU?"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.gpu.v41.step import Rows, Step
from kernels.models.gpu.v41.tokens import Half, Slab
from kernels.models.gpu.v41.weights import IndexerWeights
from kernels.models.v41.config import V41Config
from kernels.ops.gpu_index import CANDIDATES, ENTRIES, Keys, locate, score, score_candidates, select
from kernels.ops.gpu_records import index_queries
from kernels.ops.gpu_sparse import Chosen


class Indexer:
    """One index source."""

    def __init__(self, config: V41Config, weights: IndexerWeights, *, layer: int) -> None:
        self._config, self._weights, self._layer = config, weights, layer
        self._ratio = config.compress_ratios[layer]
        self._source = config.kv_source_of(layer)

    def run(self, step: Step, x: Tensor, latent: Rows) -> None:
        """Publish the step's choice.

        x: [tokens, hidden] bf16, normalised.  latent: [tokens, q_lora] (fp8), of the layer's queries.
        """
        half, source = step.half, step.records.sources[self._source]
        seen = half.seen[self._ratio]
        if half.extent.end // self._ratio <= self._config.index_topk:
            where, counts = locate(self._all(seen), source.keys, half.lines)[1:]
        else:
            cos, sin = half.turns[True]
            raw = step.products.of(latent, self._weights.queries).view(len(x), -1, self._config.index_dim)
            queries = index_queries(raw, cos, sin)
            weights = step.products.of(x, self._weights.weights).float()
            parts = [
                self._choose(step, number, slab, queries[slab.tokens], weights[slab.tokens], seen[slab.tokens])
                for number, slab in enumerate(half.extent.slabs)
            ]
            where, counts = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
        step.chosen = Chosen(where, counts, source.main, source.keys.entries_per_block)

    def _all(self, seen: Tensor) -> Tensor:
        """No token sees more entries than it may choose: it reads them all."""
        entries = torch.arange(self._config.index_topk, dtype=torch.int32, device=seen.device)
        return torch.where(entries < seen[:, None], entries, -1)

    def _choose(
        self, step: Step, number: int, slab: Slab, queries: Tensor, weights: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Places and counts of one slab's tokens."""
        config, half = self._config, step.half
        keys, count = step.records.sources[self._source].keys, config.index_topk
        lines, size = half.lines[slab.tokens], config.candidate_block_size
        if self._layer > config.candidate_source and step.candidates:
            candidates = step.candidates[number]
            scores = score_candidates(queries, weights, keys, lines, seen, candidates, block_size=size)
            chosen = select(scores, torch.full_like(seen, scores.shape[1]), count=count)
            where, counts = locate(chosen, keys, lines, candidates, block_size=size)[1:]
            return where, counts
        chosen = self._scored(step, slab, half, queries, weights, keys, seen)
        where, counts = locate(chosen, keys, lines)[1:]
        return where, counts

    def _scored(
        self, step: Step, slab: Slab, half: Half, queries: Tensor, weights: Tensor, keys: Keys, seen: Tensor
    ) -> Tensor:
        """Of all entries, [tokens, top-k] int32; the candidate source also leaves its best blocks."""
        config = self._config
        tiles = half.tiles[slab.tiles]
        if slab.tokens.start:
            tiles = tiles.clone()
            tiles[:, 0] -= slab.tokens.start
        width = max(-(-(slab.end // self._ratio) // ENTRIES), 1) * ENTRIES
        is_source = self._layer == config.candidate_source
        size = config.candidate_block_size if is_source else 0
        made = score(queries, weights, keys, tiles, seen, width=width, block_size=size)
        if made.blocks is not None:
            blocks = select(made.blocks, (seen + size - 1) // size, count=config.candidate_blocks)
            # Scored by whole products: what is missing is no block.
            step.candidates.append(
                torch.nn.functional.pad(blocks, (0, -blocks.shape[1] % (CANDIDATES // size)), value=-1)
            )
        return select(made.scores, seen, count=config.index_topk)

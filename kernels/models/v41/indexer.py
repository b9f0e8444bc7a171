"""Which compressed entries do a layer's tokens read from now on?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import Source, product
from kernels.models.v41.plan import Half, Span
from kernels.models.v41.step import Selection, Step
from kernels.ops.index import TOKENS, UNIT, best, best_blocks, index_scores, listed
from kernels.ops.numerics import Numerics
from kernels.ops.rope import rotate_last

_SLAB_VALUES = 8 << 20
"""Scores held at a time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive tokens of one span: [low, high) of the half, and the entries that the last of them sees."""

    span: int
    low: int
    high: int
    entries: int


class Indexer:
    """One index source. Where a KV source's keys are its own, a later one scores the same keys anew."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics, *, layer: int) -> None:
        """source: of the layer's `attn.indexer.` weights."""
        self._config, self._numerics, self._layer = config, numerics, layer
        self._ratio = config.compress_ratios[layer]
        self._source = config.kv_source_of(layer)
        self._queries = source.matrix("wq_b")
        self._weights = source.matrix("weights_proj")

    def run(self, step: Step, x: Tensor, latent: Tensor) -> None:
        """Publish the step's selection.

        x: [tokens, hidden] fp32, normalised.  latent: [tokens, q_lora] fp32 (fp8), of the layer's queries.
        """
        half, width = step.half, self._config.index_topk
        seen = (half.positions + 1) // self._ratio
        chosen = torch.arange(width, device=x.device).expand(x.shape[0], width)
        chosen = torch.where(chosen < seen[:, None], chosen, -1)
        batches = self._batches(half)
        if batches:
            queries, weights = self._project(step, x, latent)
            for number, parts in enumerate(batches):
                rows = torch.cat([torch.arange(part.low, part.high, device=x.device) for part in parts])
                scores = self._scores(step, parts, queries, weights)
                chosen[rows] = self._choose(step, number, scores, seen[rows])
        step.seen(f"layers.{self._layer}.index_topk", chosen)
        step.selection = Selection.of(chosen, half, self._config.block_tokens // self._ratio)

    def _batches(self, half: Half) -> list[list[_Part]]:
        """Tokens that must choose, some at a time. One that sees no more entries than it may choose reads them all."""
        contested = [span for span in half.spans if self._seen_at(span, span.count) > self._config.index_topk]
        if not contested:
            return []
        widest = max(self._seen_at(span, span.count) for span in contested)
        room = most = max(_SLAB_VALUES // widest // TOKENS, 1) * TOKENS
        batches: list[list[_Part]] = [[]]
        for index, span in enumerate(half.spans):
            done = 0 if span in contested else span.count
            while done < span.count:
                if not room:
                    batches.append([])
                    room = most
                count = min(span.count - done, room)
                low = span.start + done
                done += count
                room -= count
                batches[-1].append(_Part(index, low, low + count, self._seen_at(span, done)))
        return batches

    def _seen_at(self, span: Span, count: int) -> int:
        """Entries that the last of a span's first `count` tokens sees."""
        return (span.position + count) // self._ratio

    def _project(self, step: Step, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        numerics, dim = self._numerics, self._config.index_dim
        queries = numerics.bf16(product(self._queries, latent)).view(len(x), -1, dim)
        queries = numerics.bf16(rotate_last(queries, *step.turn(self._ratio)))
        return numerics.index_query(queries), numerics.bf16(product(self._weights, x))

    def _scores(self, step: Step, parts: list[_Part], queries: Tensor, weights: Tensor) -> Tensor:
        """Of all entries for the parts' tokens: [tokens, entries of the longest] fp32; beyond a part's own, 0."""
        width = -(-max(part.entries for part in parts) // UNIT) * UNIT
        scores = queries.new_zeros(sum(part.high - part.low for part in parts), width)
        start = 0
        for part in parts:
            span = step.half.spans[part.span]
            end = start + part.high - part.low
            index_scores(
                queries[part.low : part.high],
                weights[part.low : part.high],
                step.index_keys(self._source, part.span, UNIT),
                position=span.position + part.low - span.start,
                out=scores[start:end, : -(-part.entries // UNIT) * UNIT],
            )
            start = end
        return self._numerics.bf16(scores)

    def _choose(self, step: Step, number: int, scores: Tensor, seen: Tensor) -> Tensor:
        """Entries of one batch's tokens: [tokens, entries] fp32, overwritten -> [tokens, top-k] int64."""
        config = self._config
        size = config.candidate_block_size
        padding = -scores.shape[1] % size
        if padding:
            scores = torch.nn.functional.pad(scores, (0, padding))
        entries = torch.arange(scores.shape[1], device=scores.device)
        scores.masked_fill_(entries >= seen[:, None], float("-inf"))
        if self._layer == config.candidate_source:
            allowed = best_blocks(scores, seen, size=size, count=config.candidate_blocks)
            step.candidates.append(step.seen(f"layers.{self._layer}.candidate_blocks", allowed))
        elif step.candidates:
            # Later sources choose among the same tokens in the same batches.
            allowed = step.candidates[number].repeat_interleave(size, dim=1)
            scores.masked_fill_(~allowed, float("-inf"))
        return listed(best(scores, config.index_topk), config.index_topk)

"""How is a small V4.1 step launched at once? Captured at frozen numbers of tokens and lengths of context.

A captured step serves every batch of at most its size, whatever sequences the tokens belong to: single tokens,
verified drafts, or the end of a prompt. Tokens left over belong to no sequence. How much there is to score depends on
the longest context, so each size is captured for a few lengths of it; up to the first nothing is scored at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.models.gpu.staging import Staging
from kernels.models.gpu.v41.planner import Planned
from kernels.models.gpu.v41.stack import Stack
from kernels.models.gpu.v41.tokens import Extent, Layouter, Slab, Told
from kernels.models.v41.config import V41Config
from kernels.ops.gpu_index import QUERIES
from kernels.ops.gpu_launch import tiles
from kernels.ops.gpu_told import Say

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_CONTEXT_STEP = 8


def contexts_up_to(first: int, limit: int) -> tuple[int, ...]:
    """Lengths of context that steps are captured for: `first`, then eight times as much, until `limit`."""
    contexts = [min(first, limit)]
    while contexts[-1] < limit:
        contexts.append(min(contexts[-1] * _CONTEXT_STEP, limit))
    return tuple(contexts)


def whole_extent(size: int, context: int) -> Extent:
    """Of a step of so many tokens, however they are shared among sequences."""
    return Extent(size, (Slab(slice(0, size + tiles(size, QUERIES)), slice(0, size), context),))


class StepGraphs:
    """Small steps of one model; `run` returns logits that stay until the next one."""

    def __init__(
        self,
        config: V41Config,
        stack: Stack,
        layouter: Layouter,
        *,
        limit: int,
        device: torch.device,
    ) -> None:
        """limit: the longest context there is room for."""
        self.sizes = SIZES
        self.contexts = contexts_up_to(config.index_topk, limit)
        self._stack, self._layouter, self._device = stack, layouter, device
        self._outside = config.vocab_size
        most, reach = SIZES[-1], config.engram.max_ngram - 1
        self._sequences = np.zeros((len(Say), most), np.int32)
        self._token_ids = np.zeros(most, np.int32)
        self._preceding = np.zeros((most, reach), np.int32)
        self._wanted = np.zeros(most, np.int64)
        self._earlier = np.full(most, -1, np.int32)
        # Never grows, so the graphs' addresses stay.
        self._staging = Staging(device, sum(array.nbytes + 64 for array in self._arrays))
        self._on_device = self._staging.send(self._arrays)
        self._every = torch.arange(most, device=device)
        self.logits = torch.zeros(most, config.vocab_size, device=device)
        """Of the newest step, whatever its size: draws are captured on top of it."""
        self.history = torch.zeros(most, reach + 1, dtype=torch.int64, device=device)
        """Of the newest step: each token and those before it, the newest first."""
        self.padded: Tensor | None = None
        """The newest step's logits, those of padding included."""
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    @property
    def _arrays(self) -> list[np.ndarray]:
        return [self._sequences, self._token_ids, self._preceding, self._wanted, self._earlier]

    @property
    def ends(self) -> Tensor:
        """[sequences] int32: positions after the last tokens of the newest step, moved back by rejected drafts."""
        return self._on_device[0][Say.END]

    def takes(self, planned: Planned) -> bool:
        """Whether this batch is a step of these."""
        return (
            len(planned.token_ids) <= SIZES[-1]
            and planned.images is None
            and not planned.is_compact
            and planned.ends.max() <= self.contexts[-1]
        )

    def capture(self, sizes: Sequence[int] = SIZES) -> None:
        """Record these sizes at every length, largest first: smaller ones then live in their memory."""
        pool = None
        for size in sorted(sizes, reverse=True):
            for context in reversed(self.contexts):
                self._step(size, context)  # compiles kernels and makes the library's handles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._step(size, context)
                pool = pool or graph.pool()
                self._graphs[size, context] = graph

    def run(self, planned: Planned) -> Tensor:
        """Logits of the wanted tokens: [wanted, vocab_size] fp32."""
        sequences, tokens, wanted = planned.sequences.shape[1], len(planned.token_ids), len(planned.wanted)
        self._sequences[:, :sequences] = planned.sequences
        self._sequences[:, sequences:] = 0
        self._token_ids[:tokens], self._token_ids[tokens:] = planned.token_ids, 0
        self._preceding[:sequences], self._preceding[sequences:] = planned.preceding, self._outside
        self._wanted[:wanted], self._wanted[wanted:] = planned.wanted, 0
        self._earlier[:sequences], self._earlier[sequences:] = planned.earlier, -1
        self._staging.send(self._arrays)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        context = self.contexts[bisect_left(self.contexts, int(planned.ends.max()))]
        graph = self._graphs.get((size, context))
        if graph is None:
            self._step(size, context)
        else:
            graph.replay()
        self.padded = self.logits[:size]
        logits = self.logits[:wanted]
        return logits if logits.is_cuda else logits.clone()  # a CPU's are expected to last

    def _step(self, size: int, context: int) -> None:
        sequences, token_ids, preceding, wanted, earlier = self._on_device
        every = self._every[:size]
        told = Told(
            sequences=sequences[:, :size],
            token_ids=token_ids[:size],
            preceding=preceding[:size],
            wanted=wanted[:size],
            stored=every,
            decoder_stored=every,
            earlier=earlier[:size],
        )
        extent = whole_extent(size, context)
        laid = self._layouter.lay(told, extent, extent)
        self.history[:size] = laid.history
        self.logits[:size] = self._stack.forward(laid)

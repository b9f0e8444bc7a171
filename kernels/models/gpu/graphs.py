"""How is a decode step launched at once, whatever its batch? Captured at frozen sizes; rows left over are padding.

Padding rows belong to table row 0: they read the null block, store nothing, and no other row looks at them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.models.gpu.forward import Stack, Tokens
from kernels.models.gpu.staging import Staging
from kernels.ops.gpu_attention import FULL_PROGRAMS, PART_TOKENS, part_tokens
from kernels.ops.gpu_rope_cache import Heads
from kernels.ops.gpu_step import fill_tokens

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_MOST_SPLITS = 32
_CAPTURED_CONTEXT_TOKENS = 2048
"""Contexts grow while a graph stays: with these, 8 sequences of 8B-like models are enough for long parts."""


class DecodeGraphs:
    """Decode steps of one model; `run` returns logits that stay until the next step."""

    def __init__(self, stack: Stack, heads: Heads, sampled: Tensor, *, device: torch.device) -> None:
        """sampled: where tokens to come are found."""
        self.sizes = SIZES
        self._stack = stack
        self._kv_heads = heads.num_kv_heads
        self._sampled = sampled
        self._device = device
        # Never grows, so the graphs' address stays.
        self._staging = Staging(device, SIZES[-1] * 16)
        self._told = np.zeros((4, SIZES[-1]), np.int32)
        (self._told_on_device,) = self._staging.send([self._told])
        self.padded: Tensor | None = None
        """The newest captured step's logits, those of padding rows included."""
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self) -> None:
        """Record every size, largest first: smaller ones then live in its memory."""
        pool = None
        for size in reversed(self.sizes):
            self._step(size)  # compiles kernels and makes the library's handles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._step(size)
            pool = pool or graph.pool()
            self._graphs[size] = graph, logits

    def logits(self) -> Iterator[Tensor]:
        """Of every captured size, padding included."""
        return (logits for _, logits in self._graphs.values())

    def run(
        self,
        token_ids: Sequence[int],
        lines: Sequence[int],
        positions: Sequence[int],
    ) -> Tensor:
        """One token per row.  token_ids: below 0 as `fill_tokens` takes them.  Returns [rows, vocab_size] fp32."""
        rows = len(token_ids)
        told = self._told
        told[0, :rows], told[1, :rows], told[2, :rows], told[3, 0] = token_ids, lines, positions, rows
        self._staging.send([told])
        size = self.sizes[bisect_left(self.sizes, rows)]
        captured = self._graphs.get(size)
        if captured is None:
            return self._step(size)[:rows]
        graph, logits = captured
        graph.replay()
        self.padded = logits
        return logits[:rows]

    def _step(self, size: int) -> Tensor:
        device = self._device
        token_ids = torch.empty(size, dtype=torch.int64, device=device)
        rows, positions = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
        tiles = torch.empty(size, 4, dtype=torch.int32, device=device)
        fill_tokens(self._told_on_device, self._sampled, token_ids, rows, positions, tiles)
        # With fewer programs than fill the device, keys are shared among more of them.
        splits = min(_MOST_SPLITS, -(-FULL_PROGRAMS // (size * self._kv_heads)))
        part = PART_TOKENS
        if not self._stack.invariant:
            part = part_tokens(size, self._kv_heads, _CAPTURED_CONTEXT_TOKENS)
        return self._stack.forward(Tokens(token_ids, rows, positions, tiles, splits, part=part, is_decode=True))

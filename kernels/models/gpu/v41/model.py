"""How does DeepSeek-V4.1 run on a GPU? Graphs for small steps, a walk through the layers for others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.kv.crossing import window_name
from kernels.kv.layout import KvLayout
from kernels.kv.window import WindowSpec
from kernels.memory_plan import STEP_TOKENS
from kernels.models.doors import WindowDoor
from kernels.models.gpu.draws import Draw, Drawer, Seen
from kernels.models.gpu.staging import Staging, TableUpdates
from kernels.models.gpu.tables import TableRows, written_blocks
from kernels.models.gpu.v41.drafter import DrafterWeights, GpuDrafter
from kernels.models.gpu.v41.graphs import SIZES, StepGraphs
from kernels.models.gpu.v41.guesses import Guessed, Guesser
from kernels.models.gpu.v41.planner import GpuPlanner, Planned, extent_of, kept_of, stored_of
from kernels.models.gpu.v41.records import Records
from kernels.models.gpu.v41.stack import Stack
from kernels.models.gpu.v41.step import Products
from kernels.models.gpu.v41.tokens import Laid, Layouter, Told, Turns
from kernels.models.gpu.v41.weights import GpuV41Weights
from kernels.models.host_draws import to_draw
from kernels.models.v41.cache import V41Cache
from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import window_spec
from kernels.models.v41.slots import WindowSlots
from kernels.models.v41.weights import ropes_of
from kernels.ops.gpu_told import Say
from kernels.ops.numerics import QUANT
from kernels.ops.ranges import named

_RECIPE = "deepseek-v41-gpu-3"
MOST_SEQUENCES = 1024
"""Whose tables the device keeps."""
_PROBE_TOKENS = 40
_SEQUENCE_BYTES, _TOKEN_BYTES = 128, 64
"""That the host says of a sequence and of a token, at most, images' embeddings aside."""


class GpuV41(WindowDoor):
    """The language model with its caches on a GPU (or, for tests, on the CPU through the kernels' twins)."""

    def __init__(
        self,
        config: V41Config,
        weights: GpuV41Weights,
        compressed_ids: Tensor,
        layout: KvLayout,
        *,
        num_blocks: int,
        num_windows: int,
        device: torch.device,
        is_invariant: bool = True,
        graph_sizes: Sequence[int] = SIZES,
        step_tokens: int = STEP_TOKENS,
        drafter: DrafterWeights | None = None,
    ) -> None:
        """compressed_ids: [tokenizer's vocabulary] int64.  graph_sizes: of SIZES, those captured on a GPU.

        step_tokens: most of a step.  drafter: for rows that want drafts.
        """
        self.info = config
        self.layout = layout
        self.spec = window_spec(config, layout)
        self.window: WindowSpec | None = self.spec
        self.preceding_tokens = config.engram.max_ngram - 1
        self._device, self._is_invariant, self._weights = device, is_invariant, weights
        self.cache = V41Cache(config, layout, QUANT, num_blocks=num_blocks, num_windows=num_windows, device=device)
        self._slots = WindowSlots(self.spec, num_windows=num_windows, block_tokens=config.block_tokens)
        rows = TableRows(
            num_rows=MOST_SEQUENCES + 1,
            num_blocks=num_blocks,
            block_tokens=config.block_tokens,
            vocab_size=max((config.vocab_size - 1, *config.image_token_ids)) + 1,
            max_position_tokens=config.max_position_tokens,
        )
        self._planner = GpuPlanner(config, self._slots, rows)
        self._tables = torch.zeros(MOST_SEQUENCES + 1, rows.most_blocks, dtype=torch.int32, device=device)
        self._drawer = Drawer(
            config.vocab_size,
            MOST_SEQUENCES,
            device,
            reach=self.preceding_tokens,
            depth=config.drafter.draft_tokens if drafter else 0,
            verifies=bool(config.drafter.num_layers),
        )
        self._seen: Seen | None = None
        self._ends: Tensor | None = None  # of the newest step: where its sequences end, drafts and all
        limit = min(config.max_position_tokens, (num_blocks - 1) * config.block_tokens)
        turns, drawer = _turns(config, limit, device), self._drawer
        self.layouter = Layouter(config, turns, self._tables, drawer.standing, drawer.named)
        ids = compressed_ids[: config.vocab_size].to(device)
        records = Records(config, layout, self.cache, self._tables)
        self.stack = Stack(config, weights, records, ids, is_invariant=is_invariant)
        self._guesser = self._guesses(drafter, records, turns) if drafter else None
        self._updates = TableUpdates(self._tables)
        self._staging = Staging(device, MOST_SEQUENCES * _SEQUENCE_BYTES + step_tokens * _TOKEN_BYTES)
        self._graphs = StepGraphs(config, self.stack, self.layouter, limit=limit, device=device)
        if device.type == "cuda":
            self._graphs.capture(graph_sizes)
            self._drawer.capture(self._graphs.logits[:size] for size in graph_sizes)

    def _guesses(self, weights: DrafterWeights, records: Records, turns: Turns) -> Guesser:
        shared = self._weights
        drafter = GpuDrafter(
            self.info,
            weights,
            records,
            turns,
            embedding=shared.embedding,
            head=shared.head,
            products=Products(self._is_invariant),
        )
        return Guesser(drafter, self._drawer, MOST_SEQUENCES, self._device)

    @property
    def row_tiles(self) -> tuple[int, ...]:
        return self._graphs.sizes

    def numeric_recipe(self) -> str:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return (
            f"{_RECIPE} {'invariant' if self._is_invariant else 'fastest'} numerics={QUANT.name}"
            f" experts={self._weights.experts} device={name} torch={torch.__version__} triton={triton.__version__}"
            f" bits={self._probe()}"
        )

    def forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        crossing, size = self.cache.crossing, self.info.block_tokens
        crossing.before_step()
        logits = self._forward(batch, every_row=every_row)
        windows = (window_name(row.window) for row in batch.rows)
        crossing.after_step(chain(written_blocks(batch.rows, size), windows))
        return logits

    def _forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        planned = self._plan(batch.rows, every_row=every_row)
        if self._graphs.takes(planned):
            with named("small step"):
                self._seen = Seen(self._graphs.history, batch.rows)
                self._ends = self._graphs.ends
                return self._graphs.run(planned)
        with named("mixed step"):
            laid = self._lay(planned)
            self._seen, self._ends = Seen(laid.history, batch.rows), laid.told.sequences[Say.END]
            return self.stack.forward(laid)

    def lay(self, batch: Batch) -> Laid:
        """A step laid out on the device, for whoever runs its layers one by one."""
        self.cache.crossing.before_step()
        return self._lay(self._plan(batch.rows, every_row=True))

    def draw(self, batch: Batch, logits: Tensor) -> Draw | Guessed:
        rows, logits = to_draw(batch, logits)
        padded = self._graphs.padded
        is_captured = padded is not None and padded.data_ptr() == logits.data_ptr()
        drawn = self._drawer.draw(rows, logits, padded if is_captured else None, seen=self._seen)
        if self._guesser is None or self._ends is None or not any(row.wants_drafts for row in rows):
            return drawn
        with named("drafts"):
            return self._guesser.guess(drawn, batch.rows, rows, self._ends)

    def _plan(self, rows: Sequence[Row], *, every_row: bool) -> Planned:
        """From here on the rows count as computed: the device does things in the order it is told."""
        earlier = [self._drawer.going_on(row) for row in rows]
        news = self._planner.check(rows, earlier)
        token_ids = [self._drawer.known(row) for row in rows]
        planned = self._planner.plan(rows, token_ids, news, earlier, every_row=every_row)
        self._updates.tell(planned.changes)
        self.cache.begin(planned.begun_blocks)
        self._planner.advance(rows)
        return planned

    def _lay(self, planned: Planned) -> Laid:
        """For steps of any size, whose kernels are launched one by one."""
        ring = self.info.ring_tokens
        ends = planned.ends.tolist()
        encoder = decoder = extent_of(planned.counts.tolist(), ends)
        arrays: list[np.ndarray] = [
            planned.sequences, planned.token_ids, planned.preceding, planned.wanted,
            stored_of(planned.counts, ring), stored_of(planned.decoder_counts, ring), planned.earlier,
        ]  # fmt: skip
        if planned.is_compact:
            decoder = extent_of(planned.decoder_counts.tolist(), ends)
            arrays.append(kept_of(planned))
        if planned.images is not None:
            arrays.append(planned.images[0])
        sequences, token_ids, preceding, wanted, stored, decoder_stored, earlier, *others = self._staging.send(arrays)
        told = Told(
            sequences=sequences,
            token_ids=token_ids,
            preceding=preceding,
            wanted=wanted,
            stored=stored,
            decoder_stored=decoder_stored,
            earlier=earlier,
            kept=others[0] if planned.is_compact else None,
            images=None if planned.images is None else (others[-1], self._sent(planned.images[1])),
        )
        # Views of the staging buffer are overwritten by the next send, but only after this step has read them.
        return self.layouter.lay(told, encoder, decoder)

    def _sent(self, embeddings: NDArray[np.float32]) -> Tensor:
        """Images' embeddings as streams take them, bf16: memory of a step, not of staging."""
        rounded = torch.from_numpy(embeddings).bfloat16()
        if self._device.type == "cuda":
            rounded = rounded.pin_memory()
        return rounded.to(self._device, non_blocking=True)

    def _probe(self) -> str:
        """The bits this machine computes with these weights, for the recipe."""
        size = self.info.block_tokens
        tokens = min(_PROBE_TOKENS, (self.cache.num_blocks - 1) * size - 1, self.info.max_position_tokens - 1)
        table = range(1, 2 + tokens // size)
        ids = [(index * 7919 + 17) % self.info.vocab_size for index in range(tokens + 1)]
        before = ids[max(tokens - self.preceding_tokens, 0) : tokens]
        self.reset_window(1)
        chunk = self.forward(Batch((Row(-1, ids[:-1], 0, table, window=1),)), every_row=True).cpu()
        last = Row(-1, ids[-1:], tokens, table, window=1, preceding=before)
        single = self.forward(Batch((last,)), every_row=True).cpu()
        for block in table:
            self.write_block(block, bytes(self.layout.block_bytes))
        self.reset_window(1)
        return hashlib.sha256(chunk.numpy().tobytes() + single.numpy().tobytes()).hexdigest()[:16]


def _turns(config: V41Config, limit: int, device: torch.device) -> Turns:
    """Of all positions below the limit."""
    ropes, positions = ropes_of(config, device), torch.arange(limit, device=device)
    return Turns(ropes.plain.at(positions, limit - 1), ropes.compressed.at(positions, limit - 1))

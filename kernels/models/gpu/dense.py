"""How does a Llama-family model run on a GPU? Graphs for decode steps, a plain walk through layers for others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.kv.cache import KvCache
from kernels.kv.layout import KvLayout
from kernels.kv.window import WindowSpec
from kernels.memory_plan import STEP_TOKENS, MemoryPlan, plan_blocks
from kernels.models.config import ModelConfig, read_config
from kernels.models.doors import BlockOnlyDoor
from kernels.models.gpu.draws import Draw, Drawer, Seen
from kernels.models.gpu.forward import Stack, Tokens
from kernels.models.gpu.graphs import SIZES, DecodeGraphs
from kernels.models.gpu.memory import as_planned, dense_need, free_bytes, reserve
from kernels.models.gpu.staging import Staging, TableUpdates
from kernels.models.gpu.tables import TableRows, written_blocks
from kernels.models.gpu.weights import GpuWeights, check_supported, heads_of, load_weights
from kernels.models.host_draws import to_draw
from kernels.models.llama import check_tensors
from kernels.models.model import Progress
from kernels.models.weights import Weights, open_weights
from kernels.ops.gpu_attention import CHUNK, tokens_per_tile
from kernels.ops.gpu_rope_cache import Paging
from kernels.ops.gpu_step import fill_tokens
from kernels.ops.ranges import named

_RECIPE = "dense-gpu-1"
DEFAULT_BLOCK_TOKENS = 128
MOST_SEQUENCES = 1024
"""Whose tables the device keeps."""
_PROBE_TOKENS = 40
_TOKEN_BYTES = 64
"""That the host says of a token, at most: what it is, its tile, and where its logits go."""


class GpuDense(BlockOnlyDoor):
    """One dense decoder with its blocks on a GPU (or, for tests, on the CPU through the kernels' twins)."""

    window: WindowSpec | None = None
    preceding_tokens = 0

    def __init__(
        self,
        config: ModelConfig,
        weights: GpuWeights,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        *,
        invariant: bool = True,
        graphs: bool = True,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """graphs: capture decode steps; without, the same kernels are launched one by one.

        step_tokens: most of a step.
        """
        self.info = config
        self.layout = layout
        self._device = device
        self._invariant = invariant
        self.cache = KvCache(layout, num_blocks, device)
        self._rows = TableRows(
            num_rows=MOST_SEQUENCES + 1,
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            vocab_size=config.vocab_size,
            max_position_tokens=config.max_position_tokens,
        )
        shape = (MOST_SEQUENCES + 1, self._rows.most_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._drawer = Drawer(config.vocab_size, MOST_SEQUENCES, device)
        self._heads = heads_of(config)
        paging = [Paging(self.cache.layer(index), self._tables) for index in range(config.num_layers)]
        self._stack = Stack(config, weights, paging, invariant=invariant)
        self._updates = TableUpdates(self._tables)
        self._staging = Staging(device, MOST_SEQUENCES * 64 + step_tokens * _TOKEN_BYTES)
        self._moves = Staging(device, 8 * (MOST_SEQUENCES + 8))
        self._seen: Seen | None = None
        self._decode = DecodeGraphs(self._stack, self._heads, self._drawer.sampled, device=device)
        if graphs and device.type == "cuda":
            self._decode.capture()
            self._drawer.capture(self._decode.logits())

    @property
    def row_tiles(self) -> tuple[int, ...]:
        return self._decode.sizes

    def numeric_recipe(self) -> str:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return (
            f"{_RECIPE} {'invariant' if self._invariant else 'fastest'} kv=bf16 device={name}"
            f" torch={torch.__version__} triton={triton.__version__} bits={self._probe()}"
        )

    def forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        self.cache.crossing.before_step()
        logits = self._forward(batch, every_row=every_row)
        self.cache.crossing.after_step(written_blocks(batch.rows, self.layout.block_tokens))
        return logits

    def _forward(self, batch: Batch, *, every_row: bool) -> Tensor:
        rows = batch.rows
        news = self._rows.check(rows)
        token_ids = [self._drawer.known(row) for row in rows]
        earlier = [self._drawer.going_on(row) for row in rows]
        lines, changes = self._rows.place(rows, news)
        self._updates.tell(changes)
        self._begin(rows)
        self._seen = None
        if (
            len(rows) <= self._decode.sizes[-1]
            and max(earlier) < 0
            and all(
                len(row.token_ids) == 1 and not row.targets and (every_row or row.sampling is not None) for row in rows
            )
        ):
            positions = [row.position for row in rows]
            with named("decode step"):
                return self._decode.run([ids[0] for ids in token_ids], lines, positions)
        with named("mixed step"):
            at = self._lay_out(rows, token_ids, lines, earlier, every_row=every_row)
            self._seen = Seen(at.token_ids[:, None], rows)
            return self._stack.forward(at)

    def draw(self, batch: Batch, logits: Tensor) -> Draw:
        rows, logits = to_draw(batch, logits)
        padded = self._decode.padded
        is_decode = padded is not None and padded.data_ptr() == logits.data_ptr()
        with named("draw"):
            return self._drawer.draw(rows, logits, padded if is_decode else None, seen=self._seen)

    def _begin(self, rows: Sequence[Row]) -> None:
        """Zero blocks that get their first token and are not filled by this step: nobody reads what others left."""
        size = self.layout.block_tokens
        for row in rows:
            end = row.position + len(row.token_ids)
            last = (end - 1) // size
            if end % size and last * size >= row.position:
                self.cache.begin((row.block_table[last],))

    def _lay_out(
        self,
        rows: Sequence[Row],
        token_ids: Sequence[Sequence[int]],
        lines: Sequence[int],
        earlier: Sequence[int],
        *,
        every_row: bool,
    ) -> Tokens:
        """earlier: place in the step before of rows planned as if its drafts were accepted, else -1."""
        counts = np.array([len(ids) for ids in token_ids])
        starts = np.cumsum(counts) - counts
        total = int(counts.sum())
        told = np.zeros((4, total), np.int32)
        told[0] = np.concatenate([np.asarray(ids, np.int32) for ids in token_ids])
        told[1] = np.repeat(np.array(lines, np.int32), counts)
        told[2] = np.arange(total) - np.repeat(starts - [row.position for row in rows], counts)
        told[3, 0] = total
        tiles = self._tiles(rows, lines, starts.tolist())
        wanted = [
            int(start) + at for row, start in zip(rows, starts, strict=True) for at in row.wanted(every_row=every_row)
        ]
        chosen = np.array(wanted, np.int64)
        few = np.stack([told[1][chosen], chosen, np.ones_like(chosen), told[2][chosen]], 1).astype(np.int32)
        told_, tiles_, wanted_, few_ = self._staging.send([told, tiles, chosen, few])
        ids = torch.empty(total, dtype=torch.int64, device=self._device)
        rows_, positions = torch.empty(2, total, dtype=torch.int32, device=self._device)
        fill_tokens(told_, self._drawer.sampled, ids, rows_, positions)
        if max(earlier) >= 0:
            self._move_back(earlier, lines, rows_, positions, tiles_, few_)
        has_few = len(wanted) <= len(tiles)
        # Views of the staging buffer are overwritten by the next send, but only after this step has read them.
        return Tokens(ids, rows_, positions, tiles_, 1, CHUNK, wanted_, few_ if has_few else None)

    def _move_back(
        self,
        earlier: Sequence[int],
        lines: Sequence[int],
        rows: Tensor,
        positions: Tensor,
        tiles: Tensor,
        few: Tensor,
    ) -> None:
        """Set tokens and tiles to where they really are, by what was rejected of the drafts before them."""
        places = np.full(MOST_SEQUENCES + 1, -1, np.int64)
        places[list(lines)] = earlier
        (by_line,) = self._moves.send([places])
        back = torch.where(by_line >= 0, self._drawer.standing.rejected[by_line.clamp_min(0)], 0)
        positions -= back[rows.long()]
        for each in (tiles, few):
            each[:, 3] -= back[each[:, 0].long()]

    def _tiles(self, rows: Sequence[Row], lines: Sequence[int], starts: Sequence[int]) -> NDArray[np.int32]:
        """[tiles, 4]; those with the most keys first, so that the last programs to run are short ones."""
        most = tokens_per_tile(self._heads, CHUNK)
        tiles = []
        for row, line, start in zip(rows, lines, starts, strict=True):
            count = len(row.token_ids)
            offset = np.arange(0, count, most)
            taken = np.minimum(most, count - offset)
            tiles.append(np.stack([np.full(len(offset), line), start + offset, taken, row.position + offset], 1))
        joined = np.concatenate(tiles).astype(np.int32)
        return joined[np.argsort(-(joined[:, 3] + joined[:, 2]), kind="stable")]

    def _probe(self) -> str:
        """The bits this machine computes with these weights, for the recipe."""
        tokens = min(_PROBE_TOKENS, self.layout.block_tokens - 1, self.info.max_position_tokens - 1)
        ids = [(index * 7919 + 17) % self.info.vocab_size for index in range(tokens + 1)]
        chunk = self.forward(Batch((Row(-1, ids[:-1], 0, (1,)),)), every_row=True).cpu()
        single = self.forward(Batch((Row(-1, ids[-1:], tokens, (1,)),)), every_row=True).cpu()
        self.write_block(1, bytes(self.layout.block_bytes))
        return hashlib.sha256(chunk.numpy().tobytes() + single.numpy().tobytes()).hexdigest()[:16]


class OpenedGpuDense:
    """A Llama-family folder, for a GPU."""

    window: WindowSpec | None = None

    def __init__(
        self,
        model_dir: Path,
        *,
        block_tokens: int | None,
        device: torch.device,
        progress: Progress,
        invariant: bool = True,
        weights: Weights | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """weights: the folder's own unless given.  step_tokens: most of a step, for which memory is kept.

        Raises ModelNotSupported or BadWeights.
        """
        self._path, self._device, self._progress, self._invariant = model_dir, device, progress, invariant
        self._config = read_config(model_dir)
        check_supported(self._config)
        self.layout = KvLayout.dense(
            num_layers=self._config.num_layers,
            block_tokens=block_tokens or DEFAULT_BLOCK_TOKENS,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            dtype="bf16",
        )
        self._step_tokens = step_tokens
        self._need = dense_need(
            self._config, self.layout, step_tokens=step_tokens, graph_sizes=SIZES, num_sequences=MOST_SEQUENCES
        )
        self._weights = weights or open_weights(model_dir, progress)

    def weights_digest(self) -> bytes:
        return self._weights.digest()

    def fitting_blocks(self, *, num_windows: int) -> int:  # noqa: ARG002 - it has no windows
        return self.plan(None).num_blocks if self._device.type == "cuda" else 0

    def plan(self, num_blocks: int | None) -> MemoryPlan:
        """What of the device's free memory goes where.  num_blocks: None takes as many as fit.  Raises NoRoom."""
        return plan_blocks(
            self._need, free=free_bytes(self._device), block_bytes=self.layout.block_bytes, num_blocks=num_blocks
        )

    def build(self, *, num_blocks: int, num_windows: int) -> GpuDense:  # noqa: ARG002 - it has no windows
        """Say how memory is used, or raise NoRoom before anything is loaded; afterwards all of it is this process's."""
        if self._device.type != "cuda":
            return self._build(num_blocks)
        plan = self.plan(num_blocks)
        self._progress(plan.describe(), 1, 1)
        with as_planned(plan):
            model = self._build(num_blocks)
            reserve(self._device, plan.workspace)
        return model

    def _build(self, num_blocks: int) -> GpuDense:
        check_tensors(self._config, self._weights, self._path)
        weights = load_weights(self._config, self._weights, self._device, self._progress)
        return GpuDense(
            self._config,
            weights,
            self.layout,
            num_blocks,
            self._device,
            invariant=self._invariant,
            step_tokens=self._step_tokens,
        )

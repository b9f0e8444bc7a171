"""What does a batch mean in tensors: which tokens lie where, what is written, and who attends to what?

Decode tokens come first, grouped by the length of their context, then each chunk's tokens in order. Nothing here
depends on a layer, so it is worked out once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.kv.layout import KvLayout
from kernels.models.model import BadBatch
from kernels.ops.attention import CHUNK_TOKENS, UNIT_TOKENS
from kernels.ops.row_tiles import RowTiles

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one token each and contexts of about one length."""

    start: int
    """First of its tokens in the step."""
    count: int
    sections: Tensor
    """What KvCache.gather takes."""
    mask: Tensor


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Up to CHUNK_TOKENS consecutive tokens of one chunk."""

    start: int
    count: int
    units: int
    """Units of 128 keys that its last token sees."""
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's consecutive tokens."""

    sections: Tensor
    tiles: tuple[ChunkTile, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Tokens are padded to `sum(tiles)` rows; the padding is computed and thrown away."""

    num_tokens: int
    tiles: tuple[int, ...]
    head_tiles: tuple[int, ...]
    token_ids: Tensor
    """[sum(tiles)] int64."""
    positions: Tensor
    """[sum(tiles)] int64."""
    token_rows: Tensor
    """[num_tokens, 2] int64: where layer 0's K and V go."""
    begun_blocks: tuple[int, ...]
    """Blocks that get their first token."""
    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    num_wanted: int
    wanted_tokens: frozenset[int]
    """Tokens whose logits are wanted."""
    last: Tensor
    """[sum(last_tiles)] int64: the same, in row order, then padding: what the last layer goes on with."""
    last_tiles: tuple[int, ...]
    head: Tensor
    """[sum(head_tiles)] int64: rows of `last`, then padding: what the head is given."""


class StepPlanner:
    """Turns batches into plans for one model and cache."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        tiles: RowTiles,
        head_tiles: RowTiles,
        num_blocks: int,
        vocab_size: int,
        max_position_tokens: int,
        device: torch.device,
    ) -> None:
        self._tiles = tiles
        self._head_tiles = head_tiles
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._max_position_tokens = max_position_tokens
        self._device = device
        self._block_tokens = layout.block_tokens
        self._sections_per_block = len(layout.streams)
        self._blocks_per_unit = UNIT_TOKENS // layout.block_tokens
        _, kv_heads, head_dim = layout.streams[0].shape
        self._most_units = max(1, _GATHER_BYTES // (2 * UNIT_TOKENS * kv_heads * head_dim * 4))

    def plan(self, batch: Batch, *, every_row: bool = False) -> StepPlan:
        """Lay the batch out. `every_row` wants logits of all rows, sampled or not.  Raises BadBatch."""
        if not batch.rows:
            raise BadBatch("a batch has at least one row")
        tables = [self._checked_table(row) for row in batch.rows]
        singles = [index for index, row in enumerate(batch.rows) if len(row.token_ids) == 1]
        singles.sort(key=lambda index: (-batch.rows[index].position, index))
        longer = [index for index, row in enumerate(batch.rows) if len(row.token_ids) > 1]
        order = singles + longer
        counts = np.array([len(batch.rows[index].token_ids) for index in order])
        ends = np.cumsum(counts)
        starts = dict(zip(order, (ends - counts).tolist(), strict=True))
        token_ids = np.concatenate([np.asarray(batch.rows[index].token_ids, np.int64) for index in order])
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise BadBatch(
                f"token ids lie in 0..{self._vocab_size - 1}; the batch has {token_ids.min()}..{token_ids.max()}"
            )
        positions = [
            np.arange(batch.rows[index].position, batch.rows[index].position + n)
            for index, n in zip(order, counts, strict=True)
        ]
        blocks = np.concatenate(
            [tables[index][at // self._block_tokens] for index, at in zip(order, positions, strict=True)]
        )
        flat = np.concatenate(positions)
        slots = flat % self._block_tokens
        wanted = [starts[index] + at for index, row in enumerate(batch.rows) for at in row.wanted(every_row=every_row)]
        return StepPlan(
            num_tokens=len(token_ids),
            tiles=self._tiles.plan(len(token_ids)),
            head_tiles=self._head_tiles.plan(len(wanted)),
            token_ids=self._padded(token_ids, self._tiles.padded(len(token_ids))),
            positions=self._padded(flat, self._tiles.padded(len(token_ids))),
            token_rows=self._tensor(self._token_rows(blocks, slots)),
            begun_blocks=tuple(np.unique(blocks[slots == 0]).tolist()),
            decode_groups=self._decode_groups(singles, batch.rows, tables),
            chunks=tuple(self._chunk(batch.rows[index], tables[index], starts[index]) for index in longer),
            num_wanted=len(wanted),
            wanted_tokens=frozenset(wanted),
            last=self._padded(np.array(wanted, np.int64), self._tiles.padded(len(wanted))),
            last_tiles=self._tiles.plan(len(wanted)),
            head=self._padded(np.arange(len(wanted)), self._head_tiles.padded(len(wanted))),
        )

    def _checked_table(self, row: Row) -> Ids:
        end = row.position + len(row.token_ids)
        if not row.token_ids or row.position < 0:
            raise BadBatch(f"sequence {row.sequence}: a row has at least one token at a position of at least 0")
        if end > self._max_position_tokens:
            raise BadBatch(f"sequence {row.sequence} reaches {end} tokens; the model takes {self._max_position_tokens}")
        needed = -(-end // self._block_tokens)
        table = np.asarray(row.block_table[:needed], np.int64)
        if len(table) < needed:
            raise BadBatch(
                f"sequence {row.sequence} needs {needed} blocks for {end} tokens; its table has {len(table)}"
            )
        if table.min() < 1 or table.max() >= self._num_blocks:
            raise BadBatch(f"sequence {row.sequence}: block ids lie in 1..{self._num_blocks - 1}")
        return table

    def _token_rows(self, blocks: Ids, slots: Ids) -> Ids:
        keys = blocks * (self._sections_per_block * self._block_tokens) + slots
        return np.stack([keys, keys + self._block_tokens], axis=1)

    def _decode_groups(self, singles: list[int], rows: Sequence[Row], tables: list[Ids]) -> tuple[DecodeGroup, ...]:
        """Cut the sequences, longest context first, where padding would cost more than another group."""
        units = [rows[index].position // UNIT_TOKENS + 1 for index in singles]
        groups: list[DecodeGroup] = []
        start = 0
        while start < len(singles):
            end, waste = start + 1, 0
            while end < len(singles) and (end + 1 - start) * units[start] <= self._most_units:
                waste += units[start] - units[end]
                if waste > _WASTED_UNITS and units[end] * 4 < units[start] * 3:
                    break
                end += 1
            members = singles[start:end]
            positions = np.array([rows[index].position for index in members])
            groups.append(
                DecodeGroup(
                    start,
                    len(members),
                    self._sections([tables[index] for index in members], units[start]),
                    self._mask(positions[:, None], units[start], first=int(positions[-1]) + 1),
                )
            )
            start = end
        return tuple(groups)

    def _chunk(self, row: Row, table: Ids, start: int) -> Chunk:
        tiles = []
        for offset in range(0, len(row.token_ids), CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, len(row.token_ids) - offset)
            first = row.position + offset
            units = (first + count - 1) // UNIT_TOKENS + 1
            positions = np.arange(first, first + CHUNK_TOKENS)[None, :]
            tiles.append(ChunkTile(start + offset, count, units, self._mask(positions, units, first=first + 1)))
        return Chunk(self._sections([table], tiles[-1].units), tuple(tiles))

    def _sections(self, tables: list[Ids], units: int) -> Tensor:
        """[K and V, units, sequences, blocks per unit], flat; missing blocks are the null block."""
        blocks = np.zeros((len(tables), units * self._blocks_per_unit), np.int64)
        for index, table in enumerate(tables):
            blocks[index, : len(table)] = table
        keys = blocks.reshape(len(tables), units, self._blocks_per_unit).transpose(1, 0, 2) * self._sections_per_block
        return self._tensor(np.stack([keys, keys + 1]).reshape(-1))

    def _mask(self, positions: Ids, units: int, *, first: int) -> Tensor:
        """0 where key <= query, else -inf, for the units from the one that key `first` opens (at least the last one).

        positions: [sequences, tokens].  Returns [sequences, 1, tokens, 1, masked units, 128].
        """
        masked = max(units - first // UNIT_TOKENS, 1)
        keys = np.arange((units - masked) * UNIT_TOKENS, units * UNIT_TOKENS).reshape(masked, UNIT_TOKENS)
        hidden = np.where(keys > positions[:, None, :, None, None, None], np.float32("-inf"), np.float32(0.0))
        return torch.from_numpy(hidden).to(self._device)

    def _padded(self, values: Ids, size: int) -> Tensor:
        padded = np.zeros(size, np.int64)
        padded[: len(values)] = values
        return self._tensor(padded)

    def _tensor(self, values: Ids) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


_WASTED_UNITS = 4
"""Padding units a decode group may have before it is cut: about the cost of the calls of one more group."""
_GATHER_BYTES = 10 << 20
"""fp32 K and V of one decode group: they should stay in cache between being gathered and multiplied (measured)."""

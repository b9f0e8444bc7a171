"""What does the host say of a V4.1 batch to the device, and can the batch be computed at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.batch import PENDING, Row
from kernels.models.gpu.tables import TableRows
from kernels.models.gpu.v41.tokens import Extent, Slab
from kernels.models.model import BadBatch
from kernels.models.v41.config import V41Config
from kernels.models.v41.plan import first_kept
from kernels.models.v41.rows import check_row, image_rows, preceding_needed
from kernels.models.v41.slots import WindowSlots
from kernels.ops.gpu_index import QUERIES
from kernels.ops.gpu_told import Say

_SLAB_SCORES = 1 << 27
"""Index scores of a chunk that are held at a time: 256 MiB."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch in numbers, on the host."""

    sequences: NDArray[np.int32]
    """[Say, sequences]."""
    token_ids: NDArray[np.int32]
    preceding: NDArray[np.int32]
    wanted: NDArray[np.int64]
    changes: NDArray[np.int32]
    """[n, 2]: what the device's block tables must be told first."""
    begun_blocks: tuple[int, ...]
    """Blocks that get their first token and are not filled: nobody reads what others left in them."""
    images: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    earlier: NDArray[np.int32]
    """[sequences]: place in the step before of those planned as if its drafts were accepted, else -1."""

    @property
    def counts(self) -> NDArray[np.int32]:
        return self._of(Say.COUNT)

    @property
    def decoder_counts(self) -> NDArray[np.int32]:
        return self._of(Say.DECODER_COUNT)

    @property
    def is_compact(self) -> bool:
        """The decoder half computes fewer tokens."""
        return bool((self.decoder_counts < self.counts).any())

    @property
    def ends(self) -> NDArray[np.int32]:
        """Position after each sequence's last token."""
        return self._of(Say.END)

    def _of(self, field: Say) -> NDArray[np.int32]:
        said: NDArray[np.int32] = self.sequences[field]
        return said


class GpuPlanner:
    """Turns batches into numbers for one model."""

    def __init__(self, config: V41Config, slots: WindowSlots, tables: TableRows) -> None:
        self._config, self._slots, self._tables = config, slots, tables

    def check(self, rows: Sequence[Row], earlier: Sequence[int]) -> list[list[int] | None]:
        """Raise BadBatch for what cannot be computed; nothing is changed yet.  Returns what `plan` wants back.

        earlier: as in `Planned`.
        """
        news = self._tables.check(rows)
        windows: set[int] = set()
        for row, place in zip(rows, earlier, strict=True):
            self._slots.check(row)
            if row.window in windows:
                raise BadBatch(f"sequence {row.sequence}: window {row.window} belongs to another row of this batch")
            windows.add(row.window)
            check_row(row, self._config, may_wait=True)
            if PENDING in row.preceding and place < 0:
                raise BadBatch(f"sequence {row.sequence}: only a row's own token may be pending, not one before it")
        return news

    def plan(
        self,
        rows: Sequence[Row],
        token_ids: Sequence[Sequence[int]],
        news: Sequence[list[int] | None],
        earlier: Sequence[int],
        *,
        every_row: bool,
    ) -> Planned:
        """token_ids: of each row, tokens to come named as the device wants them."""
        lines, changes = self._tables.place(rows, news)
        firsts = [first_kept(row) if row.replay.keep_from else 0 for row in rows]
        if self._config.num_encoder_layers == self._config.num_layers:
            firsts = [0] * len(rows)
        sequences = self._said(rows, lines, firsts)
        counts, kept = sequences[Say.COUNT], sequences[Say.DECODER_COUNT]
        # Left-out tokens lie before the last one; rows that score their tokens leave none out.
        wanted = [
            int(end) - len(row.token_ids) + at
            for row, end in zip(rows, np.cumsum(kept), strict=True)
            for at in row.wanted(every_row=every_row)
        ]
        images = None
        if any(row.images for row in rows):
            images = image_rows(rows, (np.cumsum(counts) - counts).tolist(), self._config)
        return Planned(
            sequences=sequences,
            token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in token_ids]),
            preceding=self._preceding(rows),
            wanted=np.array(wanted, np.int64),
            changes=changes,
            begun_blocks=self._begun(rows),
            images=images,
            earlier=np.array(earlier, np.int32),
        )

    def advance(self, rows: Sequence[Row]) -> None:
        """The rows are computed, in the device's order of things."""
        for row in rows:
            self._slots.advance(row)

    def _said(self, rows: Sequence[Row], lines: Sequence[int], firsts: Sequence[int]) -> NDArray[np.int32]:
        said = np.zeros((len(Say), len(rows)), np.int32)
        counts = [len(row.token_ids) for row in rows]
        said[Say.COUNT] = counts
        said[Say.DECODER_COUNT] = said[Say.COUNT] - np.array(firsts, np.int32)
        said[Say.END] = said[Say.COUNT] + np.array([row.position for row in rows], np.int32)
        said[Say.LINE] = lines
        said[Say.WINDOW] = [row.window for row in rows]
        said[Say.WINDOW_FROM] = [row.replay.window_from for row in rows]
        said[Say.WRITE_FROM] = [row.replay.write_from for row in rows]
        said[Say.KEEP_FROM] = [row.replay.keep_from for row in rows]
        return said

    def _preceding(self, rows: Sequence[Row]) -> NDArray[np.int32]:
        reach = self._config.engram.max_ngram - 1
        preceding = np.full((len(rows), reach), self._config.vocab_size, np.int32)
        for index, row in enumerate(rows):
            if needed := preceding_needed(row, self._config):
                preceding[index, reach - needed :] = row.preceding[len(row.preceding) - needed :]
        return preceding

    def _begun(self, rows: Sequence[Row]) -> tuple[int, ...]:
        size = self._config.block_tokens
        begun = []
        for row in rows:
            end = row.position + len(row.token_ids)
            last = (end - 1) // size
            if end % size and last * size >= max(row.position, row.replay.write_from):
                begun.append(row.block_table[last])
        return tuple(begun)


def extent_of(counts: Sequence[int], ends: Sequence[int]) -> Extent:
    """A half's size, cut into slabs whose scores there is room for.  ends: positions after sequences' last tokens."""
    most = max(_SLAB_SCORES // max(ends) // QUERIES, 1) * QUERIES
    slabs: list[Slab] = []
    token = tile = 0
    first_token, first_tile, last = 0, 0, 0
    for count, end in zip(counts, ends, strict=True):
        done = 0
        while done < count:
            room = most - (token - first_token)
            if room <= 0:
                slabs.append(Slab(slice(first_tile, tile), slice(first_token, token), last))
                first_token, first_tile, last, room = token, tile, 0, most
            # Cuts within a sequence stand where its tiles do.
            taken = count - done if count - done <= room else max(room // QUERIES, 1) * QUERIES
            done, token, tile = done + taken, token + taken, tile - (-taken // QUERIES)
            last = max(last, end - count + done)
    slabs.append(Slab(slice(first_tile, tile), slice(first_token, token), last))
    return Extent(token, tuple(slabs))


def stored_of(counts: NDArray[np.int32], ring_tokens: int) -> NDArray[np.int64]:
    """The last tokens of each sequence, as many as a ring holds, in rows of the step."""
    ends = np.cumsum(counts)
    return np.concatenate(
        [
            np.arange(end - min(count, ring_tokens), end)
            for count, end in zip(counts.tolist(), ends.tolist(), strict=True)
        ]
    ).astype(np.int64)


def kept_of(planned: Planned) -> NDArray[np.int64]:
    """Tokens of the encoder half that the decoder half computes too."""
    ends = np.cumsum(planned.counts)
    return np.concatenate(
        [np.arange(end - count, end) for count, end in zip(planned.decoder_counts.tolist(), ends.tolist(), strict=True)]
    ).astype(np.int64)

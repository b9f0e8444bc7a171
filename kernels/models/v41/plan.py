"""What does a batch mean in tensors: which tokens are computed where, what each may see, and what is written?

Rows lie end to end in their order. Nothing here depends on a layer, only on which half of the model it belongs to:
encoder and decoder layers may see, compute and store different tokens (bounded replay).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.models.v41.config import V41Config
from kernels.models.v41.rows import Ids, check_batch, image_rows, preceding_needed
from kernels.models.v41.slots import WindowSlots


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's consecutive tokens in a half."""

    start: int
    count: int
    position: int
    """Absolute, of the first."""
    table: Tensor
    """[blocks] int64."""


@dataclass(frozen=True, slots=True)
class Half:
    """The tokens that the layers of one half compute, and their windows."""

    num_tokens: int
    positions: Tensor
    """[num_tokens] int64."""
    last_position: int
    spans: tuple[Span, ...]
    tables: Tensor
    """[spans, most blocks] int64, missing ones are the null block."""
    span_of: Tensor
    """[num_tokens] int64."""
    previous_slots: Tensor
    previous_places: Tensor
    """Window slots and places of the keys before each span, [spans * (window - 1)] int64; empty if none is seen."""
    window_keys: Tensor
    """[num_tokens, window] int64 into previous keys, then this half's, then one of zeros; oldest first."""
    window_mask: Tensor
    """[num_tokens, window] fp32: 0 where a key is seen, else -inf."""
    stored_tokens: Tensor
    """Tokens whose keys go to the rings, and where: [n] int64 each."""
    stored_slots: Tensor
    stored_places: Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """The compressed entries that a step completes for sources of one ratio."""

    sources: Tensor
    """[entries, ratio] int64, tokens of each entry: for ratio 2 into the newest earlier token of each row (as many as
    there are rows), then the step's tokens."""
    positions: Tensor
    """[entries] int64: of each entry's first token."""
    blocks: Tensor
    places: Tensor
    """[entries] int64 each: where they are written."""


@dataclass(frozen=True, slots=True)
class PairRing:
    """Which scores and latents are read from, and written to, the ring of a ratio-2 compressor."""

    slots: Tensor
    places: Tensor
    """[rows] int64 each: of the token before each row."""
    stored_tokens: Tensor
    stored_slots: Tensor
    stored_places: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    token_ids: Tensor
    """[num_tokens] int64; 0 at images."""
    images: tuple[Tensor, Tensor] | None
    """Token indices [n] and their embeddings [n, hidden] fp32."""
    image_tokens: Tensor
    """[num_tokens] bool."""
    history: Tensor
    """[num_tokens, max_ngram] int64: each token's id and those before it, newest first; -1 before the start."""
    encoder: Half
    decoder: Half
    kept: Tensor | None
    """Which of the encoder's tokens the decoder half computes; None = all."""
    entries: dict[int, Entries]
    """By ratio."""
    pair_ring: PairRing
    begun_blocks: tuple[int, ...]
    wanted: Tensor
    """[wanted] int64: tokens of the decoder half whose logits are wanted, in row order."""


class V41Planner:
    """Turns batches into plans for one model and cache."""

    def __init__(
        self,
        config: V41Config,
        slots: WindowSlots,
        *,
        num_blocks: int,
        pair_ring_tokens: int,
        device: torch.device,
    ) -> None:
        self._config, self._slots = config, slots
        self._num_blocks = num_blocks
        self._pair_ring_tokens = pair_ring_tokens
        self._device = device

    def plan(self, batch: Batch, *, every_row: bool) -> Plan:
        """Lay the batch out.  every_row: logits of all rows are wanted, sampled or not.  Raises BadBatch."""
        rows = batch.rows
        tables = check_batch(batch, self._config, self._slots, num_blocks=self._num_blocks)
        counts = np.array([len(row.token_ids) for row in rows])
        starts = np.cumsum(counts) - counts
        firsts = [0] * len(rows)
        encoder = self._half(rows, tables, firsts, lambda row: row.replay.window_from, store_from=lambda _: 0)
        decoder, kept = encoder, None
        has_decoder = self._config.num_encoder_layers < self._config.num_layers
        if has_decoder and any(row.replay.keep_from for row in rows):
            firsts = [first_kept(row) for row in rows]
            decoder = self._half(
                rows,
                tables,
                firsts,
                lambda row: max(row.replay.window_from, row.replay.keep_from),
                store_from=lambda row: row.replay.keep_from,
            )
            if any(firsts):
                spans = zip(starts, firsts, counts, strict=True)
                kept = self._tensor(np.concatenate([np.arange(at + first, at + n) for at, first, n in spans]))
        # Left-out tokens lie before the last one; rows that score their tokens leave none out (check_batch).
        wanted = [
            int(decoder_end) - len(row.token_ids) + at
            for row, decoder_end in zip(rows, np.cumsum(counts - np.array(firsts)), strict=True)
            for at in row.wanted(every_row=every_row)
        ]
        ids = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
        images = image_rows(rows, starts.tolist(), self._config)
        return Plan(
            token_ids=self._tensor(np.where(ids < self._config.vocab_size, ids, 0)),
            images=None if images is None else self._images(*images),
            image_tokens=torch.from_numpy(ids >= self._config.vocab_size).to(self._device),
            history=torch.cat([_history(row, self._config) for row in rows]).to(self._device),
            encoder=encoder,
            decoder=decoder,
            kept=kept,
            entries={ratio: self._entries(ratio, rows, tables, starts) for ratio in self._ratios()},
            pair_ring=self._pair_ring(rows, starts),
            begun_blocks=self._begun(rows, tables),
            wanted=self._tensor(np.array(wanted, np.int64)),
        )

    def _half(
        self,
        rows: tuple[Row, ...],
        tables: list[Ids],
        firsts: list[int],
        sees_from: Callable[[Row], int],
        *,
        store_from: Callable[[Row], int],
    ) -> Half:
        """firsts: tokens of each row that are left out."""
        window, ring = self._config.window_tokens, self._config.ring_tokens
        counts = [len(row.token_ids) - first for row, first in zip(rows, firsts, strict=True)]
        begins = [row.position + first for row, first in zip(rows, firsts, strict=True)]
        total = sum(counts)
        has_previous = any(begin > sees_from(row) for row, begin in zip(rows, begins, strict=True))
        num_previous = len(rows) * (window - 1) if has_previous else 0
        zero = num_previous + total
        keys, stored, slots, places, spans = [], [], [], [], []
        start = 0
        for index, (row, count, begin) in enumerate(zip(rows, counts, begins, strict=True)):
            at = np.arange(begin, begin + count)
            seen = at[:, None] - (window - 1) + np.arange(window)
            own = np.where(
                seen >= begin, num_previous + start + seen - begin, index * (window - 1) + seen - (begin - window + 1)
            )
            keys.append(np.where(seen >= max(sees_from(row), 0), own, zero))
            kept = at[(at >= store_from(row)) & (at >= begin + count - ring)]
            stored.append(start + kept - begin)
            slots.append(np.full(len(kept), row.window))
            places.append(kept % ring)
            spans.append(Span(start, count, begin, self._tensor(tables[index])))
            start += count
        window_keys = np.concatenate(keys)
        hidden = np.where(window_keys == zero, np.float32("-inf"), np.float32(0.0))
        back = np.arange(1 - window, 0)
        previous = [(begin + back) % ring for begin in begins] if has_previous else []
        return Half(
            num_tokens=total,
            positions=self._tensor(np.concatenate([np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)])),
            last_position=max(begin + count for begin, count in zip(begins, counts, strict=True)) - 1,
            spans=tuple(spans),
            tables=self._tensor(_stacked(tables)),
            span_of=self._tensor(np.repeat(np.arange(len(rows)), counts)),
            previous_slots=self._tensor(np.repeat([row.window for row in rows], window - 1 if has_previous else 0)),
            previous_places=self._tensor(np.concatenate(previous) if previous else np.zeros(0, np.int64)),
            window_keys=self._tensor(window_keys),
            window_mask=torch.from_numpy(hidden).to(self._device),
            stored_tokens=self._tensor(np.concatenate(stored)),
            stored_slots=self._tensor(np.concatenate(slots)),
            stored_places=self._tensor(np.concatenate(places)),
        )

    def _ratios(self) -> set[int]:
        return {self._config.compress_ratios[source] for source in self._config.kv_sources}

    def _entries(self, ratio: int, rows: tuple[Row, ...], tables: list[Ids], starts: Ids) -> Entries:
        """Those whose last token is in a row, and which are not shared already."""
        per_block = self._config.block_tokens // ratio
        sources, positions, blocks, places = [], [], [], []
        for index, (row, table, start) in enumerate(zip(rows, tables, starts.tolist(), strict=True)):
            lowest = max(row.replay.write_from, row.replay.window_from)
            entries = np.arange(row.position // ratio, (row.position + len(row.token_ids)) // ratio)
            entries = entries[entries * ratio >= lowest]
            tokens = entries[:, None] * ratio + np.arange(ratio) - row.position
            ahead = len(rows) if ratio > 1 else 0
            sources.append(np.where(tokens < 0, index, ahead + start + tokens))
            positions.append(entries * ratio)
            blocks.append(table[entries // per_block])
            places.append(entries % per_block)
        return Entries(*(self._tensor(np.concatenate(part)) for part in (sources, positions, blocks, places)))

    def _pair_ring(self, rows: tuple[Row, ...], starts: Ids) -> PairRing:
        ring = self._pair_ring_tokens
        stored, slots, places = [], [], []
        for row, start in zip(rows, starts.tolist(), strict=True):
            end = row.position + len(row.token_ids)
            at = np.arange(max(row.position, end - ring), end)
            stored.append(start + at - row.position)
            slots.append(np.full(len(at), row.window))
            places.append(at % ring)
        return PairRing(
            slots=self._tensor(np.array([row.window for row in rows])),
            places=self._tensor(np.array([(row.position - 1) % ring for row in rows])),
            stored_tokens=self._tensor(np.concatenate(stored)),
            stored_slots=self._tensor(np.concatenate(slots)),
            stored_places=self._tensor(np.concatenate(places)),
        )

    def _begun(self, rows: tuple[Row, ...], tables: list[Ids]) -> tuple[int, ...]:
        """Blocks that get their first token and are not shared."""
        size = self._config.block_tokens
        begun: list[int] = []
        for row, table in zip(rows, tables, strict=True):
            first = -(-max(row.position, row.replay.write_from) // size)
            begun += table[first:].tolist()
        return tuple(begun)

    def _images(self, indices: Ids, embeddings: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        return self._tensor(indices), torch.from_numpy(embeddings).to(self._device)

    def _tensor(self, values: Ids) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)


def first_kept(row: Row) -> int:
    """Tokens of the row that skip the decoder half: those below keep_from, but never its last."""
    if not row.replay.compact:
        return 0
    return min(max(row.replay.keep_from - row.position, 0), len(row.token_ids) - 1)


def _history(row: Row, config: V41Config) -> Tensor:
    """[tokens, max_ngram] int64."""
    reach = config.engram.max_ngram
    before = list(row.preceding)[len(row.preceding) - preceding_needed(row, config) :]
    ids = [-1] * (reach - 1 - len(before)) + before + list(row.token_ids)
    return torch.tensor(ids, dtype=torch.int64).unfold(0, reach, 1).flip(1)


def _stacked(tables: list[Ids]) -> Ids:
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked

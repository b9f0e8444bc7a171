"""What does a device's sampler need to know of each line of logits?

A row has one line, or with drafts one for the token before them and one for each. Everything is arrays by line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.batch import PENDING, Row, SamplingParams
from kernels.ops.gpu_sampler import Features
from kernels.ops.sampler import GREEDY_BELOW

NUM_TOLD = 8
"""Lines of what `Asking.told` returns."""
_LIST_BYTES = 16
"""Of a token that a bias or a penalty names: its id, bias and count."""
_LINE_BYTES = 64
"""Of a line's other numbers, and what alignment wastes."""

Changes = list[NDArray[np.generic]]
"""The fields of `gpu_sampler.Adjustments`, in order."""


@dataclass(frozen=True, slots=True)
class Told:
    """A request's parameters as the kernels take them; made once per sequence."""

    params: SamplingParams
    temperature: float
    log_min_p: float
    num_logprobs: int
    changes: bool
    """Its logits are adjusted, mask aside."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose changes are sent at a time, for lines [first, end)."""

    first: int
    end: int
    changes: Changes


@dataclass(frozen=True, slots=True)
class Earlier:
    """Where the step before has put what some sequences go on from."""

    places: Mapping[int, int]
    """By sequence."""
    drafted: frozenset[int] = frozenset()
    """Sequences whose drafts it verifies."""
    guessed: frozenset[int] = frozenset()
    """Sequences for which it makes drafts."""

    def going_on(self, row: Row) -> int:
        """The row's place there if it was planned as if all drafts had been accepted, else -1."""
        if row.sequence in self.drafted and row.token_ids[0] == PENDING:
            return self.places[row.sequence]
        return -1


class Asking:
    """Remembers parameters from step to step."""

    def __init__(self, vocab_size: int, most_sequences: int) -> None:
        self._vocab_size = vocab_size
        self._mask_bytes = -(-vocab_size // 8)
        self._most_told = 4 * most_sequences
        self._told: dict[int, Told] = {}

    @property
    def most_row_bytes(self) -> int:
        """Of one row's changes: every token is named, and a mask."""
        return self._vocab_size * _LIST_BYTES + self._mask_bytes + 8 * _LINE_BYTES * len(Told.__slots__)

    def of(self, row: Row) -> Told:
        params = row.sampling
        assert params is not None, "only rows that want a token are drawn for"
        told = self._told.get(row.sequence)
        if told is None or told.params is not params:
            if len(self._told) > self._most_told:
                self._told.clear()
            told = self._told[row.sequence] = Told(
                params,
                0.0 if params.temperature < GREEDY_BELOW else params.temperature,
                math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
                -1 if params.num_logprobs is None else params.num_logprobs,
                bool(
                    params.logit_bias
                    or params.presence_penalty
                    or params.frequency_penalty
                    or params.repetition_penalty != 1.0
                ),
            )
        return told

    def told(self, rows: Sequence[Row], told: Sequence[Told], counts: NDArray[np.int64], earlier: Earlier) -> Lines:
        """[NUM_TOLD, lines] int64, as `gpu_step.noise_keys` takes it.  counts: lines of each row."""
        by_row = np.empty((NUM_TOLD, len(rows)), np.int64)
        floats = by_row.view(np.float64)
        floats[0] = [each.temperature for each in told]
        floats[1] = [each.params.top_p for each in told]
        floats[2] = [each.log_min_p for each in told]
        by_row[3] = np.array([each.params.seed for each in told], np.uint64).view(np.int64)
        by_row[4] = [each.params.top_k for each in told]
        by_row[5] = [each.num_logprobs for each in told]
        by_row[6] = [row.position + len(row.token_ids) - row.num_drafts for row in rows]
        by_row[7] = [earlier.going_on(row) for row in rows]
        if int(counts.sum()) == len(rows):
            return by_row
        by_line: Lines = np.repeat(by_row, counts, axis=1)
        by_line[6] += np.arange(by_line.shape[1]) - np.repeat(np.cumsum(counts) - counts, counts)
        return by_line

    def groups(
        self,
        rows: Sequence[Row],
        told: Sequence[Told],
        counts: NDArray[np.int64],
        earlier: Earlier,
        refused: dict[int, str],
        *,
        most_bytes: int,
        most_lines: int,
    ) -> Iterator[Group]:
        """What changes logits, in groups that take at most so many bytes and lines.

        refused: gets rows that ask for what cannot be.  A row alone takes at most `most_row_bytes`.
        """
        first = end = start = held = 0
        lists: list[_List] = []
        for index, (row, each) in enumerate(zip(rows, told, strict=True)):
            made = self._list(row, each, index, refused)
            size = made[0].size * _LIST_BYTES + _LINE_BYTES * int(counts[index])
            size += self._mask_bytes if row.allowed_mask is not None else 0
            if lists and (held + size > most_bytes or end + int(counts[index]) - first > most_lines):
                yield self._group(rows, told, counts, earlier, refused, lists, start, first, end)
                first, start, held, lists = end, index, 0, []
            lists.append(made)
            held += size
            end += int(counts[index])
        yield self._group(rows, told, counts, earlier, refused, lists, start, first, end)

    def _group(
        self,
        rows: Sequence[Row],
        told: Sequence[Told],
        counts: NDArray[np.int64],
        earlier: Earlier,
        refused: dict[int, str],
        lists: Sequence[_List],
        start: int,
        first: int,
        end: int,
    ) -> Group:
        """lists: of the rows from `start` on.  Rows with drafts change nothing, so their lines are alike."""
        masks: list[NDArray[np.uint8]] = []
        mask_rows, coming, penalties, by_line = [], [], [], []
        for at, made in enumerate(lists, start):
            row, each, lines = rows[at], told[at], int(counts[at])
            is_waited = each.changes and row.token_ids[-1] == PENDING
            mask_rows += [self._mask(row, at, masks, refused)] * lines
            coming += [earlier.places.get(row.sequence, -1) if is_waited else -1] * lines
            params = each.params
            penalties += [(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)] * lines
            by_line += [made] * lines
        starts = np.cumsum([0, *(len(ids) for ids, _, _ in by_line)]).astype(np.int32)
        ids, bias, seen = (np.concatenate(column) for column in zip(*by_line, strict=True))
        changes: Changes = [
            starts,
            ids.astype(np.int32),
            bias.astype(np.float64),
            seen.astype(np.int32),
            np.array(penalties, np.float64).reshape(-1, 3),
            np.array(coming, np.int32),
            np.array(mask_rows, np.int32),
            np.stack(masks) if masks else np.zeros((0, self._mask_bytes), np.uint8),
        ]
        return Group(first, end, changes)

    def _mask(self, row: Row, index: int, masks: list[NDArray[np.uint8]], refused: dict[int, str]) -> int:
        """The row's line among the masks, to which its own is added; -1 without one."""
        if row.allowed_mask is None:
            return -1
        if len(row.allowed_mask) < self._mask_bytes:
            covered = len(row.allowed_mask) * 8
            refused[index] = f"the mask of allowed tokens covers {covered} of {self._vocab_size} tokens"
            return -1
        masks.append(np.frombuffer(row.allowed_mask, np.uint8, self._mask_bytes))
        return len(masks) - 1

    def _list(self, row: Row, told: Told, index: int, refused: dict[int, str]) -> _List:
        """Tokens that a bias or a penalty names: ids, biases, and 1 + count in the answer of those seen."""
        if not told.changes:
            return np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int64)
        biases = dict(told.params.logit_bias)
        outside = [token for token in biases if not 0 <= token < self._vocab_size]
        if outside:
            refused[index] = f"logit bias names token {outside[0]}, the vocabulary has {self._vocab_size}"
            biases = {}
        history = np.asarray(row.history, np.int64)
        is_known = (history >= 0) & (history < self._vocab_size)
        answer = history[row.num_prompt_tokens :][is_known[row.num_prompt_tokens :]]
        ids = np.unique(np.concatenate([history[is_known], np.fromiter(biases, np.int64, len(biases))]))
        seen = np.isin(ids, history[is_known]).astype(np.int64)
        answered, times = np.unique(answer, return_counts=True)
        seen[np.searchsorted(ids, answered)] += times
        return ids, np.array([biases.get(token, 0.0) for token in ids.tolist()], np.float64), seen


Lines = NDArray[np.int64]
_List = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]


def features_of(told: Sequence[Told]) -> Features:
    """What any of them asks for."""
    noisy = [each.params for each in told if each.temperature > 0.0]
    return Features(
        noise=bool(noisy),
        top_k=any(each.top_k > 0 for each in noisy),
        top_p=any(each.top_p < 1.0 for each in noisy),
        min_p=any(each.min_p > 0.0 for each in noisy),
        num_top=max((each.num_logprobs for each in told), default=-1),
    )


LEVELS = (
    Features(),
    Features(noise=True),
    Features(noise=True, top_p=True),
    Features(noise=True, top_k=True, top_p=True, min_p=True),
)
"""What draws are captured for. A row that does not ask for a cut is drawn as if there were none, so each of these
serves whatever asks for less."""


def level_of(features: Features) -> Features | None:
    """The least of LEVELS that has all of these; None if logprobs are wanted."""
    if features.num_top >= 0:
        return None
    return next(
        level
        for level in LEVELS
        if all(getattr(level, name) or not getattr(features, name) for name in ("noise", "top_k", "top_p", "min_p"))
    )

"""What does the device's sampler need to know of each row, and what did it draw?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import PENDING, Row, Sampled, SamplingParams
from kernels.models.gpu.staging import Returning, Staging
from kernels.ops.gpu_sampler import INFINITE, NAN, NUM_ASKED, Adjustments, Features, adjust, draw
from kernels.ops.sampler import GREEDY_BELOW

_PROBLEMS = {NAN: "the largest logit is nan", INFINITE: "the largest logit is inf"}
_NOTHING_LEFT = "after bias, penalties and mask no token is left"
_THREE = np.uint64(3 * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class _Told:
    """A request's parameters as the kernels take them; made once per sequence."""

    params: SamplingParams
    temperature: float
    log_min_p: float
    num_logprobs: int
    changes: bool
    """Its logits are adjusted, mask aside."""


class Draw:
    """Tokens on their way to the host."""

    def __init__(
        self, rows: Sequence[Row], returning: Returning, refused: dict[int, str], num_wanted: list[int]
    ) -> None:
        """refused: rows that could not be told to the device.  num_wanted: logprobs per row, -1 for none."""
        self._rows = rows
        self._returning = returning
        self._refused = refused
        self._num_wanted = num_wanted

    def wait(self) -> tuple[Sampled, ...]:
        """One per row, in order."""
        results, *others = self._returning.wait()
        tokens, problems = results[:, : len(self._rows)].tolist()
        extras = [each.tolist() for each in others]
        logprobs, top_ids = extras or ((), ())
        sampled = []
        for index, row in enumerate(self._rows):
            problem = self._refused.get(index) if self._refused else None
            if problems[index] and problem is None:
                problem = _problem(problems[index])
            if problem is not None:
                sampled.append(Sampled(row.sequence, -1, problem=problem))
            elif self._num_wanted[index] < 0:
                sampled.append(Sampled(row.sequence, tokens[index]))
            else:
                likely = zip(top_ids[index], logprobs[index][1:], strict=True)
                top = tuple(each for each in likely if each[0] >= 0)[: self._num_wanted[index]]
                sampled.append(Sampled(row.sequence, tokens[index], logprobs[index][0], top))
        return tuple(sampled)


class Drawer:
    """Draws on one device."""

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        """num_rows: most rows of a batch."""
        self._vocab_size = vocab_size
        self._staging = Staging(device, 1 << 16)
        self._results = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        self._told: dict[int, _Told] = {}
        self._num_rows = num_rows
        self._graphs: dict[tuple[int, int, Features], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._padded_staging = Staging(device, NUM_ASKED * 8 * num_rows)  # never grows: graphs know its address
        self._places: dict[int, int] = {}

    @property
    def sampled(self) -> Tensor:
        """[rows] int32: the newest tokens, in the order their rows were drawn."""
        return self._results[0]

    def place(self, sequence: int) -> int | None:
        """Where in `sampled` the token of that sequence is, or will be; None if the last step draws none for it."""
        return self._places.get(sequence)

    def draw(self, rows: Sequence[Row], logits: Tensor, padded: Tensor | None = None) -> Draw:
        """rows: those that want a token.  logits: [rows, vocab_size] fp32, left as they are.

        padded: logits followed by padding rows, at an address that lasts: they are then drawn from by a graph.
        """
        earlier, self._places = self._places, {row.sequence: place for place, row in enumerate(rows)}
        told = [self._tell(row) for row in rows]
        features = _features(told)
        refused: dict[int, str] = {}
        extras: tuple[Tensor, ...] = ()
        if any(each.changes or row.allowed_mask is not None for each, row in zip(told, rows, strict=True)):
            sent = self._staging.send([self._asked(rows, told), *self._changes(rows, told, earlier, refused)])
            logits = logits.clone()  # the model's own may be asked for
            adjust(logits, self.sampled, Adjustments(*sent[1:]))
            extras = self._launch(logits, sent[0], features)
        elif padded is not None and features.num_top < 0:
            self._replay(padded, rows, told, features)
        else:
            extras = self._launch(logits, self._staging.send([self._asked(rows, told)])[0], features)
        return Draw(rows, Returning((self._results, *extras)), refused, [each.num_logprobs for each in told])

    def _launch(self, logits: Tensor, asked: Tensor, features: Features) -> tuple[Tensor, ...]:
        drawn = draw(logits, asked, features, out=self._results)
        return (drawn.logprobs, drawn.top_ids) if features.num_top >= 0 else ()

    def _replay(self, padded: Tensor, rows: Sequence[Row], told: Sequence[_Told], features: Features) -> None:
        """Draw by a graph, which is captured when a batch of this size and these features is first met."""
        asked = np.zeros((NUM_ASKED, len(padded)), np.int64)
        if features.noise:
            asked[:, : len(rows)] = self._asked(rows, told)
        key = (len(padded), padded.data_ptr(), features)
        graph = self._graphs.get(key)
        if features.noise or graph is None:
            (on_device,) = self._padded_staging.send([asked])
        if graph is None:
            draw(padded, on_device, features, out=self._results)  # compiles
            torch.cuda.synchronize()
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                draw(padded, on_device, features, out=self._results)
        graph.replay()

    def _tell(self, row: Row) -> _Told:
        params = row.sampling
        assert params is not None, "only rows that want a token are drawn for"
        told = self._told.get(row.sequence)
        if told is None or told.params is not params:
            if len(self._told) > 4 * self._num_rows:
                self._told.clear()
            told = self._told[row.sequence] = _Told(
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

    def _asked(self, rows: Sequence[Row], told: Sequence[_Told]) -> NDArray[np.int64]:
        asked = np.empty((NUM_ASKED, len(rows)), np.int64)
        floats = asked.view(np.float64)
        floats[0] = [each.temperature for each in told]
        floats[1] = [each.params.top_p for each in told]
        floats[2] = [each.log_min_p for each in told]
        position = np.array([row.position + len(row.token_ids) for row in rows], np.uint64)
        shifted = position * _THREE
        shifted ^= shifted << np.uint64(13)
        asked[3] = (np.array([each.params.seed for each in told], np.uint64) + shifted).view(np.int64)
        asked[4] = [each.params.top_k for each in told]
        asked[5] = [each.num_logprobs for each in told]
        return asked

    def _changes(
        self, rows: Sequence[Row], told: Sequence[_Told], earlier: dict[int, int], refused: dict[int, str]
    ) -> list[NDArray[np.generic]]:
        """The fields of Adjustments, in order."""
        lists = []
        masks: list[NDArray[np.uint8]] = []
        mask_rows = np.full(len(rows), -1, np.int32)
        mask_bytes = -(-self._vocab_size // 8)
        for index, (row, each) in enumerate(zip(rows, told, strict=True)):
            lists.append(self._list(row, each, index, refused))
            if row.allowed_mask is None:
                continue
            if len(row.allowed_mask) < mask_bytes:
                covered = len(row.allowed_mask) * 8
                refused[index] = f"the mask of allowed tokens covers {covered} of {self._vocab_size} tokens"
                continue
            mask_rows[index] = len(masks)
            masks.append(np.frombuffer(row.allowed_mask, np.uint8, mask_bytes))
        coming = [
            earlier.get(row.sequence, -1) if each.changes and row.token_ids[-1] == PENDING else -1
            for row, each in zip(rows, told, strict=True)
        ]
        penalties = [
            (each.params.repetition_penalty, each.params.frequency_penalty, each.params.presence_penalty)
            for each in told
        ]
        starts = np.cumsum([0, *(len(ids) for ids, _, _ in lists)]).astype(np.int32)
        ids, bias, seen = (np.concatenate(column) for column in zip(*lists, strict=True))
        return [
            starts,
            ids.astype(np.int32),
            bias.astype(np.float64),
            seen.astype(np.int32),
            np.array(penalties, np.float64).reshape(-1, 3),
            np.array(coming, np.int32),
            mask_rows,
            np.stack(masks) if masks else np.zeros((0, mask_bytes), np.uint8),
        ]

    def _list(
        self, row: Row, told: _Told, index: int, refused: dict[int, str]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
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


def _features(told: Sequence[_Told]) -> Features:
    noisy = [each.params for each in told if each.temperature > 0.0]
    return Features(
        noise=bool(noisy),
        top_k=any(each.top_k > 0 for each in noisy),
        top_p=any(each.top_p < 1.0 for each in noisy),
        min_p=any(each.min_p > 0.0 for each in noisy),
        num_top=max((each.num_logprobs for each in told), default=-1),
    )


def _problem(code: int) -> str:
    return _PROBLEMS.get(code, _NOTHING_LEFT)

"""Which tokens has the device drawn, and how do they come back while it goes on?

Nothing is allocated on the device for it after the start: what rows ask for is sent through buffers of a fixed size, in
groups where it is much, and what rows can ask for is captured for every captured step before the first request. What
else is drawn from copies of logits takes memory that the plan keeps for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import PENDING, Row, Sampled
from kernels.models.gpu.asking import LEVELS, NUM_TOLD, Asking, Earlier, Told, features_of, level_of
from kernels.models.gpu.staging import Returning, Staging
from kernels.models.model import BadBatch
from kernels.ops.gpu_sampler import INFINITE, NAN, Adjustments, Features, adjust, draw
from kernels.ops.gpu_step import noise_keys
from kernels.ops.gpu_verify import Standing, accept

_PROBLEMS = {NAN: "the largest logit is nan", INFINITE: "the largest logit is inf"}
_NOTHING_LEFT = "after bias, penalties and mask no token is left"
_LINES_A_ROW = 4
"""On average, of a batch of the most rows."""
_GROUP_BYTES = 8 << 20
GROUP_LINES = 256
"""Whose logits are copied at a time to be adjusted: what memory is planned for."""


class Seen:
    """The tokens of the step that is drawn from."""

    def __init__(self, history: Tensor, rows: Sequence[Row]) -> None:
        """history: [tokens, reach + 1] int64, each token and those before it, the newest first.  rows: all of them."""
        self.history = history
        ends = np.cumsum([len(row.token_ids) for row in rows]).tolist()
        self.ends = {row.sequence: end for row, end in zip(rows, ends, strict=True)}
        """Token after each sequence's last."""


class Draw:
    """Tokens on their way to the host."""

    def __init__(
        self,
        rows: Sequence[Row],
        returning: Returning,
        refused: dict[int, str],
        num_wanted: list[int],
        *,
        has_drafts: bool = False,
    ) -> None:
        """returning: tokens and problems by row; with drafts, how many were rejected and the choices by line; logprobs.

        refused: rows that could not be told to the device.  num_wanted: logprobs per row, -1 for none.
        """
        self._rows = rows
        self._lines = np.cumsum([0, *(1 + row.num_drafts for row in rows)]).tolist() if has_drafts else range(len(rows))
        self._returning = returning
        self._refused = refused
        self._num_wanted = num_wanted
        self._has_drafts = has_drafts

    def wait(self) -> tuple[Sampled, ...]:
        """One per row, in order."""
        results, *others = self._returning.wait()
        tokens, problems = results[:, : len(self._rows)].tolist()
        accepted: list[tuple[int, ...]] = [()] * len(self._rows)
        if self._has_drafts:
            rejected, choices, *others = others
            accepted = self._accepted(rejected.tolist(), choices[0].tolist())
        extras = [each.tolist() for each in others]
        logprobs, top_ids = extras or ((), ())
        sampled = []
        for index, row in enumerate(self._rows):
            problem = self._refused.get(index) if self._refused else None
            if problems[index] and problem is None:
                problem = _PROBLEMS.get(problems[index], _NOTHING_LEFT)
            if problem is not None:
                sampled.append(Sampled(row.sequence, -1, problem=problem))
            elif self._num_wanted[index] < 0:
                sampled.append(Sampled(row.sequence, tokens[index], accepted=accepted[index]))
            else:
                line = self._lines[index]
                likely = zip(top_ids[line], logprobs[line][1:], strict=True)
                top = tuple(each for each in likely if each[0] >= 0)[: self._num_wanted[index]]
                sampled.append(Sampled(row.sequence, tokens[index], logprobs[line][0], top))
        return tuple(sampled)

    def _accepted(self, rejected: Sequence[int], choices: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            tuple(choices[line : line + row.num_drafts - back])
            for row, line, back in zip(self._rows, self._lines, rejected, strict=False)
        ]


class Drawer:
    """Draws on one device."""

    def __init__(
        self,
        vocab_size: int,
        num_rows: int,
        device: torch.device,
        *,
        reach: int = 0,
        depth: int = 0,
        verifies: bool = False,
    ) -> None:
        """num_rows: most rows of a batch.  reach: tokens before a row that the model looks at.  depth: drafts of a row.

        verifies: rows with drafts are the rule, so that captured draws are of lines and not of rows.
        """
        self._num_rows, self._verifies, self._depth = num_rows, verifies, depth
        self._asking = Asking(vocab_size, num_rows)
        self.named = torch.zeros(num_rows * (2 + depth), dtype=torch.int32, device=device)
        """Newest tokens, problems, and drafts: what tokens to come are named by their places in."""
        results = self.named[: 2 * num_rows].view(2, num_rows)
        self.drafts = self.named[2 * num_rows :].view(num_rows, depth)
        """[rows, depth] int32: what may follow the newest tokens, of rows that want to know."""
        rejected = torch.zeros(num_rows, dtype=torch.int32, device=device)
        before = torch.zeros(num_rows, reach, dtype=torch.int32, device=device)
        self._results = results
        self.standing = Standing(results[0], results[1], rejected, before)
        """Of the newest step's rows, in the order they were drawn; `newest` of a row without a token is 0."""
        self._most_lines = _LINES_A_ROW * num_rows
        self._choices = torch.zeros(2, self._most_lines, dtype=torch.int32, device=device)
        # None of them grows: graphs know the first one's address, and what they take is planned.
        self._told_staging = Staging(device, NUM_TOLD * 8 * self._most_lines)
        self._row_staging = Staging(device, 3 * 4 * num_rows)
        most_bytes = max(_GROUP_BYTES, self._asking.most_row_bytes)
        self._staging = Staging(device, most_bytes)
        self._most_bytes = most_bytes - 64 * len(Adjustments.__slots__)
        self._graphs: dict[tuple[int, int, Features], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._earlier = Earlier({})

    @property
    def sampled(self) -> Tensor:
        """[rows] int32: the newest tokens, in the order their rows were drawn."""
        return self.standing.newest

    def known(self, row: Row) -> Sequence[int]:
        """The row's tokens, those to come as -1 - their place in `named`.  Raises BadBatch where none is on its way."""
        if row.token_ids[0] != PENDING and row.token_ids[-1] != PENDING:
            return row.token_ids
        place = self._earlier.places.get(row.sequence)
        if place is None or row.token_ids[0] != PENDING or len(row.token_ids) != 1 + row.num_drafts:
            raise BadBatch(f"sequence {row.sequence}: the step before samples no token for it")
        if PENDING not in row.token_ids[1:]:
            return (-1 - place, *row.token_ids[1:])
        if row.sequence not in self._earlier.guessed or row.num_drafts > self._depth:
            raise BadBatch(f"sequence {row.sequence}: nobody drafts tokens for it")
        first = -1 - 2 * self._num_rows - place * self._depth
        drafts = (first - at if token == PENDING else token for at, token in enumerate(row.token_ids[1:]))
        return (-1 - place, *drafts)

    def going_on(self, row: Row) -> int:
        """The row's place in `standing` if the step before verifies drafts of it that are not known yet, else -1."""
        return self._earlier.going_on(row)

    def capture(self, steps: Iterable[Tensor]) -> None:
        """Record the draws of captured steps.  steps: their logits, padding included."""
        for padded in steps:
            for each in LEVELS:
                (told,) = self._told_staging.send([_nothing(len(padded))])
                self._draw_padded(padded, told, each)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    self._draw_padded(padded, told, each)
                self._graphs[len(padded), padded.data_ptr(), each] = graph

    def draw(
        self, rows: Sequence[Row], logits: Tensor, padded: Tensor | None = None, *, seen: Seen | None = None
    ) -> Draw:
        """rows: those that want a token.  logits: [lines, vocab_size] fp32, left as they are.

        padded: logits followed by padding, at an address that lasts: where that was captured, a graph draws from them.
        seen: the step's tokens; needed where rows have drafts, or the next step's may go on from this one's.
        """
        counts = np.array([1 + row.num_drafts for row in rows], np.int64)
        lines = int(counts.sum())
        has_drafts = lines > len(rows)
        if lines > self._most_lines:
            raise BadBatch(f"{lines} tokens are drawn in a step; this device takes {self._most_lines}")
        earlier = self._earlier
        drafted = frozenset(row.sequence for row in rows if row.num_drafts)
        guessed = frozenset(row.sequence for row in rows if row.wants_drafts and self._depth)
        self._earlier = Earlier({row.sequence: place for place, row in enumerate(rows)}, drafted, guessed)
        told = [self._asking.of(row) for row in rows]
        features = features_of(told)
        refused: dict[int, str] = {}
        extras: tuple[Tensor, ...] = ()
        asked = self._asking.told(rows, told, counts, earlier)
        to = self._choices if self._verifies or has_drafts else self._results
        if any(each.changes or row.allowed_mask is not None for each, row in zip(told, rows, strict=True)):
            extras = self._adjusted(rows, told, counts, earlier, refused, logits, asked, features, to)
        elif not (padded is not None and to is self._captured and self._replay(padded, asked, features)):
            extras = self._launch(logits, self._keyed(asked), features, to)
        results: tuple[Tensor, ...] = (self._results,)
        if to is self._choices:
            assert seen is not None, "drafts are compared with the step's tokens"
            self._accept(rows, counts, seen)
            if has_drafts:
                results = (*results, self.standing.rejected, self._choices[:, :lines])
        returning = Returning((*results, *extras))
        return Draw(rows, returning, refused, [each.num_logprobs for each in told], has_drafts=has_drafts)

    @property
    def _captured(self) -> Tensor:
        return self._choices if self._verifies else self._results

    def _accept(self, rows: Sequence[Row], counts: NDArray[np.int64], seen: Seen) -> None:
        starts = np.cumsum(counts) - counts
        firsts = [seen.ends[row.sequence] - row.num_drafts - 1 for row in rows]
        (spans,) = self._row_staging.send([np.array([starts, counts, firsts], np.int32).reshape(3, -1)])
        accept(self._choices, seen.history, spans, self.standing)

    def _keyed(self, asked: NDArray[np.int64]) -> Tensor:
        (told,) = self._told_staging.send([asked])
        return noise_keys(told, self.standing.rejected)

    def _launch(self, logits: Tensor, asked: Tensor, features: Features, to: Tensor) -> tuple[Tensor, ...]:
        drawn = draw(logits, asked, features, out=to)
        return (drawn.logprobs, drawn.top_ids) if features.num_top >= 0 else ()

    def _adjusted(
        self,
        rows: Sequence[Row],
        told: Sequence[Told],
        counts: NDArray[np.int64],
        earlier: Earlier,
        refused: dict[int, str],
        logits: Tensor,
        asked: NDArray[np.int64],
        features: Features,
        to: Tensor,
    ) -> tuple[Tensor, ...]:
        """Draw from copies of the logits, a group at a time; the model's own may be asked for."""
        keyed = self._keyed(asked)
        newest = self.sampled.clone() if to is self._results else self.sampled  # groups may name each other's
        parts = []
        for group in self._asking.groups(
            rows, told, counts, earlier, refused, most_bytes=self._most_bytes, most_lines=GROUP_LINES
        ):
            mine = slice(group.first, group.end)
            changed = logits[mine].clone()
            adjust(changed, newest, Adjustments(*self._staging.send(group.changes)))
            parts.append(self._launch(changed, keyed[:, mine].contiguous(), features, to[:, mine]))
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _replay(self, padded: Tensor, asked: NDArray[np.int64], features: Features) -> bool:
        """Draw by a graph, if this was captured."""
        level = level_of(features)
        graph = self._graphs.get((len(padded), padded.data_ptr(), level)) if level is not None else None
        if graph is None:
            return False
        if features.noise:
            told = _nothing(len(padded))
            told[:, : asked.shape[1]] = asked
            self._told_staging.send([told])
        graph.replay()
        return True

    def _draw_padded(self, padded: Tensor, told: Tensor, features: Features) -> None:
        asked = noise_keys(told, self.standing.rejected) if features.noise else told[:-2]
        draw(padded, asked, features, out=self._captured)


def _nothing(lines: int) -> NDArray[np.int64]:
    """What padding asks for."""
    told = np.zeros((NUM_TOLD, lines), np.int64)
    told[-1] = -1
    return told

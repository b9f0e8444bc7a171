"""Who draws tokens where the device does not, and how does a model that computes at once run ahead all the same?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.batch import PENDING, Batch, Row, Sampled
from kernels.models.model import BadBatch
from kernels.ops.sampler import Draw, UnusableLogits, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are there already."""

    sampled: tuple[Sampled, ...]

    def wait(self) -> tuple[Sampled, ...]:
        return self.sampled


class HostDraws:
    """Draws like a device that runs ahead: when a step is launched, so that the next one may name tokens PENDING.

    It gains nothing where this thread computes; what it is for is that engines which run ahead can be held against
    those that wait, without a GPU.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        """Of the newest step's rows: tokens that their histories lack."""

    def known(self, batch: Batch) -> Batch:
        """The batch with every PENDING token as the newest draw left it. Raises BadBatch for one that nobody drew."""
        pending = {row.sequence: self._token(row) for row in batch.rows if PENDING in row.token_ids}
        self._pending = pending
        return Batch(
            tuple(
                replace(row, token_ids=(pending[row.sequence],)) if row.sequence in pending else row
                for row in batch.rows
            )
        )

    def draw(self, batch: Batch, logits: Tensor) -> Drawn:
        """Sample for the rows that want a token.  logits: [wanted tokens, vocab_size], row by row."""
        rows = (
            replace(row, history=(*row.history, self._pending[row.sequence]))
            if row.history and row.sequence in self._pending
            else row
            for row in batch.rows
        )
        drawn = Drawn(draw_rows(Batch(tuple(rows)), logits))
        # A row without usable logits has no next step either; if it is launched all the same, it computes token 0.
        self._tokens = {each.sequence: max(each.token_id, 0) for each in drawn.sampled}
        return drawn

    def _token(self, row: Row) -> int:
        token = self._tokens.get(row.sequence)
        if token is None or len(row.token_ids) > 1:
            raise BadBatch(f"sequence {row.sequence}: the step before samples no token for it")
        return token


def draw_rows(batch: Batch, logits: Tensor) -> tuple[Sampled, ...]:
    """One token per row that wants one, in row order. A row without usable logits says so in `problem`.

    logits: [wanted tokens, vocab_size] fp32, row by row.
    """
    rows, logits = to_draw(batch, logits)
    draws = [_draw(row) for row in rows]
    problems: dict[int, str] = {}
    try:
        choices = sample(logits, draws)
    except UnusableLogits as error:
        problems = error.reasons
        fine = [index for index in range(len(rows)) if index not in problems]
        choices = sample(logits[fine], [draws[index] for index in fine])
    remaining = iter(choices)
    sampled = []
    for index, row in enumerate(rows):
        if index in problems:
            sampled.append(Sampled(row.sequence, -1, problem=problems[index]))
        else:
            choice = next(remaining)
            sampled.append(Sampled(row.sequence, choice.token_id, choice.logprob, choice.top))
    return tuple(sampled)


def to_draw(batch: Batch, logits: Tensor) -> tuple[list[Row], Tensor]:
    """Return the rows that want a token, and their logits of all that a step computed.  logits: as above."""
    rows = [row for row in batch.rows if row.sampling is not None]
    if len(rows) < len(logits):  # some rows score their tokens
        places = [span[-1] for row, span in spans(batch) if row.sampling is not None]
        logits = logits[torch.tensor(places, dtype=torch.int64, device=logits.device)]
    return rows, logits


def spans(batch: Batch) -> Iterator[tuple[Row, range]]:
    """Each row, and which of a step's logits are its."""
    start = 0
    for row in batch.rows:
        end = start + len(row.wanted())
        yield row, range(start, end)
        start = end


def _draw(row: Row) -> Draw:
    assert row.sampling is not None, "only rows that want a token are drawn for"
    return Draw(row.sampling, row.position + len(row.token_ids), row.history, row.num_prompt_tokens, row.allowed_mask)

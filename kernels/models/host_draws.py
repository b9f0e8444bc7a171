"""Who draws tokens where the device does not, and how does a model that computes at once run ahead all the same?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.batch import PENDING, Batch, Row, Sampled
from kernels.models.drafter import Drafter, DraftRow
from kernels.models.model import BadBatch
from kernels.ops.sampler import Draw, UnusableLogits, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that are there already."""

    sampled: tuple[Sampled, ...]

    def wait(self) -> tuple[Sampled, ...]:
        return self.sampled


@dataclass(frozen=True, slots=True)
class _Standing:
    """How far a sequence has got."""

    newest: int
    before: tuple[int, ...]
    """The tokens before it, as many as are known."""
    drafts: tuple[int, ...]
    """What may follow it."""
    rejected: int
    """Drafts that were not accepted."""


class HostDraws:
    """Draws like a device that runs ahead: when a step is launched, so that the next one may name tokens PENDING.

    It gains nothing where this thread computes; what it is for is that engines which run ahead can be held against
    those that wait, without a GPU.
    """

    def __init__(self, drafter: Drafter | None = None) -> None:
        """drafter: whose guesses rows may wait for."""
        self._drafter = drafter
        self._standings: dict[int, _Standing] = {}
        self._pending: dict[int, int] = {}
        """Of the newest step's rows: tokens that their histories lack."""

    def known(self, batch: Batch) -> Batch:
        """The batch with every PENDING token as the newest draw left it, and rows where they really are.

        Raises BadBatch for a token that nobody drew.
        """
        rows = tuple(self._known(row) if PENDING in row.token_ids else row for row in batch.rows)
        self._pending = {
            row.sequence: real.token_ids[0]
            for row, real in zip(batch.rows, rows, strict=True)
            if PENDING in row.token_ids
        }
        return Batch(rows)

    def draw(self, batch: Batch, logits: Tensor) -> Drawn:
        """Sample for the rows that want a token.  logits: [wanted tokens, vocab_size], row by row."""
        rows = (
            replace(row, history=(*row.history, self._pending[row.sequence]))
            if row.history and row.sequence in self._pending
            else row
            for row in batch.rows
        )
        drawn = Drawn(draw_rows(Batch(tuple(rows)), logits, self._drafter))
        by_sequence = {row.sequence: row for row in batch.rows}
        self._standings = {each.sequence: _standing(by_sequence[each.sequence], each) for each in drawn.sampled}
        return drawn

    def _known(self, row: Row) -> Row:
        standing = self._standings.get(row.sequence)
        if standing is None or row.token_ids[0] != PENDING or len(row.token_ids) != 1 + row.num_drafts:
            raise BadBatch(f"sequence {row.sequence}: the step before samples no token for it")
        if PENDING in row.token_ids[1:] and not standing.drafts:
            raise BadBatch(f"sequence {row.sequence}: nobody drafts tokens for it")
        preceding = row.preceding
        if preceding and (standing.rejected or PENDING in preceding):
            preceding = standing.before[-len(preceding) :]
        # A sequence may have fewer drafts than were hoped for; what is missing is guessed wrong.
        drafts = (*standing.drafts, *[0] * row.num_drafts)
        given = zip(row.token_ids[1:], drafts, strict=False)
        token_ids = (standing.newest, *(draft if token == PENDING else token for token, draft in given))
        return replace(row, token_ids=token_ids, position=row.position - standing.rejected, preceding=preceding)


_KEPT_TOKENS = 16
"""Of those before the newest one: more than a model looks back."""


def _standing(row: Row, sampled: Sampled) -> _Standing:
    rejected = row.num_drafts - len(sampled.accepted)
    last = len(row.token_ids) - rejected
    before = (*row.preceding, *row.token_ids[max(last - _KEPT_TOKENS, 0) : last])
    # A row without usable logits has no next step either; if it is launched all the same, it computes token 0.
    return _Standing(max(sampled.token_id, 0), tuple(before), sampled.drafts, rejected)


def check_drafts(row: Row, *, most: int | None) -> None:
    """Raise BadBatch for drafts that cannot be verified.  most: how many can be taken back; None is any number.

    A row with drafts is drawn from its logits as they are: what changes them, or asks for more than tokens, would
    have to be said of every draft.
    """
    params = row.sampling
    where = f"sequence {row.sequence} has {row.num_drafts} drafts"
    if not 0 <= row.num_drafts < len(row.token_ids) or (most is not None and row.num_drafts > most):
        raise BadBatch(f"{where}: they follow a token of the row, and at most {most} can be taken back")
    if params is None or row.targets or row.allowed_mask is not None or params.num_logprobs is not None:
        raise BadBatch(f"{where}: it must want a token, and neither scores, logprobs nor a mask")
    is_adjusted = params.logit_bias or params.presence_penalty or params.frequency_penalty
    if is_adjusted or params.repetition_penalty != 1.0:
        raise BadBatch(f"{where}: with a bias or penalties none are verified")


def draw_rows(batch: Batch, logits: Tensor, drafter: Drafter | None = None) -> tuple[Sampled, ...]:
    """One result per row that wants one, in row order. A row without usable logits says so in `problem`.

    logits: [wanted tokens, vocab_size] fp32, row by row.  drafter: for rows that want drafts, while the windows are
    those of this step.
    """
    sampled = _sampled(batch, logits)
    return _drafted(batch, sampled, drafter) if drafter is not None else sampled


def _drafted(batch: Batch, sampled: tuple[Sampled, ...], drafter: Drafter) -> tuple[Sampled, ...]:
    by_sequence = {row.sequence: row for row in batch.rows if row.wants_drafts}
    wanting = [each for each in sampled if each.sequence in by_sequence and each.problem is None]
    rows = [_draft_row(by_sequence[each.sequence], each) for each in wanting]
    found = {each.sequence: drafts for each, drafts in zip(wanting, drafter.draft(rows), strict=True)}
    return tuple(
        replace(each, drafts=found[each.sequence].token_ids, confidences=found[each.sequence].confidences)
        if each.sequence in found
        else each
        for each in sampled
    )


def _draft_row(row: Row, sampled: Sampled) -> DraftRow:
    assert row.sampling is not None, "only rows that want a token are drawn for"
    return DraftRow(
        token_id=sampled.token_id,
        position=row.position + len(row.token_ids) - row.num_drafts + len(sampled.accepted),
        window=row.window,
        params=row.sampling,
        history=(*row.history, sampled.token_id) if row.history else (),
        num_prompt_tokens=row.num_prompt_tokens,
        window_from=max(row.replay.window_from, row.replay.keep_from),
    )


def _sampled(batch: Batch, logits: Tensor) -> tuple[Sampled, ...]:
    rows, logits = to_draw(batch, logits)
    draws = [draw for row in rows for draw in _draws(row)]
    problems: dict[int, str] = {}
    try:
        choices = sample(logits, draws)
    except UnusableLogits as error:
        problems = error.reasons
        fine = [index for index in range(len(draws)) if index not in problems]
        choices = sample(logits[fine], [draws[index] for index in fine])
    remaining = iter(choices)
    by_line = [None if index in problems else next(remaining) for index in range(len(draws))]
    sampled, line = [], 0
    for row in rows:
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        right = 0
        while right < len(drafts) and (choice := by_line[line + right]) and choice.token_id == drafts[right]:
            right += 1
        last = by_line[line + right]
        if last is None:
            sampled.append(Sampled(row.sequence, -1, problem=problems[line + right]))
        else:
            accepted = tuple(drafts[:right])
            sampled.append(Sampled(row.sequence, last.token_id, last.logprob, last.top, accepted=accepted))
        line += 1 + len(drafts)
    return tuple(sampled)


def to_draw(batch: Batch, logits: Tensor) -> tuple[list[Row], Tensor]:
    """Return the rows that want a token, and their logits of all that a step computed, one line more than drafts each.

    logits: as above.
    """
    rows = [row for row in batch.rows if row.sampling is not None]
    if sum(1 + row.num_drafts for row in rows) < len(logits):  # some rows score their tokens
        places = [at for row, span in spans(batch) if row.sampling is not None for at in span[-1 - row.num_drafts :]]
        chosen = torch.tensor(places, dtype=torch.int64)
        if logits.is_cuda:  # from pageable memory the copy would wait for the step
            chosen = chosen.pin_memory()
        logits = logits[chosen.to(logits.device, non_blocking=True)]
    return rows, logits


def spans(batch: Batch) -> Iterator[tuple[Row, range]]:
    """Each row, and which of a step's logits are its."""
    start = 0
    for row in batch.rows:
        end = start + len(row.wanted())
        yield row, range(start, end)
        start = end


def _draws(row: Row) -> Iterator[Draw]:
    """After the token before the drafts, and after each draft."""
    assert row.sampling is not None, "only rows that want a token are drawn for"
    first = row.position + len(row.token_ids) - row.num_drafts
    for position in range(first, first + row.num_drafts + 1):
        yield Draw(row.sampling, position, row.history, row.num_prompt_tokens, row.allowed_mask)

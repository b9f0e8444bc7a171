"""What was launched and is not collected yet, and whose blocks does the device still write into?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.batch import PENDING, Batch, Image, Row
from services.decode.sampling import has_penalties

if TYPE_CHECKING:
    from kernels.executor import Step
    from services.decode.sequence import DecodeSequence


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a step: its tokens [start, end)."""

    sequence: DecodeSequence
    start: int
    end: int
    is_sampled: bool
    """The step draws the token that follows."""


@dataclass(slots=True, eq=False)
class Flight:
    """One launched step."""

    step: Step
    parts: dict[int, Part]
    """By sequence."""
    started: float
    """Monotonic seconds."""
    is_drawn: bool
    """False: masks are still filled for some of its rows."""
    leaving: list[DecodeSequence] = field(default_factory=list)
    """Ended since the launch. Their rows are computed for nothing, and until then their blocks and windows are held."""

    def draws(self, sequence: int) -> bool:
        """Say whether a token of that sequence is on its way."""
        part = self.parts.get(sequence)
        return part is not None and part.is_sampled

    def guided(self) -> Iterable[DecodeSequence]:
        """Return the sequences whose tokens are drawn under a mask."""
        return (part.sequence for part in self.parts.values() if part.is_sampled and part.sequence.guide is not None)


def batch_of(parts: Sequence[Part], *, preceding_tokens: int) -> Batch:
    """Lay out a step.  preceding_tokens: how many tokens before a row the model looks at."""
    return Batch(rows=tuple(_row(part, preceding_tokens) for part in parts))


def _row(part: Part, preceding_tokens: int) -> Row:
    sequence, start, end = part.sequence, part.start, part.end
    # A list of its own: the sequence's grows by the pending token before the step that waits for it is drawn.
    history = list(sequence.token_ids) if part.is_sampled and has_penalties(sequence.sampling) else ()
    return Row(
        sequence=sequence.sequence,
        token_ids=sequence.token_ids[start:end] or (PENDING,),
        position=start,
        block_table=sequence.block_table,
        sampling=sequence.sampling if part.is_sampled else None,
        history=history,
        num_prompt_tokens=sequence.num_prompt_tokens,
        window=sequence.window,
        preceding=sequence.token_ids[max(start - preceding_tokens, 0) : start],
        images=tuple(Image(i.position, i.num_tokens, i.embeddings) for i in sequence.images.within(start, end)),
        replay=sequence.replay,
    )

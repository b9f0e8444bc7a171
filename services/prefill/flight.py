"""What was launched and is not collected yet, and whose blocks does the device still write into?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.executor import Step
    from services.prefill.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt's part of a step: its tokens [start, end)."""

    prompt: Prompt
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def ends_at_stop(self) -> bool:
        """The window state after it is saved, so nothing may go on from there before."""
        return self.end in self.prompt.stops


@dataclass(slots=True, eq=False)
class Flight:
    """One launched step."""

    step: Step
    parts: dict[int, Part]
    """By sequence."""
    started: float
    """Seconds since the Unix epoch."""
    leaving: list[Prompt] = field(default_factory=list)
    """Released since the launch. Their chunks are computed for nothing, and until then blocks and windows are held."""

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts.values())

    @property
    def is_scored(self) -> bool:
        """More is asked of its logits than one token a row: they last until the next launch."""
        return any(part.prompt.num_scores is not None for part in self.parts.values())

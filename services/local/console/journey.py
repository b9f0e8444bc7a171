"""What is one request's way through the services?"""

from dataclasses import dataclass
from datetime import UTC, datetime

MAX_INDENT = 40
"""Levels of a tree that are drawn: a chain of thousands would be drawn as so many lines of so many spaces."""


@dataclass(frozen=True, slots=True)
class Row:
    """One span of a journey; a parent stands above its children."""

    depth: int
    service: str
    replica: str
    name: str
    start_seconds: float
    """Since the journey's begin."""
    seconds: float
    is_error: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """One request's way."""

    id: str
    """What its caller knows it by."""
    also: tuple[str, ...]
    """Other ids that name it: ours, the answer's, the trace's."""
    operation: str
    model: str
    started_unix_seconds: float
    is_finished: bool
    """Whether the recipe has said how it ended; until then only what has ended is known."""
    is_running: bool
    """Whether it may still say so. When it is neither, that word was lost, with the process or the message."""
    is_closing: bool
    """Whether it has run its way, and the recipe's word alone is still to come, in a moment."""
    status: int
    """HTTP status; 0 while it runs."""
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_seconds: float | None
    total_seconds: float
    """Until it ended; until now while it runs; until the last that is known of it where its end was lost."""
    path: tuple[tuple[str, str], ...] = ()
    """Who called whom, each pair once, in the order of the first calls."""
    rows: tuple[Row, ...] = ()

    @property
    def outcome(self) -> str:
        """How it ended, in a word or two."""
        if not self.is_finished:
            return "running" if self.is_running else "incomplete"
        reasons = ", ".join(dict.fromkeys(reason for reason in self.finish_reasons if reason != "none"))
        return f"{self.status} {reasons}".strip()

    @property
    def caveat(self) -> str:
        """What a reader must know of a request whose end is not known; empty where it is."""
        if self.is_finished:
            return ""
        if self.is_running:
            return "It has not finished yet: only what has ended is shown"
        return "Incomplete: the recipe's span, which says how it ended, never came"


def clock(unix_seconds: float) -> str:
    """Return the time of day here."""
    return datetime.fromtimestamp(unix_seconds, UTC).astimezone().strftime("%H:%M:%S")


def millis(seconds: float | None) -> str:
    """Return milliseconds, with a decimal where there is little else."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"

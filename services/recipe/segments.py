"""Which parts does an answer have, and when does each begin, grow and end? What event protocols are made of.

Reasoning, text and each call are segments; at most one is open. An API's events are a table from (move, kind) to what
is written then: `MOVES` lists all that can happen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from services.recipe.dialect import CallBegun
from services.recipe.transcript import Piece, Score

Kind = Literal["reasoning", "text", "call"]
Move = Literal["opened", "grew", "closed"]
MOVES: Final[tuple[tuple[Move, Kind], ...]] = (
    ("opened", "reasoning"), ("grew", "reasoning"), ("closed", "reasoning"),
    ("opened", "text"), ("grew", "text"), ("closed", "text"),
    ("opened", "call"), ("grew", "call"), ("closed", "call"),
)  # fmt: skip


@dataclass(slots=True)
class Segment:
    """A part of an answer. index: its place among all parts; call: among calls; name: the tool's, for calls."""

    index: int
    kind: Kind
    name: str = ""
    call: int = 0
    scores: list[Score] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether it ended by itself, not by the token limit."""

    @property
    def text(self) -> str:
        """What it says: reasoning, text, or arguments."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a segment. text, scores: what it grew by."""

    move: Move
    segment: Segment
    text: str = ""
    scores: tuple[Score, ...] = ()


class Segments:
    """Cuts one choice's pieces into segments, however they were dealt out."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._open: Segment | None = None

    def feed(self, piece: Piece) -> Iterator[Change]:
        """Yield what the piece changes; the last piece closes what is open."""
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.text or piece.scores:
            yield from self._grow("text", piece.text, tuple(piece.scores))
        for event in piece.calls:
            if isinstance(event, CallBegun):
                yield from self._close(is_whole=True)
                yield self._begin(Segment(len(self.all), "call", event.name, event.index))
            elif event.text:
                yield from self._grow("call", event.text)
        if piece.finish_reason is not None:
            yield from self._close(is_whole=piece.finish_reason != "length")

    def _grow(self, kind: Kind, text: str, scores: tuple[Score, ...] = ()) -> Iterator[Change]:
        segment = self._open
        if segment is None or segment.kind != kind:
            yield from self._close(is_whole=True)
            opened = self._begin(Segment(len(self.all), kind))
            yield opened
            segment = opened.segment
        segment.texts.append(text)
        segment.scores += scores
        yield Change("grew", segment, text, scores)

    def _begin(self, segment: Segment) -> Change:
        self.all.append(segment)
        self._open = segment
        return Change("opened", segment)

    def _close(self, *, is_whole: bool) -> Iterator[Change]:
        segment, self._open = self._open, None
        if segment is not None:
            segment.is_whole = is_whole
            yield Change("closed", segment)

"""What has one choice said so far? Token events in, pieces out, the same however the tokens were dealt out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.common_pb2 import FinishReason, PositionLogprobs, TokenEvent
from services.chassis import errors
from services.recipe.dialect import CallArguments, CallBegun, Event, Parser, Reasoning, Text
from services.recipe.stops import StopMatcher

_STOP: Final = FinishReason.FINISH_REASON_STOP  # looked up once: an enum's name costs a call, at every event
_REASONS: Final = {_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}
_FAILED: Final = frozenset({FinishReason.FINISH_REASON_CANCELLED, FinishReason.FINISH_REASON_ERROR})


@dataclass(slots=True)
class Score:
    """One position's logprobs. offset: where its text begins in the answer, in characters."""

    position: PositionLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """What can be shown after an event: reasoning, then text, then calls. `finish_reason` is set on the last piece.

    This, not an API's own objects, is what every way of telling an answer is made from.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: str = ""
    calls: list[CallBegun | CallArguments] = field(default_factory=list)

    @property
    def says_something(self) -> bool:
        """Whether there is anything to show but the end."""
        return bool(self.text or self.reasoning or self.calls)


class Transcript:
    """Collects one choice.

    Its text never shows special tokens, nor the token or string that ended it. Stop strings are looked for in the text
    alone, not in reasoning nor in calls. `token_ids` and `num_tokens` hold every token that was sampled up to the end,
    the ending one included; tokens after a stop string do not count.

    max_calls: the call after that many is not begun but ends the answer, as a stop string would; None: any number.
    """

    def __init__(self, parser: Parser, stops: Sequence[str], *, has_scores: bool, max_calls: int | None = None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._has_enough = False
        self._stops = StopMatcher(stops) if stops else None
        self._has_scores = has_scores
        self._waiting: deque[Score] = deque()
        self._unsent_ids: list[int] = []
        self._num_read = 0  # characters of text that the parser gave
        self._num_shown = 0  # characters of text that left
        self._has_calls = False
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, event: TokenEvent) -> Piece | None:
        """Take an event and return what can be shown now, None when that is nothing.

        Raises the event's error, or Cancelled for a request that somebody else ended.
        """
        if event.HasField("error"):
            raise errors.from_stream_error(event.error)
        reason = event.finish_reason
        if reason in _FAILED:
            raise errors.Cancelled("the request was cancelled")
        if event.HasField("usage"):
            self.cached_tokens = event.usage.cached_tokens
        piece = Piece()
        self._read(event, piece)
        if reason and self.finish_reason is None:
            self._end(_REASONS[reason], piece)
        if not piece.says_something and self.finish_reason is None:
            return None
        self._num_shown += len(piece.text)
        piece.token_ids, self._unsent_ids = self._unsent_ids, []
        if self._has_scores:
            piece.scores = self._ready_scores()
        piece.finish_reason = self.finish_reason
        return piece

    @property
    def is_cut(self) -> bool:
        """Whether a stop string, or one call too many, ended the answer; the engine does not know yet."""
        return self._has_enough or (self._stops is not None and self._stops.is_cut)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, "" when none did."""
        return self._stops.found if self._stops is not None else ""

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens were spent on thinking."""
        return self._parser.num_reasoning_tokens

    def _read(self, event: TokenEvent, piece: Piece) -> None:
        token_ids = list(event.token_ids)
        # The token that ended the answer is counted and reported, but is no text.
        ends = bool(token_ids) and event.finish_reason == _STOP
        shown_ids = token_ids[:-1] if ends else token_ids
        if self._stops is None and not self._has_scores and self._max_calls is None:
            self._say(self._parser.feed(shown_ids), piece)
        else:
            num_used = self._read_one_by_one(shown_ids, event.logprobs, piece)
            if self.is_cut:
                token_ids = token_ids[:num_used]
                self.finish_reason = self._cut_reason
        self.num_tokens += len(token_ids)
        self._unsent_ids += token_ids

    def _read_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], piece: Piece) -> int:
        """Return how many tokens were used: what follows a stop string in an event is not ours."""
        for i, token_id in enumerate(token_ids):
            offset = self._num_read
            events = self._parser.feed((token_id,))
            if self._has_scores and i < len(logprobs) and self._parser.is_text:
                self._waiting.append(Score(logprobs[i], offset))
            self._say(events, piece)
            if self.is_cut:
                return i + 1
        return len(token_ids)

    def _say(self, events: Sequence[Event], piece: Piece) -> None:
        for event in events:
            if self.is_cut:
                return
            if isinstance(event, Text):
                self._num_read += len(event.text)
                piece.text += self._stops.feed(event.text) if self._stops else event.text
            elif isinstance(event, Reasoning):
                piece.reasoning += event.text
            elif isinstance(event, CallBegun) and self._max_calls is not None and event.index >= self._max_calls:
                self._has_enough = True
            else:
                # The text is over, so nothing in it can become a stop string any more.
                piece.text += self._stops.rest() if self._stops else ""
                self._has_calls = True
                _add_call(piece.calls, event)

    def _end(self, reason: str, piece: Piece) -> None:
        self._say(self._parser.rest(is_whole=reason == "stop"), piece)
        piece.text += self._stops.rest() if self._stops else ""
        if self.is_cut:
            self.finish_reason = self._cut_reason
        else:
            self.finish_reason = "tool_calls" if reason == "stop" and self._has_calls else reason

    @property
    def _cut_reason(self) -> str:
        return "tool_calls" if self._has_enough else "stop"

    def _ready_scores(self) -> list[Score]:
        """Return the scores of tokens whose text has begun to leave; at the end all, but for what a cut or call hid."""
        ready = []
        is_over = self.finish_reason is not None and not self.is_cut and not self._has_calls
        while self._waiting and (is_over or self._waiting[0].offset < self._num_shown):
            ready.append(self._waiting.popleft())
        return ready


def _add_call(calls: list[CallBegun | CallArguments], event: CallBegun | CallArguments) -> None:
    """Add to what is said of calls; more of the arguments said last is one with them."""
    last = calls[-1] if calls else None
    if isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
        calls[-1] = CallArguments(event.index, last.text + event.text)
    else:
        calls.append(event)

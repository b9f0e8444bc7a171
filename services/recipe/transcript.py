"""What has one choice said so far? Token events in, pieces of text out, the same however the tokens were dealt out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.common_pb2 import FinishReason, PositionLogprobs, TokenEvent
from services.chassis import errors
from services.recipe.detokenize import Detokenizer
from services.recipe.stops import StopMatcher

_REASONS: Final = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Score:
    """One position's logprobs. offset: where its text begins in the answer, in characters."""

    position: PositionLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """What can be shown after an event; `finish_reason` is set on the last piece."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None


class Transcript:
    """Collects one choice.

    Its text never shows special tokens, nor the token or string that ended it. `token_ids` and `num_tokens` hold every
    token that was sampled up to the end, the ending one included; tokens after a stop string do not count.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str], *, has_scores: bool) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopMatcher(stops) if stops else None
        self._has_scores = has_scores
        self._waiting: deque[Score] = deque()
        self._unsent_ids: list[int] = []
        self._num_read = 0  # characters detokenized
        self._num_shown = 0  # characters that left
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, event: TokenEvent) -> Piece | None:
        """Take an event and return what can be shown now, None when that is nothing.

        Raises the event's error, or Cancelled for a request that somebody else ended.
        """
        if event.HasField("error"):
            raise errors.from_stream_error(event.error)
        if event.finish_reason in {FinishReason.FINISH_REASON_CANCELLED, FinishReason.FINISH_REASON_ERROR}:
            raise errors.Cancelled("the request was cancelled")
        if event.HasField("usage"):
            self.cached_tokens = event.usage.cached_tokens
        text = self._read(event)
        if self.finish_reason is None and event.finish_reason:
            self.finish_reason = _REASONS[event.finish_reason]
            text += self._stops.rest() if self._stops else ""
        if not text and self.finish_reason is None:
            return None
        self._num_shown += len(text)
        ids, self._unsent_ids = self._unsent_ids, []
        return Piece(text, ids, self._ready_scores() if self._has_scores else [], self.finish_reason)

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the text; the engine does not know yet."""
        return self._stops is not None and self._stops.is_cut

    def _read(self, event: TokenEvent) -> str:
        token_ids = list(event.token_ids)
        # The token that ended the answer is counted and reported, but is no text.
        ends = bool(token_ids) and event.finish_reason == FinishReason.FINISH_REASON_STOP
        shown_ids = token_ids[:-1] if ends else token_ids
        if self._stops is None and not self._has_scores:
            text = self._detokenizer.feed(shown_ids)
        else:
            text, num_used = self._read_one_by_one(shown_ids, event.logprobs)
            if self.is_cut:
                token_ids = token_ids[:num_used]
                self.finish_reason = "stop"
        self.num_tokens += len(token_ids)
        self._unsent_ids += token_ids
        return text

    def _read_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> tuple[str, int]:
        """Return the text to show and how many tokens were used: what follows a stop string in an event is not ours."""
        shown = []
        for i, token_id in enumerate(token_ids):
            if self._has_scores and i < len(logprobs):
                self._waiting.append(Score(logprobs[i], self._num_read))
            text = self._detokenizer.feed((token_id,))
            self._num_read += len(text)
            shown.append(self._stops.feed(text) if self._stops else text)
            if self.is_cut:
                return "".join(shown), i + 1
        return "".join(shown), len(token_ids)

    def _ready_scores(self) -> list[Score]:
        """Return the scores of tokens whose text has begun to leave; at the end all, except those behind the cut."""
        ready = []
        while self._waiting and (self._waiting[0].offset < self._num_shown or (self.finish_reason and not self.is_cut)):
            ready.append(self._waiting.popleft())
        return ready

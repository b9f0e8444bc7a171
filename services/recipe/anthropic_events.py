"""How is an answer told in the words of the Messages API, whole and as events?"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from services.recipe.choices import Choice, spent
from services.recipe.refusals import ApiError
from services.recipe.segments import Change, Kind, Move, Segment, Segments
from services.recipe.shapes import ANTHROPIC, named_frame
from services.recipe.transcript import Piece

Event = dict[str, Any]
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReplies:
    """Tells one answer. shows_thinking: whether the text of thinking blocks is told, or their signatures alone."""

    def __init__(self, request_id: str, model: str, *, shows_thinking: bool) -> None:
        self._ids = request_id[:24]
        self._model = model
        self._shows_thinking = shows_thinking
        self._segments = Segments()

    @property
    def id(self) -> str:
        """The message's id."""
        return f"msg_{self._ids}"

    def opening(self, choice: Choice) -> bytes:
        """Return message_start, with what the prompt cost."""
        message = self._message([], None, None, self._usage([choice]))
        return named_frame({"type": "message_start", "message": message})

    def chunk(self, _choice: Choice, piece: Piece) -> bytes:
        """Return the events of every block that the piece begins, adds to or ends."""
        events = [
            event
            for change in self._segments.feed(piece)
            for event in EVENTS[change.move, change.segment.kind](self, change)
        ]
        return b"".join(map(named_frame, events))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last block."""
        reason, stop = _ending(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._usage(choices)
        del usage["service_tier"]
        return named_frame({"type": "message_delta", "delta": delta, "usage": usage}) + named_frame(
            {"type": "message_stop"}
        )

    def failing(self, error: ApiError, shown_id: str) -> bytes:
        """Return the event that ends a stream which cannot go on."""
        return ANTHROPIC.last_frame(error, shown_id)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the message."""
        for piece in choices[0].pieces:
            for _change in self._segments.feed(piece):
                pass
        blocks = [self._block(segment) for segment in self._segments.all]
        return orjson.dumps(self._message(blocks, *_ending(choices[0]), self._usage(choices)))

    def begin(self, change: Change) -> list[Event]:
        """Return a block's first event: the block without its content."""
        segment = change.segment
        return [{"type": "content_block_start", "index": segment.index, "content_block": self._empty(segment)}]

    def think(self, change: Change) -> list[Event]:
        """Return more of what the model thinks, if it is to be shown."""
        return [self._delta(change, "thinking_delta", "thinking")] if self._shows_thinking else []

    def say(self, change: Change) -> list[Event]:
        """Return more of the text."""
        return [self._delta(change, "text_delta", "text")] if change.text else []

    def argue(self, change: Change) -> list[Event]:
        """Return more of a call's arguments."""
        return [self._delta(change, "input_json_delta", "partial_json")]

    def sign(self, change: Change) -> list[Event]:
        """Return the signature, which is the last of a thinking block."""
        delta = {"type": "signature_delta", "signature": signature(change.segment.text)}
        return [{"type": "content_block_delta", "index": change.segment.index, "delta": delta}, *self.end(change)]

    def end(self, change: Change) -> list[Event]:
        """Return a block's last event."""
        return [{"type": "content_block_stop", "index": change.segment.index}]

    def _delta(self, change: Change, kind: str, field: str) -> Event:
        delta = {"type": kind, field: change.text}
        return {"type": "content_block_delta", "index": change.segment.index, "delta": delta}

    def _empty(self, segment: Segment) -> Event:
        if segment.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if segment.kind == "text":
            return {"type": "text", "text": ""}
        call_id = f"toolu_{self._ids}_{segment.call}"
        return {"type": "tool_use", "id": call_id, "name": segment.name, "input": {}}

    def _block(self, segment: Segment) -> Event:
        block, text = self._empty(segment), segment.text
        if segment.kind == "reasoning":
            return block | {"thinking": text if self._shows_thinking else "", "signature": signature(text)}
        if segment.kind == "text":
            return block | {"text": text}
        # Arguments that the token limit cut off are no object, and the API has no place for anything else.
        return block | {"input": orjson.loads(text) if segment.is_whole else {}}

    def _message(self, blocks: list[Event], reason: str | None, stop: str | None, usage: Event) -> Event:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self, choices: Sequence[Choice]) -> Event:
        tokens = spent(choices)
        return {
            "input_tokens": tokens.prompt_tokens - tokens.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tokens.cached_tokens,
            "output_tokens": tokens.completion_tokens,
            "output_tokens_details": {"thinking_tokens": tokens.reasoning_tokens},
            "service_tier": "standard",
        }


EVENTS: Final[Mapping[tuple[Move, Kind], Callable[[MessagesReplies, Change], list[Event]]]] = {
    ("opened", "reasoning"): MessagesReplies.begin,
    ("grew", "reasoning"): MessagesReplies.think,
    ("closed", "reasoning"): MessagesReplies.sign,
    ("opened", "text"): MessagesReplies.begin,
    ("grew", "text"): MessagesReplies.say,
    ("closed", "text"): MessagesReplies.end,
    ("opened", "call"): MessagesReplies.begin,
    ("grew", "call"): MessagesReplies.argue,
    ("closed", "call"): MessagesReplies.end,
}
"""All that can happen to a block, and what is written then."""


def signature(thinking: str) -> str:
    """Return what stands for a thinking block's integrity: a digest of it. Nobody is held to it."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def _ending(choice: Choice) -> tuple[str, str | None]:
    transcript = choice.transcript
    if transcript.stop_string:
        return "stop_sequence", transcript.stop_string
    return _REASONS[transcript.finish_reason or "stop"], None

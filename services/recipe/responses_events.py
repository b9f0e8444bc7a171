"""How is an answer told in the words of the Responses API, whole and as events?"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from services.recipe.choices import Choice, spent
from services.recipe.refusals import ApiError, bounded
from services.recipe.responses_items import seal
from services.recipe.segments import Change, Kind, Move, Segment, Segments
from services.recipe.shapes import named_frame
from services.recipe.token_scores import told_scores
from services.recipe.tokenizer import PromptTokenizer
from services.recipe.transcript import Piece

Event = dict[str, Any]
_ERROR_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponsesReplies:
    """Tells one answer. echo: what the response repeats of its request; seals: whether reasoning comes encoded too."""

    def __init__(
        self, request_id: str, tokenizer: PromptTokenizer, echo: Mapping[str, Any], *, seals: bool, has_scores: bool
    ) -> None:
        self._ids = request_id[:24]
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._seals = seals
        self._has_scores = has_scores
        self._echo = {"created_at": int(time.time()), **echo}
        self._segments = Segments()
        self._number = 0
        self.followed: int | None = None
        """Number of the last event told when they are another's: of the same response, generated in the background."""

    def twin(self) -> "ResponsesReplies":
        """Return another that tells the same response from its beginning."""
        return ResponsesReplies(
            self._request_id, self._tokenizer, self._echo, seals=self._seals, has_scores=self._has_scores
        )

    @property
    def id(self) -> str:
        """The response's id."""
        return f"resp_{self._request_id}"

    def opening(self, _choice: Choice | None = None) -> bytes:
        """Return the events before the first item."""
        return _frames(self.begun())

    def chunk(self, _choice: Choice, piece: Piece) -> bytes:
        """Return the events of every item that the piece begins, adds to or ends."""
        return _frames(self.told(piece))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the event after the last item."""
        return _frames([self.ended(choices)])

    def failing(self, error: ApiError, _shown_id: str) -> bytes:
        """Return the events that end a stream which cannot go on."""
        if self.followed is not None:  # the response goes on; only the telling of it ends
            return _frames([telling_failed(error, self.followed + 1)])
        return _frames(([] if self._number else self.begun()) + [self.failed(error)])

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the response."""
        return orjson.dumps(self.whole_body(choices))

    def whole_body(self, choices: Sequence[Choice]) -> Event:
        """Return the response of a choice whose pieces were kept, and not told."""
        for piece in choices[0].pieces:
            for _change in self._segments.feed(piece):
                pass
        return self.body(choices)

    def begun(self, *, is_queued: bool = False) -> list[Event]:
        """Return the events before the first item; a background response begins queued, and goes on later."""
        if is_queued:
            return [self._about("response.created", "queued"), self._about("response.queued", "queued")]
        created = [] if self._number else [self._about("response.created", "in_progress")]
        return [*created, self._about("response.in_progress", "in_progress")]

    def told(self, piece: Piece) -> list[Event]:
        """Return the events of a piece."""
        return [
            self._numbered(event)
            for change in self._segments.feed(piece)
            for event in EVENTS[change.move, change.segment.kind](self, change)
        ]

    def ended(self, choices: Sequence[Choice]) -> Event:
        """Return the event that holds the finished response."""
        body = self.body(choices)
        return self._numbered({"type": f"response.{body['status']}", "response": body})

    def failed(self, error: ApiError) -> Event:
        """Return the event of a response that cannot go on."""
        return self._numbered({"type": "response.failed", "response": self.failed_body(error)})

    def body(self, choices: Sequence[Choice]) -> Event:
        """Return the finished response."""
        transcript = choices[0].transcript
        is_cut = transcript.finish_reason == "length"
        ended = {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(segment) for segment in self._segments.all],
            "usage": _usage(choices),
        }
        return self.bare("incomplete" if is_cut else "completed") | ended

    def failed_body(self, error: ApiError) -> Event:
        """Return the response that could not go on, with what there is of it."""
        code = _ERROR_CODES.get(error.status, "server_error")
        return self.partial("failed") | {"error": {"code": code, "message": bounded(error.message)}}

    def partial(self, status: str) -> Event:
        """Return a response that was stopped, with what there is of it."""
        output = [self._item(segment) for segment in self._segments.all]
        return self.bare(status) | {"output": output}

    def bare(self, status: str) -> Event:
        """Return the response without what it says."""
        return {
            "id": self.id,
            "object": "response",
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echo,
        }

    def begin_reasoning(self, change: Change) -> list[Event]:
        """Return the events of a new reasoning item."""
        item = {"type": "reasoning", "id": self._id(change.segment), "summary": [], "content": []}
        return [self._added(change, item | {"status": "in_progress"}), self._part(change, "added", "")]

    def think(self, change: Change) -> list[Event]:
        """Return more of what the model thinks."""
        return [self._in_part(change, "reasoning_text.delta") | {"delta": change.text}]

    def end_reasoning(self, change: Change) -> list[Event]:
        """Return the events of reasoning that is over."""
        text = change.segment.text
        said = self._in_part(change, "reasoning_text.done") | {"text": text}
        return [said, self._part(change, "done", text), self._done(change)]

    def begin_text(self, change: Change) -> list[Event]:
        """Return the events of a new message."""
        item = {"type": "message", "id": self._id(change.segment), "role": "assistant", "content": []}
        return [self._added(change, item | {"status": "in_progress"}), self._part(change, "added", "")]

    def say(self, change: Change) -> list[Event]:
        """Return more of the text, with its logprobs."""
        scores = told_scores(change.scores, self._tokenizer)
        return [self._in_part(change, "output_text.delta") | {"delta": change.text, "logprobs": scores}]

    def end_text(self, change: Change) -> list[Event]:
        """Return the events of a message that is over."""
        segment = change.segment
        scores = told_scores(segment.scores, self._tokenizer)
        said = self._in_part(change, "output_text.done") | {"text": segment.text, "logprobs": scores}
        return [said, self._part(change, "done", segment.text), self._done(change)]

    def begin_call(self, change: Change) -> list[Event]:
        """Return the event of a new call."""
        return [self._added(change, self._item(change.segment) | {"status": "in_progress", "arguments": ""})]

    def argue(self, change: Change) -> list[Event]:
        """Return more of a call's arguments."""
        return [self._at(change, "function_call_arguments.delta") | {"delta": change.text}]

    def end_call(self, change: Change) -> list[Event]:
        """Return the events of a call that is over."""
        done = self._at(change, "function_call_arguments.done")
        return [done | {"arguments": change.segment.text, "name": change.segment.name}, self._done(change)]

    def _about(self, kind: str, status: str) -> Event:
        return self._numbered({"type": kind, "response": self.bare(status)})

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._number
        self._number += 1
        return event

    def _at(self, change: Change, kind: str) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self._id(change.segment),
            "output_index": change.segment.index,
        }

    def _in_part(self, change: Change, kind: str) -> Event:
        return self._at(change, kind) | {"content_index": 0}

    def _part(self, change: Change, move: str, text: str) -> Event:
        segment = change.segment
        part = self._content(segment) if move == "done" else _content_part(segment.kind, text, [])
        return self._in_part(change, f"content_part.{move}") | {"part": part}

    def _added(self, change: Change, item: Event) -> Event:
        return {"type": "response.output_item.added", "output_index": change.segment.index, "item": item}

    def _done(self, change: Change) -> Event:
        item = self._item(change.segment)
        return {"type": "response.output_item.done", "output_index": change.segment.index, "item": item}

    def _id(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}_{self._ids}_{segment.index}"

    def _content(self, segment: Segment) -> Event:
        scores = told_scores(segment.scores, self._tokenizer) if self._has_scores else []
        return _content_part(segment.kind, segment.text, scores)

    def _item(self, segment: Segment) -> Event:
        head = {"id": self._id(segment), "status": "completed" if segment.is_whole else "incomplete"}
        if segment.kind == "call":
            call_id = f"call_{self._ids}_{segment.call}"
            called = {"call_id": call_id, "name": segment.name, "arguments": segment.text}
            return {"type": "function_call", **head, **called}
        content = [self._content(segment)]
        if segment.kind == "text":
            return {"type": "message", **head, "role": "assistant", "content": content}
        sealed = {"encrypted_content": seal(segment.text)} if self._seals else {}
        return {"type": "reasoning", **head, "summary": [], "content": content, **sealed}


_PREFIXES: Final[Mapping[Kind, str]] = {"reasoning": "rs", "text": "msg", "call": "fc"}
EVENTS: Final[Mapping[tuple[Move, Kind], Callable[[ResponsesReplies, Change], list[Event]]]] = {
    ("opened", "reasoning"): ResponsesReplies.begin_reasoning,
    ("grew", "reasoning"): ResponsesReplies.think,
    ("closed", "reasoning"): ResponsesReplies.end_reasoning,
    ("opened", "text"): ResponsesReplies.begin_text,
    ("grew", "text"): ResponsesReplies.say,
    ("closed", "text"): ResponsesReplies.end_text,
    ("opened", "call"): ResponsesReplies.begin_call,
    ("grew", "call"): ResponsesReplies.argue,
    ("closed", "call"): ResponsesReplies.end_call,
}
"""All that can happen to an item, and what is written then."""


def telling_failed(error: ApiError, number: int) -> Event:
    """Return the event that ends a stream whose response may go on."""
    told = error.envelope()["error"]
    return {"type": "error", "code": told["code"], "message": told["message"], "param": None, "sequence_number": number}


def _content_part(kind: Kind, text: str, scores: list[Event]) -> Event:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _usage(choices: Sequence[Choice]) -> Event:
    tokens = spent(choices)
    return {
        "input_tokens": tokens.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tokens.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tokens.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning_tokens},
        "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
    }


def _frames(events: Sequence[Event]) -> bytes:
    return b"".join(map(named_frame, events))

"""What does an answer look like on the wire? OpenAI's objects, whole and in chunks."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from services.recipe.choices import Choice, join, spent
from services.recipe.dialect import CallArguments, CallBegun
from services.recipe.identity import SERVICE_TIER
from services.recipe.jobs import Job
from services.recipe.refusals import ApiError
from services.recipe.schema import AnswerRules
from services.recipe.shapes import OPENAI, frame
from services.recipe.token_scores import told_scores
from services.recipe.tokenizer import PromptTokenizer
from services.recipe.transcript import Piece, Score

DONE = b"data: [DONE]\n\n"


class OpenAiReplies:
    """Writes the answer to one request, as generating.Replies has it. Subclasses differ in where the text stands."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    no_logprobs: ClassVar[dict[str, Any]]
    whole_extras: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, request_id: str, model: str, tokenizer: PromptTokenizer, rules: AnswerRules, *, has_scores: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._has_scores = has_scores
        self._head = {"id": f"{self.id_prefix}{request_id}", "created": int(time.time()), "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_object}

    @property
    def id(self) -> str:
        """The answer's own id."""
        return str(self._head["id"])

    def opening(self, choice: Choice) -> bytes:
        """Return the frames that precede a choice's first text."""
        raise NotImplementedError

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Return the frames that show a piece, the finishing one included."""
        raise NotImplementedError

    def _choice(self, choice: Choice, said: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the last frames of a stream: usage when it was asked for, and [DONE]."""
        if not self._rules.includes_usage:
            return DONE
        return frame({**self._chunk_head, "choices": [], "usage": self.usage(choices)}) + DONE

    def failing(self, error: ApiError, shown_id: str) -> bytes:
        """Return what ends a stream that fails: the error, and no [DONE]."""
        return OPENAI.last_frame(error, shown_id)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the body of an answer that is not streamed."""
        told = []
        for choice in choices:
            said = join(choice.pieces)
            body = self._choice(choice, said) | {"finish_reason": self._reason(choice.transcript.finish_reason)}
            if self._has_scores and body["logprobs"] is None:
                body["logprobs"] = self.no_logprobs
            if self._rules.returns_token_ids:
                body["prompt_token_ids"] = list(choice.job.prompt_ids)
                body["token_ids"] = said.token_ids
            told.append(body)
        body = {**self._head, "object": self.whole_object, "choices": told, "usage": self.usage(choices)}
        return orjson.dumps(body | self.whole_extras)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the usage object of the answer."""
        return usage(choices)

    def _reason(self, reason: str | None) -> str | None:
        return reason

    def _frame(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
        if self._rules.includes_usage:
            chunk["usage"] = None
        return frame(chunk)

    def _ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.token_ids} if self._rules.returns_token_ids else {}

    def _prompt_ids(self, job: Job) -> dict[str, Any]:
        return {"prompt_token_ids": list(job.prompt_ids), "token_ids": []} if self._rules.returns_token_ids else {}


class ChatReplies(OpenAiReplies):
    """Answers of /v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    no_logprobs: ClassVar[dict[str, Any]] = {"content": [], "refusal": None}
    whole_extras: ClassVar[dict[str, Any]] = {"service_tier": SERVICE_TIER}

    def __init__(
        self, *args: Any, reasons: bool = False, thinks: bool = False, names_call: bool = False, **options: Any
    ) -> None:
        """names_call: the request named the function to be called."""
        super().__init__(*args, **options)
        self._reasons = reasons
        self._thinks = thinks
        self._names_call = names_call
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: Choice) -> bytes:
        job = choice.job
        return self._delta(job, {"role": "assistant", "content": "", "refusal": None}, None, self._prompt_ids(job))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        job = choice.job
        if self._is_text_alone(piece):
            before, after = self._around_text.get(job.choice) or self._begin_text(job)
            return before + orjson.dumps(piece.text) + after
        deltas: list[dict[str, Any]] = [{"reasoning_content": piece.reasoning}] if piece.reasoning else []
        # What belongs to the tokens as such goes with the first delta, logprobs with the text that they are of.
        extras, scored = self._ids(piece), len(deltas) if piece.text else 0
        deltas += [{"content": piece.text}] if piece.text else []
        deltas += [{"tool_calls": [self._call_delta(job, call)]} for call in piece.calls]
        reasons: list[str | None] = [None] * len(deltas)
        if piece.finish_reason is not None:
            deltas.append({})
            reasons.append(self._reason(piece.finish_reason))
        logprobs = self._logprobs(piece.scores)
        return b"".join(
            self._delta(job, delta, reason, extras if at == 0 else {}, logprobs if at == scored else None)
            for at, (delta, reason) in enumerate(zip(deltas, reasons, strict=True))
        )

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        told = usage(choices)
        if self._reasons:
            told["completion_tokens_details"] = {"reasoning_tokens": spent(choices).reasoning_tokens}
        return told

    def _is_text_alone(self, piece: Piece) -> bool:
        """Return whether all that a piece has is text, as most of a stream's have."""
        is_more = piece.finish_reason or piece.reasoning or piece.calls or piece.scores
        return bool(piece.text) and not is_more and not self._rules.returns_token_ids

    def _begin_text(self, job: Job) -> tuple[bytes, bytes]:
        """Return what stands before and after the text in frames of a choice: the same in all of them."""
        mark = "\x00"
        before, after = self._delta(job, {"content": mark}, None, {}).rsplit(orjson.dumps(mark), 1)
        self._around_text[job.choice] = before, after
        return before, after

    def _reason(self, reason: str | None) -> str | None:
        # OpenAI says "tool_calls" only where the call was the model's own idea.
        return "stop" if self._names_call and reason == "tool_calls" else reason

    def _delta(
        self,
        job: Job,
        delta: dict[str, Any],
        finish_reason: str | None,
        extras: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": job.choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **extras}
        return self._frame(choice)

    def _choice(self, choice: Choice, said: Piece) -> dict[str, Any]:
        calls = self._calls(choice.job, said)
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if self._thinks:
            message["reasoning_content"] = said.reasoning
        if calls:
            message |= {"content": said.text or None, "tool_calls": calls}
        return {"index": choice.job.choice, "message": message, "logprobs": self._logprobs(said.scores)}

    def _calls(self, job: Job, said: Piece) -> list[dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}
        for event in said.calls:
            if isinstance(event, CallBegun):
                function = {"name": event.name, "arguments": ""}
                told[event.index] = {"id": self._call_id(job, event), "type": "function", "function": function}
            else:
                told[event.index]["function"]["arguments"] += event.text
        return list(told.values())

    def _call_delta(self, job: Job, event: CallBegun | CallArguments) -> dict[str, Any]:
        if isinstance(event, CallArguments):
            return {"index": event.index, "function": {"arguments": event.text}}
        function = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": self._call_id(job, event), "type": "function", "function": function}

    def _call_id(self, job: Job, event: CallBegun) -> str:
        # 40 characters at most: OpenAI takes no longer ones back.
        return f"call_{self.id.removeprefix(self.id_prefix)[:24]}_{job.choice}_{event.index}"

    def _logprobs(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        if not scores:
            return None
        return {"content": told_scores(scores, self._tokenizer), "refusal": None}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return OpenAI's usage object. A prompt counts once, however many choices continue it."""
    tokens = spent(choices)
    return {
        "prompt_tokens": tokens.prompt_tokens,
        "completion_tokens": tokens.completion_tokens,
        "total_tokens": tokens.prompt_tokens + tokens.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tokens.cached_tokens},
    }

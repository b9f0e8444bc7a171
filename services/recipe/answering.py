"""READ THIS FIRST: what happens to one request, from its bytes to the last byte of the answer?"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from opentelemetry.trace import Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.chassis import names, telemetry
from services.chassis.errors import HTTP_CLIENT_CLOSED, NoReplica
from services.recipe.body import parse_object, read_body
from services.recipe.dialect import Parser, PlainParser
from services.recipe.jobs import Job, plan_jobs
from services.recipe.meters import Meters
from services.recipe.model_folder import ServedModel
from services.recipe.pictures import Prompt
from services.recipe.refusals import ApiError, as_api_error, refuse
from services.recipe.replies import DONE, ChatReplies, Choice, CompletionReplies, Replies, echo_text, usage
from services.recipe.schema import AnswerRules, Sampling, read_chat, read_completion, read_model
from services.recipe.stream import (
    FAREWELL_SECONDS,
    PING_SECONDS,
    ClientGoneError,
    EventStream,
    cancelled_on_disconnect,
    send_whole,
)
from services.recipe.transcript import Piece, Transcript
from services.recipe.upstream import Upstream

Show = Callable[[Choice, Piece], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Front:
    """What all requests share."""

    model: ServedModel
    upstream: Upstream
    meters: Meters
    max_body_bytes: int
    ping_seconds: float = PING_SECONDS

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus answer that both the model and the engines' memory allow."""
        card = self.upstream.card
        limit = self.model.context_tokens
        return min(limit, card.context_tokens) if card is not None and card.context_tokens else limit


@dataclass(frozen=True, slots=True)
class Understood:
    """A valid request with its prompts as ids, how to read what the model says, and the words to tell it in."""

    sampling: Sampling
    rules: AnswerRules
    prompts: Sequence[Prompt]
    parser: Callable[[], Parser]
    """Makes one for each choice."""
    replies: Replies


class Endpoint:
    """ASGI application for one kind of generation; subclasses know how to read and encode its requests."""

    operation: ClassVar[str]
    prompt_field: ClassVar[str]
    """Where its requests hold the prompt."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def understand(self, body: dict[str, Any], request_id: str) -> Understood:
        """Return the request in `body`; raise ApiError when it cannot be served."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Its errors end here too: a status before the answer has begun, an error frame after."""
        answer = _Answer(self, Headers(scope=scope), str(scope["fathom.request_id"]), send)
        answer.shown_id = str(scope["fathom.shown_id"])
        telemetry.bind_request(answer.request_id)
        traceparent = answer.headers.get("traceparent", "")
        attributes = {
            names.GEN_AI_OPERATION_NAME: self.operation,
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: self.front.model.name,
            names.REQUEST_ID: answer.request_id,
            names.HTTP_ROUTE: scope["path"],
        }
        name = f"{self.operation} {self.front.model.name}"
        with (
            self.front.meters.open_requests.track_inprogress(),
            telemetry.span(name, traceparent=traceparent, kind=telemetry.SpanKind.SERVER, **attributes) as span,
        ):
            try:
                await answer.give(receive)
            except ClientGoneError:
                answer.status = HTTP_CLIENT_CLOSED
            except asyncio.CancelledError:
                await answer.give_up()
            except Exception as exc:  # noqa: BLE001 - every error has an answer; strangers are logged with an id
                await answer.fail(as_api_error(exc))
            finally:
                answer.report(span)


class _Answer:
    """One request being answered."""

    def __init__(self, endpoint: Endpoint, headers: Headers, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self.shown_id = request_id
        self.headers = headers
        self.status: int = HTTPStatus.OK
        self._endpoint = endpoint
        self._front = endpoint.front
        self._send = send
        self._stream = EventStream(send, ping_seconds=self._front.ping_seconds)
        self._started = time.perf_counter()
        self._first_token_seconds: float | None = None
        self._choices: list[Choice] = []
        self._understood: Understood | None = None

    async def give(self, receive: Receive) -> None:
        """Read, understand, generate, tell."""
        body = await read_body(self.headers, receive, self._front.max_body_bytes)
        async with cancelled_on_disconnect(receive):
            understood = await self._endpoint.understand(parse_object(body), self.request_id)
            del body
            self._understood = understood
            self._choices = [self._choice(job, understood) for job in self._plan(understood)]
            if understood.rules.is_stream:
                await self._tell_as_it_comes(understood.replies)
            else:
                await self._follow_all(self._keep)
        # Outside: a connection reads as disconnected once its response is complete.
        if understood.rules.is_stream:
            last = understood.replies.usage_chunk(self._choices) if understood.rules.includes_usage else b""
            await self._stream.end(last + DONE)
        else:
            await send_whole(self._send, HTTPStatus.OK, understood.replies.whole(self._choices))

    async def fail(self, error: ApiError) -> None:
        """Tell the caller what went wrong. A stream that has begun ends with the error and without [DONE]."""
        self.status = error.status
        if self._stream.is_started:
            await self._stream.end(b"data: " + orjson.dumps(error.envelope()) + b"\n\n")
        else:
            await send_whole(self._send, error.status, error.body(), error.headers())

    async def give_up(self) -> None:
        """Tell the caller that drain_seconds are over. The task was cancelled for that alone, so that ends here."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.fail(as_api_error(NoReplica("this server is shutting down")))
        except TimeoutError:
            telemetry.log.info("recipe.request.cut")  # the caller does not read

    def report(self, span: telemetry.Span) -> None:
        """Log, count and trace how it went; never what was said."""
        seconds = time.perf_counter() - self._started
        self._front.meters.done(self._endpoint.operation, self.status, seconds, self._choices)
        tokens = usage(self._choices)
        telemetry.log.info(
            "recipe.request.done",
            shown_id=self.shown_id,
            status=int(self.status),
            seconds=round(seconds, 4),
            first_token_seconds=self._first_token_seconds,
            prompt_tokens=tokens["prompt_tokens"],
            completion_tokens=tokens["completion_tokens"],
        )
        if not span.is_recording():
            return
        span.set_attribute(names.HTTP_RESPONSE_STATUS_CODE, self.status)
        span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, tokens["prompt_tokens"])
        span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, tokens["completion_tokens"])
        span.set_attribute(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, tokens["prompt_tokens_details"]["cached_tokens"])
        reasons = [choice.transcript.finish_reason or "none" for choice in self._choices]
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
        if self._first_token_seconds is not None:
            span.set_attribute(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, self._first_token_seconds)
        if self._understood is not None:
            _trace_request(span, self._understood)
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_attribute(names.ERROR_TYPE, str(self.status))
            span.set_status(Status(StatusCode.ERROR))

    def _plan(self, understood: Understood) -> Sequence[Job]:
        return plan_jobs(
            self.request_id,
            self._front.model,
            understood.prompts,
            understood.sampling,
            understood.rules,
            context_tokens=self._front.context_tokens,
            prompt_field=self._endpoint.prompt_field,
            traceparent=telemetry.current_traceparent(),
        )

    def _choice(self, job: Job, understood: Understood) -> Choice:
        has_scores = understood.sampling.num_logprobs is not None
        return Choice(job, Transcript(understood.parser(), understood.rules.stops, has_scores=has_scores))

    async def _tell_as_it_comes(self, replies: Replies) -> None:
        opened: set[int] = set()

        async def tell(choice: Choice, piece: Piece) -> None:
            frames = replies.chunk(choice.job, piece)
            if choice.job.choice not in opened:
                opened.add(choice.job.choice)
                frames = replies.opening(choice.job) + frames
            await self._stream.write(frames)

        async with self._stream.pinging():
            await self._follow_all(tell)

    async def _follow_all(self, show: Show) -> None:
        if len(self._choices) == 1:
            await self._follow(self._choices[0], show)
            return
        async with asyncio.TaskGroup() as group:
            for choice in self._choices:
                group.create_task(self._follow(choice, show))

    async def _follow(self, choice: Choice, show: Show) -> None:
        """Take one choice's tokens to its end: the engine's, or a stop string, of which only we know."""
        transcript = choice.transcript
        async with self._front.upstream.generate(choice.job.request) as generation:
            async for event in generation:
                if self._first_token_seconds is None and event.token_ids:
                    self._first_token_seconds = time.perf_counter() - self._started
                    self._front.meters.first_token(self._endpoint.operation, self._first_token_seconds)
                piece = transcript.feed(event)
                if piece is not None:
                    await show(choice, piece)
                if transcript.is_cut:
                    generation.reason = "stop_string"
                    return

    async def _keep(self, choice: Choice, piece: Piece) -> None:
        choice.pieces.append(piece)


class ChatEndpoint(Endpoint):
    """POST /v1/chat/completions."""

    operation = "chat"
    prompt_field = "messages"

    async def understand(self, body: dict[str, Any], request_id: str) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_chat(body, model.rules)
        prompt = await model.encoder.chat(asked.conversation, context_tokens=self.front.context_tokens)
        replies = ChatReplies(
            request_id,
            model.name,
            model.tokenizer,
            asked.rules,
            has_scores=asked.sampling.num_logprobs is not None,
            reasons=model.dialect.reasons,
            thinks=asked.conversation.effort != "none",
        )
        return Understood(
            asked.sampling, asked.rules, [prompt], lambda: model.dialect.parser(asked.conversation), replies
        )


class CompletionEndpoint(Endpoint):
    """POST /v1/completions."""

    operation = "text_completion"
    prompt_field = "prompt"

    async def understand(self, body: dict[str, Any], request_id: str) -> Understood:
        model = self.front.model
        check_model(read_model(body), model.name)
        asked = read_completion(body, vocab_tokens=model.rules.vocab_tokens)
        prompts = await model.encoder.texts(asked.prompts, context_tokens=self.front.context_tokens)
        replies = CompletionReplies(
            request_id,
            model.name,
            model.tokenizer,
            asked.rules,
            has_scores=asked.sampling.num_logprobs is not None,
            echoes=[echo_text(prompt, model.tokenizer) for prompt in asked.prompts] if asked.echo else (),
        )
        pieces = model.tokenizer.pieces
        return Understood(asked.sampling, asked.rules, [*map(Prompt, prompts)], lambda: PlainParser(pieces), replies)


def check_model(asked: str, served: str) -> None:
    """Raise a 404 for a model that is not the one served."""
    if asked != served:
        shown = asked if len(asked) <= 100 else asked[:100] + "..."
        raise refuse(
            "model", f"{shown!r} is not served here; {served!r} is", code="model_not_found", status=HTTPStatus.NOT_FOUND
        )


def _trace_request(span: telemetry.Span, understood: Understood) -> None:
    rules, sampling = understood.rules, understood.sampling
    span.set_attribute(names.GEN_AI_RESPONSE_ID, understood.replies.id)
    span.set_attribute(names.GEN_AI_REQUEST_STREAM, rules.is_stream)
    span.set_attribute(names.GEN_AI_REQUEST_CHOICE_COUNT, rules.num_choices)
    span.set_attribute(names.GEN_AI_REQUEST_TEMPERATURE, sampling.temperature)
    span.set_attribute(names.GEN_AI_REQUEST_TOP_P, sampling.top_p)
    if rules.max_tokens is not None:
        span.set_attribute(names.GEN_AI_REQUEST_MAX_TOKENS, rules.max_tokens)
    if sampling.seed is not None:
        span.set_attribute(names.GEN_AI_REQUEST_SEED, sampling.seed)

"""READ THIS FIRST: what happens to one request, from its bytes to the last byte of the answer?

Every API has an `Endpoint` that understands its requests and an object of `generating.Replies` that tells the answer in
its words. What lies between is the same for all and stands here and in `generating.py`.
"""

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from opentelemetry.trace import Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.chassis import names, telemetry
from services.chassis.errors import HTTP_CLIENT_CLOSED, NoReplica
from services.recipe.body import parse_object, read_body
from services.recipe.choices import Choice, spent
from services.recipe.generating import Front, Generating, Replies, Understood
from services.recipe.keys_visit import current_visit
from services.recipe.refusals import ApiError, as_api_error, refuse
from services.recipe.shapes import Shape
from services.recipe.stream import (
    FAREWELL_SECONDS,
    ClientGoneError,
    EventStream,
    cancelled_on_disconnect,
    send_whole,
)
from services.recipe.transcript import Piece


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. request_id: ours, unique; shown_id: the one that the caller reads; tenant: "" while keys are off."""

    request_id: str
    shown_id: str
    tenant: str = ""

    @classmethod
    def of(cls, scope: Scope) -> "Caller":
        """Return who asks in this HTTP request."""
        ids = str(scope["fathom.request_id"]), str(scope["fathom.shown_id"])
        return cls(*ids, str(scope.get("fathom.tenant", "")))


class Endpoint:
    """ASGI application for one kind of generation; subclasses know how to read and encode its requests."""

    operation: ClassVar[str]
    prompt_field: ClassVar[str]
    """Where its requests hold the prompt."""

    shape: ClassVar[Shape]

    def __init__(self, front: Front) -> None:
        self.front = front

    async def understand(self, body: dict[str, Any], caller: Caller) -> Understood:
        """Return the request in `body`; raise ApiError when it cannot be served."""
        raise NotImplementedError

    async def perform(self, answer: "Answer", understood: Understood) -> bytes:
        """Generate the answer, telling it as it comes if it is to be a stream; return what is left to be sent."""
        generating = answer.generating(understood)
        if not understood.rules.is_stream:
            await generating.run(generating.keep)
            return understood.replies.whole(generating.choices)
        await answer.tell(generating, understood.replies)
        return understood.replies.closing(generating.choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Its errors end here too: a status before the answer has begun, an error frame after."""
        answer = Answer(self, scope, send)
        telemetry.bind_request(answer.caller.request_id)
        traceparent = answer.headers.get("traceparent", "")
        attributes = {
            names.GEN_AI_OPERATION_NAME: self.operation,
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
            names.GEN_AI_REQUEST_MODEL: self.front.model.name,
            names.REQUEST_ID: answer.caller.request_id,
            names.SHOWN_ID: answer.caller.shown_id,  # of the answer's x-request-id: what people have to look for
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


class Answer:
    """One request being answered."""

    def __init__(self, endpoint: Endpoint, scope: Scope, send: Send) -> None:
        self.caller = Caller.of(scope)
        self.headers = Headers(scope=scope)
        self.status: int = HTTPStatus.OK
        self.stream = EventStream(send, ping_seconds=endpoint.front.ping_seconds, ping=endpoint.shape.ping)
        self._endpoint = endpoint
        self._front = endpoint.front
        self._send = send
        self._started = time.perf_counter()
        self._generating: Generating | None = None
        self._understood: Understood | None = None

    async def give(self, receive: Receive) -> None:
        """Read, understand, generate, tell."""
        body = await read_body(self.headers, receive, self._front.max_body_bytes)
        async with cancelled_on_disconnect(receive):
            understood = await self._endpoint.understand(parse_object(body), self.caller)
            del body
            self._understood = understood
            last = await self._endpoint.perform(self, understood)
        # Outside: a connection reads as disconnected once its response is complete.
        if understood.rules.is_stream:
            await self.stream.end(last)
        else:
            await send_whole(self._send, HTTPStatus.OK, last)

    def generating(self, understood: Understood) -> Generating:
        """Return the request's choices, ready to run; raise a 400 when they cannot fit the context."""
        endpoint = self._endpoint
        self._generating = Generating(
            self._front,
            understood,
            self.caller.request_id,
            operation=endpoint.operation,
            prompt_field=endpoint.prompt_field,
            started=self._started,
        )
        return self._generating

    async def tell(self, generating: Generating, replies: Replies) -> None:
        """Run to the end, sending every piece as it comes."""
        opened: set[int] = set()

        async def show(choice: Choice, piece: Piece) -> None:
            opening = b""
            if choice.job.choice not in opened:
                opened.add(choice.job.choice)
                opening = replies.opening(choice)
            await self.stream.write(opening + replies.chunk(choice, piece))

        async with self.stream.pinging():
            await generating.run(show)

    async def fail(self, error: ApiError) -> None:
        """Tell the caller what went wrong. A stream that has begun ends with the error and without [DONE]."""
        shape, shown_id = self._endpoint.shape, self.caller.shown_id
        self.status = shape.status(error)
        if not self.stream.is_started:
            await send_whole(self._send, self.status, shape.body(error, shown_id), error.headers())
        elif self._understood is None:
            await self.stream.end(shape.last_frame(error, shown_id))
        else:
            await self.stream.end(self._understood.replies.failing(error, shown_id))

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
        choices = self._generating.choices if self._generating else []
        first_token_seconds = self._generating.first_token_seconds if self._generating else None
        self._front.meters.done(self._endpoint.operation, self.status, seconds, choices)
        tokens = spent(choices)
        telemetry.log.info(
            "recipe.request.done",
            shown_id=self.caller.shown_id,
            status=int(self.status),
            seconds=round(seconds, 4),
            first_token_seconds=first_token_seconds,
            prompt_tokens=tokens.prompt_tokens,
            completion_tokens=tokens.completion_tokens,
        )
        if not span.is_recording():
            return
        span.set_attribute(names.HTTP_RESPONSE_STATUS_CODE, self.status)
        span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, tokens.prompt_tokens)
        span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, tokens.completion_tokens)
        span.set_attribute(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, tokens.cached_tokens)
        reasons = [choice.transcript.finish_reason or "none" for choice in choices]
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
        if first_token_seconds is not None:
            span.set_attribute(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, first_token_seconds)
        if self._understood is not None:
            _trace_request(span, self._understood)
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_attribute(names.ERROR_TYPE, str(self.status))
            span.set_status(Status(StatusCode.ERROR))


def check_model(asked: str, served: str) -> None:
    """Raise a 404 for a model that is not the one served, a 403 when the caller's key is not for it."""
    if asked != served:
        shown = asked if len(asked) <= 100 else asked[:100] + "..."
        raise refuse(
            "model", f"{shown!r} is not served here; {served!r} is", code="model_not_found", status=HTTPStatus.NOT_FOUND
        )
    current_visit().check_model(asked)


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

"""Which requests are being answered here, and how does each of them end?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proto.common_pb2 import FinishReason, ModelCard, Request, TokenEvent
from services.chassis import names
from services.chassis.errors import (
    BlocksLost,
    DeadlinePassed,
    FathomError,
    InvalidRequest,
    NoReplica,
    PeerLost,
    as_fathom_error,
)
from services.chassis.telemetry import bind_request, log, span
from services.entrypoint import admission
from services.entrypoint.answer import Answer
from services.entrypoint.flow import generate

if TYPE_CHECKING:
    from services.entrypoint.config import EntrypointSettings
    from services.entrypoint.metrics import EntrypointMetrics
    from services.entrypoint.peers import Peers

Emit = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[None]
    answer: Answer
    emit: Emit
    """Where its caller listens: the same for all requests of one stream."""


class Requests:
    """The requests in flight: a task each, by request id."""

    def __init__(
        self,
        settings: EntrypointSettings,
        peers: Peers,
        metrics: EntrypointMetrics,
        choose_card: Callable[[str], ModelCard],
    ) -> None:
        """choose_card: model name -> card of the fleet that serves it now; raises ModelNotFound or NoReplica."""
        self._settings = settings
        self._peers = peers
        self._metrics = metrics
        self._choose_card = choose_card
        self._running: dict[str, _Running] = {}
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, request: Request, emit: Emit) -> None:
        """Begin to answer into `emit`, from the next turn of the loop on; a refusal is an answer as well."""
        answer = Answer(request, emit)
        try:
            self._admit(request)
        except FathomError as refusal:
            log.info("entrypoint.request.refused", request_id=request.request_id, error=refusal.kind)
            self._metrics.requests.labels(refusal.kind).inc()
            twin = self._running.get(request.request_id)
            # An error under the id of a request on the same stream would end that one for its caller.
            if twin is None or twin.emit != emit or twin.answer.finish_reason:
                answer.fail(refusal)
            return
        task = asyncio.create_task(self._answer(request, answer), name=f"request {request.request_id}")
        self._running[request.request_id] = _Running(task, answer, emit)
        task.add_done_callback(lambda done: self._forget(request.request_id, done))

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request early; unknown ids are ignored, the request may have just ended."""
        running = self._running.get(request_id)
        if running is not None:
            running.task.cancel(reason)

    def cancel_all(self, emit: Emit) -> None:
        """End all requests of one caller: its stream is gone."""
        for running in tuple(self._running.values()):
            if running.emit == emit:
                running.task.cancel("disconnect")

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones have ended."""
        self._is_draining = True
        while self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    def _admit(self, request: Request) -> None:
        if request.request_id in self._running:
            raise InvalidRequest("this request id is in use by a running request", field="request_id")
        if self._is_draining:
            raise NoReplica("this entrypoint is shutting down")
        admission.admit(len(self._running), max_requests=self._settings.max_requests)

    def _forget(self, request_id: str, done: asyncio.Task[None]) -> None:
        running = self._running.pop(request_id)
        if done.cancelled():  # before its first step, so nobody has answered yet
            running.answer.cancel()

    async def _answer(self, request: Request, answer: Answer) -> None:
        bind_request(request.request_id)
        started = time.monotonic()
        attributes: dict[str, Any] = {
            names.REQUEST_ID: request.request_id,
            names.GEN_AI_REQUEST_MODEL: request.model,
            names.GEN_AI_REQUEST_MAX_TOKENS: request.stop.max_tokens,
        }
        with (
            self._metrics.in_flight.track_inprogress(),
            span("entrypoint.generate", traceparent=request.traceparent, **attributes) as hop,
        ):
            outcome = await self._run(request, answer)
            hop.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [outcome])
            hop.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, answer.usage.prompt_tokens)
            hop.set_attribute(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, answer.usage.cached_tokens)
            hop.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, answer.usage.completion_tokens)
        self._count(answer, outcome, started)

    async def _run(self, request: Request, answer: Answer) -> str:
        """Bring the answer to its last event, whatever happens; return how it ended."""
        try:
            await self._generate(request, answer)
        except asyncio.CancelledError:
            # Swallowed: this task was made for this request and has nothing else to end.
            answer.cancel()
            return "cancelled"
        except Exception as error:  # noqa: BLE001 - a stranger becomes an InternalError with an id, and is logged
            known = as_fathom_error(error)
            if isinstance(known, BlocksLost):  # between services only; for the caller: it can be tried again
                log.warning("entrypoint.blocks.lost", reason=known.message)
                known = PeerLost("the KV of this request was lost on its way")
            answer.fail(known)
            return known.kind
        return "stop" if answer.finish_reason == FinishReason.FINISH_REASON_STOP else "length"

    async def _generate(self, request: Request, answer: Answer) -> None:
        """Check, complete and answer the request within its deadline."""
        card = self._choose_card(request.model)
        admission.check(request, card)
        now = time.time()
        full = admission.admitted(request, card, cluster_key=self._settings.cluster_key_bytes, now=now)
        try:
            async with asyncio.timeout(full.deadline_unix_seconds - now) as deadline:
                await generate(full, card, self._peers, answer)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlinePassed("the request's deadline has passed") from None

    def _count(self, answer: Answer, outcome: str, started: float) -> None:
        self._metrics.requests.labels(outcome).inc()
        self._metrics.prompt_tokens.inc(answer.usage.prompt_tokens)
        self._metrics.cached_tokens.inc(answer.usage.cached_tokens)
        self._metrics.completion_tokens.inc(answer.usage.completion_tokens)
        if answer.begun_seconds is not None:
            self._metrics.ttft_seconds.observe(answer.begun_seconds - started)
        log.info(
            "entrypoint.request.done",
            outcome=outcome,
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=answer.usage.cached_tokens,
            completion_tokens=answer.usage.completion_tokens,
            seconds=round(time.monotonic() - started, 4),
        )

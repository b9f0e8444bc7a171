"""How is one request's part on one replica begun, followed and ended?

A leg submits, collects the replica's events and, if the request leaves it before its last event, cancels there. The two
legs of a request are paired: what ends one wakes whoever waits on the other, so that neither waits for a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from proto.common_pb2 import Cancel, FinishReason, Request, TokenEvent
from proto.decode_pb2 import DecodeCommand, DecodeSubmit
from proto.prefill_pb2 import PrefillCommand, PrefillDeliver, PrefillEvent, PrefillSubmit
from services.chassis import names
from services.chassis.errors import FathomError, Overloaded, PeerLost, from_stream_error
from services.chassis.telemetry import SpanKind, current_traceparent, span

if TYPE_CHECKING:
    from types import TracebackType

    from services.chassis.streams import PeerStream, Subscription
    from services.entrypoint.bookings import Booking

CONNECT_SECONDS = 1.5
"""A replica that cannot be reached must show within two seconds."""

LAST_WORD_SECONDS = 1.0
"""How long decode may still prove that it has the KV after prefill was lost. Prefill may have handed over and not have
lived to say so; decode's first step takes less, and a lost peer must show within two seconds."""

Command = TypeVar("Command")
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    is_own: bool
    """False when the paired leg failed."""


class Leg(ABC, Generic[Command, Event]):
    """Runs while its `async with` block does; `next` gives the replica's events, then raises what ended them."""

    span_name: ClassVar[str]

    def __init__(self, stream: PeerStream[Command, Any], booking: Booking, request: Request) -> None:
        self.booking = booking
        self.error: Exception | None = None
        """What ended this leg, if not its last event."""
        self._stream = stream
        self.request = request
        """What was submitted: its images may have been encoded again since it was admitted."""
        self._cause = current_traceparent()
        self._items: asyncio.Queue[Event | _Failure] = asyncio.Queue()
        self._partner: Leg[Any, Any] | None = None
        self._is_independent = False
        """True once the partner's fate no longer matters."""
        self._must_cancel = False
        self._reason = ""
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def _submission(self, request: Request) -> Command:
        """Return the command that begins the request there."""

    @abstractmethod
    def _cancellation(self, cancel: Cancel) -> Command:
        """Return the command that ends it early."""

    @abstractmethod
    def _failure_in(self, event: Event) -> FathomError | None:
        """Return the error that an event stands for, if it does: the replica has then forgotten the request."""

    @abstractmethod
    def _is_last(self, event: Event) -> bool:
        """Say whether the replica has forgotten the request after this event."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"{self.span_name} {self.request.request_id}")
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._reason = _reason(error)
        self._task.cancel()
        await asyncio.wait([self._task])

    def pair(self, other: Leg[Any, Any]) -> None:
        """Let each leg hear of the other's failure."""
        self._partner, other._partner = other, self

    def hear_of(self, error: Exception, *, is_lost: bool) -> None:  # noqa: ARG002 - decode's leg makes the difference
        """Take note that the paired leg failed. is_lost: its replica could not say what it had done before."""
        self._items.put_nowait(_Failure(error, is_own=False))

    async def next(self) -> Event:
        """Return the next event; raise what ended this leg or, before it stands on its own, the paired one."""
        while True:
            item = await self._items.get()
            if not isinstance(item, _Failure):
                return item
            if item.is_own or not self._is_independent:
                raise item.error

    async def _run(self) -> None:
        # A task of its own, so that its span is current here and covers this replica's work only.
        attributes = {names.REPLICA: self.booking.replica}
        try:
            with span(self.span_name, traceparent=self._cause, kind=SpanKind.CLIENT, **attributes):
                await self._follow()
        except Exception as error:  # noqa: BLE001 - raised again by next(), which is where the request waits
            self._fail(error)

    async def _follow(self) -> None:
        async with await self._connect() as events:
            try:
                self._must_cancel = True
                await self._stream.send(self._submission(self._traced_request()))
                async for event in events:
                    self._take(event)
                    if not self._must_cancel:
                        return
            finally:
                if self._must_cancel:
                    await self._cancel()

    async def _connect(self) -> Subscription:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._stream.open_request(self.request.request_id)
        except TimeoutError:
            raise PeerLost(f"{self.booking.replica} cannot be reached") from None

    def _traced_request(self) -> Request:
        traced = Request()
        traced.CopyFrom(self.request)
        traced.traceparent = current_traceparent()
        for image in traced.images:  # engines fetch embeddings by hash; the bytes stay here for a second encoding
            image.ClearField("data")
        return traced

    def _take(self, event: Event) -> None:
        failure = self._failure_in(event)
        if failure is not None or self._is_last(event):
            self._must_cancel = False
        if failure is not None:
            raise failure
        self._items.put_nowait(event)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._items.put_nowait(_Failure(error, is_own=True))
        if self._partner is not None:
            self._partner.hear_of(error, is_lost=self._must_cancel)

    async def _cancel(self) -> None:
        # A broken stream has cancelled all its requests already. Sending only queues, so it is safe while cancelled.
        with contextlib.suppress(FathomError):
            cancel = Cancel(request_id=self.request.request_id, reason=self._reason)
            await self._stream.send(self._cancellation(cancel))


def _reason(error: BaseException | None) -> str:
    """Say, for the replica's log, why its part ends early."""
    if error is None:
        return "finished"
    if isinstance(error, asyncio.CancelledError):
        return str(error.args[0]) if error.args else "deadline"
    return f"error: {type(error).__name__}"


class PrefillLeg(Leg[PrefillCommand, PrefillEvent]):
    """The prompt's part: from submit to the finished handoff."""

    span_name = "prefill.run"
    _is_handing_over = False

    def __init__(
        self, stream: PeerStream[PrefillCommand, Any], booking: Booking, request: Request, *, hit_tokens: int
    ) -> None:
        super().__init__(stream, booking, request)
        self._hit_tokens = hit_tokens

    async def deliver(self, decode: DecodeLeg) -> None:
        """Say where the KV goes."""
        to = decode.booking
        deliver = PrefillDeliver(
            request_id=self.request.request_id, replica=to.replica, address=to.address, boot_id=to.boot_id
        )
        await self._stream.send(PrefillCommand(deliver=deliver))

    def _submission(self, request: Request) -> PrefillCommand:
        return PrefillCommand(submit=PrefillSubmit(request=request, hit_tokens=self._hit_tokens))

    def _cancellation(self, cancel: Cancel) -> PrefillCommand:
        return PrefillCommand(cancel=cancel)

    def _failure_in(self, event: PrefillEvent) -> FathomError | None:
        self._is_handing_over = self._is_handing_over or event.HasField("last_chunk_started")
        if not event.HasField("failed"):
            return None
        error = from_stream_error(event.failed)
        if self._is_handing_over and isinstance(error, Overloaded):  # decode's refusal, in words about its blocks
            return Overloaded("all decode replicas are full", retry_after=error.retry_after)
        return error

    def _is_last(self, event: PrefillEvent) -> bool:
        return event.HasField("handoff_done") or bool(event.first_token.token.finish_reason)


class DecodeLeg(Leg[DecodeCommand, TokenEvent]):
    """The answer's part: from submit to the last token."""

    span_name = "decode.run"

    def hear_of(self, error: Exception, *, is_lost: bool) -> None:
        """Take note that prefill failed: at once when it said so, later when it was lost and decode may know better."""
        hear = functools.partial(super().hear_of, error, is_lost=is_lost)
        if is_lost:
            asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, hear)
        else:
            hear()

    def _submission(self, request: Request) -> DecodeCommand:
        return DecodeCommand(submit=DecodeSubmit(request=request))

    def _cancellation(self, cancel: Cancel) -> DecodeCommand:
        return DecodeCommand(cancel=cancel)

    def _failure_in(self, event: TokenEvent) -> FathomError | None:
        # Tokens prove that the handoff committed: prefill's end no longer matters, even if its last word got lost.
        self._is_independent = self._is_independent or bool(event.token_ids)
        if event.finish_reason == FinishReason.FINISH_REASON_CANCELLED:
            return PeerLost(f"{self.booking.replica} gave the request up")
        if event.finish_reason == FinishReason.FINISH_REASON_ERROR:
            return from_stream_error(event.error)
        return None

    def _is_last(self, event: TokenEvent) -> bool:
        return bool(event.finish_reason)

"""How is a replica chosen and its load booked, so that every booking is given back?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from proto.decode_lb_pb2 import DecodePickRequest, DecodeReleaseRequest
from proto.prefill_lb_pb2 import PrefillPickRequest, PrefillReleaseRequest
from services.chassis import names
from services.chassis.errors import DeadlinePassed, FathomError, PeerLost
from services.chassis.telemetry import SpanKind, log, span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proto.common_pb2 import Request
    from services.entrypoint.peers import Peers

PICK_SECONDS = 1.5
"""A balancer decides in a millisecond. One that needs longer is lost, and a lost peer must show within two seconds."""

RELEASE_SECONDS = 2.0


class _Reply(Protocol):
    @property
    def replica(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def booking_id(self) -> str: ...
    @property
    def boot_id(self) -> str: ...


_R = TypeVar("_R", bound=_Reply)


class Booking:
    """One replica chosen for one request, and the load booked on it."""

    def __init__(self, reply: _Reply, give_back: Callable[[str], None]) -> None:
        self.replica = reply.replica
        self.address = reply.address
        self.boot_id = reply.boot_id
        self._booking_id = reply.booking_id
        self._give_back = give_back
        self._is_held = True

    def release(self) -> None:
        """Give the load back; harmless the second time. Nobody waits for it."""
        if self._is_held:
            self._is_held = False
            self._give_back(self._booking_id)


@asynccontextmanager
async def book_prefill(
    request: Request, hit_tokens: int, peers: Peers, *, exclude: Sequence[str]
) -> AsyncIterator[Booking]:
    """Pick a prefill replica for as long as the block runs. Raises what the balancer says, PeerLost if it is away."""
    ask = PrefillPickRequest(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        prompt_tokens=len(request.prompt_token_ids),
        hit_tokens=hit_tokens,
        exclude=exclude,
        deadline_unix_seconds=request.deadline_unix_seconds,
        priority=request.priority,
    )

    def give_back(booking_id: str) -> None:
        call = peers.prefill_lb.Release(PrefillReleaseRequest(booking_id=booking_id), timeout=RELEASE_SECONDS)
        peers.in_background(_quietly(call))

    with span("prefill_lb.pick", kind=SpanKind.CLIENT) as hop:
        booking = await _book(peers.prefill_lb.Pick(ask, timeout=PICK_SECONDS), give_back)
        hop.set_attribute(names.REPLICA, booking.replica)
    try:
        yield booking
    finally:
        booking.release()


@asynccontextmanager
async def book_decode(
    request: Request, kv_tokens: int, peers: Peers, *, exclude: Sequence[str]
) -> AsyncIterator[Booking]:
    """Pick a decode replica for as long as the block runs. Raises what the balancer says, PeerLost if it is away."""
    ask = DecodePickRequest(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        kv_tokens=kv_tokens,
        max_tokens=request.stop.max_tokens,
        exclude=exclude,
        deadline_unix_seconds=request.deadline_unix_seconds,
        priority=request.priority,
    )

    def give_back(booking_id: str) -> None:
        call = peers.decode_lb.Release(DecodeReleaseRequest(booking_id=booking_id), timeout=RELEASE_SECONDS)
        peers.in_background(_quietly(call))

    with span("decode_lb.pick", kind=SpanKind.CLIENT) as hop:
        booking = await _book(peers.decode_lb.Pick(ask, timeout=PICK_SECONDS), give_back)
        hop.set_attribute(names.REPLICA, booking.replica)
    try:
        yield booking
    finally:
        booking.release()


async def _book(pick: Awaitable[_R], give_back: Callable[[str], None]) -> Booking:
    """Await a pick. One that is cancelled meanwhile may have booked already: its answer is awaited and given back."""
    picking = asyncio.ensure_future(pick)
    try:
        reply = await asyncio.shield(picking)
    except asyncio.CancelledError:
        picking.add_done_callback(lambda done: _give_back_late(done, give_back))
        raise
    except DeadlinePassed as late:
        raise PeerLost("the balancer did not answer in time") from late
    return Booking(reply, give_back)


def _give_back_late(done: asyncio.Future[_R], give_back: Callable[[str], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        give_back(done.result().booking_id)


async def _quietly(release: Awaitable[Any]) -> None:
    """Await a release that nobody waits for. One that is lost costs little: bookings end with their deadline."""
    try:
        await release
    except FathomError as error:
        log.warning("entrypoint.release.failed", error=error.kind)

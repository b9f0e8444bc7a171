"""Who may put blocks and a window state here, where do they wait, and when do they become a sequence's?

Runs on the event loop. A ticket names one staging area that no other handoff ever uses, so a late or stale writer can
only write into memory that nobody reads again. The engine thread copies from it into blocks that the ticket holds, and
nobody can find those before the commit.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from proto.common_pb2 import Ticket
from proto.decode_pb2 import CommitRequest, HoldReply, ReserveReply, ReserveRequest
from services.chassis import names
from services.chassis.errors import (
    BlocksLost,
    Cancelled,
    FathomError,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from services.chassis.handoff import HOLD_BEAT_SECONDS, NONCE_BYTES
from services.chassis.handoff_push import Piece, check_piece
from services.chassis.telemetry import log, span
from services.decode.landing import LAND_SECONDS, Landing
from services.decode.lanes import Lane
from services.decode.reservation import Reservation, State, check_commit, check_reserve, open_staging

if TYPE_CHECKING:
    import socket

    from services.chassis.engine_thread import EngineThread
    from services.chassis.handoff_lane import Hello
    from services.decode.admission import Limits
    from services.decode.rooms import Rooms

RESERVATION_SECONDS = 30.0
"""Longest life of a ticket: whoever needs longer to fill it is gone."""
WAIT_SECONDS = 10.0
"""Longest wait for blocks; then another replica is the better choice."""
_MAX_REFUSED = 4096
"""Ids of requests that ended before their KV came."""


class Counters(Protocol):
    """What an operator is told."""

    def count_handoff(self, backend: str, num_bytes: int) -> None:
        """One committed."""

    def count_abort(self, reason: str) -> None:
        """One was given back: "abort" by prefill, "lost" with it, "expired", "cancelled", "damaged"."""

    def count_late_write(self) -> None:
        """A piece came for a reservation that had ended."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A handoff that committed: the engine holds its blocks under the epoch."""

    epoch: int
    kv_tokens: int
    first_token_id: int
    cached_tokens: int


class Intake:
    """All handoffs of one replica, from reservation to start."""

    def __init__(
        self,
        thread: EngineThread,
        rooms: Rooms,
        limits: Limits,
        *,
        replica: str,
        boot_id: str,
        folder: Path | None,
        counters: Counters,
        wait_seconds: float = WAIT_SECONDS,
        reservation_seconds: float = RESERVATION_SECONDS,
    ) -> None:
        """folder: private and in shared memory, or None to have all bytes travel."""
        self.lane_port = 0
        """Where blocks come past gRPC; 0: nowhere."""
        self.folder = folder
        self._thread = thread
        self._rooms = rooms
        self._limits = limits
        self._replica = replica
        self._boot_id = boot_id
        self._counters = counters
        self._wait_seconds = wait_seconds
        self._reservation_seconds = reservation_seconds
        self._num_reservations = 0
        self._handoffs: dict[int, Reservation] = {}
        self._landed: dict[str, Landed] = {}
        self._waiters: dict[str, asyncio.Future[Landed]] = {}
        self._refused: dict[str, None] = {}  # in order of arrival

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Hold blocks for one sequence's KV and name the place where the missing ones go.

        Waits for room up to a bound, then raises Overloaded. Raises BlocksLost for another boot or model.
        """
        if request.request_id in self._refused:
            raise Cancelled("the request has ended on this replica")
        check_reserve(request, self._limits, boot_id=self._boot_id)
        self._num_reservations += 1
        epoch = self._num_reservations
        now = time.time()
        expires = min(request.deadline_unix_seconds, now + self._reservation_seconds)
        num_blocks = -(-request.kv_tokens // self._limits.block_tokens)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            present = await self._room(epoch, request, num_blocks, min(self._wait_seconds, expires - now))
            staging = await open_staging(nonce, num_blocks - present, self._limits, self.folder)
        except BaseException:
            self._thread.post(self._rooms.release, epoch)
            raise
        ticket = Ticket(
            replica=self._replica,
            boot_id=self._boot_id,
            epoch=epoch,
            nonce=nonce,
            request_id=request.request_id,
            expires_unix_seconds=expires,
        )
        landing = self._landing(epoch, num_blocks, present) if staging is not None else None
        handoff = Reservation(ticket, request.kv_tokens, num_blocks, present, staging, landing)
        self._handoffs[epoch] = handoff
        self._arm(handoff, expires - time.time())
        path = str(staging.path) if staging is not None and staging.path is not None else ""
        return ReserveReply(ticket=ticket, present_blocks=present, shm_path=path, lane_port=self.lane_port)

    async def hold(self, request: ReserveRequest) -> AsyncGenerator[HoldReply]:
        """Reserve, and keep the room for as long as the caller listens; give it to gRPC as the handler's response.

        Ends without an error after the commit. Ends with one, at once, when the reservation is given back for whatever
        reason; and when the caller goes, the reservation is given back, and whoever waits for it here hears so.
        """
        reply = await self.reserve(request)
        handoff = self._handoffs[reply.ticket.epoch]
        try:
            yield HoldReply(reserved=reply)
            while not handoff.ended.done():
                await asyncio.wait([handoff.ended], timeout=HOLD_BEAT_SECONDS)
                if not handoff.ended.done():
                    yield HoldReply()
        finally:
            if handoff.state is State.OPEN:
                self._drop(handoff, "lost", PeerLost("the prefill replica went away during the handoff"), is_told=True)
        error = handoff.ended.result()
        if error is not None:
            raise error

    def open_lane(self, hello: Hello, connection: socket.socket) -> Lane:
        """Let a connection bring the blocks of the reservation that it names. Raises BlocksLost for any other."""
        named = Ticket(boot_id=self._boot_id, epoch=hello.epoch, nonce=hello.nonce)
        handoff = self._find_for_writing(named)
        handoff.check_alone()
        if handoff.lane is not None or handoff.staging is None or handoff.landing is None:
            raise BlocksLost("this reservation has had a lane, or needs none")
        handoff.lane = Lane(connection, handoff.landing, handoff.staging, shares_file=hello.shares_file)
        return handoff.lane

    def lane_failed(self, lane: Lane, error: FathomError) -> None:
        """End the reservation of a lane that broke or carried nonsense; the holder hears why."""
        for handoff in [h for h in self._handoffs.values() if h.lane is lane and h.state is State.OPEN]:
            self._drop(handoff, "damaged", error)

    async def push(self, pieces: AsyncIterator[Piece]) -> int:
        """Take pieces of the ticket's blocks; return the bytes taken.

        Raises BlocksLost at once where the reservation's bytes come another way already, or by another call.
        """
        handoff: Reservation | None = None
        num_bytes = 0
        try:
            async for piece in pieces:
                handoff = handoff or self._begin_push(piece.head.ticket)
                try:
                    self._check_open(handoff)
                    check_piece(piece)  # not in a thread: it is in this core's cache, and waking one takes longer
                    await handoff.take(piece)
                except (BlocksLost, InvalidRequest) as error:
                    self._drop(handoff, "damaged", error)  # the holder hears why even if this call's status gets lost
                    raise
                num_bytes += len(piece.data)
        finally:
            if handoff is not None:
                handoff.is_pushed = False
        return num_bytes

    def _begin_push(self, ticket: Ticket) -> Reservation:
        handoff = self._find_for_writing(ticket)
        handoff.check_alone()
        handoff.is_pushed = True
        return handoff

    def _check_open(self, handoff: Reservation) -> None:
        if handoff.state is not State.OPEN or handoff.staging is None:
            self._counters.count_late_write()
            raise BlocksLost("the reservation ended while its blocks were arriving")

    async def commit(self, request: CommitRequest) -> None:
        """Verify what came and let the sequence start; if it is wrong, forget the ticket and raise BlocksLost."""
        handoff = self._find(request.ticket)
        handoff.state = State.COMMITTING
        try:
            check_commit(handoff, request, self._limits)
            with span("decode.intake") as hop:
                hop.set_attribute(names.BLOCKS, handoff.missing_blocks)
                hop.set_attribute(names.KV_TOKENS, handoff.kv_tokens)
                await self._land(handoff, request)
        except FathomError as error:
            self._drop(handoff, "damaged", error)
            raise
        except BaseException:  # the caller went away
            self._drop(handoff, "lost", PeerLost("the prefill replica went away during its commit"), is_told=True)
            raise
        finally:
            handoff.close()

    def abort(self, ticket: Ticket, reason: str) -> None:
        """Give a reservation back; unknown tickets are ignored, for aborting twice is harmless."""
        handoff = self._handoffs.get(ticket.epoch)
        if handoff is not None and handoff.is_named_by(ticket):
            log.info("decode.intake.aborted", request_id=ticket.request_id, reason=reason)
            self._drop(handoff, "abort", BlocksLost(f"the handoff was aborted: {reason}"))

    def abort_request(self, request_id: str) -> None:
        """Give back whatever a request still holds here."""
        for handoff in [h for h in self._handoffs.values() if h.ticket.request_id == request_id]:
            self._drop(handoff, "cancelled", Cancelled("the request has ended on the decode side"))

    def refuse_request(self, request_id: str) -> None:
        """Give back whatever a request holds here, and make no more room for it: it ended before its KV came."""
        self.abort_request(request_id)
        self._refused[request_id] = None
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def admit_request(self, request_id: str) -> None:
        """Make room for a request again: it had ended here, and comes back since others lost it."""
        self._refused.pop(request_id, None)

    async def landed(self, request_id: str) -> Landed:
        """Wait for the request's handoff to commit. Its blocks are then the caller's to start or release."""
        landed = self._landed.get(request_id)
        if landed is None:
            waiter = self._waiters.setdefault(request_id, asyncio.get_running_loop().create_future())
            try:
                landed = await waiter
            finally:
                self._waiters.pop(request_id, None)
            if self._landed.get(request_id) is not landed:
                raise BlocksLost("the handoff was given back right after its commit")
        del self._landed[request_id]
        handoff = self._handoffs.pop(landed.epoch)
        handoff.disarm()
        return landed

    def close(self) -> None:
        """Give everything back."""
        for handoff in tuple(self._handoffs.values()):
            self._drop(handoff, "cancelled", PeerLost("this decode replica is shutting down"))

    async def _room(self, epoch: int, request: ReserveRequest, num_blocks: int, wait_seconds: float) -> int:
        reply = self._thread.reply()
        self._thread.post(self._rooms.ask, reply, epoch, tuple(request.block_keys), num_blocks)
        try:
            async with asyncio.timeout(wait_seconds):
                return int(await reply)
        except TimeoutError:
            raise Overloaded(f"no room for {num_blocks} blocks within {wait_seconds:.1f} s") from None

    def _find_for_writing(self, ticket: Ticket) -> Reservation:
        try:
            return self._find(ticket)
        except BlocksLost:
            self._counters.count_late_write()
            raise

    def _find(self, ticket: Ticket) -> Reservation:
        """Return the open handoff that a ticket names. Raises BlocksLost for any other ticket."""
        handoff = self._handoffs.get(ticket.epoch)
        if handoff is None or handoff.state is not State.OPEN or not handoff.is_named_by(ticket):
            raise BlocksLost("this ticket names no open reservation; it expired, was used, or is of another boot")
        return handoff

    def _landing(self, epoch: int, num_blocks: int, present_blocks: int) -> Landing:
        return Landing(
            self._thread,
            self._rooms,
            epoch,
            first_block=present_blocks,
            num_blocks=num_blocks - present_blocks,
            block_bytes=self._limits.block_bytes,
            window_bytes=self._limits.window_bytes,
            on_late=self._counters.count_late_write,
        )

    async def _land(self, handoff: Reservation, request: CommitRequest) -> None:
        if handoff.staging is not None and handoff.landing is not None:
            if handoff.lane is not None:
                await _lane_end(handoff.lane)
            await handoff.landing.confirm(handoff.staging, request.block_xxh3, request.window_xxh3)
            if handoff.state is not State.COMMITTING:
                raise BlocksLost("the reservation ended during its commit")
        self._announce(handoff, request)
        num_bytes = handoff.missing_blocks * self._limits.block_bytes + self._limits.window_bytes
        self._counters.count_handoff(handoff.backend, num_bytes)

    def _announce(self, handoff: Reservation, request: CommitRequest) -> None:
        """Let the sequence start."""
        handoff.state = State.LANDED
        handoff.end(None)
        request_id = handoff.ticket.request_id
        landed = Landed(handoff.ticket.epoch, handoff.kv_tokens, request.first_token_id, request.cached_tokens)
        self._landed[request_id] = landed
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(landed)

    def _arm(self, handoff: Reservation, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        handoff.expiry = loop.call_later(max(seconds, 0.0), self._expire, handoff)

    def _expire(self, handoff: Reservation) -> None:
        if handoff.state is State.COMMITTING:
            self._arm(handoff, 1.0)
            return
        log.info("decode.intake.expired", request_id=handoff.ticket.request_id, state=handoff.state.value)
        self._drop(handoff, "expired", BlocksLost("the reservation expired"))

    def _drop(self, handoff: Reservation, reason: str, error: FathomError, *, is_told: bool = False) -> None:
        """Forget a handoff and give its blocks back; its holder hears the error.

        is_told: so does the request that waits for it here, for whoever should end it may not know yet.
        """
        if self._handoffs.get(handoff.ticket.epoch) is not handoff:
            return
        self._counters.count_abort(reason)
        del self._handoffs[handoff.ticket.epoch]
        landed = self._landed.get(handoff.ticket.request_id)
        if landed is not None and landed.epoch == handoff.ticket.epoch:
            del self._landed[handoff.ticket.request_id]
        is_committing = handoff.state is State.COMMITTING
        handoff.state = State.GONE
        handoff.disarm()
        handoff.end(error)
        if handoff.lane is not None:
            handoff.lane.close()
        waiter = self._waiters.get(handoff.ticket.request_id)
        if is_told and waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self._thread.post(self._rooms.release, handoff.ticket.epoch)
        if not is_committing:  # the commit still reads; it closes the area when it is done
            handoff.close()


async def _lane_end(lane: Lane) -> None:
    """Wait for what the sender wrote before its commit; nothing can come after that."""
    try:
        async with asyncio.timeout(LAND_SECONDS):
            error = await asyncio.shield(lane.ended)
    except TimeoutError:
        raise BlocksLost("the handoff's connection was still open at its commit") from None
    if error is not None:
        raise error

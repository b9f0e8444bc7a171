"""Who may put blocks and a window state here, where do they wait, and when do they become a sequence's?

Runs on the event loop. A ticket names one staging area that no other handoff ever uses, so a late or stale writer can
only write into memory that nobody reads again. The device is touched at the commit, by the engine thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING

from proto.common_pb2 import Ticket
from proto.decode_pb2 import CommitRequest, PushChunk, ReserveReply, ReserveRequest
from services.chassis import names
from services.chassis.errors import BlocksLost, DeadlinePassed, InvalidRequest, Overloaded, PromptTooLong
from services.chassis.handoff import NONCE_BYTES, Staging, block_crc32, check_chunk
from services.chassis.telemetry import log, span

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread, Reply
    from services.decode.admission import Limits
    from services.decode.rooms import Rooms

RESERVATION_SECONDS = 30.0
"""Longest life of a ticket: whoever needs longer to fill it is gone."""
WAIT_SECONDS = 10.0
"""Longest wait for blocks; then another replica is the better choice."""
_GROUP_BYTES = 64 << 20
"""Written between two steps: tens of milliseconds."""


class _State(Enum):
    OPEN = "open"
    COMMITTING = "committing"
    LANDED = "landed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Landed:
    """A handoff that committed: the engine holds its blocks under the epoch."""

    epoch: int
    kv_tokens: int
    first_token_id: int
    cached_tokens: int


@dataclass(slots=True, eq=False)
class _Handoff:
    ticket: Ticket
    kv_tokens: int
    num_blocks: int
    present_blocks: int
    staging: Staging | None
    """None when nothing has to travel."""
    state: _State = _State.OPEN
    expiry: asyncio.TimerHandle | None = None
    pushed_bytes: int = 0

    @property
    def missing_blocks(self) -> int:
        return self.num_blocks - self.present_blocks


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
        on_bytes: Callable[[str, int], None],
        wait_seconds: float = WAIT_SECONDS,
        reservation_seconds: float = RESERVATION_SECONDS,
    ) -> None:
        """folder: private and in shared memory, or None to take blocks over gRPC only.  on_bytes: backend, bytes."""
        self._thread = thread
        self._rooms = rooms
        self._limits = limits
        self._replica = replica
        self._boot_id = boot_id
        self._folder = folder
        self._on_bytes = on_bytes
        self._wait_seconds = wait_seconds
        self._reservation_seconds = reservation_seconds
        self._num_reservations = 0
        self._handoffs: dict[int, _Handoff] = {}
        self._landed: dict[str, Landed] = {}
        self._waiters: dict[str, asyncio.Future[Landed]] = {}

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Hold blocks for one sequence's KV and name the place where the missing ones go.

        Waits for room up to a bound, then raises Overloaded. Raises BlocksLost for another boot or model.
        """
        self._check_reserve(request)
        self._num_reservations += 1
        epoch = self._num_reservations
        now = time.time()
        expires = min(request.deadline_unix_seconds, now + self._reservation_seconds)
        num_blocks = -(-request.kv_tokens // self._limits.block_tokens)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            present = await self._room(epoch, request, num_blocks, min(self._wait_seconds, expires - now))
            staging = await self._staging(nonce, num_blocks - present)
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
        handoff = _Handoff(ticket, request.kv_tokens, num_blocks, present, staging)
        self._handoffs[epoch] = handoff
        self._arm(handoff, expires - time.time())
        path = str(staging.path) if staging is not None and staging.path is not None else ""
        return ReserveReply(ticket=ticket, present_blocks=present, shm_path=path)

    async def push(self, chunks: AsyncIterator[PushChunk]) -> int:
        """Take pieces of blocks into the ticket's staging area; return the bytes taken."""
        handoff: _Handoff | None = None
        num_bytes = 0
        async for chunk in chunks:
            if handoff is None:
                handoff = self._find(chunk.ticket)
            check_chunk(chunk)
            if handoff.state is not _State.OPEN or handoff.staging is None:
                raise BlocksLost("the reservation ended while its blocks were arriving")
            if chunk.is_window:
                handoff.staging.write_window(chunk.offset_bytes, chunk.data)
            else:
                handoff.staging.write(chunk.block_index - handoff.present_blocks, chunk.offset_bytes, chunk.data)
            handoff.pushed_bytes += len(chunk.data)
            num_bytes += len(chunk.data)
        return num_bytes

    async def commit(self, request: CommitRequest) -> None:
        """Verify what was staged and give it to the engine; if it is wrong, forget the ticket and raise BlocksLost."""
        handoff = self._find(request.ticket)
        handoff.state = _State.COMMITTING
        try:
            self._check_commit(handoff, request)
            with span("decode.intake") as hop:
                hop.set_attribute(names.BLOCKS, handoff.missing_blocks)
                hop.set_attribute(names.KV_TOKENS, handoff.kv_tokens)
                await self._land(handoff, request)
        except BaseException:
            self._drop(handoff)
            raise
        finally:
            _close(handoff)

    def abort(self, ticket: Ticket, reason: str) -> None:
        """Give a reservation back; unknown tickets are ignored, for aborting twice is harmless."""
        handoff = self._handoffs.get(ticket.epoch)
        if handoff is not None and _is_same(handoff.ticket, ticket):
            log.info("decode.intake.aborted", request_id=ticket.request_id, reason=reason)
            self._drop(handoff)

    def abort_request(self, request_id: str) -> None:
        """Give back whatever a request still holds here."""
        for handoff in [h for h in self._handoffs.values() if h.ticket.request_id == request_id]:
            self._drop(handoff)

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
        _disarm(handoff)
        return landed

    def close(self) -> None:
        """Give everything back."""
        for handoff in tuple(self._handoffs.values()):
            self._drop(handoff)

    def _check_reserve(self, request: ReserveRequest) -> None:
        limits = self._limits
        if request.boot_id != self._boot_id:
            raise BlocksLost("this replica was restarted since it was picked")
        if request.fingerprint != limits.fingerprint:
            raise BlocksLost("the blocks were computed for another model fingerprint than this replica's")
        if request.window_bytes != limits.window_bytes:
            raise InvalidRequest(
                f"the KV layouts differ: a window state of {request.window_bytes} bytes is to be handed over"
                f" where one has {limits.window_bytes}"
            )
        if len(request.block_keys) != request.kv_tokens // limits.block_tokens or request.kv_tokens < 1:
            raise InvalidRequest(f"{len(request.block_keys)} block keys do not name {request.kv_tokens} tokens of KV")
        if request.kv_tokens >= limits.context_tokens:
            raise PromptTooLong(f"{request.kv_tokens} tokens of KV do not fit; {limits.context_tokens - 1} would")
        if request.deadline_unix_seconds <= time.time():
            raise DeadlinePassed("the handoff's deadline passed")

    async def _room(self, epoch: int, request: ReserveRequest, num_blocks: int, wait_seconds: float) -> int:
        reply = self._thread.reply()
        self._thread.post(self._rooms.ask, reply, epoch, tuple(request.block_keys), num_blocks)
        try:
            async with asyncio.timeout(wait_seconds):
                return int(await reply)
        except TimeoutError:
            raise Overloaded(f"no room for {num_blocks} blocks within {wait_seconds:.1f} s") from None

    async def _staging(self, nonce: bytes, num_blocks: int) -> Staging | None:
        """Make the staging area: in shared memory if there is any left, else in plain memory."""
        if num_blocks == 0 and self._limits.window_bytes == 0:
            return None
        # In a thread: claiming many megabytes of pages takes a while. If the caller goes away, the area goes as well.
        making = asyncio.ensure_future(asyncio.to_thread(self._make_staging, nonce, num_blocks))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: made.result().close())
            raise

    def _make_staging(self, nonce: bytes, num_blocks: int) -> Staging:
        make = partial(
            Staging,
            nonce=nonce,
            num_blocks=num_blocks,
            block_bytes=self._limits.block_bytes,
            window_bytes=self._limits.window_bytes,
        )
        try:
            return make(folder=self._folder)
        except OSError as error:
            num_bytes = num_blocks * self._limits.block_bytes + self._limits.window_bytes
            log.warning("decode.intake.shm_full", num_bytes=num_bytes, reason=str(error))
            return make(folder=None)

    def _find(self, ticket: Ticket) -> _Handoff:
        """Return the open handoff that a ticket names. Raises BlocksLost for any other ticket."""
        handoff = self._handoffs.get(ticket.epoch)
        if handoff is None or handoff.state is not _State.OPEN or not _is_same(handoff.ticket, ticket):
            raise BlocksLost("this ticket names no open reservation; it expired, was used, or is of another boot")
        return handoff

    def _check_commit(self, handoff: _Handoff, request: CommitRequest) -> None:
        if request.kv_tokens != handoff.kv_tokens or len(request.block_crc32) != handoff.missing_blocks:
            raise BlocksLost(
                f"{len(request.block_crc32)} blocks for {request.kv_tokens} tokens were committed where"
                f" {handoff.missing_blocks} for {handoff.kv_tokens} were reserved"
            )
        if request.first_token_id >= self._limits.vocab_tokens:
            raise InvalidRequest(f"the first token must be below {self._limits.vocab_tokens}")

    async def _land(self, handoff: _Handoff, request: CommitRequest) -> None:
        epoch = handoff.ticket.epoch
        size = max(1, _GROUP_BYTES // self._limits.block_bytes)
        blocks = range(handoff.missing_blocks)
        writing: Reply[None] | None = None
        for start in range(0, len(blocks), size):
            if writing is not None:
                await writing
            payloads = await asyncio.to_thread(_verified, handoff, blocks[start : start + size], request.block_crc32)
            if handoff.state is not _State.COMMITTING:
                raise BlocksLost("the reservation ended during its commit")
            first = handoff.present_blocks + start
            writing = self._thread.call(self._rooms.write, epoch, first, payloads)
        if self._limits.window_bytes:
            if writing is not None:
                await writing
            state = await asyncio.to_thread(_verified_window, handoff, request.window_crc32)
            if handoff.state is not _State.COMMITTING:
                raise BlocksLost("the reservation ended during its commit")
            writing = self._thread.call(self._rooms.write_window, epoch, state)
        self._announce(handoff, request)
        if writing is not None:
            await writing
        num_bytes = handoff.missing_blocks * self._limits.block_bytes + self._limits.window_bytes
        self._on_bytes("grpc" if handoff.pushed_bytes else "shm", num_bytes)

    def _announce(self, handoff: _Handoff, request: CommitRequest) -> None:
        """Let the sequence start in the same pause of the engine that takes its last blocks in."""
        handoff.state = _State.LANDED
        request_id = handoff.ticket.request_id
        landed = Landed(handoff.ticket.epoch, handoff.kv_tokens, request.first_token_id, request.cached_tokens)
        self._landed[request_id] = landed
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(landed)

    def _arm(self, handoff: _Handoff, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        handoff.expiry = loop.call_later(max(seconds, 0.0), self._expire, handoff)

    def _expire(self, handoff: _Handoff) -> None:
        if handoff.state is _State.COMMITTING:
            self._arm(handoff, 1.0)
            return
        log.info("decode.intake.expired", request_id=handoff.ticket.request_id, state=handoff.state.value)
        self._drop(handoff)

    def _drop(self, handoff: _Handoff) -> None:
        """Forget a handoff and give its blocks back."""
        if self._handoffs.get(handoff.ticket.epoch) is not handoff:
            return
        del self._handoffs[handoff.ticket.epoch]
        landed = self._landed.get(handoff.ticket.request_id)
        if landed is not None and landed.epoch == handoff.ticket.epoch:
            del self._landed[handoff.ticket.request_id]
        is_committing = handoff.state is _State.COMMITTING
        handoff.state = _State.GONE
        _disarm(handoff)
        self._thread.post(self._rooms.release, handoff.ticket.epoch)
        if not is_committing:  # the commit still reads; it closes the area when it is done
            _close(handoff)


def _is_same(mine: Ticket, theirs: Ticket) -> bool:
    return mine.boot_id == theirs.boot_id and compare_digest(mine.nonce, theirs.nonce)


def _verified(handoff: _Handoff, blocks: range, crcs: Sequence[int]) -> list[bytes]:
    """Copy blocks out of the staging area, then check the copies: nobody can change those any more."""
    assert handoff.staging is not None, "blocks are missing, so there is an area for them"
    payloads = []
    for block in blocks:
        payload = handoff.staging.read(block)
        if block_crc32(payload) != crcs[block]:
            raise BlocksLost(f"block {handoff.present_blocks + block} arrived damaged")
        payloads.append(payload)
    return payloads


def _verified_window(handoff: _Handoff, crc: int) -> bytes:
    """As `_verified`, for the window state."""
    assert handoff.staging is not None, "a window state travels, so there is an area for it"
    payload = handoff.staging.read_window()
    if block_crc32(payload) != crc:
        raise BlocksLost("the window state arrived damaged")
    return payload


def _disarm(handoff: _Handoff) -> None:
    if handoff.expiry is not None:
        handoff.expiry.cancel()


def _close(handoff: _Handoff) -> None:
    if handoff.staging is not None:
        handoff.staging.close()
        handoff.staging = None

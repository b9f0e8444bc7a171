"""How does a prompt's KV get to the decode replica? Reserve, push, commit; or abort, said out loud."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import structlog

from proto.common_pb2 import Ticket
from proto.decode_pb2 import AbortRequest, CommitRequest, HoldReply, PushReply, ReserveReply, ReserveRequest
from proto.decode_pb2_grpc import DecodeStub, IntakeStub
from proto.prefill_pb2 import PrefillDeliver
from services.chassis.errors import BlocksLost, DeadlinePassed, FathomError, PeerLost
from services.chassis.handoff import HOLD_SILENCE_SECONDS, PeerStaging, StagingUnavailableError, close_soon
from services.chassis.handoff_lane import LaneUnavailableError, connect, connect_beside
from services.chassis.handoff_push import PUSH_METHOD
from services.prefill.pushing import Blocks, pieces
from services.prefill.sending import SENDERS, Sender, Way

_ABORT_SECONDS = 1.0
_REASON_SECONDS = 0.5
"""Why decode refused bytes is known to the call that holds the room; it comes right behind."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Cargo:
    """What is handed over."""

    request_id: str
    fingerprint: bytes
    keys: Sequence[bytes]
    kv_tokens: int
    num_blocks: int
    block_bytes: int
    window_bytes: int
    """Of the window state; 0 for a model without windows."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What the handoff took."""

    num_bytes: int
    backend: str


class Counters(Protocol):
    """What an operator is told."""

    def count_handoff(self, backend: str, num_bytes: int) -> None:
        """One committed."""

    def count_abort(self, reason: str) -> None:
        """One was given up: "moved" to another target, or "ended" with its request."""

    def count_load(self, num_tokens: int, *, seconds: float, recompute_seconds: float) -> None:
        """KV of so many tokens came from the KV store in that time; computing them would have taken the other."""


_aborting: set[asyncio.Task[None]] = set()
"""Aborts nobody waits for; the event loop itself keeps only weak references to tasks."""


async def aborts_said() -> None:
    """Wait for the aborts that are under way: a replica that shuts down says them before it goes."""
    if _aborting:
        await asyncio.wait(_aborting)


class Handoff:
    """One sequence's way to one decode replica. Room is asked for at once; `deliver` or `abandon` ends it.

    The room is held by a call that lives until the commit. So decode knows at once when this replica is gone, and this
    replica when decode is, or when decode gave the room back.
    """

    def __init__(
        self, channel: grpc.aio.Channel, target: PrefillDeliver, cargo: Cargo, *, deadline_unix_seconds: float
    ) -> None:
        self.replica = target.replica
        self._stub = DecodeStub(channel)
        self._intake = IntakeStub(channel)
        self._push: Any = channel.stream_unary(
            PUSH_METHOD, request_serializer=bytes, response_deserializer=PushReply.FromString
        )
        self._cargo = cargo
        self._deadline = deadline_unix_seconds
        self._backend = "grpc"
        self._host = target.address.rpartition(":")[0].strip("[]")
        self._reserved: asyncio.Future[ReserveReply] = asyncio.get_running_loop().create_future()
        # Tasks of their own: whoever stops waiting for the ticket must still be able to give it back.
        self._holding = asyncio.create_task(self._hold(target.boot_id), name="handoff hold")
        self._mapping = asyncio.create_task(self._find_way(), name="handoff way")
        for task in (self._holding, self._mapping):
            task.add_done_callback(_take_note)

    async def deliver(self, blocks: Blocks, *, first_token_id: int, cached_tokens: int) -> Delivered:
        """Push the blocks that are missing over there and the window, then commit.

        Raises FathomError; the caller then abandons it.
        """
        reservation = await asyncio.shield(self._reserved)
        work = self._send(reservation, blocks, first_token_id, cached_tokens)
        sending = asyncio.create_task(work, name="handoff send")
        sending.add_done_callback(_take_note)
        try:
            await asyncio.wait({sending, self._holding}, return_when=asyncio.FIRST_COMPLETED)
            if self._holding.done():  # without an error: it has committed, and the answer to that is on its way
                self._holding.result()
            await sending
        except PeerLost:
            # A call that decode ended while we still wrote into it looks like a lost peer. The held one knows better.
            await asyncio.wait({self._holding}, timeout=_REASON_SECONDS)
            if not self._holding.done():
                raise BlocksLost(f"{self.replica} refused the blocks") from None
            self._holding.result()  # without an error: it has committed, and only the answer was lost
        finally:
            sending.cancel()
        num_blocks = self._cargo.num_blocks - reservation.present_blocks
        num_bytes = num_blocks * self._cargo.block_bytes + self._cargo.window_bytes
        return Delivered(num_bytes=num_bytes, backend=self._backend)

    def abandon(self, reason: str) -> None:
        """Give the reservation back, in the background: a dead peer must not hold up anybody."""
        aborting = asyncio.create_task(self._abort(reason), name="handoff abort")
        _aborting.add(aborting)
        aborting.add_done_callback(_aborting.discard)

    async def _abort(self, reason: str) -> None:
        try:
            if self._reserved.done() and not self._holding.done():
                ticket = self._reserved.result().ticket
                await self._stub.Abort(AbortRequest(ticket=ticket, reason=reason), timeout=_ABORT_SECONDS)
        except FathomError as error:  # then the end of the call that held the room says it
            log.info("handoff.abort.unsaid", error_kind=error.kind, reason=error.message)
        finally:
            self._holding.cancel()
            self._reserved.cancel()  # by itself, if it was so early that the other has not even begun
            with suppress(FathomError, OSError, asyncio.CancelledError):
                close_soon((await self._mapping).close)

    async def _hold(self, boot_id: str) -> None:
        """Ask for room and keep it until the commit. Raises the FathomError that it was lost with."""
        call: Any = None
        try:
            seconds = self._seconds_left()
            # The caller sends nothing after this: a message that meets the end of a call makes gRPC forget its status.
            call = self._intake.Hold(self._ask(boot_id), timeout=seconds)
            while (reply := await _next_reply(call, seconds)) is not None:
                if not self._reserved.done():
                    self._reserved.set_result(reply.reserved)
                seconds = HOLD_SILENCE_SECONDS
            if not self._reserved.done():
                self._lose(PeerLost(f"{self.replica} gave no answer"))
        except TimeoutError:
            self._lose(PeerLost(f"{self.replica} has said nothing for {seconds:g} s"))
        except FathomError as error:
            self._lose(error)
        finally:
            self._reserved.cancel()
            if call is not None:
                call.cancel()

    def _lose(self, error: FathomError) -> None:
        if not self._reserved.done():
            self._reserved.set_exception(error)
            self._reserved.exception()  # nobody may have asked for it yet, or ever
        raise error

    def _ask(self, boot_id: str) -> ReserveRequest:
        return ReserveRequest(
            request_id=self._cargo.request_id,
            fingerprint=self._cargo.fingerprint,
            boot_id=boot_id,
            block_keys=self._cargo.keys,
            kv_tokens=self._cargo.kv_tokens,
            deadline_unix_seconds=self._deadline,
            window_bytes=self._cargo.window_bytes,
        )

    async def _find_way(self) -> Way:
        """Map the file that the reservation names, and connect to its lane, while the last chunk is computed."""
        reservation = await asyncio.shield(self._reserved)
        if self._cargo.num_blocks == reservation.present_blocks and not self._cargo.window_bytes:
            return Way()
        return await asyncio.to_thread(self._open_way, reservation)

    def _open_way(self, reservation: ReserveReply) -> Way:
        """Blocks the calling thread, for seconds if the network swallows what is sent to the lane."""
        way, num_blocks = Way(), self._cargo.num_blocks - reservation.present_blocks
        sizes = {"block_bytes": self._cargo.block_bytes, "window_bytes": self._cargo.window_bytes}
        if reservation.shm_path:
            try:
                way.staging = PeerStaging(
                    reservation.shm_path, nonce=reservation.ticket.nonce, num_blocks=num_blocks, **sizes
                )
            except StagingUnavailableError as error:  # then decode runs on another host
                log.info("handoff.shm.unavailable", replica=self.replica, reason=str(error))
        if reservation.lane_port:
            self._open_lane(way, reservation)
            if way.backend == "tcp":
                way.make_buffers(num_blocks, **sizes)
        return way

    def _open_lane(self, way: Way, reservation: ReserveReply) -> None:
        ticket, port = reservation.ticket, reservation.lane_port
        try:
            if way.staging is not None:
                with suppress(LaneUnavailableError):
                    way.lane = connect_beside(Path(reservation.shm_path), ticket)
            if way.lane is None and self._host:
                way.lane = connect(self._host, port, ticket, shares_file=way.staging is not None)
        except LaneUnavailableError as error:
            log.info("handoff.lane.unavailable", replica=self.replica, reason=str(error))

    async def _send(self, reservation: ReserveReply, blocks: Blocks, first_token_id: int, cached_tokens: int) -> None:
        cargo = self._cargo
        wanted = range(reservation.present_blocks, cargo.num_blocks)
        way = await asyncio.shield(self._mapping)
        self._backend = way.backend
        checksums: list[int] = []
        if way.backend != "grpc":
            checksums = await self._send_past_grpc(way, wanted, blocks)
        elif wanted or cargo.window_bytes:
            checksums = await self._push_all(reservation.ticket, wanted, blocks)
        await self._stub.Commit(
            CommitRequest(
                ticket=reservation.ticket,
                block_xxh3=checksums[: len(wanted)],
                window_xxh3=checksums[-1] if cargo.window_bytes else 0,
                kv_tokens=cargo.kv_tokens,
                first_token_id=first_token_id,
                cached_tokens=cached_tokens,
            ),
            timeout=self._seconds_left(),
        )
        close_soon(way.close)

    async def _push_all(self, ticket: Ticket, wanted: range, blocks: Blocks) -> list[int]:
        checksums: list[int] = []
        failures: list[Exception] = []

        async def messages() -> AsyncIterator[bytes]:
            sizes = {"block_bytes": self._cargo.block_bytes, "window_bytes": self._cargo.window_bytes}
            made = pieces(ticket, wanted, blocks, **sizes, checksums=checksums, deadline_unix_seconds=self._deadline)
            try:
                async for message in made:
                    yield message
            except Exception as error:
                failures.append(error)
                raise

        try:
            await self._push(messages(), timeout=self._seconds_left())
        except asyncio.CancelledError:
            if failures:  # gRPC knows no other end of a call whose messages failed
                raise failures[0] from None
            raise
        return checksums

    async def _send_past_grpc(self, way: Way, wanted: range, blocks: Blocks) -> list[int]:
        cargo = self._cargo
        sender = Sender(way, wanted, blocks, block_bytes=cargo.block_bytes, window_bytes=cargo.window_bytes)
        try:
            return await asyncio.get_running_loop().run_in_executor(SENDERS, sender.send, self._deadline)
        except BaseException:
            sender.stop()
            raise

    def _seconds_left(self) -> float:
        left = self._deadline - time.time()
        if left <= 0:
            raise DeadlinePassed("the handoff's deadline passed")
        return left


def _take_note(task: asyncio.Task[Any]) -> None:
    """An error that nobody waited for was told another way, or concerns nobody."""
    if not task.cancelled():
        task.exception()


async def _next_reply(call: Any, seconds: float) -> HoldReply | None:
    """Return None after the last one. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        reply = await call.read()
    return None if reply is grpc.aio.EOF else reply

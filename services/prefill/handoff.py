"""How does a prompt's KV get to the decode replica? Reserve, push, commit; or abort, said out loud."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog

from proto.common_pb2 import Ticket
from proto.decode_pb2 import AbortRequest, CommitRequest, PushChunk, ReserveReply, ReserveRequest
from proto.decode_pb2_grpc import DecodeStub
from proto.prefill_pb2 import PrefillDeliver
from services.chassis.errors import DeadlinePassed, FathomError
from services.chassis.handoff import StagingUnavailableError, block_crc32, chunks_of, fill_staging

_GROUP_BYTES = 64 << 20
"""Copied off the device between two steps: tens of milliseconds, and a bound on host memory."""
_ABORT_SECONDS = 2.0

ReadBlocks = Callable[[range], Awaitable[list[bytes]]]
"""Copies blocks of the prompt's table off the device."""
ReadWindow = Callable[[], Awaitable[bytes]]
"""Copies the prompt's window state off the device."""

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


_aborting: set[asyncio.Task[None]] = set()
"""Aborts nobody waits for; the event loop itself keeps only weak references to tasks."""


class Handoff:
    """One sequence's way to one decode replica. Room is asked for at once; `deliver` or `abandon` ends it."""

    def __init__(
        self, channel: grpc.aio.Channel, target: PrefillDeliver, cargo: Cargo, *, deadline_unix_seconds: float
    ) -> None:
        self.replica = target.replica
        self._stub = DecodeStub(channel)
        self._cargo = cargo
        self._deadline = deadline_unix_seconds
        # A task of its own: whoever stops waiting for the ticket must still be able to give it back.
        self._reserving = asyncio.create_task(self._reserve(target.boot_id), name="handoff reserve")

    async def deliver(
        self, read: ReadBlocks, read_window: ReadWindow, *, first_token_id: int, cached_tokens: int
    ) -> Delivered:
        """Push the blocks that are missing over there and the window, then commit.

        Raises FathomError; the caller then abandons it.
        """
        reservation = await asyncio.shield(self._reserving)
        wanted = range(reservation.present_blocks, self._cargo.num_blocks)
        backend = "shm" if reservation.shm_path and await self._can_share(reservation, wanted) else "grpc"
        push = self._push_shm if backend == "shm" else self._push_grpc
        crcs = await push(reservation, wanted, read, read_window)
        await self._stub.Commit(
            CommitRequest(
                ticket=reservation.ticket,
                block_crc32=crcs[: len(wanted)],
                window_crc32=crcs[-1] if self._cargo.window_bytes else 0,
                kv_tokens=self._cargo.kv_tokens,
                first_token_id=first_token_id,
                cached_tokens=cached_tokens,
            ),
            timeout=self._seconds_left(),
        )
        num_bytes = len(wanted) * self._cargo.block_bytes + self._cargo.window_bytes
        return Delivered(num_bytes=num_bytes, backend=backend)

    def abandon(self, reason: str) -> None:
        """Give the reservation back, in the background: a dead peer must not hold up anybody."""
        aborting = asyncio.create_task(self._abort(reason), name="handoff abort")
        _aborting.add(aborting)
        aborting.add_done_callback(_aborting.discard)

    async def _abort(self, reason: str) -> None:
        try:
            reservation = await self._reserving
            await self._stub.Abort(AbortRequest(ticket=reservation.ticket, reason=reason), timeout=_ABORT_SECONDS)
        except FathomError as error:  # there is no ticket, or it will expire by itself
            log.info("handoff.abort.unsaid", error_kind=error.kind, reason=error.message)

    async def _reserve(self, boot_id: str) -> ReserveReply:
        return await self._stub.Reserve(
            ReserveRequest(
                request_id=self._cargo.request_id,
                fingerprint=self._cargo.fingerprint,
                boot_id=boot_id,
                block_keys=self._cargo.keys,
                kv_tokens=self._cargo.kv_tokens,
                deadline_unix_seconds=self._deadline,
                window_bytes=self._cargo.window_bytes,
            ),
            timeout=self._seconds_left(),
        )

    def _seconds_left(self) -> float:
        left = self._deadline - time.time()
        if left <= 0:
            raise DeadlinePassed("the handoff's deadline passed")
        return left

    async def _can_share(self, reservation: ReserveReply, wanted: range) -> bool:
        """Say whether the file named by the reservation is here: then both run on one host."""
        try:
            await self._fill(reservation, wanted, 0, [])
        except StagingUnavailableError as error:
            log.info("handoff.shm.unavailable", replica=self.replica, reason=str(error))
            return False
        return True

    async def _fill(
        self, reservation: ReserveReply, wanted: range, first: int, payloads: list[bytes], window: bytes = b""
    ) -> list[int]:
        return await asyncio.to_thread(
            fill_staging,
            reservation.shm_path,
            nonce=reservation.ticket.nonce,
            num_blocks=len(wanted),
            block_bytes=self._cargo.block_bytes,
            first_block=first,
            payloads=payloads,
            window_bytes=self._cargo.window_bytes,
            window=window,
        )

    async def _push_shm(
        self, reservation: ReserveReply, wanted: range, read: ReadBlocks, read_window: ReadWindow
    ) -> list[int]:
        """Return the checksums of the blocks, then the window's if there is one."""
        crcs: list[int] = []
        for group in self._groups(wanted):
            crcs += await self._fill(reservation, wanted, group.start - wanted.start, await read(group))
        if self._cargo.window_bytes:
            crcs += await self._fill(reservation, wanted, 0, [], await read_window())
        return crcs

    async def _push_grpc(
        self, reservation: ReserveReply, wanted: range, read: ReadBlocks, read_window: ReadWindow
    ) -> list[int]:
        """As `_push_shm`."""
        crcs: list[int] = []
        if wanted or self._cargo.window_bytes:
            pieces = self._pieces(reservation, wanted, read, read_window, crcs)
            await self._stub.Push(pieces, timeout=self._seconds_left())
        return crcs

    async def _pieces(
        self, reservation: ReserveReply, wanted: range, read: ReadBlocks, read_window: ReadWindow, crcs: list[int]
    ) -> AsyncIterator[PushChunk]:
        ticket: Ticket | None = reservation.ticket
        for group in self._groups(wanted):
            payloads = await read(group)
            for block, payload in zip(group, payloads, strict=True):
                # In a thread: the checksums of a block take milliseconds that belong to other requests.
                chunks, crc = await asyncio.to_thread(_cut, payload, block, ticket)
                crcs.append(crc)
                ticket = None
                for chunk in chunks:
                    yield chunk
        if self._cargo.window_bytes:
            chunks, crc = await asyncio.to_thread(_cut, await read_window(), None, ticket)
            crcs.append(crc)
            for chunk in chunks:
                yield chunk

    def _groups(self, wanted: range) -> list[range]:
        size = max(1, _GROUP_BYTES // self._cargo.block_bytes)
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def _cut(payload: bytes, block: int | None, ticket: Ticket | None) -> tuple[list[PushChunk], int]:
    """Cut a block, or with None the window state."""
    chunks = chunks_of(payload, block_index=block or 0, ticket=ticket, is_window=block is None)
    return list(chunks), block_crc32(payload)

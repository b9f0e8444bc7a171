"""How do blocks come from the KV store, without a damaged, late or missing one ever being used?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import grpc.aio
import structlog

from proto.kvstore_pb2 import BlockChunk, ReadRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError
from services.chassis.handoff import block_crc32
from services.chassis.kvstore_shards import keys_of, parse_replicas, split
from services.chassis.local_reads import LocalReads

_LATE_SECONDS = 5.0
_LEAST_LATE_SECONDS = 0.5

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Stores:
    """The replicas of the KV store, as one caller sees them."""

    channels: Mapping[str, grpc.aio.Channel]
    """By the name that placement goes by."""
    local: Mapping[str, LocalReads] = field(default_factory=dict)
    """Those that may run on this host: their files can be read without them."""
    late_until: dict[str, float] = field(default_factory=dict)
    """Replicas whose last read never came: each is spared for a while, or every hit would cost what it was to save."""

    @classmethod
    def of(cls, address: str, channel: Callable[[str], grpc.aio.Channel]) -> Stores | None:
        """Return the replicas that a `kvstore_address` names, None for an empty one. Raises ValueError."""
        channels = {replica.name: channel(replica.address) for replica in parse_replicas(address)}
        return cls(channels, {name: LocalReads(each) for name, each in channels.items()}) if channels else None

    @classmethod
    def single(cls, channel: grpc.aio.Channel) -> Stores:
        """Return the simple case: one replica, over gRPC."""
        return cls({"kvstore": channel})


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that somebody would rather read than compute."""

    keys: Sequence[bytes]
    """Of the whole chain up to the last wanted one: a block's place follows from its chain."""
    first_index: int
    """Of the first wanted one."""
    fingerprint: bytes
    block_bytes: int
    request_id: str = ""
    """Its lease on the blocks ends with this read."""
    pending_seconds: float = 0.0
    """How long blocks that are just being written may be waited for."""


async def read_blocks(stores: Stores, wanted: Wanted, *, timeout_seconds: float) -> AsyncGenerator[bytes | memoryview]:
    """Yield the payloads of the leading wanted blocks, verified, in order.

    Ends early, without an error, at the first block that is missing, late or damaged: whoever wants the rest computes
    it. When a replica is away, the next in its groups' order is asked for them, and the last one's absence is a miss.
    """
    deadline = time.monotonic() + timeout_seconds
    now = time.monotonic()
    names, index = {name for name in stores.channels if stores.late_until.get(name, now) <= now}, wanted.first_index
    while index < len(wanted.keys) and names:
        reading = _Reading(stores, wanted, index, names, deadline)
        async with aclosing(reading.blocks()) as blocks:
            async for payload in blocks:
                index += 1
                yield payload
        if reading.lost is None:
            return
        names.discard(reading.lost)


class _Reading:
    """One pass over the replicas, one call to each, until the end or until one of them is lost."""

    def __init__(self, stores: Stores, wanted: Wanted, first_index: int, names: set[str], deadline: float) -> None:
        self.lost: str | None = None
        self._stores = stores
        self._wanted = wanted
        self._runs = split(wanted.keys, first_index, sorted(names))
        self._deadline = deadline

    async def blocks(self) -> AsyncGenerator[bytes | memoryview]:
        async with AsyncExitStack() as stack:
            sources: dict[str, AsyncGenerator[bytes | memoryview]] = {}
            for run in self._runs:
                if run.replica not in sources:
                    keys = keys_of(run.replica, self._runs, self._wanted.keys)
                    sources[run.replica] = await stack.enter_async_context(aclosing(self._from(run.replica, keys)))
                for _ in range(run.num_blocks):
                    asked_at = time.monotonic()
                    try:
                        async with asyncio.timeout(self._deadline - time.monotonic()):
                            payload = await anext(sources[run.replica], None)
                    except TimeoutError:
                        log.info("kvstore.read.late", replica=run.replica)
                        self._note_late(run.replica, asked_at)
                        return
                    except (FathomError, grpc.aio.AioRpcError) as error:
                        log.info("kvstore.read.ended", replica=run.replica, reason=str(error))
                        self.lost = run.replica
                        return
                    if payload is None:
                        return
                    yield payload

    def _note_late(self, replica: str, asked_at: float) -> None:
        now = time.monotonic()
        # Else it was not the replica that took so long, but whoever used the blocks before.
        if now - asked_at > self._wanted.pending_seconds + _LEAST_LATE_SECONDS:
            self._stores.late_until[replica] = now + _LATE_SECONDS

    async def _from(self, replica: str, keys: list[bytes]) -> AsyncGenerator[bytes | memoryview]:
        """Yield one replica's blocks: from its files as far as they can be had, then by its own hand."""
        wanted = self._wanted
        num_read = 0
        local = self._stores.local.get(replica)
        if local is not None:
            found = local.read(
                keys, fingerprint=wanted.fingerprint, block_bytes=wanted.block_bytes, request_id=wanted.request_id
            )
            async with aclosing(found):
                async for payload in found:
                    num_read += 1
                    yield payload
        if num_read == len(keys):
            return
        request = ReadRequest(
            block_keys=keys[num_read:],
            fingerprint=wanted.fingerprint,
            request_id=wanted.request_id,
            pending_seconds=wanted.pending_seconds,
        )
        seconds_left = max(0.0, self._deadline - time.monotonic())
        call = KvstoreStub(self._stores.channels[replica]).Read(request, timeout=seconds_left)
        chunks = aiter(call)
        try:
            for key in keys[num_read:]:
                block = await _next_block(chunks, key, wanted.block_bytes)
                if block is None:
                    return
                yield block
        finally:
            call.cancel()


async def _next_block(chunks: AsyncIterator[BlockChunk], key: bytes, block_bytes: int) -> bytes | None:
    """Collect one block's pieces; None when the stream ends first or something does not fit."""
    pieces: list[bytes] = []
    received = crc32 = 0
    while received < block_bytes:
        chunk = await anext(chunks, None)
        if chunk is None:
            return None
        if chunk.block_key != key or chunk.block_bytes != block_bytes or chunk.offset_bytes != received:
            log.warning("kvstore.read.misfit", block_bytes=chunk.block_bytes, offset_bytes=chunk.offset_bytes)
            return None
        pieces.append(chunk.data)
        received += len(chunk.data)
        crc32 = chunk.block_crc32
    payload = b"".join(pieces)
    # In a thread: a checksum of megabytes would hold up every other request's event.
    if received != block_bytes or await asyncio.to_thread(block_crc32, payload) != crc32:
        log.warning("kvstore.read.damaged", block_bytes=block_bytes)
        return None
    return payload

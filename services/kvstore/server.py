"""How do gRPC calls reach the store?"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from proto.common_pb2 import RetentionClass
from proto.kvstore_pb2 import (
    BlockChunk,
    GetStatsRequest,
    KvstoreStats,
    LookupReply,
    LookupRequest,
    ReadRequest,
    WriteReply,
)
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from services.chassis.errors import DeadlinePassed, InvalidRequest, Overloaded
from services.chassis.service import Service
from services.kvstore.admission import CallLimit
from services.kvstore.assembly import KEY_BYTES, MAX_CHUNK_BYTES, BlockAssembly, check_key
from services.kvstore.config import KvstoreSettings
from services.kvstore.metrics import register
from services.kvstore.segments import Block
from services.kvstore.store import Outcome, Store, StoredBlock

MAX_KEYS = 8192
MAX_READS = 16
MAX_WRITES = 16
"""Calls at once. Each read holds three blocks in memory; what writes hold is bounded by the store's byte budget."""
ROOM_TIMEOUT_SECONDS = 5.0
CHUNK_TIMEOUT_SECONDS = 30.0
"""A writer silent for longer loses its call: the block it began holds memory that others wait for."""


@dataclass(slots=True)
class _Blocks:
    """Blocks of one Write call on their way into the store."""

    writes: list[asyncio.Task[Outcome]] = field(default_factory=list)
    num_duplicate: int = 0

    async def settle(self) -> WriteReply:
        """Wait for all; raise the first error after every other block is stored."""
        outcomes = await asyncio.gather(*self.writes, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        num_stored = outcomes.count(Outcome.STORED)
        return WriteReply(num_stored=num_stored, num_duplicate=self.num_duplicate + len(outcomes) - num_stored)


class Servicer(KvstoreServicer):
    """Lookup, Read, Write and GetStats over one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reads = CallLimit("Read", MAX_READS)
        self._writes = CallLimit("Write", MAX_WRITES)

    async def Lookup(self, request: LookupRequest, _context: object) -> LookupReply:
        _check_keys(request)
        return LookupReply(num_blocks=self._store.lookup(request.fingerprint, request.block_keys))

    async def Read(self, request: ReadRequest, _context: object) -> AsyncIterator[BlockChunk]:
        _check_keys(request)
        with self._shedding(), self._reads.slot():
            async with aclosing(self._store.read(request.fingerprint, request.block_keys)) as blocks:
                async for block in blocks:
                    for chunk in _pieces(block):
                        yield chunk

    async def Write(self, request_iterator: Any, _context: object) -> WriteReply:
        with self._shedding(), self._writes.slot():
            blocks = _Blocks()
            try:
                await self._receive(aiter(request_iterator), blocks)
            except BaseException:
                # Whole blocks before the fault are good and stay; the caller hears of the fault once they are down.
                await asyncio.gather(*blocks.writes, return_exceptions=True)
                raise
            return await blocks.settle()

    async def GetStats(self, _request: GetStatsRequest, _context: object) -> KvstoreStats:
        return KvstoreStats(
            num_blocks=self._store.num_blocks,
            num_segments=self._store.num_segments,
            disk_bytes=self._store.disk_bytes,
            max_bytes=self._store.max_bytes,
            num_damaged=self._store.counts.damaged_blocks,
            num_evicted=self._store.counts.evicted_blocks,
        )

    async def _receive(self, chunks: AsyncIterator[BlockChunk], blocks: _Blocks) -> None:
        while (first := await _next(chunks)) is not None:
            is_kept = not self._store.has(first.fingerprint, first.block_key)
            block = BlockAssembly.start(first, max_block_bytes=self._store.max_block_bytes, is_kept=is_kept)
            await self._store.room.take(block.held_bytes, timeout_seconds=ROOM_TIMEOUT_SECONDS)
            try:
                last = await _fill(block, first, chunks)
            except BaseException:
                self._store.room.give_back(block.held_bytes)
                raise
            if is_kept:
                blocks.writes.append(asyncio.create_task(self._write(block.finish(last))))
            else:
                blocks.num_duplicate += 1
                self._store.counts.duplicate_blocks += 1

    @contextmanager
    def _shedding(self) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self._store.counts.shed_calls += 1
            raise

    async def _write(self, block: Block) -> Outcome:
        try:
            return await self._store.write(block)
        finally:
            self._store.room.give_back(len(block.payload))


async def build(service: Service) -> None:
    """Open the store, index what it holds, and serve it."""
    settings = service.settings
    assert isinstance(settings, KvstoreSettings)
    store = await Store.open(
        settings.path,
        max_bytes=settings.max_bytes,
        segment_bytes=settings.segment_bytes,
        progress=service.progress,
    )
    service.on_stop(store.close)
    register(store, service.metrics)
    add_KvstoreServicer_to_server(Servicer(store), service.server)


async def _fill(block: BlockAssembly, first: BlockChunk, chunks: AsyncIterator[BlockChunk]) -> BlockChunk:
    """Add pieces until the block is whole; return the last one."""
    chunk = first
    block.add(chunk)
    while not block.is_whole:
        following = await _next(chunks)
        if following is None:
            raise InvalidRequest(
                f"the stream ended after {block.received_bytes} of {block.block_bytes} bytes of a block", field="data"
            )
        chunk = following
        block.add(chunk)
    return chunk


async def _next(chunks: AsyncIterator[BlockChunk]) -> BlockChunk | None:
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT_SECONDS):
            return await anext(chunks, None)
    except TimeoutError:
        raise DeadlinePassed(f"no chunk came for {CHUNK_TIMEOUT_SECONDS:g} s") from None


def _pieces(block: StoredBlock) -> Iterator[BlockChunk]:
    where, size = block.location, block.location.block_bytes
    for offset in range(0, size, MAX_CHUNK_BYTES):
        end = min(offset + MAX_CHUNK_BYTES, size)
        yield BlockChunk(
            block_key=where.key,
            fingerprint=where.fingerprint if offset == 0 else b"",
            block_bytes=size,
            offset_bytes=offset,
            data=bytes(block.payload[offset:end]),
            block_crc32=where.crc32 if end == size else 0,
            retention=cast("RetentionClass.ValueType", where.retention),
        )


def _check_keys(request: LookupRequest | ReadRequest) -> None:
    check_key(request.fingerprint, "fingerprint")
    if len(request.block_keys) > MAX_KEYS:
        raise InvalidRequest(f"{len(request.block_keys)} block keys; at most {MAX_KEYS} a call", field="block_keys")
    if any(len(key) != KEY_BYTES for key in request.block_keys):
        raise InvalidRequest(f"a block key does not have {KEY_BYTES} bytes", field="block_keys")

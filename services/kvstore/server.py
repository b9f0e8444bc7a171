"""How do gRPC calls reach the store?"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from proto.common_pb2 import RetentionClass
from proto.kvstore_pb2 import (
    BadBlock,
    BlockChunk,
    EvictReply,
    EvictRequest,
    GetStatsRequest,
    KvstoreStats,
    LocateReply,
    LocateRequest,
    LookupReply,
    LookupRequest,
    PinReply,
    PinRequest,
    ReadRequest,
    ReleaseReply,
    ReleaseRequest,
    VerifyReport,
    VerifyRequest,
    WriteReply,
)
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from services.chassis.errors import DeadlinePassed, InvalidRequest, Overloaded
from services.chassis.service import Service
from services.kvstore.admission import CallLimit
from services.kvstore.assembly import MAX_CHUNK_BYTES, BlockAssembly, check_key, check_name, check_seconds, held_bytes
from services.kvstore.config import KvstoreSettings
from services.kvstore.format import KEY_BYTES, TENANT_BYTES
from services.kvstore.local_reads import LocalReads
from services.kvstore.metrics import register
from services.kvstore.object_store import attach
from services.kvstore.reading import StoredBlock
from services.kvstore.retention import RetentionPolicy
from services.kvstore.segments import Block
from services.kvstore.stats import stats_of
from services.kvstore.store import Outcome, Store
from services.kvstore.tiers import Selection

MAX_KEYS = 8192
MAX_READS = 32
MAX_WRITES = 16
"""Calls at once; reads that wait for pending blocks are among them. What each read holds is bounded by its read-ahead,
what writes hold by the store's byte budget."""
ROOM_TIMEOUT_SECONDS = 5.0
CHUNK_TIMEOUT_SECONDS = 30.0
"""A writer silent for longer loses its call: the block it began holds memory that others wait for."""
MAX_PENDING_SECONDS = 10.0


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
    """The whole Kvstore service over one store."""

    def __init__(self, store: Store, local_reads: LocalReads | None = None) -> None:
        self._store = store
        self._local_reads = local_reads
        self._reads = CallLimit("Read", MAX_READS)
        self._writes = CallLimit("Write", MAX_WRITES)
        self._verifications = CallLimit("Verify", 1)

    async def Lookup(self, request: LookupRequest, _context: object) -> LookupReply:
        keys = _checked_keys(request)
        check_name(request.request_id, "request_id")
        check_seconds(request.lease_seconds, "lease_seconds")
        found = await self._store.find(
            request.fingerprint,
            keys,
            request_id=request.request_id,
            lease_seconds=request.lease_seconds,
            retention=request.retention,
        )
        return LookupReply(
            num_blocks=found.num_blocks,
            num_pending=found.num_pending,
            pending_seconds=found.pending_seconds,
            lease_seconds=found.lease_seconds,
        )

    async def Read(self, request: ReadRequest, _context: object) -> AsyncIterator[BlockChunk]:
        keys = _checked_keys(request)
        check_seconds(request.pending_seconds, "pending_seconds")
        reading = self._store.read(
            request.fingerprint,
            keys,
            pending_seconds=max(0.0, min(request.pending_seconds, MAX_PENDING_SECONDS)),
            request_id=request.request_id,
        )
        with self._shedding(), self._reads.slot():
            async with aclosing(reading) as blocks:
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

    async def Pin(self, request: PinRequest, _context: object) -> PinReply:
        keys = _checked_keys(request)
        if not request.session_id:
            raise InvalidRequest("a pin needs a session", field="session_id")
        check_name(request.session_id, "session_id")
        check_name(request.tenant, "tenant", max_bytes=TENANT_BYTES)
        check_seconds(request.hold_seconds, "hold_seconds")
        num_pinned, expires_at = await self._store.pin(
            request.tenant, request.session_id, request.fingerprint, keys, hold_seconds=request.hold_seconds
        )
        return PinReply(num_pinned=num_pinned, expires_at_unix_seconds=expires_at)

    async def Release(self, request: ReleaseRequest, _context: object) -> ReleaseReply:
        num_released = self._store.release(request.tenant, request.session_id, request.block_keys)
        return ReleaseReply(num_released=num_released)

    async def Locate(self, _request: LocateRequest, _context: object) -> LocateReply:
        local = self._local_reads
        return LocateReply() if local is None else LocateReply(socket_path=local.path, boot_id=local.boot_id)

    async def GetStats(self, _request: GetStatsRequest, _context: object) -> KvstoreStats:
        return stats_of(self._store)

    async def Verify(self, request: VerifyRequest, _context: object) -> AsyncIterator[VerifyReport]:
        with self._verifications.slot():
            reports = self._store.verify(
                max_bytes_per_second=request.max_bytes_per_second, remote_bytes=request.remote_bytes
            )
            async for report in reports:
                bad = [
                    BadBlock(block_key=one.key, segment=one.segment, offset_bytes=one.offset_bytes, fault=one.fault)
                    for one in report.bad
                ]
                yield VerifyReport(
                    num_blocks=report.num_blocks,
                    total_blocks=report.total_blocks,
                    bad=bad,
                    is_last=report.is_last,
                    num_unread=report.num_unread,
                )

    async def Evict(self, request: EvictRequest, _context: object) -> EvictReply:
        removed = await self._store.evict(_selection(request))
        return EvictReply(num_blocks=removed.num_blocks, num_bytes=removed.num_bytes)

    async def _receive(self, chunks: AsyncIterator[BlockChunk], blocks: _Blocks) -> None:
        while (first := await _next(chunks)) is not None:
            is_kept = not self._store.has(first.fingerprint, first.block_key)
            block = BlockAssembly.start(first, max_block_bytes=self._store.max_block_bytes, is_kept=is_kept)
            if not is_kept:
                await _fill(block, first, chunks)
                blocks.num_duplicate += 1
                self._store.counts.duplicate_blocks += 1
                continue
            # From here on the next turn of a conversation, milliseconds behind, knows that it is coming.
            with self._store.announce(first.fingerprint, first.block_key):
                await self._take_room(block.held_bytes)
                try:
                    last = await _fill(block, first, chunks)
                except BaseException:
                    self._store.room.give_back(block.held_bytes)
                    raise
                blocks.writes.append(asyncio.create_task(self._write(block.finish(last))))
                await asyncio.sleep(0)  # the write announces it itself before this does no longer

    async def _take_room(self, num_bytes: int) -> None:
        try:
            await self._store.room.take(num_bytes, timeout_seconds=ROOM_TIMEOUT_SECONDS)
        except Overloaded:
            self._store.counts.write_drops["memory"] += 1
            raise

    @contextmanager
    def _shedding(self) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self._store.counts.shed_calls += 1
            raise

    async def _write(self, block: Block) -> Outcome:
        try:
            with self._store.announce(block.fingerprint, block.key):
                return await self._store.write(block)
        finally:
            self._store.room.give_back(held_bytes(len(block.payload)))


async def build(service: Service) -> None:
    """Open the store, index what it holds, and serve it."""
    settings = service.settings
    assert isinstance(settings, KvstoreSettings)
    store = await Store.open(
        settings.path,
        max_bytes=settings.max_bytes,
        segment_bytes=settings.segment_bytes,
        policy=RetentionPolicy(settings.agent_seconds, settings.chat_seconds, settings.quota_bytes),
        encryption_key_file=Path(settings.encryption_key_file) if settings.encryption_key_file else None,
        progress=service.progress,
    )
    service.on_stop(store.close)
    register(store, service.metrics)
    if settings.object_store_url:
        await attach(service, store, url=settings.object_store_url, options_file=settings.object_store_options_file)
    # Nobody is let in before: what may have been deleted while this replica was away is gone only now.
    local_reads = LocalReads.start(store, settings.path, boot_id=service.boot_id)
    if local_reads is not None:
        service.on_stop(local_reads.close)
    add_KvstoreServicer_to_server(Servicer(store, local_reads), service.server)


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
            block_crc32=block.crc32 if end == size else 0,
            retention=cast("RetentionClass.ValueType", where.retention),
        )


def _selection(request: EvictRequest) -> Selection:
    """Return what an operator wants removed; raise InvalidRequest for nothing at all, or everything and something."""
    tenant = request.tenant if request.is_tenant_set or request.tenant else None
    fingerprint = request.fingerprint or None
    retention = request.retention or None
    if fingerprint is not None:
        check_key(fingerprint, "fingerprint")
    is_narrow = tenant is not None or fingerprint is not None or retention is not None
    if request.is_all == is_narrow:
        raise InvalidRequest("name a tenant, a fingerprint or a class, or everything", field="is_all")
    return Selection(tenant, fingerprint, retention)


def _checked_keys(request: LookupRequest | ReadRequest | PinRequest) -> list[bytes]:
    check_key(request.fingerprint, "fingerprint")
    if len(request.block_keys) > MAX_KEYS:
        raise InvalidRequest(f"{len(request.block_keys)} block keys; at most {MAX_KEYS} a call", field="block_keys")
    keys = request.block_keys[:]  # a list, and sooner than list() makes one
    if list(map(len, keys)).count(KEY_BYTES) < len(keys):
        raise InvalidRequest(f"a block key does not have {KEY_BYTES} bytes", field="block_keys")
    return keys

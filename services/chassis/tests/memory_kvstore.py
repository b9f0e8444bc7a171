"""A KV store that keeps blocks in memory: real on the wire, with switches for trouble."""

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from grpc import aio

from proto.kvstore_pb2 import (
    BlockChunk,
    GetStatsRequest,
    KvstoreStats,
    LocateReply,
    LocateRequest,
    LookupReply,
    LookupRequest,
    ReadRequest,
    WriteReply,
)
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from services.chassis.channel import open_channel
from services.chassis.errors import InternalError
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_writer import Origin
from services.chassis.testing import serve

CHUNK_BYTES = 2 << 20


class MemoryKvstore(KvstoreServicer):
    """Keeps (payload, CRC-32) by key. `gate` holds calls up while cleared; with `fails`, writes fail."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes, int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False
        self.channel: aio.Channel
        self.stores: Stores
        """This one alone, as engines are given it."""
        self.num_write_calls = 0
        """Begun, also those that the gate holds up."""
        self.num_written = 0
        """Blocks received, duplicates included."""
        self.order: list[bytes] = []
        """Keys of blocks in the order they came."""
        self.origins: dict[bytes, Origin] = {}
        """By key: what their first chunk said."""
        self.reads: list[ReadRequest] = []
        self.pending: dict[bytes, asyncio.Event] = {}
        """Blocks that are there once the event is set."""
        self.socket_path = ""
        self.boot_id = "memory-boot"

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupReply:
        found = itertools.takewhile(self.blocks.__contains__, request.block_keys)
        return LookupReply(num_blocks=len(list(found)))

    async def GetStats(self, request: GetStatsRequest, context: Any) -> KvstoreStats:
        return KvstoreStats(num_blocks=len(self.blocks))

    async def Locate(self, request: LocateRequest, context: Any) -> LocateReply:
        return LocateReply(socket_path=self.socket_path, boot_id=self.boot_id)

    async def Pin(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Release(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Verify(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def Evict(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Read(self, request: ReadRequest, context: Any) -> AsyncIterator[BlockChunk]:
        self.reads.append(request)
        await self.gate.wait()
        for key in request.block_keys:
            if key in self.pending:
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.pending_seconds):
                        await self.pending[key].wait()
            payload, crc32 = self.blocks.get(key, (None, 0))
            if payload is None:
                return
            for offset in range(0, len(payload), CHUNK_BYTES):
                data = payload[offset : offset + CHUNK_BYTES]
                is_last = offset + len(data) == len(payload)
                yield BlockChunk(
                    block_key=key, block_bytes=len(payload), offset_bytes=offset, data=data, block_crc32=crc32 * is_last
                )

    async def Write(self, request_iterator: Any, context: Any) -> WriteReply:
        self.num_write_calls += 1
        await self.gate.wait()
        if self.fails:
            raise InternalError("disk")
        num_stored = 0
        pieces: list[bytes] = []
        async for chunk in request_iterator:
            pieces.append(chunk.data)
            if chunk.offset_bytes == 0:
                assert chunk.fingerprint
                self.origins[chunk.block_key] = Origin(chunk.tenant, chunk.retention)
            if chunk.offset_bytes + len(chunk.data) == chunk.block_bytes:
                payload, pieces = b"".join(pieces), []
                assert zlib.crc32(payload) == chunk.block_crc32
                self.blocks[chunk.block_key] = (payload, chunk.block_crc32)
                num_stored += 1
                self.order.append(chunk.block_key)
        self.num_written += num_stored
        return WriteReply(num_stored=num_stored)


@asynccontextmanager
async def memory_kvstore() -> AsyncIterator[MemoryKvstore]:
    """Serve a store and open its `channel`; at the end nobody is held up any more."""
    store = MemoryKvstore()
    async with serve(lambda server: add_KvstoreServicer_to_server(store, server)) as address:
        store.channel = open_channel(address, peer="kvstore")
        store.stores = Stores.single(store.channel)
        try:
            yield store
        finally:
            store.gate.set()
            await store.channel.close()

"""How do blocks come from the KV store and go to it, without a damaged one ever being used?"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog

from proto.common_pb2 import RETENTION_CLASS_CHAT
from proto.kvstore_pb2 import BlockChunk, ReadRequest, WriteReply
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError

_CHUNK_BYTES = 2 << 20
_WRITE_TIMEOUT_SECONDS = 30.0
_BATCH_BLOCKS = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One full block on its way to the store."""

    key: bytes
    payload: bytes


async def read_blocks(
    channel: grpc.aio.Channel, keys: Sequence[bytes], *, fingerprint: bytes, block_bytes: int, timeout_seconds: float
) -> AsyncGenerator[bytes]:
    """Yield the payloads of the leading `keys`, verified, in order.

    Ends early, without an error, at the first block that is missing, late or damaged, and when the store is away:
    whoever wants the rest computes it.
    """
    call = KvstoreStub(channel).Read(ReadRequest(block_keys=keys, fingerprint=fingerprint), timeout=timeout_seconds)
    chunks = aiter(call)
    try:
        for key in keys:
            payload = await _next_block(chunks, key, block_bytes)
            if payload is None:
                return
            yield payload
    except (FathomError, grpc.aio.AioRpcError) as error:
        log.info("kvstore.read.ended", reason=str(error), error_kind=type(error).__name__)
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
    # In a thread: a checksum of megabytes would hold up every other request's event for milliseconds.
    if received != block_bytes or await asyncio.to_thread(zlib.crc32, payload) != crc32:
        log.warning("kvstore.read.damaged", block_bytes=block_bytes)
        return None
    return payload


async def write_blocks(
    channel: grpc.aio.Channel, blocks: Sequence[StoredBlock], *, fingerprint: bytes, timeout_seconds: float
) -> WriteReply:
    """Store blocks in order, parents before children. Raises FathomError when the store did not take them."""
    crcs = await asyncio.to_thread(lambda: [zlib.crc32(block.payload) for block in blocks])
    chunks = itertools.chain.from_iterable(
        _chunks_of(block, crc, fingerprint) for block, crc in zip(blocks, crcs, strict=True)
    )
    return await KvstoreStub(channel).Write(chunks, timeout=timeout_seconds)


def _chunks_of(block: StoredBlock, crc32: int, fingerprint: bytes) -> Iterator[BlockChunk]:
    size = len(block.payload)
    for offset in range(0, size, _CHUNK_BYTES):
        data = block.payload[offset : offset + _CHUNK_BYTES]
        yield BlockChunk(
            block_key=block.key,
            fingerprint=fingerprint if offset == 0 else b"",
            block_bytes=size,
            offset_bytes=offset,
            data=data,
            block_crc32=crc32 if offset + len(data) == size else 0,
            retention=RETENTION_CLASS_CHAT,
        )


class BlockWriter:
    """A queue of blocks for the store that is bounded by bytes and never makes the engine wait.

    The engine thread alone calls `has_room` and `put`, the event loop alone runs `run`. Each side adds to its own
    counter and only reads the other's, so that no lock is needed.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, fingerprint: bytes, max_bytes: int, on_drop: Callable[[int], None]
    ) -> None:
        """on_drop is told how many blocks were given up, from either thread."""
        self._channel = channel
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[StoredBlock] = asyncio.Queue()
        self._bytes_in = 0
        self._bytes_out = 0

    @property
    def pending_bytes(self) -> int:
        return self._bytes_in - self._bytes_out

    def has_room(self, num_bytes: int) -> bool:
        """Say whether a block fits; counts a drop when it does not. Ask before copying it off the device."""
        if self.pending_bytes + num_bytes <= self._max_bytes:
            return True
        self._on_drop(1)
        return False

    def put(self, block: StoredBlock) -> None:
        self._bytes_in += len(block.payload)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, block)

    async def flush(self) -> None:
        """Wait until all that was put before is written or given up."""
        await self._queue.join()

    async def run(self) -> None:
        """Write what comes, several blocks a call, until cancelled. A store that is away costs blocks, never time."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH_BLOCKS and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                await write_blocks(
                    self._channel, batch, fingerprint=self._fingerprint, timeout_seconds=_WRITE_TIMEOUT_SECONDS
                )
            except (FathomError, grpc.aio.AioRpcError) as error:
                self._on_drop(len(batch))
                log.warning("kvstore.write.failed", num_blocks=len(batch), reason=str(error))
            finally:
                self._bytes_out += sum(len(block.payload) for block in batch)
                for _ in batch:
                    self._queue.task_done()

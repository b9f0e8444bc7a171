"""How do computed blocks get to the KV store, without ever making an engine wait?"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc.aio
import structlog

from proto.common_pb2 import RETENTION_CLASS_CHAT, RetentionClass
from proto.kvstore_pb2 import BlockChunk, WriteReply
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError
from services.chassis.handoff import block_crc32
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_shards import group_key, order

MAX_AGE_SECONDS = 30.0
"""A block that waited longer belongs to a turn whose successor has come and gone."""

_CHUNK_BYTES = 2 << 20
_WRITE_TIMEOUT_SECONDS = 10.0
_AWAY_SECONDS = 5.0
"""A replica that failed is passed over for this long, for the next one in each group's order."""
_BATCH_BLOCKS = 16
_MAX_GIVEN_UP = 16_384
_GIVEN_UP_SECONDS = 60.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose blocks they are, and how long they are worth keeping."""

    tenant: str = ""
    retention: RetentionClass.ValueType = RETENTION_CLASS_CHAT


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One full block on its way to the store."""

    key: bytes
    payload: bytes
    parent: bytes = b""
    """Key of the block before it; empty for a chain's first."""
    group: bytes = b""
    """What places it among the replicas."""
    origin: Origin = field(default_factory=Origin)

    @classmethod
    def of_chain(cls, keys: Sequence[bytes], index: int, payload: bytes, origin: Origin) -> StoredBlock:
        """Return block `index` of a chain.  keys: from block 0 on."""
        return cls(keys[index], payload, keys[index - 1] if index else b"", group_key(keys, index), origin)


async def write_blocks(
    channel: grpc.aio.Channel, blocks: Sequence[StoredBlock], *, fingerprint: bytes, timeout_seconds: float
) -> WriteReply:
    """Store blocks in order, parents before children. Raises FathomError when the store did not take them."""
    crcs = await asyncio.to_thread(lambda: [block_crc32(block.payload) for block in blocks])
    chunks = itertools.chain.from_iterable(
        _chunks_of(block, crc, fingerprint) for block, crc in zip(blocks, crcs, strict=True)
    )
    return await KvstoreStub(channel).Write(chunks, timeout=timeout_seconds)


def _chunks_of(block: StoredBlock, crc32: int, fingerprint: bytes) -> Iterator[BlockChunk]:
    size = len(block.payload)
    for offset in range(0, size, _CHUNK_BYTES):
        data = block.payload[offset : offset + _CHUNK_BYTES]
        is_first = offset == 0
        yield BlockChunk(
            block_key=block.key,
            fingerprint=fingerprint if is_first else b"",
            block_bytes=size,
            offset_bytes=offset,
            data=data,
            block_crc32=crc32 if offset + len(data) == size else 0,
            retention=block.origin.retention,
            tenant=block.origin.tenant if is_first else "",
        )


@dataclass(slots=True)
class _Lane:
    """What waits for one replica."""

    channel: grpc.aio.Channel
    blocks: deque[tuple[float, StoredBlock]] = field(default_factory=deque)
    """With the time each came, oldest first."""
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    away_until: float = 0.0


class BlockWriter:
    """A queue of blocks for the store, bounded by bytes and by age; the oldest go when there are too many.

    With a block its descendants go as well, for without it nothing can find them; so a chain that does not fit by
    itself loses its end. The engine thread alone calls `has_room` and `put`, the event loop alone everything else. Each
    side adds to its own counter and only reads the other's, so that no lock is needed.
    """

    def __init__(
        self,
        stores: Stores,
        *,
        fingerprint: bytes,
        max_bytes: int,
        on_drop: Callable[[str, int], None],
        max_age_seconds: float = MAX_AGE_SECONDS,
    ) -> None:
        """on_drop: is told why, and how many: "bytes", "age", "failed", "orphan". From either thread."""
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds
        self._on_drop = on_drop
        self._loop = asyncio.get_running_loop()
        self._lanes = {name: _Lane(channel) for name, channel in stores.channels.items()}
        self._parents: dict[bytes, bytes] = {}  # of the waiting blocks
        self._given_up: dict[bytes, float] = {}  # in order of time
        self._changed = asyncio.Event()
        self._held_bytes = 0
        self._bytes_in = 0
        self._bytes_out = 0

    @property
    def pending_bytes(self) -> int:
        return self._bytes_in - self._bytes_out

    def has_room(self, num_bytes: int) -> bool:
        """Say whether a block may be copied off the device; counts a drop when not.

        It may, except when the event loop is so far behind that it has not even dropped the oldest yet.
        """
        if self.pending_bytes + num_bytes <= 2 * self._max_bytes:
            return True
        self._on_drop("bytes", 1)
        return False

    def put(self, block: StoredBlock) -> None:
        self._bytes_in += len(block.payload)
        self._loop.call_soon_threadsafe(self._accept, block)

    async def flush(self) -> None:
        """Wait until all that was put is written or given up."""
        while self.pending_bytes:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Write what comes, several blocks a call, until cancelled. A store that is away costs blocks, never time."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                group.create_task(self._write_lane(lane))
            group.create_task(self._watch_age())

    async def _write_lane(self, lane: _Lane) -> None:
        while True:
            await lane.filled.wait()
            self._drop_old()
            batch = [self._take(lane) for _ in range(min(len(lane.blocks), _BATCH_BLOCKS))]
            if not lane.blocks:
                lane.filled.clear()
            if not batch:
                continue
            try:
                await write_blocks(
                    lane.channel, batch, fingerprint=self._fingerprint, timeout_seconds=_WRITE_TIMEOUT_SECONDS
                )
            except (FathomError, grpc.aio.AioRpcError) as error:
                lane.away_until = time.monotonic() + _AWAY_SECONDS
                log.warning("kvstore.write.failed", num_blocks=len(batch), reason=str(error))
                for block in batch:
                    self._give_up(block, "failed")
            except BaseException:  # the writer is being stopped
                for block in batch:
                    self._give_up(block, "failed")
                raise
            else:
                for block in batch:
                    self._forget(block)

    async def _watch_age(self) -> None:
        """Give up what waits behind a call that hangs."""
        while True:
            await asyncio.sleep(self._max_age_seconds / 4)
            self._drop_old()

    def _accept(self, block: StoredBlock) -> None:
        now = time.monotonic()
        self._held_bytes += len(block.payload)
        self._given_up.pop(block.key, None)
        if now - self._given_up.get(block.parent, -_GIVEN_UP_SECONDS) < _GIVEN_UP_SECONDS:
            self._give_up(block, "orphan")
            return
        lane = self._lane_of(block.group, now)
        lane.blocks.append((now, block))
        self._parents[block.key] = block.parent
        lane.filled.set()
        self._drop_old()
        while self._held_bytes > self._max_bytes and (oldest := self._oldest()) is not None:
            if oldest.blocks[0][1].key in self._ancestors(block) and lane.blocks and lane.blocks[-1][1] is block:
                lane.blocks.pop()  # without the oldest this one were of no use: its chain ends before it
                del self._parents[block.key]
                self._give_up(block, "bytes")
            else:
                self._give_up(self._take(oldest), "bytes")

    def _take(self, lane: _Lane) -> StoredBlock:
        """Take the oldest out of a lane."""
        _, block = lane.blocks.popleft()
        self._parents.pop(block.key, None)
        return block

    def _ancestors(self, block: StoredBlock) -> Iterator[bytes]:
        """Yield the keys of the blocks before it that wait as well, the next one first."""
        key = block.parent
        while key in self._parents:
            yield key
            key = self._parents[key]

    def _lane_of(self, group: bytes, now: float) -> _Lane:
        lanes = [self._lanes[name] for name in order(group, self._lanes)]
        return next((lane for lane in lanes if lane.away_until <= now), lanes[0])

    def _drop_old(self) -> None:
        too_old = time.monotonic() - self._max_age_seconds
        for lane in self._lanes.values():
            while lane.blocks and lane.blocks[0][0] <= too_old:
                self._give_up(self._take(lane), "age")

    def _oldest(self) -> _Lane | None:
        waiting = [lane for lane in self._lanes.values() if lane.blocks]
        return min(waiting, key=lambda lane: lane.blocks[0][0], default=None)

    def _give_up(self, block: StoredBlock, reason: str) -> None:
        self._on_drop(reason, 1)
        self._given_up[block.key] = time.monotonic()
        if len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._forget(block)

    def _forget(self, block: StoredBlock) -> None:
        self._held_bytes -= len(block.payload)
        self._bytes_out += len(block.payload)
        self._changed.set()


class Fetched(Protocol):
    """A block on its way off the device."""

    def is_there(self) -> bool:
        """Whether `payload` would not wait."""

    def payload(self) -> bytes:
        """Return its bytes, once."""


class Writeback:
    """Copies full blocks off the device for the store while the queue to it has room, and never waits for a copy.

    Called in the engine thread, with blocks that this replica computed: what came from the store is not offered.
    """

    def __init__(self, fetch_block: Callable[[int], Fetched], block_bytes: int, writer: BlockWriter | None) -> None:
        """fetch_block: begins to read a block.  Without a writer nothing is kept: the replica has no KV store."""
        self._fetch_block = fetch_block
        self._block_bytes = block_bytes
        self._writer = writer
        self._coming: deque[tuple[StoredBlock, Fetched]] = deque()

    def offer(self, origin: Origin, keys: Sequence[bytes], block: int, block_id: int) -> None:
        """Copy one full block of a chain; the queue drops its oldest (counted) when the store cannot keep up."""
        if self._writer is not None and self._writer.has_room((1 + len(self._coming)) * self._block_bytes):
            named = StoredBlock.of_chain(keys, block, b"", origin)
            self._coming.append((named, self._fetch_block(block_id)))
            self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Queue the blocks that have come, in the order in which they were offered.  wait: for all of them."""
        while self._coming and self._writer is not None and (wait or self._coming[0][1].is_there()):
            named, fetched = self._coming.popleft()
            self._writer.put(replace(named, payload=fetched.payload()))

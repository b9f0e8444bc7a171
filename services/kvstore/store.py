"""Which blocks are stored, and how do they get in and out?

The event loop owns the index, the segment table and the pins; one writer thread and a few reader threads own the files.
A block enters the index only after its bytes are synced: that insertion is the atomic publish.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import structlog

from services.chassis.errors import InvalidRequest, Overloaded
from services.kvstore.admission import ByteBudget
from services.kvstore.directory import SegmentFile
from services.kvstore.format import MAX_RECORD_OVERHEAD_BYTES
from services.kvstore.index import BlockIndex, BlockLocation
from services.kvstore.log import Appended, SegmentLog
from services.kvstore.recovery import Recovered, close_folder, recover
from services.kvstore.retention import SegmentUse, victims
from services.kvstore.segments import Block, DamagedBlockError, read_block

_log = structlog.get_logger()

MAX_BLOCK_BYTES = 64 << 20
MAX_WAITING_BYTES = 64 << 20
"""Blocks received and not yet on disk, over all writers."""
READ_AHEAD = 2
"""Blocks of one read that are on their way from the disk: enough to check one while the next is read."""
_READER_THREADS = 4

Progress = Callable[[str, int, int], None]


class Outcome(Enum):
    """What became of a block that was written."""

    STORED = "stored"
    DUPLICATE = "duplicate"


@dataclass(slots=True)
class StoreCounts:
    """Counted since boot."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    read_blocks: int = 0
    stored_blocks: int = 0
    duplicate_blocks: int = 0
    damaged_blocks: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    shed_calls: int = 0


@dataclass(slots=True)
class _Segment:
    file: SegmentFile
    num_bytes: int
    last_hit: int
    is_active: bool = False
    pins: int = 0


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A verified block, as read from disk."""

    location: BlockLocation
    payload: memoryview


class Store:
    """Blocks of KV under one folder, at most `max_bytes` of disk."""

    def __init__(self, folder: Path, recovered: Recovered, *, max_bytes: int, segment_bytes: int) -> None:
        self.max_bytes = max_bytes
        # One block must fit beside an active segment of the largest size whatever the cap is.
        self.max_block_bytes = min(MAX_BLOCK_BYTES, max_bytes // 2 - MAX_RECORD_OVERHEAD_BYTES)
        self.room = ByteBudget(MAX_WAITING_BYTES)
        self.counts = StoreCounts(damaged_blocks=recovered.num_damaged)
        self._max_batch_bytes = min(MAX_WAITING_BYTES, max_bytes // 4)
        self._index: BlockIndex = recovered.index
        self._segments = {
            file.number: _Segment(file, num_bytes, last_hit=position)
            for position, (file, num_bytes) in enumerate(recovered.segments)
        }
        self._hit_clock = len(self._segments)
        self._lock = recovered.lock
        self._log = SegmentLog(
            folder, next_number=recovered.next_number, segment_bytes=min(segment_bytes, max_bytes // 4)
        )
        self._in_flight: dict[tuple[bytes, bytes], asyncio.Future[BlockLocation | None]] = {}
        self._queue: deque[Block] = deque()
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-write")
        self._readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="kvstore-read")
        self._loop = asyncio.get_running_loop()
        self._write_loop = asyncio.create_task(self._write_batches(), name="kvstore-write-loop")

    @classmethod
    async def open(
        cls, folder: Path, *, max_bytes: int, segment_bytes: int, progress: Progress | None = None
    ) -> "Store":
        """Lock the folder and rebuild the index from its segments; raise StoreLockedError when another store has it."""
        recovered = await asyncio.to_thread(recover, folder, progress)
        store = cls(folder, recovered, max_bytes=max_bytes, segment_bytes=segment_bytes)
        await store._make_room(0)  # the cap may be lower than in the last life
        return store

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all segment files, the footer that the active one will get included."""
        return sum(segment.num_bytes for segment in list(self._segments.values()))

    def lookup(self, fingerprint: bytes, keys: Collection[bytes]) -> int:
        """Return how many leading keys are stored under this fingerprint."""
        found = self._index.longest_prefix(fingerprint, keys)
        self.counts.lookups += 1
        self.counts.lookup_blocks += len(keys)
        self.counts.hit_blocks += len(found)
        self._touch({location.segment for location in found})
        return len(found)

    def has(self, fingerprint: bytes, key: bytes) -> bool:
        return self._index.find(fingerprint, key) is not None

    async def read(self, fingerprint: bytes, keys: Iterable[bytes]) -> AsyncGenerator[StoredBlock]:
        """Yield the blocks in order, each verified; stop before the first that is missing or damaged.

        The next blocks are read from disk while the caller sends the last one: READ_AHEAD more are in memory.
        """
        ahead: deque[asyncio.Task[StoredBlock | None]] = deque()
        left = iter(keys)

        def start_next() -> None:
            if (key := next(left, None)) is not None:
                ahead.append(asyncio.create_task(self._read_one(fingerprint, key)))

        for _ in range(READ_AHEAD):
            start_next()
        try:
            while ahead:
                block = await ahead[0]
                ahead.popleft()
                if block is None:
                    return
                start_next()
                yield block
        finally:
            for task in ahead:
                task.cancel()

    async def write(self, block: Block) -> Outcome:
        """Store a block and return once it is durable and findable, or was there already (first writer wins).

        The caller holds `room` for the payload. Raises InvalidRequest for a wrong CRC-32 or size, Overloaded when the
        disk cannot take it; then nothing was published.
        """
        if not 0 < len(block.payload) <= self.max_block_bytes:
            raise InvalidRequest(
                f"block has {len(block.payload)} bytes; this store takes 1 to {self.max_block_bytes}",
                field="block_bytes",
            )
        # In a thread of its own: checked while the writer thread is busy with the blocks before.
        if await asyncio.to_thread(zlib.crc32, block.payload) != block.crc32:
            self.counts.refused_blocks += 1
            raise InvalidRequest("block_crc32 is not the CRC-32 of the block's bytes", field="block_crc32")
        name = (block.fingerprint, block.key)
        while name in self._in_flight:
            await asyncio.wait([self._in_flight[name]])  # then it is either findable or this copy's turn
        if self.has(*name):
            self.counts.duplicate_blocks += 1
            return Outcome.DUPLICATE
        if self._is_closing:
            raise Overloaded("the KV store is stopping")
        done = self._in_flight[name] = self._loop.create_future()
        self._queue.append(block)
        self._arrived.set()
        # Shielded: a writer that goes away must not undo what other writers of the same key wait for.
        if await asyncio.shield(done) is None:
            raise Overloaded("the KV store's disk cannot take the block", retry_after=5.0)
        return Outcome.STORED

    async def close(self) -> None:
        """Write what waits, seal the active segment, release the folder."""
        self._is_closing = True
        self._arrived.set()
        await self._write_loop
        await self._loop.run_in_executor(self._writer, self._log.close)
        await asyncio.to_thread(self._writer.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        close_folder(self._lock)

    async def _read_one(self, fingerprint: bytes, key: bytes) -> StoredBlock | None:
        location = self._index.find(fingerprint, key)
        if location is None:
            return None
        segment = self._segments[location.segment]
        self._touch({location.segment})
        segment.pins += 1
        reading: Future[memoryview] = self._readers.submit(read_block, segment.file, location)
        # The pin lasts until the thread is done with the file, even when nobody waits for the bytes any more.
        reading.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._unpin, segment))
        try:
            payload = await asyncio.wrap_future(reading)
        except DamagedBlockError as exc:
            if self._index.remove(location):
                self.counts.damaged_blocks += 1
                _log.warning("kvstore.block.damaged", file=segment.file.path.name, reason=str(exc))
            return None
        except OSError as exc:
            # Out of descriptors and the like: this read misses, the block itself may be fine.
            _log.error("kvstore.read.failed", file=segment.file.path.name, reason=str(exc))
            return None
        self.counts.read_blocks += 1
        return StoredBlock(location, payload)

    @staticmethod
    def _unpin(segment: _Segment) -> None:
        segment.pins -= 1

    def _touch(self, numbers: Iterable[int]) -> None:
        self._hit_clock += 1
        for number in numbers:
            self._segments[number].last_hit = self._hit_clock

    async def _write_batches(self) -> None:
        while True:
            await self._arrived.wait()
            if not self._queue:
                if self._is_closing:
                    return
                self._arrived.clear()
                continue
            batch = self._next_batch()
            try:
                locations = await self._append(batch)
            except Exception as exc:  # noqa: BLE001 - handed to every writer of the batch, which reports it
                for block in batch:
                    self._in_flight.pop((block.fingerprint, block.key)).set_exception(exc)
                continue
            for block, location in zip(batch, locations, strict=True):
                self._publish(block, location)

    def _next_batch(self) -> list[Block]:
        """Take what waits, up to one batch: while one batch syncs, the next one gathers."""
        batch = [self._queue.popleft()]
        total = self._cost(batch[0])
        while self._queue and total + self._cost(self._queue[0]) <= self._max_batch_bytes:
            batch.append(self._queue.popleft())
            total += self._cost(batch[-1])
        return batch

    async def _append(self, batch: Sequence[Block]) -> Sequence[BlockLocation | None]:
        if not await self._make_room(sum(self._cost(block) for block in batch)):
            return [None] * len(batch)
        appended = await self._loop.run_in_executor(self._writer, self._log.append, batch)
        self._note_sizes(appended)
        return appended.locations

    async def _make_room(self, needed_bytes: int) -> bool:
        uses = [
            SegmentUse(number, one.num_bytes, one.last_hit, evictable=not one.is_active and one.pins == 0)
            for number, one in self._segments.items()
        ]
        chosen = victims(uses, max_bytes=self.max_bytes, needed_bytes=needed_bytes)
        if not chosen:
            return chosen is not None
        # Out of the index first, with no await in between: from here on no reader can pin them.
        num_evicted = sum(self._index.remove_segment(number) for number in chosen)
        self.counts.evicted_blocks += num_evicted
        files = [self._segments[number].file for number in chosen]
        gone = await self._loop.run_in_executor(self._writer, self._log.remove, files)
        for file in gone:
            del self._segments[file.number]
        _log.info("kvstore.evicted", num_segments=len(gone), num_blocks=num_evicted)
        return len(gone) == len(files)

    def _note_sizes(self, appended: Appended) -> None:
        for number, size in appended.segments.items():
            segment = self._segments.setdefault(number, _Segment(size.file, 0, self._hit_clock))
            segment.num_bytes, segment.is_active = size.num_bytes, size.is_active
            if size.num_bytes == 0:
                del self._segments[number]

    def _publish(self, block: Block, location: BlockLocation | None) -> None:
        if location is None:
            self.counts.refused_blocks += 1
        else:
            self._index.add(location)
            self.counts.stored_blocks += 1
        self._in_flight.pop((block.fingerprint, block.key)).set_result(location)

    @staticmethod
    def _cost(block: Block) -> int:
        return len(block.payload) + MAX_RECORD_OVERHEAD_BYTES

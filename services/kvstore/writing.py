"""How do blocks get to disk and become findable, one batch after the other, and what makes room for them?

One task owns the order of everything that changes files: batches of new blocks, copies, deletions. A batch is written
while those before it are synced; whatever is no batch waits until all are settled. A block enters the index only after
its bytes are synced: that insertion is the atomic publish.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.chassis.errors import Overloaded
from services.kvstore.catalog import Catalog
from services.kvstore.directory import SegmentFile
from services.kvstore.disk import Disk, free_bytes
from services.kvstore.format import MAX_RECORD_OVERHEAD_BYTES
from services.kvstore.index import BlockLocation
from services.kvstore.log import Appended, SegmentLog, SegmentSize, Unsynced
from services.kvstore.meters import Meters, StoreCounts
from services.kvstore.reading import BlockReader
from services.kvstore.retention import HIGH, capacity, kept_blocks, shares_to_drop, victims
from services.kvstore.segments import Block
from services.kvstore.tiers import SegmentListener, Selection
from services.kvstore.wall_clock import WallClock

_log = structlog.get_logger()

MAX_BATCH_BYTES = 16 << 20
"""Most that one fdatasync waits for: a quarter of what may wait, some of that is being received, some written, some
synced. There is no least: what arrives while one batch is written is the next."""
MAX_UNSETTLED = 2
"""Batches handed to the disk and not yet published, when the next is handed to it."""
_RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 50  # a fiftieth of a small file system
_FORWARD_BYTES = 32 << 20
"""Copied forward in one piece of memory."""


@dataclass(slots=True)
class Waiting:
    """A block in the queue."""

    block: Block
    done: "asyncio.Future[str]"
    """Empty when it was published; else why not."""
    replaced: BlockLocation | None = None
    """Its former copy, when this is one."""
    since: float = field(default_factory=time.monotonic)
    arrived_unix_seconds: float = field(default_factory=time.time)

    @property
    def cost_bytes(self) -> int:
        return len(self.block.payload) + MAX_RECORD_OVERHEAD_BYTES

    @property
    def first_created_seconds(self) -> float:
        """What a deletion of it goes by: when its first copy was written, or it came if it is the first."""
        return self.block.first_created_seconds or self.arrived_unix_seconds


class WriteLine:
    """The queue to the disk, and the task that empties it."""

    def __init__(
        self,
        disk: Disk,
        log: SegmentLog,
        catalog: Catalog,
        reader: BlockReader,
        *,
        max_bytes: int,
        counts: StoreCounts,
        meters: Meters,
    ) -> None:
        self.listener: SegmentListener | None = None
        self.clock = WallClock()
        """Dates what is written."""
        self._disk = disk
        self._log = log
        self._catalog = catalog
        self._reader = reader
        self._max_bytes = max_bytes
        self._max_batch_bytes = min(MAX_BATCH_BYTES, max_bytes // 4)
        self._counts = counts
        self._meters = meters
        self._queue: deque[Waiting] = deque()
        self._settling: deque[asyncio.Task[None]] = deque()
        self._unsettled_bytes = 0
        self._jobs: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-write")
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="kvstore-write-loop")

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, block: Block, replaced: BlockLocation | None = None) -> "asyncio.Future[str]":
        """Queue a block; the future tells what became of it. The caller bounds how many bytes wait."""
        waiting = Waiting(block, self._loop.create_future(), replaced, arrived_unix_seconds=self.clock.now())
        if self._task.done():  # nobody would ever answer
            self._refuse([waiting], "stopping")
            return waiting.done
        self._queue.append(waiting)
        self._arrived.set()
        return waiting.done

    def drop(self, selection: Selection, before_unix_seconds: float) -> None:
        """Give up what waits, matches and was there before: once written, it would outlive the deletion."""
        waiting, self._queue = self._queue, deque()
        for one in waiting:
            if selection.matches(one.block) and one.first_created_seconds < before_unix_seconds:
                self._refuse([one], "deleted")
            else:
                self._queue.append(one)

    async def run(self, job: Callable[[], Awaitable[Any]]) -> Any:
        """Run something that changes files between two batches; return what it returns.

        Raises Overloaded when the line has ended.
        """
        if self._task.done():
            raise Overloaded("the KV store is stopping")
        done: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.append((job, done))
        self._arrived.set()
        return await done

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run file work in the one writer thread. Only from within run()'s job."""
        return await self._loop.run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        """Write what waits and seal the active segments."""
        self._is_closing = True
        self._arrived.set()
        await self._task
        await self.seal(self._log.close)
        await asyncio.to_thread(self._thread.shutdown)

    async def seal(self, which: Callable[..., Appended], *arguments: float) -> None:
        """Let the log seal some of its active segments, and tell the listener. Only within run()'s job."""
        for file, locations in (await self.seal_quietly(which, *arguments)).sealed:
            self.announce(file, locations)

    async def seal_quietly(self, which: Callable[..., Appended], *arguments: float) -> Appended:
        """The same without telling: the caller does so by announce() when it is done with the files."""
        appended: Appended = await self.in_thread(which, *arguments)
        self._catalog.note_sizes(appended.segments.values())
        return appended

    def announce(self, file: SegmentFile, locations: Sequence[BlockLocation]) -> None:
        """Tell the listener of a sealed segment with these records, if it is still there."""
        if self.listener is not None and locations and file.number in self._catalog.segments:
            self.listener.sealed(self._catalog.sealed(file.number, locations))

    async def unlink_doomed(self, *, is_forced: bool = False) -> int:
        """Unlink what nobody reads or leases any more; return the bytes given back. Only from within run()'s job.

        is_forced: everything, at once, and emptied before: an open descriptor must not keep a deleted tenant's bytes.
        """
        doomed = list(self._catalog.doomed.values()) if is_forced else self._catalog.free_to_unlink()
        if not doomed:
            return 0
        if is_forced:
            await self.in_thread(self._log.empty, [one.file for one in doomed])
        gone = await self.in_thread(self._log.remove, [one.file for one in doomed])
        numbers = {file.number for file in gone}
        freed = sum(one.physical_bytes for one in doomed if one.file.number in numbers)
        self._catalog.unlinked(gone)
        return freed

    async def settle_in(self) -> None:
        """Obey a cap or quotas that are lower than in the last life."""
        for tenant in list(self._catalog.index.tenants):
            self._drop_shares(tenant, self._catalog.policy.quota_of(tenant), 0)
        await self.make_room(0)

    async def make_room(self, needed_bytes: int) -> bool:
        """Evict until so much more fits; False when it cannot. Only from within run()'s job, or the loop itself."""
        await self.unlink_doomed()
        wanted_bytes = needed_bytes
        needed_bytes += self._log.ahead_bytes + self._unsettled_bytes
        free, total = free_bytes(self._disk.folder)
        physical = self._catalog.physical_bytes
        cap = capacity(
            self._max_bytes,
            physical_bytes=physical,
            free_bytes=free,
            reserve_bytes=min(_RESERVE_BYTES, total // _RESERVE_SHARE),
        )
        if physical + needed_bytes <= cap * HIGH:
            return True
        if self._settling:  # a segment must not go while blocks are about to be published in it
            await self._settled()
            return await self.make_room(wanted_bytes)
        uses = self._catalog.uses()
        doomed_bytes = sum(one.physical_bytes for one in self._catalog.doomed.values())
        chosen = victims(uses, max_bytes=cap - doomed_bytes, needed_bytes=needed_bytes)
        if not chosen:
            return chosen is not None
        num_evicted = 0
        for number in chosen:
            await self._copy_forward(number, room_bytes=cap - self._catalog.physical_bytes - needed_bytes)
            num_evicted += self._catalog.doom(number)
        self._counts.evictions["capacity"] += num_evicted
        await self.unlink_doomed()
        _log.info("kvstore.evicted", num_segments=len(chosen), num_blocks=num_evicted)
        return not any(number in self._catalog.doomed for number in chosen)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if self._jobs:
                await self._settled()
                await _do(*self._jobs.popleft())
            elif self._queue:
                await self._write(self._next_batch())
            elif self._settling and self._is_closing:
                await self._settled()  # and look again: whatever came meanwhile waits for an answer
            elif self._is_closing:
                return
            else:
                self._arrived.clear()

    def _next_batch(self) -> list[Waiting]:
        batch = [self._queue.popleft()]
        total = batch[0].cost_bytes
        while self._queue and total + self._queue[0].cost_bytes <= self._max_batch_bytes:
            batch.append(self._queue.popleft())
            total += batch[-1].cost_bytes
        return batch

    async def _write(self, batch: Sequence[Waiting]) -> None:
        try:
            fitting = await self._within_quotas(batch)
            if fitting and not await self.make_room(sum(one.cost_bytes for one in fitting)):
                self._refuse(fitting, "room")
            elif fitting:
                await self._append(fitting)
        except Exception as exc:  # noqa: BLE001 - handed to every writer of the batch, which reports it
            _fail(batch, exc)

    async def _append(self, batch: Sequence[Waiting]) -> None:
        """Hand a batch to the disk; it settles by itself, after those before it."""
        await self._settled(but=MAX_UNSETTLED)
        now = self.clock.now()
        blocks = [one.block for one in batch]
        appended: Appended = await self.in_thread(lambda: self._log.append(blocks, now=now))
        before = self._settling[-1] if self._settling else None
        self._unsettled_bytes += sum(one.cost_bytes for one in batch)
        settling = asyncio.create_task(self._settle(batch, appended, before), name="kvstore-settle")
        self._settling.append(settling)
        settling.add_done_callback(self._settling.remove)

    async def _settled(self, *, but: int = 0) -> None:
        """Wait until all batches that were handed to the disk are settled, but for so many of the last."""
        while len(self._settling) > but:
            await asyncio.wait([self._settling[0]])

    async def _settle(self, batch: Sequence[Waiting], appended: Appended, before: asyncio.Task[None] | None) -> None:
        try:
            for part in appended.unsynced:
                await self._wait_for(part, appended)
            if before is not None:
                await asyncio.wait([before])
            self._publish(batch, appended)
        except Exception as exc:  # noqa: BLE001 - as above
            _fail(batch, exc)
        finally:
            self._unsettled_bytes -= sum(one.cost_bytes for one in batch)

    async def _wait_for(self, part: Unsynced, appended: Appended) -> None:
        """Wait until blocks are durable; take back what was said of them when they never will be."""
        file = part.writer.file
        try:
            physical = await asyncio.wrap_future(part.durable)
        except OSError as exc:
            for place in part.places:
                appended.locations[place] = None
            appended.segments |= (await self.in_thread(self._log.give_up, part, exc)).segments
        else:
            appended.segments[file.number] = SegmentSize(file, part.num_bytes, physical, is_active=True)

    def _publish(self, batch: Sequence[Waiting], appended: Appended) -> None:
        self._catalog.note_sizes(appended.segments.values())
        ended = time.monotonic()
        for waiting, location in zip(batch, appended.locations, strict=True):
            if location is None:
                self._refuse([waiting], "disk")
                continue
            self._catalog.publish(location, waiting.replaced)
            if waiting.replaced is None:
                self._meters.publish_lag_seconds.observe(ended - waiting.since)
            if not waiting.done.done():
                waiting.done.set_result("")
        for file, locations in appended.sealed:
            self.announce(file, locations)

    def _refuse(self, batch: Sequence[Waiting], reason: str) -> None:
        for waiting in batch:
            self._counts.write_drops[reason] += 1
            if not waiting.done.done():
                waiting.done.set_result(reason)

    async def _within_quotas(self, batch: Sequence[Waiting]) -> list[Waiting]:
        """Let each tenant over its quota give up its own coldest blocks; return what may be written."""
        fitting = list(batch)
        for tenant in dict.fromkeys(one.block.tenant for one in batch if one.replaced is None):
            quota = self._catalog.policy.quota_of(tenant)
            if not quota:
                continue
            mine = [one for one in batch if one.block.tenant == tenant and one.replaced is None]
            new_bytes = sum(one.block.block_bytes for one in mine)
            if self._held_bytes(tenant) + self._unsettled_bytes + new_bytes > quota:
                await self._settled()  # then it is known what the tenant holds
            self._drop_shares(tenant, quota, new_bytes)
            if self._held_bytes(tenant) + new_bytes > quota:
                self._refuse(mine, "quota")
                fitting = [one for one in fitting if one not in mine]
        return fitting

    def _held_bytes(self, tenant: str) -> int:
        use = self._catalog.index.tenants.get(tenant)
        return use.num_bytes if use is not None else 0

    def _drop_shares(self, tenant: str, quota: int, new_bytes: int) -> None:
        index, pins = self._catalog.index, self._catalog.pins
        chosen = shares_to_drop(
            self._catalog.tenant_uses(tenant),
            quota_bytes=quota,
            held_bytes=self._held_bytes(tenant),
            new_bytes=new_bytes,
        )
        for number in chosen:
            gone = [one for one in index.blocks_of(number, tenant) if not pins.is_pinned(one)]
            self._counts.evictions["quota"] += sum(index.remove(one) for one in gone)

    async def _copy_forward(self, number: int, *, room_bytes: int) -> None:
        """Save the pinned and the hot blocks of a victim into its class's active segment."""
        catalog = self._catalog
        segment = catalog.segments[number]
        blocks = catalog.index.blocks_of(number)
        warmth = ((one, catalog.hits.last(one.key), catalog.pins.is_pinned(one)) for one in blocks)
        catalog.hits.fold()
        kept = kept_blocks(warmth, segment_bytes=segment.num_bytes)
        total = 0
        batch: list[Waiting] = []
        for location in kept:
            total += location.stored_bytes + MAX_RECORD_OVERHEAD_BYTES
            if total > min(room_bytes, _FORWARD_BYTES):
                break
            stored = await self._reader.stored_bytes_of(location)
            if stored is not None:
                batch.append(Waiting(again(location, stored, location.retention), self._loop.create_future(), location))
        if batch:
            await self._append(batch)
            await self._settled()
            self._counts.refreshed_blocks += len(batch)


async def _do(job: Callable[[], Awaitable[Any]], done: asyncio.Future[Any]) -> None:
    try:
        outcome = await job()
    except Exception as exc:  # noqa: BLE001 - whoever asked for it gets it
        if not done.done():
            done.set_exception(exc)
        return
    if not done.done():
        done.set_result(outcome)


def _fail(batch: Sequence[Waiting], exc: Exception) -> None:
    for waiting in batch:
        if not waiting.done.done():
            waiting.done.set_exception(exc)


def again(location: BlockLocation, stored: memoryview, retention: int) -> Block:
    """Return a stored block to write once more; sealed bytes stay sealed."""
    return Block(
        location.key,
        location.fingerprint,
        stored,
        location.crc32,
        retention,
        location.tenant,
        location.flags,
        location.first_created_seconds,
    )

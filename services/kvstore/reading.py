"""How do stored blocks come off the disk, several runs at a time, each verified?"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from isal.isal_zlib import crc32 as checksum

from services.kvstore.catalog import Catalog
from services.kvstore.disk import Disk
from services.kvstore.encryption import Keyring, SealedAwayError
from services.kvstore.format import record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.meters import Meters, StoreCounts
from services.kvstore.pending import PendingBlocks
from services.kvstore.segments import DamagedBlockError, read_run
from services.kvstore.tiers import RemoteBlocks, RemoteLocation

_log = structlog.get_logger()

READ_AHEAD = 4
"""Runs of one read that are on their way: enough to keep the disk busy while one is checked and one is sent."""
RUN_BYTES = 4 << 20
"""Most that one run reads; a longer block is a run of its own."""
_AHEAD_BYTES = 16 << 20
"""No further run is started while so much is on its way: with the longest blocks one at a time."""
MAX_GAPS = 16
"""How often one chain may go from local blocks to remote ones."""
_READER_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A verified block, as read from disk."""

    location: BlockLocation
    payload: memoryview | bytes
    crc32: int
    """Of the payload."""


_Opened = StoredBlock | DamagedBlockError | SealedAwayError
"""A block, or why it is none."""
_Ahead = tuple[int, asyncio.Task[list[StoredBlock | None]]]
"""Bytes of a run, and the run under way."""


class BlockReader:
    """Reads for one store. Event loop only; the file work is done in threads."""

    def __init__(
        self,
        disk: Disk,
        catalog: Catalog,
        pending: PendingBlocks,
        keyring: Keyring | None,
        *,
        counts: StoreCounts,
        meters: Meters,
    ) -> None:
        self.remote: RemoteBlocks | None = None
        self._disk = disk
        self._catalog = catalog
        self._pending = pending
        self._keyring = keyring
        self._counts = counts
        self._meters = meters
        self._threads = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="kvstore-read")
        self._loop = asyncio.get_running_loop()

    async def read(
        self, fingerprint: bytes, keys: Sequence[bytes], *, pending_seconds: float
    ) -> AsyncGenerator[StoredBlock]:
        """Yield the blocks in order, each verified; stop before the first that is missing or damaged."""
        left = deque(keys)
        ahead: deque[_Ahead] = deque()
        until = self._loop.time() + pending_seconds
        away: deque[RemoteLocation] = deque()
        num_asked = 0
        try:
            while True:
                self._start_ahead(fingerprint, left, away, ahead)
                if ahead:
                    blocks = await ahead[0][1]
                    ahead.popleft()
                    for block in blocks:
                        if block is None:
                            self._counts.short_reads += 1
                            return
                        yield block
                elif not left:
                    return
                elif await self._has_come((fingerprint, left[0]), until):
                    continue
                else:
                    num_asked += 1
                    away.extend(await self._ask_remote(fingerprint, list(left)))
                    if not away or num_asked > MAX_GAPS:
                        self._counts.short_reads += 1
                        return
        finally:
            for _, task in ahead:
                task.cancel()

    async def num_remote(self, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        """Return how many of these keys the tier behind has, with local ones in between, from the first on."""
        now = time.time()
        count = 0
        for _ in range(MAX_GAPS):
            count += len(await self._ask_remote(fingerprint, keys[count:]))
            start = count
            while count < len(keys) and self._catalog.find(fingerprint, keys[count], now) is not None:
                count += 1
            if count in {start, len(keys)}:
                break
        return count

    async def stored_bytes_of(self, location: BlockLocation) -> memoryview | None:
        """Return the verified bytes of a record as they are on disk; None when they are damaged."""
        found = (await self.stored_run([location]))[0]
        return None if isinstance(found, DamagedBlockError) else found

    async def stored_run(self, locations: Sequence[BlockLocation]) -> list[memoryview | DamagedBlockError]:
        """Return the stored bytes of records that lie one behind the other, each verified; damage is quarantined."""
        segment = self._catalog.segments[locations[0].segment]
        found = await self._in_thread(segment.file.number, lambda: read_run(self._disk, segment.file, locations))
        for location, one in zip(locations, found, strict=True):
            if isinstance(one, DamagedBlockError):
                self.quarantine(location, one)
        return found

    def quarantine(self, location: BlockLocation, why: DamagedBlockError) -> None:
        """Let a bad block never be found again; it can be written anew."""
        if self._catalog.index.remove(location):
            self._counts.damaged_blocks += 1
            _log.warning("kvstore.block.damaged", reason=str(why))

    def _lose(self, location: BlockLocation, why: SealedAwayError) -> None:
        """Forget a block whose bytes are right and whose key is gone: it is a miss, and can be written anew."""
        if self._catalog.index.remove(location):
            self._counts.evictions["key"] += 1
            _log.info("kvstore.block.sealed_away", reason=str(why))

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    def _start_ahead(
        self, fingerprint: bytes, left: deque[bytes], away: deque[RemoteLocation], ahead: deque[_Ahead]
    ) -> None:
        """Keep a few runs on their way, as long as there are keys that can be found."""
        while left and len(ahead) < READ_AHEAD and sum(size for size, _ in ahead) < _AHEAD_BYTES:
            size, run = self._next_run(fingerprint, left, away)
            if run is None:
                return
            ahead.append((size, asyncio.create_task(run)))

    def _next_run(
        self, fingerprint: bytes, left: deque[bytes], away: deque[RemoteLocation]
    ) -> tuple[int, Coroutine[Any, Any, list[StoredBlock | None]] | None]:
        """Take the leading keys whose blocks one read brings; return its size, and None if the first is nowhere."""
        now = time.time()
        run: list[BlockLocation] = []
        end = 0
        while left and (location := self._catalog.find(fingerprint, left[0], now)) is not None:
            if run and (
                location.segment != run[0].segment
                or location.offset_bytes != end
                or end - run[0].offset_bytes + record_bytes(location.stored_bytes) > RUN_BYTES
            ):
                break
            end = location.offset_bytes + record_bytes(location.stored_bytes)
            run.append(location)
            left.popleft()
        if run:
            return end - run[0].offset_bytes, self._read_run(run)
        while away:
            remote = away.popleft()
            if left and remote.location.key == left[0]:
                left.popleft()
                return remote.location.stored_bytes, self._read_remote(remote)
        return 0, None

    async def _read_run(self, run: Sequence[BlockLocation]) -> list[StoredBlock | None]:
        number = run[0].segment
        segment = self._catalog.segments.get(number)
        if segment is None:  # gone since the run was chosen; what was worth keeping has moved
            moved = [self._catalog.find(one.fingerprint, one.key, time.time()) for one in run]
            return [block for one in moved for block in (await self._read_run([one]) if one is not None else [None])]
        try:
            with self._meters.read_seconds.time():
                found = await self._in_thread(
                    number, lambda: self._opened(read_run(self._disk, segment.file, run), run)
                )
        except OSError as exc:
            # Out of descriptors and the like: this read misses, the blocks themselves may be fine.
            _log.error("kvstore.read.failed", file=segment.file.path.name, reason=str(exc))
            return [None]
        blocks: list[StoredBlock | None] = []
        for location, one in zip(run, found, strict=True):
            if isinstance(one, DamagedBlockError):
                self.quarantine(location, one)
                return [*blocks, None]
            if isinstance(one, SealedAwayError):
                self._lose(location, one)
                return [*blocks, None]
            blocks.append(one)
        self._counts.read_blocks += len(blocks)
        self._counts.read_bytes += sum(one.stored_bytes for one in run)
        return blocks

    async def _read_remote(self, remote: RemoteLocation) -> list[StoredBlock | None]:
        assert self.remote is not None
        location = remote.location
        try:
            stored = memoryview(await self.remote.read(remote))
            opened = await self._loop.run_in_executor(self._threads, self._opened, [stored], [location])
        except Exception as exc:  # noqa: BLE001 - whatever went wrong over there is a miss here
            _log.info("kvstore.remote.missed", reason=str(exc), error_kind=type(exc).__name__)
            return [None]
        block = opened[0]
        if not isinstance(block, StoredBlock):
            return [None]
        self._counts.remote_blocks += 1
        return [block]

    async def _ask_remote(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[RemoteLocation]:
        if self.remote is None:
            return ()
        try:
            return await self.remote.longest(fingerprint, keys)
        except Exception as exc:  # noqa: BLE001 - as above
            _log.info("kvstore.remote.missed", reason=str(exc), error_kind=type(exc).__name__)
            return ()

    async def _has_come(self, name: tuple[bytes, bytes], until: float) -> bool:
        """Wait for a block that is being written; True when it can be found now."""
        await self._pending.wait(name, timeout_seconds=until - self._loop.time())
        return self._catalog.find(*name, time.time()) is not None

    async def _in_thread(self, number: int, work: Callable[[], list[Any]]) -> list[Any]:
        """Do file work while the segment counts as read: until the thread is done, even when nobody waits for it."""
        segment = self._catalog.segments[number]
        segment.readers += 1
        reading: Future[list[Any]] = self._threads.submit(work)

        def end() -> None:
            segment.readers -= 1

        reading.add_done_callback(lambda _: self._loop.call_soon_threadsafe(end))
        return await asyncio.wrap_future(reading)

    def _opened(self, found: Sequence[memoryview | DamagedBlockError], run: Sequence[BlockLocation]) -> list[_Opened]:
        """In a thread: open what is sealed, and say the payload's own checksum."""
        opened: list[_Opened] = []
        for stored, location in zip(found, run, strict=True):
            if isinstance(stored, DamagedBlockError):
                opened.append(stored)
            elif not location.is_encrypted:
                opened.append(StoredBlock(location, stored, location.crc32))
            else:
                opened.append(self._unsealed(stored, location))
        return opened

    def _unsealed(self, stored: memoryview, location: BlockLocation) -> StoredBlock | SealedAwayError:
        if self._keyring is None:
            return SealedAwayError("the store has no master key")
        try:
            payload = self._keyring.unseal(location.tenant, location.key + location.fingerprint, stored)
        except SealedAwayError as exc:
            return exc
        return StoredBlock(location, payload, checksum(payload))

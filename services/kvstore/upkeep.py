"""What does the store do by itself: what ends, what is unlinked, what is written again before it ends?"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from services.kvstore.catalog import Catalog
from services.kvstore.index import BlockLocation
from services.kvstore.log import SegmentLog
from services.kvstore.meters import StoreCounts
from services.kvstore.reading import BlockReader
from services.kvstore.writing import WriteLine, again

_logger = structlog.get_logger()

MAX_STALE = 4096
"""Blocks that wait to be written again; beyond it a hit refreshes nothing, and the next hit tries once more."""
_MAX_QUEUED = 8
"""Copies give way to new blocks: they wait while so many are queued."""
_MAX_COPY_BYTES = 16 << 20
"""Copies under way at once take about so much memory, beside the budget of the writers."""
_PERIOD_SECONDS = 1.0


class Upkeep:
    """The task that ends leases, pins and lives, and refreshes what was hit."""

    def __init__(
        self,
        catalog: Catalog,
        log: SegmentLog,
        line: WriteLine,
        reader: BlockReader,
        *,
        counts: StoreCounts,
        period_seconds: float,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._line = line
        self._reader = reader
        self._counts = counts
        self._period_seconds = min(_PERIOD_SECONDS, period_seconds)
        self._stale: dict[BlockLocation, int] = {}
        self._under_way: set[BlockLocation] = set()
        self._task = asyncio.create_task(self._run(), name="kvstore-upkeep")
        self._task.add_done_callback(self._ended)

    def refresh(self, stale: Sequence[tuple[BlockLocation, int]]) -> None:
        """Write these again soon, under the class that goes with each."""
        for location, retention in stale:
            if len(self._stale) >= MAX_STALE:
                return
            if location not in self._under_way:
                self._stale.setdefault(location, retention)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_seconds)
            try:
                await self._tick(self._line.clock.now())
            except OSError:
                _logger.exception("kvstore.upkeep.failed")

    async def _tick(self, now: float) -> None:
        self._catalog.leases.expire(time.monotonic())
        self._catalog.pins.expire(now)
        self._catalog.hits.fold()
        if len(self._catalog.pins):
            self.refresh(self._catalog.pinned_and_short(now))
        await self._refresh_stale()
        await self._line.run(lambda: self._end_lives(now))

    async def _end_lives(self, now: float) -> None:
        await self._line.seal(self._log.seal_due, now)
        for number in self._catalog.expired(now):
            self._counts.evictions["ttl"] += self._catalog.doom(number)
        await self._line.unlink_doomed()

    async def _refresh_stale(self) -> None:
        while self._stale and len(self._line) < _MAX_QUEUED:
            try:
                for outcome in await asyncio.gather(*await self._copy_some(), return_exceptions=True):
                    self._counts.refreshed_blocks += outcome == ""
            finally:
                self._under_way.clear()

    async def _copy_some(self) -> list["asyncio.Future[str]"]:
        """Read a few stale blocks and queue them to be written again."""
        waiting: list[asyncio.Future[str]] = []
        num_bytes = 0
        while self._stale and len(waiting) < _MAX_QUEUED and num_bytes < _MAX_COPY_BYTES:
            location, retention = self._stale.popitem()
            self._under_way.add(location)
            if not self._is_current(location):
                continue
            stored = await self._reader.stored_bytes_of(location)
            # Looked up again: what was deleted while it was read must not come back.
            if stored is not None and self._is_current(location):
                waiting.append(self._line.put(again(location, stored, retention), location))
                num_bytes += len(stored)
        return waiting

    def _is_current(self, location: BlockLocation) -> bool:
        return self._catalog.index.find(location.fingerprint, location.key) is location

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            _logger.error("kvstore.upkeep.ended", exc_info=failure)

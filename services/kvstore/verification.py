"""Are the bytes on disk those that were written? For a store that runs, and for the folder of one that does not."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.chassis.errors import InvalidRequest
from services.kvstore.catalog import Catalog
from services.kvstore.directory import SegmentFile, lock, segment_files
from services.kvstore.disk import Disk
from services.kvstore.format import record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.reading import RUN_BYTES, BlockReader
from services.kvstore.segments import DamagedBlockError, load_segment, read_run


@dataclass(frozen=True, slots=True)
class Bad:
    """A block whose bytes are not what was written."""

    key: bytes
    segment: str
    """File name."""
    offset_bytes: int
    fault: str
    """ "header", "payload" or "missing"; "remote" for a block of the object store, whose path `segment` is then."""


@dataclass(frozen=True, slots=True)
class Report:
    """How far a verification is."""

    num_blocks: int
    total_blocks: int
    bad: tuple[Bad, ...] = ()
    """Found since the report before."""
    is_last: bool = False
    num_unread: int = 0
    """At the end: blocks of the object store behind that were not read."""


class Throttle:
    """How long must a reader pause so as not to take more than its share of the disk?"""

    def __init__(self, max_bytes_per_second: int) -> None:
        self._max_bytes_per_second = max_bytes_per_second
        self._started = time.monotonic()
        self._num_bytes = 0

    def pause_seconds(self, num_bytes: int) -> float:
        """Count bytes that were read; return the pause that is due."""
        self._num_bytes += num_bytes
        if not self._max_bytes_per_second:
            return 0.0
        return max(0.0, self._num_bytes / self._max_bytes_per_second - (time.monotonic() - self._started))


class StoreVerification:
    """Reads every block of a running store once, beside its work, and some of the object store behind it."""

    def __init__(
        self, catalog: Catalog, reader: BlockReader, *, max_bytes_per_second: int, remote_bytes: int = 0
    ) -> None:
        """remote_bytes: most that is read from the object store; 0 leaves it out. Raises InvalidRequest without one."""
        if remote_bytes and reader.remote is None:
            raise InvalidRequest("this store has no object store behind it", field="remote_bytes")
        self._catalog = catalog
        self._reader = reader
        self._throttle = Throttle(max_bytes_per_second)
        self._remote_bytes = remote_bytes

    async def __aiter__(self) -> AsyncIterator[Report]:
        done = num_remote = 0
        async for report in self._local():
            done = report.num_blocks
            yield report
        async for report in self._remote():
            num_remote = report.num_blocks
            yield replace(report, num_blocks=done + num_remote, total_blocks=done + report.total_blocks)
        remote = self._reader.remote
        num_unread = max(0, remote.num_blocks - num_remote) if remote is not None else 0
        yield Report(done + num_remote, done + num_remote, is_last=True, num_unread=num_unread)

    async def _local(self) -> AsyncIterator[Report]:
        total, done = len(self._catalog.index), 0
        for number in list(self._catalog.segments):
            segment = self._catalog.segments.get(number)
            locations = list(self._catalog.index.blocks_of(number))
            for run in runs(locations):
                if segment is None or number not in self._catalog.segments:
                    break  # evicted meanwhile
                bad = _bad(segment.file, run, await self._reader.stored_run(run))
                done += len(run)
                yield Report(min(done, total), total, bad)
                await asyncio.sleep(self._throttle.pause_seconds(_length(run)))

    async def _remote(self) -> AsyncIterator[Report]:
        remote = self._reader.remote
        if remote is None or not self._remote_bytes:
            return
        async for one in remote.verify(max_bytes=self._remote_bytes):
            bad = tuple(Bad(bad.key, bad.path, bad.offset_bytes, bad.fault) for bad in one.bad)
            yield Report(one.num_blocks, one.total_blocks, bad)
            await asyncio.sleep(self._throttle.pause_seconds(one.num_bytes))


def verify_folder(folder: Path, *, max_bytes_per_second: int = 0) -> Iterator[Report]:
    """Read every block of a stopped store; change nothing.

    Raises StoreLockedError when a store has the folder open, FileNotFoundError when there is none. A segment without a
    footer (its store was killed) is scanned as a start would scan it: what ends in its torn tail was never published,
    and is no block.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    descriptor = lock(folder)
    try:
        yield from _verify(folder, max_bytes_per_second)
    finally:
        os.close(descriptor)


def _verify(folder: Path, max_bytes_per_second: int) -> Iterator[Report]:
    disk, throttle = Disk(folder), Throttle(max_bytes_per_second)
    loaded = [(file, load_segment(file)) for file in segment_files(folder)]
    total = sum(len(one.locations) + len(one.damaged) for _, one in loaded)
    done = 0
    for file, segment in loaded:
        bad = tuple(Bad(one.key, file.path.name, one.offset_bytes, "payload") for one in segment.damaged)
        done += len(bad)
        if bad:
            yield Report(done, total, bad)
        for run in runs(segment.locations):
            found = _bad(file, run, read_run(disk, file, run))
            done += len(run)
            yield Report(done, total, found)
            time.sleep(throttle.pause_seconds(_length(run)))
    yield Report(done, total, is_last=True)


def runs(locations: Sequence[BlockLocation]) -> Iterator[list[BlockLocation]]:
    """Yield records that lie one behind the other, as long as one read should be."""
    run: list[BlockLocation] = []
    for location in sorted(locations, key=lambda one: one.offset_bytes):
        if run and (location.offset_bytes != run[0].offset_bytes + _length(run) or _length(run) >= RUN_BYTES):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _length(run: Sequence[BlockLocation]) -> int:
    return run[-1].offset_bytes + record_bytes(run[-1].stored_bytes) - run[0].offset_bytes


def _bad(file: SegmentFile, run: Sequence[BlockLocation], found: Sequence[object]) -> tuple[Bad, ...]:
    return tuple(
        Bad(location.key, file.path.name, location.offset_bytes, one.fault)
        for location, one in zip(run, found, strict=True)
        if isinstance(one, DamagedBlockError)
    )

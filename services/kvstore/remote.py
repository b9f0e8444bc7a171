"""How does the local engine use an object store behind it?

It is told of sealed segments, which are uploaded in the background; it asks for blocks that are not local, which are
read in runs of a few MiB and verified; and deletions go to every replica through it. Whatever fails or is late here is
a miss there: the breaker sees to it that a store that is down costs nobody any time.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from isal.isal_zlib import crc32

from services.chassis.errors import FathomError, NoReplica
from services.kvstore.absence import FILE_NAME, Absence
from services.kvstore.blobs import BlobBackend, BlobError, BlobMissingError, load_options, open_blobs
from services.kvstore.encryption import Keyring
from services.kvstore.index import ENCRYPTED, BlockLocation
from services.kvstore.manifests import DELETION_SECONDS, Tombstone
from services.kvstore.remote_catalog import RemoteCatalog
from services.kvstore.remote_index import Found
from services.kvstore.remote_verification import verify_objects
from services.kvstore.tenant_keys import TenantKeys
from services.kvstore.tiers import LocalEngine, RemoteChecked, RemoteLocation, Removed, SealedSegment, Selection
from services.kvstore.uploads import Uploads
from services.kvstore.wall_clock import WallClock

RUN_BYTES = 4 << 20
"""Blocks that lie one behind the other are read together up to this size."""
FULL_REFRESHES = 40
"""One refresh of so many lists everything."""
SWEEPS = 6 * FULL_REFRESHES
"""One of so many is followed by a sweep."""
FLUSH_SECONDS = 3.0
"""How long a store that stops may still upload; what is left is uploaded after its next start."""
_AFTER_SECONDS = 0.05
"""So that a deletion that is heard late covers what just waits to be written here."""
_IN_THREAD_BYTES = 1 << 20
"""From here on a checksum takes long enough to be worth a thread."""

_log = structlog.get_logger()


@dataclass(slots=True)
class RemoteCounts:
    """Counted since boot."""

    read_blocks: int = 0
    read_bytes: int = 0
    """Of blocks that were handed out; ranges are read whole."""
    reads: int = 0
    """Calls to the object store for them."""
    failed_reads: int = 0
    damaged_blocks: int = 0
    missing_blocks: int = 0
    """Listed in a manifest whose object is gone."""
    evicted_for_others: int = 0
    """Local blocks removed because another replica was told to."""
    evicted_in_doubt: int = 0
    """Local blocks removed because they could have been deleted while this replica was away."""


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks of one prefix that lie one behind the other in an object: one range to read."""

    path: str
    start_bytes: int
    num_bytes: int = 0
    num_left: int = 0
    """Blocks that were not handed out yet: with the last one the bytes go."""
    next: "_Run | None" = None
    reading: asyncio.Task[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    found: Found
    run: _Run


class RemoteTier:
    """Segment listener and source of remote blocks of one engine."""

    def __init__(
        self,
        blobs: BlobBackend,
        *,
        keyring: Keyring | None = None,
        absence: Absence | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """keyring: of the engine, if it encrypts.  absence: None if the engine starts empty.  now: Unix seconds."""
        self.counts = RemoteCounts()
        self.blobs = blobs
        self.catalog = RemoteCatalog(blobs, now)
        self.keys = TenantKeys(blobs, keyring)
        self.uploads = Uploads(blobs, self.catalog, self.keys, now)
        self._absence = absence
        self._now = now
        self._wall = WallClock(now=now)
        self._refreshed = now()
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    def open(cls, url: str, options_file: Path | None, folder: Path, *, keyring: Keyring | None = None) -> "RemoteTier":
        """Return the tier over an object store; raise ValueError for a bad URL or options file. Calls nothing yet.

        folder: of the engine.
        """
        blobs = open_blobs(url, load_options(options_file))
        return cls(blobs, keyring=keyring, absence=Absence(folder / FILE_NAME, url, blobs.time))

    @property
    def breaker(self) -> str:
        """State for the stats: "closed" while the object store is in use, else "open"."""
        return "open" if self.blobs.is_away else "closed"

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found in the object store, whether they are local too or not."""
        return self.catalog.index.num_blocks

    @property
    def refresh_age_seconds(self) -> float:
        """Time since the last good look at what the other replicas published."""
        return self._now() - self._refreshed

    def sealed(self, segment: SealedSegment) -> None:
        """Take a segment for upload."""
        self.uploads.put(segment)

    async def evict(self, selection: Selection) -> Removed:
        """Delete what matches from the object store and, when they hear of it, from the disks of all replicas."""
        # By the clock that dates the blocks here, which does not follow a jump, or the object store's if that is later.
        now = max(self._wall.now(), self.blobs.time.now() or 0.0)
        tombstone = Tombstone(
            before_unix_seconds=now + DELETION_SECONDS,
            tenant=selection.tenant,
            fingerprint=selection.fingerprint,
            retention=selection.retention,
        )
        try:
            await self.catalog.refresh(is_full=True)
            # What a clock that was ahead has dated: later blocks of the selection go with it until that date.
            dates = (one.created_unix_seconds for _, one in self.catalog.index.manifests() if tombstone.may_cover(one))
            latest = max(dates, default=0.0) + DELETION_SECONDS
            if latest > tombstone.before_unix_seconds:
                tombstone = replace(tombstone, before_unix_seconds=latest)
            removed = await self.catalog.delete(tombstone)
            await self.keys.refresh(self.catalog.tombstones)
        except (BlobError, OSError) as exc:
            raise NoReplica(f"not all is deleted, for the object store failed; delete again: {exc}") from exc
        return removed

    async def longest(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[RemoteLocation]:
        """Return where the leading keys are; nothing while the object store is left alone."""
        if self.blobs.is_away:
            return ()
        locations: list[RemoteLocation] = []
        run: _Run | None = None
        opens: dict[str, bool] = {}
        for found in self.catalog.index.longest(fingerprint, keys, self._now()):
            entry, path = found.entry, found.name.object_path
            if entry.flags & ENCRYPTED and not opens.setdefault(entry.tenant, self.keys.can_open(entry.tenant)):
                break  # a hit that cannot be opened would be none
            if (
                run is None
                or run.path != path
                or run.start_bytes + run.num_bytes != entry.offset_bytes
                or run.num_bytes + entry.stored_bytes > RUN_BYTES
            ):
                last, run = run, _Run(path, entry.offset_bytes)
                if last is not None:
                    last.next = run
            run.num_bytes += entry.stored_bytes
            run.num_left += 1
            locations.append(RemoteLocation(_location(found), found.manifest.epoch, _Place(found, run)))
        return locations

    async def read(self, location: RemoteLocation) -> memoryview:
        """Return a block's stored bytes, verified; raise BlobError when they cannot be had.

        The first of a run reads it whole, and the run behind it too: a reader goes on to the next blocks.
        """
        place = location.place
        assert isinstance(place, _Place)
        run, entry = place.run, place.found.entry
        self._start(run)
        if run.next is not None:
            self._start(run.next)
        assert run.reading is not None
        try:
            # Shielded: a reader that goes away must not undo what the others of its run wait for.
            whole = await asyncio.shield(run.reading)
        except BlobMissingError:
            self.counts.missing_blocks += 1
            self.catalog.index.remove_block(place.found)
            raise
        except BlobError:
            self.counts.failed_reads += 1
            raise
        finally:
            run.num_left -= 1
            if run.num_left <= 0:
                run.reading = None
        start = entry.offset_bytes - run.start_bytes
        stored = whole[start : start + entry.stored_bytes]
        if await _checksum(stored) != entry.crc32:
            self.counts.damaged_blocks += 1
            self.catalog.index.remove_block(place.found)
            _log.warning("kvstore.remote.damaged", path=run.path, offset_bytes=entry.offset_bytes)
            raise BlobError(f"{run.path} is damaged at {entry.offset_bytes}")
        self.counts.read_blocks += 1
        self.counts.read_bytes += len(stored)
        return stored

    def verify(self, *, max_bytes: int) -> AsyncIterator[RemoteChecked]:
        """Read back blocks of the object store, at most so many bytes, and compare checksums. Raises NoReplica."""
        return verify_objects(self.blobs, self.catalog.index, self._now(), max_bytes=max_bytes)

    async def run(self, engine: LocalEngine, opened: Callable[[], Sequence[SealedSegment]] = tuple) -> None:
        """Keep the catalog fresh, the engine's segments short and the object store tidy, until cancelled.

        opened: returns the engine's open segments with what is findable in them, as they are at that moment.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.uploads.run(), name="kvstore-upload")
            tasks.create_task(self._seal(engine), name="kvstore-seal")
            tasks.create_task(self._hear(engine), name="kvstore-news")
            if self.blobs.options.early_seconds:
                tasks.create_task(self._upload_early(opened), name="kvstore-upload-early")
            turn = 0
            while True:
                try:
                    await self._refresh(engine, is_full=turn % FULL_REFRESHES == 0)
                    if turn % SWEEPS == 0 and not self.blobs.is_read_only:
                        await self.catalog.sweep()
                    turn += 1
                except (BlobError, FathomError, OSError) as exc:
                    _log.warning("kvstore.catalog.failed", reason=str(exc))
                pause = self.blobs.options.refresh_seconds * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
                if self.blobs.is_away:
                    # The next refresh is the trial, so that no request has to be it; before it all are refused.
                    pause = self.blobs.seconds_to_trial + _AFTER_SECONDS
                await asyncio.sleep(pause)

    async def drain(self, engine: LocalEngine) -> None:
        """Seal and upload what is on this disk alone, for a moment; the rest is found again at the next start."""
        if self.blobs.is_read_only:
            return
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await engine.seal_older_than(-1.0)
                await self.uploads.flush()
                await self.uploads.tidy(is_last=True)
        except BlobError as exc:
            _log.info("kvstore.upload.untidy", reason=str(exc))
        except TimeoutError:
            _log.info("kvstore.upload.left", queued_bytes=self.uploads.queued_bytes)

    async def forget_doubtful(self, engine: LocalEngine) -> None:
        """Let the engine drop what may have been deleted while this replica was away for too long to hear of it.

        To be called before anything is served or uploaded.
        """
        before = self._absence.doubted_before() if self._absence is not None else None
        self.keys.doubt(before or 0.0, engine.holders)
        if self._absence is None or before is None or self._absence.has_forgotten(before):
            return
        async with self._one_at_a_time:
            removed = await engine.evict_local(Selection(), before)
        self._absence.forgot(before)
        self.counts.evicted_in_doubt += removed.num_blocks
        if removed.num_blocks:
            _log.warning("kvstore.remote.long_away", num_blocks=removed.num_blocks, before_unix_seconds=before)

    async def ask_time(self) -> None:
        """Set the object store's clock, if it is time for that; without it the clock here must do. Never raises."""
        if not self.blobs.time.is_due or self.blobs.is_away:
            return
        try:
            await self.blobs.ask_time()
        except BlobError as exc:
            if self.blobs.time.now() is None:
                _log.info("kvstore.remote.time_unknown", reason=str(exc))
        if abs(self.blobs.time.ahead_seconds) > DELETION_SECONDS:
            _log.warning("kvstore.remote.clocks_differ", ahead_seconds=self.blobs.time.ahead_seconds)

    async def _refresh(self, engine: LocalEngine, *, is_full: bool) -> None:
        await self.ask_time()
        await self.forget_doubtful(engine)
        is_first = not self.catalog.listed.is_set()
        try:
            await self.catalog.refresh(is_full=is_full)
        finally:
            await self._obey(engine, is_first=is_first)
        self._refreshed = self._now()
        await self.forget_doubtful(engine)  # what was listed may be dated a month later than all that is known here
        await self.keys.obey(self.catalog.tombstones)
        if self._absence is not None:  # before anything is written: a replica that may only read has heard as well
            self._absence.heard()
            await asyncio.to_thread(self._absence.note)
        if not self.blobs.is_read_only:
            await self.keys.share()
            await self.catalog.tidy()

    async def _obey(self, engine: LocalEngine, *, is_first: bool) -> None:
        """Let the engine delete what other replicas were told to delete."""
        # What is here may have been copied until this moment, however late we hear of it.
        # (By no clock: a clock that was set back since may have dated it ahead of now.)
        heard = 0.0 if is_first else sys.float_info.max
        deletions = self.catalog.deletions
        async with self._one_at_a_time:
            while deletions:
                gone = deletions[0]
                selection = Selection(tenant=gone.tenant, fingerprint=gone.fingerprint, retention=gone.retention)
                removed = await engine.evict_local(selection, max(gone.before_unix_seconds, heard))
                self.counts.evicted_for_others += removed.num_blocks
                deletions.pop(0)

    async def _hear(self, engine: LocalEngine) -> None:
        """Take in what others publish within seconds; what is missed here the next refresh finds."""
        await self.catalog.listed.wait()
        while True:
            await asyncio.sleep(self.blobs.options.news_seconds)
            if self.blobs.is_away:
                continue
            try:
                try:
                    heard = await self.catalog.hear()
                finally:
                    is_deleted = bool(self.catalog.deletions)
                    await self.forget_doubtful(engine)
                    await self._obey(engine, is_first=False)
                if is_deleted or any(self.keys.lacks_key_for(manifest) for manifest in heard):
                    await self.keys.refresh(self.catalog.tombstones)
            except (BlobError, FathomError, OSError) as exc:
                _log.warning("kvstore.news.failed", reason=str(exc))

    async def _upload_early(self, opened: Callable[[], Sequence[SealedSegment]]) -> None:
        while True:
            await asyncio.sleep(self.blobs.options.early_seconds)
            if self.blobs.is_read_only:
                continue
            try:
                await self.uploads.upload_opened(opened())
            except (BlobError, OSError) as exc:
                _log.warning("kvstore.early_upload.failed", reason=str(exc))

    async def _seal(self, engine: LocalEngine) -> None:
        seconds = self.blobs.options.seal_seconds
        while True:
            await asyncio.sleep(seconds / 4)
            if self.blobs.is_read_only:
                continue
            try:
                await engine.seal_older_than(seconds)
            except (FathomError, OSError) as exc:
                _log.warning("kvstore.seal.failed", reason=str(exc))

    def _start(self, run: _Run) -> None:
        if run.reading is None:
            self.counts.reads += 1
            run.reading = asyncio.create_task(
                self.blobs.get_range(run.path, run.start_bytes, run.num_bytes), name="kvstore-remote-read"
            )
            # Nobody may be waiting for it any more when it fails.
            run.reading.add_done_callback(lambda done: done.cancelled() or done.exception())


def _location(found: Found) -> BlockLocation:
    """Return the block as its segment's footer had it; the segment's number is no longer of use."""
    entry = found.entry
    return BlockLocation(
        key=entry.key,
        fingerprint=entry.fingerprint,
        segment=0,
        offset_bytes=entry.segment_offset_bytes,
        block_bytes=entry.block_bytes,
        crc32=entry.crc32,
        retention=found.manifest.retention,
        created_seconds=entry.created_unix_seconds,
        tenant=entry.tenant,
        flags=entry.flags,
        age_minutes=entry.age_minutes,
    )


async def _checksum(stored: memoryview) -> int:
    if len(stored) < _IN_THREAD_BYTES:
        return crc32(stored)
    return await asyncio.to_thread(crc32, stored)

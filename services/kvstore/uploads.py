"""When and how does a sealed segment become a published object?

In the background, one at a time, from a queue bounded by bytes and age. Serving never waits for it: what the object
store does not take in time stays on this replica's disk alone.
"""

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import structlog
from isal.isal_zlib import crc32

from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.format import HEADER_BYTES
from services.kvstore.index import BlockLocation
from services.kvstore.manifests import HOUR_SECONDS, MAX_ENTRIES, Entry, Manifest, ManifestName
from services.kvstore.remote_catalog import RemoteCatalog
from services.kvstore.tiers import SealedSegment

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0
_MAX_LIFE_SECONDS = 400 * 86_400.0
_WORTH_LIFE = 0.5
"""A block that the object store has already is uploaded again when it has less than this share of its life left."""

_log = structlog.get_logger()


@dataclass(slots=True)
class UploadCounts:
    """Counted since boot."""

    objects: int = 0
    blocks: int = 0
    num_bytes: int = 0
    retries: int = 0
    known_blocks: int = 0
    """Not uploaded, for the object store has them already."""
    damaged_blocks: int = 0
    """Not uploaded, for their bytes on the local disk were wrong."""
    drops: dict[str, int] = field(default_factory=dict)
    """Blocks that were given up, by reason: "bytes", "age", "gone", "encrypted"."""

    def drop(self, reason: str, num_blocks: int) -> None:
        self.drops[reason] = self.drops.get(reason, 0) + num_blocks


@dataclass(frozen=True, slots=True)
class _Waiting:
    segment: SealedSegment
    since: float


class Uploads:
    """The queue of sealed segments, and the one that is on its way."""

    def __init__(
        self,
        blobs: BlobBackend,
        catalog: RemoteCatalog,
        now: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """now: seconds since the Unix epoch."""
        self.counts = UploadCounts()
        self.queued_bytes = 0
        self._blobs = blobs
        self._catalog = catalog
        self._now = now
        self._clock = clock
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def oldest_seconds(self) -> float:
        """How long the segment at the head of the queue has waited."""
        return self._clock() - self._queue[0].since if self._queue else 0.0

    def put(self, segment: SealedSegment) -> None:
        """Take a segment; the oldest are given up when they are too many bytes together."""
        self._queue.append(_Waiting(segment, self._clock()))
        self.queued_bytes += segment.num_bytes
        while self.queued_bytes > self._blobs.options.max_queue_bytes:
            self._drop_first("bytes")
        if self._queue:
            self._idle.clear()
            self._arrived.set()

    async def flush(self) -> None:
        """Wait until nothing waits any more."""
        await self._idle.wait()

    async def run(self) -> None:
        """Upload what comes, until cancelled."""
        pause = FIRST_RETRY_SECONDS
        await self._catalog.listed.wait()  # or what earlier lives uploaded would go up once more
        while True:
            self._drop_old()
            if not self._queue:
                self._idle.set()
                self._arrived.clear()
                await self._arrived.wait()
                continue
            first = self._queue[0]
            try:
                await self._upload(first.segment)
            except BlobError as exc:
                self.counts.retries += 1
                _log.warning("kvstore.upload.failed", segment=first.segment.path.name, reason=str(exc))
                await asyncio.sleep(max(self._blobs.seconds_to_write, pause * random.uniform(0.8, 1.2)))  # noqa: S311 - jitter
                pause = min(2 * pause, MAX_RETRY_SECONDS)
            else:
                pause = FIRST_RETRY_SECONDS
                self._remove(first)

    async def _upload(self, segment: SealedSegment) -> None:
        name = ManifestName(
            segment.retention,
            int(segment.last_created_unix_seconds // HOUR_SECONDS),
            f"{segment.number:012d}-{segment.epoch:016x}",
        )
        if name in self._catalog.index:
            return
        wanted = self._wanted(segment)
        if not wanted:
            return
        try:
            descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.counts.drop("gone", len(wanted))
            return
        entries: list[Entry] = []
        try:
            size = sum(location.stored_bytes for location in wanted)
            await self._blobs.put_stream(name.object_path, self._pieces(descriptor, wanted, entries), size)
        finally:
            os.close(descriptor)
        if not entries:
            return
        num_bytes = entries[-1].offset_bytes + entries[-1].stored_bytes
        manifest = Manifest(
            segment.retention,
            segment.epoch,
            num_bytes,
            max(entry.created_unix_seconds for entry in entries),
            self._expiry(segment),
            tuple(entries),
        )
        if await self._catalog.publish(name, manifest):
            self.counts.objects += 1
            self.counts.blocks += len(entries)
            self.counts.num_bytes += num_bytes

    def _wanted(self, segment: SealedSegment) -> list[BlockLocation]:
        """Return the blocks that are worth their upload."""
        plain = [location for location in segment.locations if not location.is_encrypted]
        self.counts.drop("encrypted", len(segment.locations) - len(plain))
        life = self._expiry(segment) - segment.last_created_unix_seconds
        wanted = []
        for location in plain:
            found = self._catalog.index.find(location.fingerprint, location.key, self._now())
            if found is not None and found.expires_unix_seconds >= location.created_seconds + life * _WORTH_LIFE:
                self.counts.known_blocks += 1
            else:
                wanted.append(location)
        return wanted[:MAX_ENTRIES]

    async def _pieces(self, descriptor: int, wanted: list[BlockLocation], entries: list[Entry]) -> AsyncIterator[bytes]:
        """Yield the stored bytes of each block that is as it was written; append to `entries` where they will be."""
        entries.clear()
        offset = 0
        for location in wanted:
            stored = await asyncio.to_thread(_read, descriptor, location)
            if stored is None:
                self.counts.damaged_blocks += 1
                continue
            entries.append(
                Entry(
                    key=location.key,
                    fingerprint=location.fingerprint,
                    tenant=location.tenant,
                    created_unix_seconds=location.created_seconds,
                    offset_bytes=offset,
                    segment_offset_bytes=location.offset_bytes,
                    block_bytes=location.block_bytes,
                    stored_bytes=location.stored_bytes,
                    crc32=location.crc32,
                    flags=location.flags,
                )
            )
            offset += location.stored_bytes
            yield stored

    def _expiry(self, segment: SealedSegment) -> float:
        """Return when the segment's last block ends; a class without an end gets one here, or nothing would ever go."""
        life = min(segment.expires_at_unix_seconds - segment.last_created_unix_seconds, _MAX_LIFE_SECONDS)
        if segment.expires_at_unix_seconds == float("inf"):
            life = self._blobs.options.unspecified_seconds
        return segment.last_created_unix_seconds + life

    def _drop_old(self) -> None:
        while self._queue and self.oldest_seconds > self._blobs.options.max_queue_seconds:
            self._drop_first("age")

    def _drop_first(self, reason: str) -> None:
        first = self._queue.popleft()
        self.queued_bytes -= first.segment.num_bytes
        self.counts.drop(reason, len(first.segment.locations))
        _log.warning("kvstore.upload.dropped", segment=first.segment.path.name, reason=reason)

    def _remove(self, done: _Waiting) -> None:
        # It may have been dropped while it was on its way.
        if self._queue and self._queue[0] is done:
            self._queue.popleft()
            self.queued_bytes -= done.segment.num_bytes


def _read(descriptor: int, location: BlockLocation) -> bytes | None:
    """Return a record's stored bytes; None when they are not what was written: overwritten, punched out or damaged."""
    try:
        stored = os.pread(descriptor, location.stored_bytes, location.offset_bytes + HEADER_BYTES)
    except OSError:
        return None
    # The engine reads past the page cache and so should we: these pages serve nobody again.
    os.posix_fadvise(descriptor, location.offset_bytes, HEADER_BYTES + location.stored_bytes, os.POSIX_FADV_DONTNEED)
    if len(stored) != location.stored_bytes or crc32(stored) != location.crc32:
        return None
    return stored

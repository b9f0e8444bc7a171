"""When and how does a sealed segment become a published object?

In the background, one at a time, from a queue bounded by bytes and age; beside them pieces of segments that are still
open. Serving never waits for it: what the object store does not take in time stays on this replica's disk alone.
"""

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import structlog
from isal.isal_zlib import crc32

from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.format import HEADER_BYTES
from services.kvstore.index import BlockLocation
from services.kvstore.manifests import HOUR_SECONDS, MAX_ENTRIES, Entry, Manifest, ManifestName
from services.kvstore.pieces import Pieces
from services.kvstore.remote_catalog import RemoteCatalog
from services.kvstore.tenant_keys import TenantKeys
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
    pieces: int = 0
    """Of those, parts of segments that were still open."""
    blocks: int = 0
    num_bytes: int = 0
    retries: int = 0
    known_blocks: int = 0
    """Not uploaded, for the object store has them already."""
    damaged_blocks: int = 0
    """Not uploaded, for their bytes on the local disk were wrong."""
    drops: dict[str, int] = field(default_factory=dict)
    """Blocks that were given up, by reason: "bytes", "age", "gone", "encrypted" (nobody could open them)."""

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
        keys: TenantKeys,
        now: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """now: seconds since the Unix epoch."""
        self.counts = UploadCounts()
        self.queued_bytes = 0
        self._blobs = blobs
        self._catalog = catalog
        self._keys = keys
        self._pieces = Pieces()
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

    async def upload_opened(self, opened: Sequence[SealedSegment]) -> None:
        """Upload what is new in open segments, as they are now, and delete the pieces that have become superfluous."""
        if not self._catalog.listed.is_set():
            return
        for segment in opened:
            number, blocks = self._pieces.next_blocks(segment)
            while blocks:
                name = _name(segment, blocks[-1].created_seconds, suffix=f"-{number:05d}")
                self._pieces.begin(segment, name, blocks)
                wanted = self._wanted(segment, blocks)
                if wanted:
                    self.counts.pieces += await self._send(name, segment, wanted) > 0
                self._pieces.done(segment, blocks)
                number, blocks = self._pieces.next_blocks(segment)
        await self.tidy()

    async def tidy(self, *, is_last: bool = False) -> None:
        """Delete the small pieces of segments that are uploaded; is_last: at once, for nobody would do so later."""
        while (name := self._pieces.first_superseded(math.inf if is_last else self._now())) is not None:
            await self._catalog.remove(name)
            self._pieces.deleted(name)

    async def _upload(self, segment: SealedSegment) -> None:
        name = _name(segment, segment.last_created_unix_seconds)
        if name in self._catalog.index:
            self._pieces.stay(segment)
            return
        wanted = self._wanted(segment, segment.locations)
        if wanted and await self._send(name, segment, wanted) == len(wanted):
            self._pieces.whole_is_there(segment, self._now())
        else:
            self._pieces.stay(segment)

    async def _send(self, name: ManifestName, segment: SealedSegment, wanted: Sequence[BlockLocation]) -> int:
        """Put blocks of a segment into an object and publish it; return how many: some may be gone or damaged."""
        await self._keys.publish({location.tenant for location in wanted if location.is_encrypted})
        try:
            descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.counts.drop("gone", len(wanted))
            return 0
        entries: list[Entry] = []
        try:
            size = sum(location.stored_bytes for location in wanted)
            await self._blobs.put_stream(name.object_path, self._read_all(descriptor, wanted, entries), size)
        finally:
            os.close(descriptor)
        if not entries:
            return 0
        num_bytes = entries[-1].offset_bytes + entries[-1].stored_bytes
        created = max(entry.created_unix_seconds for entry in entries)
        expires = created + self._life_seconds(segment)
        manifest = Manifest(segment.retention, segment.epoch, num_bytes, created, expires, tuple(entries))
        if await self._catalog.publish(name, manifest):
            self.counts.objects += 1
            self.counts.blocks += len(entries)
            self.counts.num_bytes += num_bytes
        return len(entries)

    def _wanted(self, segment: SealedSegment, locations: Sequence[BlockLocation]) -> list[BlockLocation]:
        """Return the blocks that are worth their upload."""
        life = self._life_seconds(segment)
        small = self._pieces.small(segment)
        wanted = []
        for location in locations:
            found = self._catalog.index.find(location.fingerprint, location.key, self._now())
            if location.is_encrypted and not self._keys.can_open(location.tenant):
                self.counts.drop("encrypted", 1)
            elif (
                found is not None
                and found.name not in small
                and found.expires_unix_seconds >= location.created_seconds + life * _WORTH_LIFE
            ):
                self.counts.known_blocks += 1
            else:
                wanted.append(location)
        return wanted[:MAX_ENTRIES]

    async def _read_all(
        self, descriptor: int, wanted: Sequence[BlockLocation], entries: list[Entry]
    ) -> AsyncIterator[bytes]:
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
                    age_minutes=location.age_minutes,
                )
            )
            offset += location.stored_bytes
            yield stored

    def _life_seconds(self, segment: SealedSegment) -> float:
        """Return how long its blocks live; a class without an end gets one here, or nothing would ever go."""
        if math.isinf(segment.expires_at_unix_seconds):
            return self._blobs.options.unspecified_seconds
        return min(segment.expires_at_unix_seconds - segment.last_created_unix_seconds, _MAX_LIFE_SECONDS)

    def _drop_old(self) -> None:
        while self._queue and self.oldest_seconds > self._blobs.options.max_queue_seconds:
            self._drop_first("age")

    def _drop_first(self, reason: str) -> None:
        first = self._queue.popleft()
        self.queued_bytes -= first.segment.num_bytes
        self.counts.drop(reason, len(first.segment.locations))
        self._pieces.stay(first.segment)
        _log.warning("kvstore.upload.dropped", segment=first.segment.path.name, reason=reason)

    def _remove(self, done: _Waiting) -> None:
        # It may have been dropped while it was on its way.
        if self._queue and self._queue[0] is done:
            self._queue.popleft()
            self.queued_bytes -= done.segment.num_bytes


def _name(segment: SealedSegment, last_created: float, suffix: str = "") -> ManifestName:
    words = f"{segment.number:012d}-{segment.epoch:016x}{suffix}"
    return ManifestName(segment.retention, int(last_created // HOUR_SECONDS), words)


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

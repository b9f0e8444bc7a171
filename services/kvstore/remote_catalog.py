"""What does the object store hold by now, and what in it has to go?

Every replica keeps the same catalog by itself: it lists manifests, reads the new ones, obeys tombstones, and deletes
what has expired. All of it can be done twice, by two replicas at once, or be left half done, without harm: a manifest
goes before its object, a rewritten object is published before the old one goes, and names of rewritten objects follow
from what is kept.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
from isal.isal_zlib import crc32

from services.kvstore.blobs import BlobBackend, BlobError, BlobMissingError
from services.kvstore.manifests import (
    CLASSES,
    HOUR_SECONDS,
    MAX_MANIFEST_BYTES,
    MAX_TOMBSTONE_BYTES,
    Entry,
    Manifest,
    ManifestName,
    Tombstone,
    class_prefix,
    pack,
    pack_tombstone,
    parse,
    parse_name,
    parse_tombstone,
    without,
)
from services.kvstore.news import News
from services.kvstore.remote_index import RemoteIndex
from services.kvstore.tiers import Removed

MAX_MANIFESTS = 200_000
MAX_TOMBSTONES = 10_000
"""One more deletion is refused: a listing that is cut short would hide the others."""
TOMBSTONE_SECONDS = 30 * 86_400.0
"""How long a deletion is remembered. Whoever was away for longer gives up what is older (absence.py)."""
_READS_AT_ONCE = 8
_LATE_HOURS = 2
"""How long after its last block a segment may be published and still be seen by the next short listing."""
_UPLOAD_SECONDS = 3600.0
"""No upload takes as long: an older object without a manifest will never get one."""
_OTHERS_GRACE_SECONDS = 300.0
"""How long what another replica published and should delete is left to it."""

_log = structlog.get_logger()


@dataclass(slots=True)
class CatalogCounts:
    """Counted since boot."""

    refreshes: int = 0
    failed_refreshes: int = 0
    damaged_manifests: int = 0
    expired_objects: int = 0
    purged_objects: int = 0
    swept_objects: int = 0
    heard_manifests: int = 0
    """Found within seconds, not by listing all of them."""


class RemoteCatalog:
    """The published manifests and the tombstones, as of the last refresh."""

    def __init__(self, blobs: BlobBackend, now: Callable[[], float]) -> None:
        """now: seconds since the Unix epoch."""
        self.index = RemoteIndex(blobs.options.max_blocks)
        self.counts = CatalogCounts()
        self.listed = asyncio.Event()
        """Set once all that was published has been listed."""
        self.heard_after_seconds = 0.0
        """How old the last block was that was heard of from another replica."""
        self.deletions: list[Tombstone] = []
        """Those that were heard of, for whoever keeps blocks elsewhere: it takes out each that it has obeyed. Kept here
        until then, for the call that heard of one may fail after that."""
        self._blobs = blobs
        self._now = now
        self._news = News(blobs, now)
        self._one_at_a_time = asyncio.Lock()
        self._tombstones: dict[str, Tombstone] = {}
        """By path."""
        self._tombstone_dates: dict[str, float] = {}
        """By path: when the object store got it, by its own clock."""
        self._mine: set[ManifestName] = set()
        """Published by this process."""
        self._covered: set[ManifestName] = set()
        """Manifests with blocks that a tombstone covers."""
        self._orphans: set[str] = set()
        """Objects without a manifest whose deletion failed."""
        self._unreadable: set[str] = set()

    @property
    def tombstones(self) -> tuple[Tombstone, ...]:
        return tuple(self._tombstones.values())

    async def publish(self, name: ManifestName, manifest: Manifest) -> bool:
        """Publish an object that is there already; False when it had been published before."""
        is_new = await self._blobs.put_if_absent(name.path, pack(manifest))
        self._mine.add(name)
        if is_new:
            self._take(name, manifest)
            await self._news.tell(name.path)
        return is_new

    async def hear(self) -> Sequence[Manifest]:
        """Take in what others published in the last moments: one call, and one for each manifest that is new.

        Returns the manifests that were not known before.
        """
        paths = await self._news.heard()
        async with self._one_at_a_time:
            is_deleted = any(path.startswith("tombstone/") and path not in self._tombstones for path in paths)
            if is_deleted:
                await self._refresh_tombstones()
            heard = await self._read([name for path in paths if (name := parse_name(path)) is not None])
        for manifest in heard:
            self.counts.heard_manifests += 1
            self.heard_after_seconds = self._now() - manifest.created_unix_seconds
        return heard

    async def remove(self, name: ManifestName) -> None:
        """Delete an object that is superseded by another one."""
        async with self._one_at_a_time:
            await self._delete_object(name)

    async def refresh(self, *, is_full: bool) -> None:
        """Take in what others published and deleted.

        is_full: list everything, which also shows what is gone; else only what was published lately.
        """
        try:
            async with self._one_at_a_time:
                await self._refresh_tombstones()
                if is_full or not self.listed.is_set():
                    await self._refresh_all()
                else:
                    await self._refresh_latest()
        except BlobError:
            self.counts.failed_refreshes += 1
            raise
        self.counts.refreshes += 1

    async def delete(self, tombstone: Tombstone) -> Removed:
        """Delete what matches, for good, whoever published it; return what was removed once it is gone."""
        path = f"tombstone/{secrets.token_hex(16)}"
        if len(self._tombstones) >= MAX_TOMBSTONES:
            raise BlobError(f"{MAX_TOMBSTONES} deletions are remembered already, and each for a month")
        await self._blobs.put_if_absent(path, pack_tombstone(tombstone))
        await self._news.tell(path)
        self._obey({path: tombstone})
        await self.refresh(is_full=True)
        num_blocks = num_bytes = 0
        async with self._one_at_a_time:
            for name in self._covered | set(self.index.forgotten()):
                removed = await self._purge(name)
                num_blocks, num_bytes = num_blocks + removed.num_blocks, num_bytes + removed.num_bytes
        return Removed(num_blocks, num_bytes)

    async def tidy(self) -> None:
        """Delete what has expired or is deleted: one's own at once, what other replicas left after a while."""
        async with self._one_at_a_time:
            now = self._earliest_now()
            late = now - _OTHERS_GRACE_SECONDS
            long_expired = set(self.index.expired(late))
            for name in self.index.expired(now):
                if name in self._mine or name in long_expired:
                    await self._delete_object(name)
                    self.counts.expired_objects += 1
            is_late = any(one.before_unix_seconds < late for one in self.tombstones)
            for name in tuple(self._covered):
                if is_late or name in self._mine:
                    await self._purge(name)
            for path in tuple(self._orphans):
                await self._blobs.delete(path)
                self._orphans.discard(path)
            # Only right after a date was written there: those who cannot write one tell by it how long they were away.
            if not self._blobs.time.is_due:
                await self._end_tombstones(now - TOMBSTONE_SECONDS)
            await self._news.tidy()

    async def sweep(self) -> None:
        """Delete objects that nothing publishes: what a replica that died while it uploaded or deleted left behind."""
        async with self._one_at_a_time:
            await self._news.sweep()
            objects = await self._blobs.list("seg", max_blobs=MAX_MANIFESTS)
            if not await self._refresh_all():
                return
            names = [*self.index.names(), *(name for path in self._unreadable if (name := parse_name(path)))]
            published = {name.object_path for name in names}
            before = self._earliest_now() - _UPLOAD_SECONDS
            for blob in objects:
                if blob.path not in published and blob.modified.timestamp() < before:
                    await self._blobs.delete(blob.path)
                    self.counts.swept_objects += 1

    def _earliest_now(self) -> float:
        """Return a time that has come by both clocks: nothing is deleted for good because one of them is wrong."""
        there = self._blobs.time.now()
        return self._now() if there is None else min(self._now(), there)

    async def _end_tombstones(self, before: float) -> None:
        for path, tombstone in tuple(self._tombstones.items()):
            if max(tombstone.before_unix_seconds, self._tombstone_dates.get(path, 0.0)) < before:
                await self._blobs.delete(path)
                self._forget_tombstone(path)

    def _forget_tombstone(self, path: str) -> None:
        self._tombstones.pop(path, None)
        self._tombstone_dates.pop(path, None)

    def _take(self, name: ManifestName, manifest: Manifest) -> None:
        kept = without(manifest, self.tombstones)
        self.index.add(name, kept)
        if kept is not manifest:
            self._covered.add(name)

    def _obey(self, fresh: Mapping[str, Tombstone]) -> None:
        """Let nothing be found any more that these deletions cover."""
        self._tombstones.update(fresh)
        for name, manifest in self.index.manifests() if fresh else ():
            if without(manifest, tuple(fresh.values())) is not manifest:
                self._take(name, manifest)

    async def _refresh_tombstones(self) -> None:
        known = set(self._tombstones)  # before the listing, as with manifests
        blobs = await self._blobs.list("tombstone", max_blobs=2 * MAX_TOMBSTONES)
        listed = {one.path: one.modified.timestamp() for one in blobs}
        fresh: dict[str, Tombstone] = {}
        for path in listed.keys() - self._tombstones.keys() - self._unreadable:
            try:
                tombstone = parse_tombstone(await self._blobs.get(path, max_bytes=MAX_TOMBSTONE_BYTES))
            except BlobMissingError:
                continue
            if tombstone is None:
                self._refuse(path)
            else:
                fresh[path] = tombstone
        for path in known - listed.keys() if len(blobs) < 2 * MAX_TOMBSTONES else ():
            self._forget_tombstone(path)
        self._obey(fresh)
        self._tombstone_dates = {path: listed[path] for path in listed.keys() & self._tombstones.keys()}
        self.deletions += fresh.values()

    async def _refresh_all(self) -> bool:
        """Make the catalog what is listed; False when the listing was cut short, and what is gone is not known."""
        known = set(self.index.names())  # before the listing: what is published meanwhile need not be in it
        listed = await self._list("manifest", "")
        is_whole = len(listed) < MAX_MANIFESTS
        for name in known - set(listed) if is_whole else ():
            self._lose(name)
        await self._read(listed)
        self.listed.set()
        return is_whole

    async def _refresh_latest(self) -> None:
        hour = int(self._now() // HOUR_SECONDS) - _LATE_HOURS
        for retention in CLASSES:
            prefix = class_prefix(retention)
            await self._read(await self._list(prefix, f"{prefix}{hour:08d}"))

    async def _list(self, prefix: str, after: str) -> list[ManifestName]:
        blobs = await self._blobs.list(prefix, after=after, max_blobs=MAX_MANIFESTS)
        if len(blobs) == MAX_MANIFESTS:
            _log.warning("kvstore.catalog.truncated", num_manifests=len(blobs))
        return [name for blob in blobs if (name := parse_name(blob.path)) is not None]

    async def _read(self, names: Sequence[ManifestName]) -> list[Manifest]:
        """Take in the manifests that are not known yet, and return them."""
        new = [name for name in names if name not in self.index and name.path not in self._unreadable]
        found: list[Manifest | None] = []
        for start in range(0, len(new), _READS_AT_ONCE):
            found += await asyncio.gather(*(self._read_one(name) for name in new[start : start + _READS_AT_ONCE]))
        return [manifest for manifest in found if manifest is not None]

    async def _read_one(self, name: ManifestName) -> Manifest | None:
        manifest = await self._fetch(name)
        if manifest is not None:
            self._take(name, manifest)
        return manifest

    async def _fetch(self, name: ManifestName) -> Manifest | None:
        """Return a manifest as published; None when it is gone or damaged."""
        try:
            manifest = parse(await self._blobs.get(name.path, max_bytes=MAX_MANIFEST_BYTES))
        except BlobMissingError:
            self._lose(name)
            return None
        if manifest is None or manifest.retention != name.retention:
            self._refuse(name.path)
            return None
        return manifest

    async def _purge(self, name: ManifestName) -> Removed:
        """Rewrite an object without what tombstones cover, or delete it when nothing else is in it."""
        manifest = await self._fetch(name)
        if manifest is None:
            return Removed()
        kept = without(manifest, self.tombstones)
        if kept is manifest:
            self._covered.discard(name)
            return Removed()
        if kept.entries:
            await self._rewrite(name, kept)
        await self._delete_object(name)
        self.counts.purged_objects += 1
        left = {entry.offset_bytes for entry in kept.entries}
        gone = [entry for entry in manifest.entries if entry.offset_bytes not in left]
        return Removed(len(gone), sum(entry.block_bytes for entry in gone))

    async def _rewrite(self, name: ManifestName, kept: Manifest) -> None:
        # Named after what is kept: two replicas that do this at once write the same object.
        digest = hashlib.sha256(b"".join(entry.key for entry in kept.entries)).hexdigest()[:16]
        new = replace(name, id=f"{name.id.partition('.')[0]}.{digest}")
        entries: list[Entry] = []
        size = sum(entry.stored_bytes for entry in kept.entries)
        await self._blobs.put_stream(new.object_path, self._copy(name, kept.entries, entries), size)
        if not entries:  # the old object is gone, or all of it is damaged
            await self._blobs.delete(new.object_path)
        else:
            size = entries[-1].offset_bytes + entries[-1].stored_bytes
            await self.publish(new, replace(kept, object_bytes=size, entries=tuple(entries)))

    async def _copy(
        self, name: ManifestName, wanted: Sequence[Entry], copied: list[Entry]
    ) -> AsyncIterator[memoryview]:
        """Yield the bytes of the wanted blocks; append to `copied` where they will be. Damaged ones are left behind."""
        offset = 0
        for entry in wanted:
            try:
                stored = await self._blobs.get_range(name.object_path, entry.offset_bytes, entry.stored_bytes)
            except BlobMissingError:
                return
            if crc32(stored) == entry.crc32:
                copied.append(entry._replace(offset_bytes=offset))
                offset += entry.stored_bytes
                yield stored

    async def _delete_object(self, name: ManifestName) -> None:
        await self._blobs.delete(name.path)
        self._lose(name)
        self._orphans.add(name.object_path)  # forgotten on a crash: then the bucket's lifecycle rule removes it
        await self._blobs.delete(name.object_path)
        self._orphans.discard(name.object_path)

    def _lose(self, name: ManifestName) -> None:
        self.index.remove(name)
        self._mine.discard(name)
        self._covered.discard(name)

    def _refuse(self, path: str) -> None:
        self._unreadable.add(path)
        self.counts.damaged_manifests += 1
        _log.warning("kvstore.catalog.unreadable", path=path)

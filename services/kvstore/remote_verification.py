"""Are the bytes in the object store those that their manifests say?"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from isal.isal_zlib import crc32

from services.chassis.errors import NoReplica
from services.kvstore.blobs import BlobBackend, BlobError, BlobMissingError
from services.kvstore.manifests import Entry, Manifest, ManifestName
from services.kvstore.remote_index import Found, RemoteIndex
from services.kvstore.tiers import RemoteBad, RemoteChecked

_RUN_BYTES = 4 << 20
_TRIES = 3
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks that lie one behind the other in an object."""

    name: ManifestName
    manifest: Manifest
    entries: Sequence[Entry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.stored_bytes for entry in self.entries)


async def verify_objects(
    blobs: BlobBackend, index: RemoteIndex, now: float, *, max_bytes: int
) -> AsyncIterator[RemoteChecked]:
    """Read back live blocks, at most `max_bytes` of them, and compare their CRC-32 with the manifests'.

    Starts at any object, so that several short looks see all of them in time. Bad blocks are not found any more. Raises
    NoReplica when the object store fails; what it did not answer is neither good nor bad.
    """
    planned = list(_plan(index, now, max_bytes))
    num_blocks, total = 0, sum(len(run.entries) for run in planned)
    for run in planned:
        bad = await _bad_of(blobs, index, run)
        for entry, _ in bad:
            index.remove_block(Found(run.name, run.manifest, entry))
        num_blocks += len(run.entries)
        found = tuple(RemoteBad(entry.key, run.name.object_path, entry.offset_bytes, fault) for entry, fault in bad)
        yield RemoteChecked(num_blocks, total, run.num_bytes, found)


def _plan(index: RemoteIndex, now: float, max_bytes: int) -> Iterator[_Run]:
    listed = list(index.manifests())
    start = random.randrange(len(listed)) if listed else 0  # noqa: S311 - any object will do
    left = max_bytes
    for name, manifest in listed[start:] + listed[:start]:
        for run in _runs(name, manifest, now):
            left -= run.num_bytes
            if left < 0:
                return
            yield run


def _runs(name: ManifestName, manifest: Manifest, now: float) -> Iterator[_Run]:
    run: list[Entry] = []
    size = 0
    for entry in manifest.entries:
        if entry.created_unix_seconds + manifest.life_seconds <= now:
            continue
        follows = run and entry.offset_bytes == run[-1].offset_bytes + run[-1].stored_bytes
        if run and not (follows and size + entry.stored_bytes <= _RUN_BYTES):
            yield _Run(name, manifest, tuple(run))
            run, size = [], 0
        run.append(entry)
        size += entry.stored_bytes
    if run:
        yield _Run(name, manifest, tuple(run))


async def _bad_of(blobs: BlobBackend, index: RemoteIndex, run: _Run) -> list[tuple[Entry, str]]:
    try:
        raw = await _read(blobs, run)
    except BlobMissingError:
        if run.name not in index:
            return []  # it expired or was replaced meanwhile
        if len(run.entries) == 1:
            return [(run.entries[0], "missing")]
        # An object that is too short may have its first blocks.
        parts = [await _bad_of(blobs, index, _Run(run.name, run.manifest, (entry,))) for entry in run.entries]
        return [one for part in parts for one in part]
    first = run.entries[0].offset_bytes
    bad = []
    for entry in run.entries:
        start = entry.offset_bytes - first
        if crc32(raw[start : start + entry.stored_bytes]) != entry.crc32:
            bad.append((entry, "remote"))
    return bad


async def _read(blobs: BlobBackend, run: _Run) -> memoryview:
    for left in reversed(range(_TRIES)):
        try:
            return await blobs.get_range(run.name.object_path, run.entries[0].offset_bytes, run.num_bytes)
        except BlobMissingError:
            raise
        except BlobError as exc:
            if not left:
                raise NoReplica(f"not all is verified, for the object store failed: {exc}") from exc
            await asyncio.sleep(_RETRY_SECONDS + blobs.seconds_to_trial)
    raise AssertionError

"""What did earlier lives of the store leave in its folder?"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.kvstore.directory import SegmentFile, former_files, lock, segment_files, sync_folder
from services.kvstore.disk import physical_bytes
from services.kvstore.index import BlockIndex
from services.kvstore.retention import RetentionPolicy
from services.kvstore.segments import LoadedSegment, load_segment, seal_again

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """A segment that is there."""

    file: SegmentFile
    num_bytes: int
    physical_bytes: int
    first_created: float
    last_created: float
    """Of its blocks; both 0 when it could not be read."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a store needs to go on where the last one stopped."""

    lock: int
    """Descriptor that holds the folder's lock."""
    index: BlockIndex
    segments: tuple[RecoveredSegment, ...]
    """Oldest first."""
    next_number: int
    num_damaged: int


def recover(
    folder: Path, policy: RetentionPolicy, now: float, progress: Callable[[str, int, int], None] | None = None
) -> Recovered:
    """Lock the folder, index what its segments hold, seal those that a crash left open, remove what is expired.

    Raises StoreLockedError when another process has the folder. A segment that cannot be read is kept, unindexed, until
    its room is needed.
    """
    descriptor = lock(folder)
    try:
        with _without_collections():
            return _rebuild(folder, descriptor, policy, now, progress)
    except BaseException:
        os.close(descriptor)
        raise


def close_folder(descriptor: int) -> None:
    """Let another store open the folder."""
    os.close(descriptor)


def _rebuild(
    folder: Path,
    descriptor: int,
    policy: RetentionPolicy,
    now: float,
    progress: Callable[[str, int, int], None] | None,
) -> Recovered:
    index = BlockIndex()
    files = segment_files(folder)
    former = former_files(folder)
    for path in former:
        path.unlink()
        _log.info("kvstore.segment.of_former_format", file=path.name)
    kept: list[RecoveredSegment] = []
    num_damaged = 0
    # Newest first: a block that was written again (moved, refreshed, or its first copy had gone bad) is the later copy.
    for done, file in enumerate(reversed(files)):
        loaded, num_bytes = _load(file, policy, now)
        if loaded is not None:
            num_damaged += len(loaded.damaged)
            if not loaded.locations:
                file.path.unlink()
                continue
            for location in reversed(loaded.locations):
                if not index.add(location):
                    index.note_stale(location)
            for location in loaded.damaged:
                index.note_stale(location)
        created = [one.created_seconds for one in loaded.locations] if loaded is not None else [0.0]
        kept.append(RecoveredSegment(file, num_bytes, physical_bytes(file.path), min(created), max(created)))
        if progress is not None:
            progress("index", done + 1, len(files))
    if len(kept) < len(files) or former:
        sync_folder(folder)
    next_number = files[-1].number + 1 if files else 1
    return Recovered(descriptor, index, tuple(reversed(kept)), next_number, num_damaged)


def _load(file: SegmentFile, policy: RetentionPolicy, now: float) -> tuple[LoadedSegment | None, int]:
    """Return what a segment holds that is not expired, and its size; None for one that cannot be read."""
    try:
        loaded = load_segment(file)
        if loaded.locations and policy.expires_at(file.retention, loaded.locations[-1].created_seconds) <= now:
            return LoadedSegment((), 0, loaded.damaged, is_sealed=True), 0
        if loaded.is_sealed or not loaded.locations:
            return loaded, file.path.stat().st_size
        num_bytes = seal_again(file, loaded.locations, loaded.end_bytes)
    except OSError as exc:
        _log.error("kvstore.segment.unreadable", file=file.path.name, reason=str(exc))
        return None, file.path.stat().st_size
    _log.info("kvstore.segment.recovered", file=file.path.name, num_blocks=len(loaded.locations))
    return loaded, num_bytes


@contextmanager
def _without_collections() -> Iterator[None]:
    """An index of a million tuples that all stay would be walked again and again by the collector."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

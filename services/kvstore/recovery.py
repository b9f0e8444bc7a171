"""What did earlier lives of the store leave in its folder?"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.kvstore.directory import SegmentFile, lock, segment_files, sync_folder
from services.kvstore.index import BlockIndex
from services.kvstore.segments import load_segment, seal_recovered

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a store needs to go on where the last one stopped."""

    lock: int
    """Descriptor that holds the folder's lock."""
    index: BlockIndex
    segments: tuple[tuple[SegmentFile, int], ...]
    """Each segment and its size in bytes, oldest first."""
    next_number: int
    num_damaged: int


def recover(folder: Path, progress: Callable[[str, int, int], None] | None = None) -> Recovered:
    """Lock the folder, index what its segments hold, and seal those that a crash left open.

    Raises StoreLockedError when another process has the folder. A segment that cannot be read is kept, unindexed, until
    its room is needed.
    """
    descriptor = lock(folder)
    try:
        return _rebuild(folder, descriptor, progress)
    except BaseException:
        os.close(descriptor)
        raise


def close_folder(descriptor: int) -> None:
    """Let another store open the folder."""
    os.close(descriptor)


def _rebuild(folder: Path, descriptor: int, progress: Callable[[str, int, int], None] | None) -> Recovered:
    index = BlockIndex()
    files = segment_files(folder)
    kept: list[tuple[SegmentFile, int]] = []
    num_damaged = num_removed = 0
    # Newest first: when a key was written again because its first copy had gone bad, the later copy must win.
    for done, file in enumerate(reversed(files)):
        try:
            loaded = load_segment(file)
            num_damaged += loaded.num_damaged
            if not loaded.locations:
                file.path.unlink()
                num_removed += 1
                continue
            for location in reversed(loaded.locations):
                index.add(location)
            num_bytes = file.path.stat().st_size if loaded.is_sealed else seal_recovered(file, loaded)
            if not loaded.is_sealed:
                _log.info("kvstore.segment.recovered", file=file.path.name, num_blocks=len(loaded.locations))
        except OSError as exc:
            _log.error("kvstore.segment.unreadable", file=file.path.name, reason=str(exc))
            num_bytes = file.path.stat().st_size
        kept.append((file, num_bytes))
        if progress is not None:
            progress("index", done + 1, len(files))
    if num_removed:
        sync_folder(folder)
    next_number = files[-1].number + 1 if files else 1
    return Recovered(descriptor, index, tuple(reversed(kept)), next_number, num_damaged)

"""How do batches of blocks become durable records in a row of segment files?

Runs in the one writer thread; the store tells it what to remove and what to append, and publishes what it returns.
"""

import errno
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.kvstore.directory import SegmentFile, new_segment_file
from services.kvstore.index import BlockLocation
from services.kvstore.segments import Block, SegmentWriter

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A segment that a batch touched, as it is now. num_bytes 0: the file is gone."""

    file: SegmentFile
    num_bytes: int
    is_active: bool


@dataclass(slots=True)
class Appended:
    """What became of a batch: where each block lies, in order, durably; None for those the disk did not take."""

    locations: list[BlockLocation | None]
    segments: dict[int, SegmentSize] = field(default_factory=dict)


class SegmentLog:
    """Appends to an active segment and seals it when full. Files of earlier lives are never appended to."""

    def __init__(self, folder: Path, *, next_number: int, segment_bytes: int) -> None:
        self._folder = folder
        self._next_number = next_number
        self._segment_bytes = segment_bytes
        self._active: SegmentWriter | None = None

    def append(self, blocks: Sequence[Block]) -> Appended:
        """Write blocks and sync them once; after a disk error give up those that were not yet durable."""
        result = Appended(locations=[None] * len(blocks))
        unsynced: list[tuple[int, BlockLocation]] = []
        try:
            for position, block in enumerate(blocks):
                if self._active is not None and self._active.is_full_for(block, self._segment_bytes):
                    self._seal(self._active, result)
                    self._settle(unsynced, result)
                if self._active is None:
                    self._active = SegmentWriter(new_segment_file(self._folder, self._next_number))
                    self._next_number += 1
                unsynced.append((position, self._active.append(block, created_seconds=time.time())))
            if self._active is not None and unsynced:
                self._active.sync()
                result.segments[self._active.file.number] = SegmentSize(
                    self._active.file, self._active.disk_bytes, is_active=True
                )
                self._settle(unsynced, result)
        except OSError as exc:
            self._abandon(exc, result)
        return result

    def remove(self, files: Iterable[SegmentFile]) -> list[SegmentFile]:
        """Delete segment files; return those that are gone."""
        gone: list[SegmentFile] = []
        for file in files:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as exc:
                _log.error("kvstore.segment.remove_failed", file=file.path.name, errno=_errno_name(exc))
            else:
                gone.append(file)
        return gone

    def close(self) -> Appended:
        """Seal the active segment."""
        result = Appended(locations=[])
        if self._active is not None:
            try:
                self._seal(self._active, result)
            except OSError as exc:
                self._abandon(exc, result)
        return result

    def _seal(self, active: SegmentWriter, result: Appended) -> None:
        active.seal()
        self._active = None
        result.segments[active.file.number] = SegmentSize(active.file, active.disk_bytes, is_active=False)

    def _abandon(self, exc: OSError, result: Appended) -> None:
        """Leave the file that failed: after a failed sync nobody knows which of its unsynced pages reached the disk."""
        _log.error("kvstore.write.failed", errno=_errno_name(exc))
        if self._active is not None:
            kept_bytes = self._active.abandon()
            result.segments[self._active.file.number] = SegmentSize(self._active.file, kept_bytes, is_active=False)
            self._active = None

    @staticmethod
    def _settle(unsynced: list[tuple[int, BlockLocation]], result: Appended) -> None:
        for position, location in unsynced:
            result.locations[position] = location
        unsynced.clear()


def _errno_name(exc: OSError) -> str:
    return errno.errorcode.get(exc.errno or 0, str(exc))

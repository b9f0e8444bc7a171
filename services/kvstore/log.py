"""How do batches of blocks become durable records in rows of segment files, one row a class?

Runs in the one writer thread; the store tells it what to remove and what to append, and publishes what it returns as
soon as that is durable.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from services.kvstore.directory import CLASSES, SegmentFile, new_segment_file
from services.kvstore.disk import Disk, physical_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.retention import RetentionPolicy
from services.kvstore.segments import Block, SegmentWriter, load_segment, reserved_ahead, seal_again

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """A segment that a batch touched, as it is now. num_bytes 0: the file is gone."""

    file: SegmentFile
    num_bytes: int
    physical_bytes: int
    is_active: bool


@dataclass(frozen=True, slots=True)
class Unsynced:
    """Blocks of a batch whose bytes are on their way to one segment."""

    writer: SegmentWriter
    places: Sequence[int]
    """Which of the batch."""
    num_bytes: int
    """Of the file, with them."""
    durable: "Future[int]"
    """Has a result, the disk that the file takes in bytes, once they may be published; else an OSError."""


@dataclass(slots=True)
class Appended:
    """What becomes of a batch: where each block lies, in order; None for those the disk did not take."""

    locations: list[BlockLocation | None]
    """Durable, but for those in `unsynced`."""
    unsynced: list[Unsynced] = field(default_factory=list)
    segments: dict[int, SegmentSize] = field(default_factory=dict)
    sealed: list[tuple[SegmentFile, Sequence[BlockLocation]]] = field(default_factory=list)
    """Segments that got their footer, with all their records."""


class SegmentLog:
    """Appends to one active segment a class, and seals it when it is full or its hour is over.

    Files of earlier lives are never appended to.
    """

    def __init__(self, disk: Disk, policy: RetentionPolicy, *, next_number: int, segment_bytes: int) -> None:
        self._disk = disk
        self._policy = policy
        self._next_number = next_number
        self._segment_bytes = segment_bytes
        self._active: dict[int, SegmentWriter] = {}

    @property
    def ahead_bytes(self) -> int:
        """Most disk that a batch may take beyond its records: each class may open a segment."""
        return len(CLASSES) * reserved_ahead(self._segment_bytes)

    def append(self, blocks: Sequence[Block], *, now: float) -> Appended:
        """Begin to write blocks and to sync them, once a class; after a disk error give up what was not yet durable."""
        result = Appended(locations=[None] * len(blocks))
        for retention in dict.fromkeys(block.retention for block in blocks):
            places = [place for place, block in enumerate(blocks) if block.retention == retention]
            try:
                self._append(retention, places, blocks, now, result)
            except OSError as exc:
                self._abandon(retention, exc, result)
        return result

    def give_up(self, part: Unsynced, exc: OSError) -> Appended:
        """Leave the segment of blocks that did not become durable, if it is not left yet."""
        result = Appended(locations=[])
        if self._active.get(part.writer.file.retention) is part.writer:
            self._abandon(part.writer.file.retention, exc, result)
        return result

    def seal_due(self, now: float) -> Appended:
        """Seal active segments whose hour is over."""
        return self._seal_where(lambda writer: self._is_over(writer, now))

    def seal_older(self, than: float) -> Appended:
        """Seal active segments that were opened before that moment."""
        return self._seal_where(lambda writer: writer.opened_seconds < than)

    def close(self) -> Appended:
        """Seal the active segments."""
        return self._seal_where(lambda _: True)

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

    @staticmethod
    def empty(files: Iterable[SegmentFile]) -> None:
        """Give back the bytes of files, also to those who have them open. Raises OSError."""
        for file in files:
            if file.path.exists():
                os.truncate(file.path, 0)

    def erase(self, file: SegmentFile, gone: Sequence[BlockLocation], ranges: Sequence[tuple[int, int]]) -> SegmentSize:
        """Make the bytes of records unreadable for good, and forget that they were here. Raises OSError.

        The bytes go first: when the process dies between the two, the footer still names them, so that repeating the
        deletion finds them; reading finds no record.
        """
        self._disk.erase(file.path, ranges)
        active = self._active.get(file.retention)
        if active is not None and active.file == file:
            active.forget(gone)
            return self._size(file, active.disk_bytes, is_active=True)
        loaded = load_segment(file)
        names = set(gone)
        num_bytes = seal_again(file, [one for one in loaded.locations if one not in names], loaded.end_bytes)
        return self._size(file, num_bytes, is_active=False)

    def _append(self, retention: int, places: list[int], blocks: Sequence[Block], now: float, result: Appended) -> None:
        active = self._active.get(retention)
        if active is not None and self._is_over(active, now):
            self._seal(active, result)
        left = places
        while left:
            active = self._active.get(retention)
            if active is None:
                active = self._start(retention, now)
            count = active.num_fitting([blocks[place] for place in left])
            if count:
                locations = active.append([blocks[place] for place in left[:count]], now=now)
            if count < len(left):
                self._seal(active, result)
            else:
                result.unsynced.append(Unsynced(active, left, active.disk_bytes, active.start_sync()))
            if count:
                for place, location in zip(left, locations, strict=False):
                    result.locations[place] = location
            left = left[count:]

    def _start(self, retention: int, now: float) -> SegmentWriter:
        file = new_segment_file(self._disk.folder, self._next_number, retention)
        self._next_number += 1
        writer = SegmentWriter(
            self._disk, file, slot=self._policy.slot(retention, now), segment_bytes=self._segment_bytes, now=now
        )
        self._active[retention] = writer
        return writer

    def _is_over(self, writer: SegmentWriter, now: float) -> bool:
        return writer.slot != self._policy.slot(writer.file.retention, now)

    def _seal_where(self, is_due: Callable[[SegmentWriter], bool]) -> Appended:
        result = Appended(locations=[])
        for retention, writer in list(self._active.items()):
            if is_due(writer):
                try:
                    self._seal(writer, result)
                except OSError as exc:
                    self._abandon(retention, exc, result)
        return result

    def _seal(self, active: SegmentWriter, result: Appended) -> None:
        active.seal()
        del self._active[active.file.retention]
        result.segments[active.file.number] = self._size(active.file, active.disk_bytes, is_active=False)
        result.sealed.append((active.file, active.locations))

    def _abandon(self, retention: int, exc: OSError, result: Appended) -> None:
        """Leave the file that failed: after a failed sync nobody knows which of its unsynced pages reached the disk."""
        _log.error("kvstore.write.failed", errno=_errno_name(exc))
        active = self._active.pop(retention, None)
        if active is not None:
            kept_bytes = active.abandon()
            result.segments[active.file.number] = self._size(active.file, kept_bytes, is_active=False)

    @staticmethod
    def _size(file: SegmentFile, num_bytes: int, *, is_active: bool) -> SegmentSize:
        return SegmentSize(file, num_bytes, physical_bytes(file.path) if num_bytes else 0, is_active)


def _errno_name(exc: OSError) -> str:
    return errno.errorcode.get(exc.errno or 0, str(exc))

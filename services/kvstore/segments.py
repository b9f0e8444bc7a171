"""How is a segment file written, read and recovered?

Blocking file work only, for a thread: no index, no policy. Appends past the page cache, then one fdatasync for a batch,
while the next batch is written.
"""

import errno
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from isal.isal_zlib import crc32 as checksum

from services.kvstore.directory import SegmentFile, sync_folder
from services.kvstore.disk import Disk, physical_bytes
from services.kvstore.format import (
    ALIGN_BYTES,
    HEADER_BYTES,
    RECORD_MAGIC,
    TRAILER_BYTES,
    Trailer,
    aligned,
    footer_bytes,
    pack_footer,
    pack_header,
    parse_footer,
    parse_header,
    parse_trailer,
    record_bytes,
)
from services.kvstore.index import SEAL_BYTES, BlockLocation

_MAX_AGE_MINUTES = (1 << 16) - 1
"""Forty-five days: longer than any deletion is remembered."""
_SCAN_PIECE_BYTES = 1 << 20
_MAX_AHEAD_BYTES = 32 << 20
_DAMAGE_ERRNOS = frozenset({errno.EIO, errno.ENOENT, errno.ESTALE, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN})


class DamagedBlockError(Exception):
    """The bytes on disk are not the block that the index promised. `fault`: "header", "payload" or "missing"."""

    def __init__(self, fault: str, where: str) -> None:
        super().__init__(f"{fault} {where}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block on its way to disk."""

    key: bytes
    fingerprint: bytes
    payload: bytes | bytearray | memoryview
    """The bytes to store."""
    crc32: int
    """Of these bytes."""
    retention: int = 0
    tenant: str = ""
    flags: int = 0
    """ENCRYPTED when `payload` is sealed."""
    first_created_seconds: float = 0.0
    """When its first copy was written, seconds since the Unix epoch; 0 for a block that is new."""

    @property
    def block_bytes(self) -> int:
        """Length of the payload as its writer gave it."""
        return len(self.payload) - SEAL_BYTES * (self.flags & 1)

    def age_minutes(self, now: float) -> int:
        """Return how much older its first copy is, rounded up: no copy may pass for younger than it is."""
        if not self.first_created_seconds:
            return 0
        return min(_MAX_AGE_MINUTES, max(0, math.ceil((now - self.first_created_seconds) / 60)))


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """What a segment file was found to hold."""

    locations: Sequence[BlockLocation]
    end_bytes: int
    """Where the last good record ends."""
    damaged: Sequence[BlockLocation]
    """Records whose header is whole and whose bytes are not; only a scan can see them."""
    is_sealed: bool
    """True when the footer was whole; False when the records were found by a scan and every one was verified."""


def reserved_ahead(segment_bytes: int) -> int:
    """Return how much disk an open segment may hold beyond its records: long pieces, yet little of a small cap."""
    return aligned(min(_MAX_AHEAD_BYTES, segment_bytes // 4))


class SegmentWriter:
    """Appends records to a new file. After any OSError only abandon() may be called."""

    def __init__(self, disk: Disk, file: SegmentFile, *, slot: int, segment_bytes: int, now: float) -> None:
        self.file = file
        self.slot = slot
        self.end_bytes = 0
        self.locations: list[BlockLocation] = []
        self.opened_seconds = now
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._synced_bytes = 0
        self._reserved_bytes = 0
        self._pieces: list[Future[None]] = []
        """Writes that no sync waits for yet."""
        self._last_sync: Future[int] | None = None
        self._failure: BaseException | None = None
        self._fd = disk.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    @property
    def disk_bytes(self) -> int:
        """Size of the file once sealed."""
        return self.end_bytes + footer_bytes(self.locations)

    def num_fitting(self, blocks: Sequence[Block]) -> int:
        """Return how many leading blocks still go into this segment. An empty one takes a block of any size."""
        end = self.end_bytes
        for count, block in enumerate(blocks):
            end += record_bytes(len(block.payload))
            if end > self._segment_bytes and (count or self.end_bytes):
                return count
        return len(blocks)

    def append(self, blocks: Sequence[Block], *, now: float) -> list[BlockLocation]:
        """Begin to write records behind the last.

        They are durable, and may be published, only when a later start_sync() has a result, or after seal().
        """
        parts: list[bytes | bytearray | memoryview] = []
        locations: list[BlockLocation] = []
        end = self.end_bytes
        for block in blocks:
            location = BlockLocation(
                block.key,
                block.fingerprint,
                self.file.number,
                end,
                block.block_bytes,
                block.crc32,
                self.file.retention,
                now,
                block.tenant,
                block.flags,
                block.age_minutes(now),
            )
            locations.append(location)
            size = len(block.payload)
            parts += [pack_header(location, epoch=self.file.epoch), block.payload, bytes(aligned(size) - size)]
            end += record_bytes(size)
        if end > self._reserved_bytes:
            wanted = min(reserved_ahead(self._segment_bytes), self._segment_bytes - self._reserved_bytes)
            length = aligned(max(wanted, end - self._reserved_bytes))
            self._disk.preallocate(self._fd, self._reserved_bytes, length)
            self._reserved_bytes += length
        self._pieces += self._disk.start_write(self._fd, parts, self.end_bytes)
        self.end_bytes = end
        self.locations += locations
        return locations

    def start_sync(self) -> "Future[int]":
        """Have all records so far brought to the disk; return a future of what the file takes there, in bytes.

        After the first that fails with an OSError all later ones do: nobody knows which pages are lost.
        """
        pieces, self._pieces = self._pieces, []
        end = self.end_bytes
        self._last_sync = self._disk.start_sync(lambda: self._sync(pieces, end))
        return self._last_sync

    def seal(self) -> None:
        """Write the footer, give back what was reserved behind it, and close. The next start need not scan."""
        footer = pack_footer(self.locations, epoch=self.file.epoch, start_bytes=self.end_bytes)
        self._disk.write(self._fd, [footer], self.end_bytes)
        wait(self._pieces)  # a piece that comes later would make the file longer again
        os.ftruncate(self._fd, self.end_bytes + len(footer))
        self.start_sync().result()
        os.close(self._fd)

    def forget(self, gone: Sequence[BlockLocation]) -> None:
        """Leave blocks that were erased out of the footer."""
        names = set(gone)
        self.locations = [one for one in self.locations if one not in names]

    def abandon(self) -> int:
        """Give up after an error: cut off what was never synced; return the bytes kept, 0 when the file is gone."""
        wait(self._pieces)
        if self._last_sync is not None:
            wait([self._last_sync])
        try:
            if self._synced_bytes == 0:
                self.file.path.unlink(missing_ok=True)
            else:
                os.ftruncate(self._fd, self._synced_bytes)
        except OSError:
            # What stays behind is a torn tail: the next start's scan verifies it like after a crash.
            return max(self._synced_bytes, os.fstat(self._fd).st_size)
        finally:
            os.close(self._fd)
        return self._synced_bytes

    def _sync(self, pieces: "Sequence[Future[None]]", end_bytes: int) -> int:
        wait(pieces)
        try:
            if self._failure is not None:
                raise self._failure  # noqa: TRY301 - said once more, for every sync that it concerns
            for piece in pieces:
                piece.result()
            os.fdatasync(self._fd)
            if self._synced_bytes == 0:
                sync_folder(self.file.path.parent)
        except BaseException as exc:
            self._failure = exc
            raise
        self._synced_bytes = end_bytes
        return physical_bytes(self.file.path)


def read_run(disk: Disk, file: SegmentFile, locations: Sequence[BlockLocation]) -> list[memoryview | DamagedBlockError]:
    """Return the stored bytes of records that lie one behind the other, or for each what is wrong with it.

    Header, key, place and CRC-32 are checked against the disk. Raises OSError for what is no damage.
    """
    start = locations[0].offset_bytes
    end = locations[-1].offset_bytes + record_bytes(locations[-1].stored_bytes)
    try:
        fd = disk.open(file.path)
        try:
            raw = disk.read(fd, end - start, start)
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno not in _DAMAGE_ERRNOS:
            raise
        if len(locations) > 1:  # one bad sector must not cost its neighbours
            return [found for location in locations for found in read_run(disk, file, [location])]
        return [DamagedBlockError("missing", f"{file.path.name}: {exc}")]
    return [_checked(raw[one.offset_bytes - start :], file, one) for one in locations]


def _checked(raw: memoryview, file: SegmentFile, location: BlockLocation) -> memoryview | DamagedBlockError:
    where = f"at {location.offset_bytes} of {file.path.name}"
    header, stored = raw[:HEADER_BYTES], raw[HEADER_BYTES : HEADER_BYTES + location.stored_bytes]
    found = parse_header(header, segment=file.number, epoch=file.epoch, offset_bytes=location.offset_bytes)
    if found != location:
        return DamagedBlockError("header", where)
    if len(stored) != location.stored_bytes or checksum(stored) != location.crc32:
        return DamagedBlockError("payload", where)
    return stored


def load_segment(file: SegmentFile) -> LoadedSegment:
    """Return the records of a segment: from its footer, or from a scan that verifies every payload."""
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        footer = _read_footer(fd, file, size)
        if footer is not None:
            locations, trailer = footer
            return LoadedSegment(locations, trailer.start_bytes, (), is_sealed=True)
        return _scan(fd, file, size)
    finally:
        os.close(fd)


def seal_again(file: SegmentFile, locations: Sequence[BlockLocation], end_bytes: int) -> int:
    """Cut a closed segment at `end_bytes` and give it a footer of these records; return its new size in bytes."""
    fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, end_bytes)
        footer = pack_footer(locations, epoch=file.epoch, start_bytes=end_bytes)
        os.pwrite(fd, footer, end_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return end_bytes + len(footer)


def _read_footer(fd: int, file: SegmentFile, size: int) -> tuple[list[BlockLocation], Trailer] | None:
    if size < TRAILER_BYTES:
        return None
    raw = os.pread(fd, TRAILER_BYTES, size - TRAILER_BYTES)
    trailer = parse_trailer(raw, epoch=file.epoch, file_bytes=size)
    if trailer is None:
        return None
    locations = parse_footer(os.pread(fd, trailer.body_bytes, trailer.start_bytes), trailer, segment=file.number)
    return None if locations is None else (locations, trailer)


def _scan(fd: int, file: SegmentFile, size: int) -> LoadedSegment:
    locations: list[BlockLocation] = []
    damaged: list[BlockLocation] = []
    offset = end = 0
    for place in _headers(fd, size):
        if place < offset:
            continue  # inside the record before: payload bytes that look like a header
        header = os.pread(fd, HEADER_BYTES, place)
        location = parse_header(header, segment=file.number, epoch=file.epoch, offset_bytes=place)
        # A damaged header's length is unknown: the next record may start at any place behind it.
        if location is None or location.retention != file.retention:
            continue
        if place + HEADER_BYTES + location.stored_bytes > size:
            break  # torn tail: the process died while writing it
        offset = place + record_bytes(location.stored_bytes)
        if _stored_crc32(fd, location) == location.crc32:
            locations.append(location)
            end = offset
        else:
            damaged.append(location)
    return LoadedSegment(locations, end, damaged, is_sealed=False)


def _headers(fd: int, size: int) -> Iterator[int]:
    """Yield every place that begins like a record; zeros of a tail that was never written are passed quickly."""
    for start in range(0, size, _SCAN_PIECE_BYTES):
        piece = os.pread(fd, _SCAN_PIECE_BYTES, start)
        for at in range(0, len(piece), ALIGN_BYTES):
            if piece.startswith(RECORD_MAGIC, at):
                yield start + at


def _stored_crc32(fd: int, location: BlockLocation) -> int:
    crc32, done = 0, 0
    while done < location.stored_bytes:
        wanted = min(_SCAN_PIECE_BYTES, location.stored_bytes - done)
        piece = os.pread(fd, wanted, location.offset_bytes + HEADER_BYTES + done)
        if not piece:
            break
        crc32 = checksum(piece, crc32)
        done += len(piece)
    return crc32

"""How is a segment file written, read and recovered?

Blocking file work only, for a thread: no index, no policy. Buffered appends, then one fdatasync for a batch.
"""

import errno
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.directory import SegmentFile, sync_folder
from services.kvstore.format import (
    ALIGN_BYTES,
    HEADER_BYTES,
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
from services.kvstore.index import BlockLocation

_SCAN_PIECE_BYTES = 1 << 20
_DAMAGE_ERRNOS = frozenset({errno.EIO, errno.ENOENT, errno.ESTALE, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN})


class DamagedBlockError(Exception):
    """The bytes on disk are not the block that the index promised."""


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block on its way to disk."""

    key: bytes
    fingerprint: bytes
    payload: bytes | bytearray
    crc32: int
    retention: int = 0


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """What a segment file was found to hold."""

    locations: Sequence[BlockLocation]
    end_bytes: int
    """Where the last good record ends."""
    num_damaged: int
    """Records whose header is whole and whose payload is not; only a scan can see them."""
    is_sealed: bool
    """True when the footer was whole; False when the records were found by a scan and every payload was verified."""


class SegmentWriter:
    """Appends records to a new file. After any OSError only abandon() may be called."""

    def __init__(self, file: SegmentFile) -> None:
        self.file = file
        self.end_bytes = 0
        self._synced_bytes = 0
        self._locations: list[BlockLocation] = []
        self._fd = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def disk_bytes(self) -> int:
        """Size of the file once sealed."""
        return self.end_bytes + footer_bytes(len(self._locations))

    def is_full_for(self, block: Block, segment_bytes: int) -> bool:
        """Return whether the block must start a new segment. An empty segment takes a block of any size."""
        return self.end_bytes > 0 and self.end_bytes + record_bytes(len(block.payload)) > segment_bytes

    def append(self, block: Block, *, created_seconds: float) -> BlockLocation:
        """Write one record behind the last. It is durable, and may be published, only after sync() or seal()."""
        location = BlockLocation(
            block.key,
            block.fingerprint,
            self.file.number,
            self.end_bytes,
            len(block.payload),
            block.crc32,
            block.retention,
        )
        header = pack_header(location, epoch=self.file.epoch, created_seconds=created_seconds)
        padding = bytes(aligned(len(block.payload)) - len(block.payload))
        _write_all(self._fd, [header, block.payload, padding], self.end_bytes)
        self.end_bytes += record_bytes(len(block.payload))
        self._locations.append(location)
        return location

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        os.fdatasync(self._fd)
        if self._synced_bytes == 0:
            sync_folder(self.file.path.parent)
        self._synced_bytes = self.end_bytes

    def seal(self) -> None:
        """Write the footer and close. The next start reads it instead of scanning."""
        footer = pack_footer(self._locations, epoch=self.file.epoch, start_bytes=self.end_bytes)
        _write_all(self._fd, [footer], self.end_bytes)
        self.sync()
        os.close(self._fd)

    def abandon(self) -> int:
        """Give up after an error: cut off what was never synced; return the bytes kept, 0 when the file is gone."""
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


def read_block(file: SegmentFile, location: BlockLocation) -> memoryview:
    """Return the payload after checking header, key and CRC-32 against the disk; raise DamagedBlockError otherwise."""
    wanted = HEADER_BYTES + location.block_bytes
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = memoryview(os.pread(fd, wanted, location.offset_bytes))
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno in _DAMAGE_ERRNOS:
            raise DamagedBlockError(str(exc)) from exc
        raise
    header, payload = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
    found = parse_header(header, segment=file.number, epoch=file.epoch, offset_bytes=location.offset_bytes)
    if found != location:
        raise DamagedBlockError(f"header at {location.offset_bytes} of {file.path.name}")
    if len(raw) != wanted or zlib.crc32(payload) != location.crc32:
        raise DamagedBlockError(f"payload at {location.offset_bytes} of {file.path.name}")
    return payload


def load_segment(file: SegmentFile) -> LoadedSegment:
    """Return the records of a segment: from its footer, or from a scan that verifies every payload."""
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        footer = _read_footer(fd, file, size)
        if footer is not None:
            locations, trailer = footer
            return LoadedSegment(locations, trailer.start_bytes, 0, is_sealed=True)
        return _scan(fd, file, size)
    finally:
        os.close(fd)


def seal_recovered(file: SegmentFile, loaded: LoadedSegment) -> int:
    """Cut a scanned segment behind its last good record and give it a footer; return its new size in bytes."""
    fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, loaded.end_bytes)
        footer = pack_footer(loaded.locations, epoch=file.epoch, start_bytes=loaded.end_bytes)
        _write_all(fd, [footer], loaded.end_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return loaded.end_bytes + len(footer)


def _read_footer(fd: int, file: SegmentFile, size: int) -> tuple[list[BlockLocation], Trailer] | None:
    if size < TRAILER_BYTES:
        return None
    raw = os.pread(fd, TRAILER_BYTES, size - TRAILER_BYTES)
    trailer = parse_trailer(raw, epoch=file.epoch, file_bytes=size)
    if trailer is None:
        return None
    locations = parse_footer(os.pread(fd, trailer.entries_bytes, trailer.start_bytes), trailer, segment=file.number)
    return None if locations is None else (locations, trailer)


def _scan(fd: int, file: SegmentFile, size: int) -> LoadedSegment:
    locations: list[BlockLocation] = []
    num_damaged = offset = end = 0
    while offset + HEADER_BYTES <= size:
        header = os.pread(fd, HEADER_BYTES, offset)
        location = parse_header(header, segment=file.number, epoch=file.epoch, offset_bytes=offset)
        if location is None:
            # Damaged header: its length is unknown, so look for the next record at every place where one may start.
            offset += ALIGN_BYTES
            continue
        if offset + HEADER_BYTES + location.block_bytes > size:
            break  # torn tail: the process died while writing it
        if _payload_crc32(fd, location) == location.crc32:
            locations.append(location)
            end = offset + record_bytes(location.block_bytes)
        else:
            num_damaged += 1
        offset += record_bytes(location.block_bytes)
    return LoadedSegment(locations, end, num_damaged, is_sealed=False)


def _payload_crc32(fd: int, location: BlockLocation) -> int:
    crc32, done = 0, 0
    while done < location.block_bytes:
        wanted = min(_SCAN_PIECE_BYTES, location.block_bytes - done)
        piece = os.pread(fd, wanted, location.offset_bytes + HEADER_BYTES + done)
        if not piece:
            break
        crc32 = zlib.crc32(piece, crc32)
        done += len(piece)
    return crc32


def _write_all(fd: int, buffers: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    """Write all buffers at `offset`; a nearly full disk writes a part first and raises on the rest."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]

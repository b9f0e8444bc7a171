"""What do the bytes of a segment file mean?

A segment is records, then (once sealed) a footer. A record is a 4 KiB header and a payload padded to 4 KiB. The footer
lists the records, so that a restart reads it instead of every header. All numbers are little-endian.

The segment's epoch, 64 random bits that are part of the file's name, stands in every header and in the footer: neither
bytes of an earlier life of the disk nor payload bytes that look like a record can be taken for one.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.index import BlockLocation

ALIGN_BYTES = 4096
"""Records and payloads start at multiples of this: scans find what lies behind damage, and O_DIRECT stays possible."""

HEADER_BYTES = ALIGN_BYTES
_FORMAT = 1
_RECORD_MAGIC = b"FKVBLOCK"
_FOOTER_MAGIC = b"FKVINDEX"
# magic, format, retention, payload crc32, epoch, offset, payload bytes, created (Unix seconds), key, fingerprint
_HEADER = struct.Struct("<8sHHIQQQd32s32s")
_CRC = struct.Struct("<I")
_HEADER_PADDING = bytes(HEADER_BYTES - _HEADER.size - _CRC.size)
# key, fingerprint, offset, payload bytes, payload crc32, retention
_ENTRY = struct.Struct("<32s32sQQIHxx")
# magic, format, number of entries, epoch, offset of the first entry, crc32 of entries and of this trailer before it
_TRAILER = struct.Struct("<8sHxxIQQ")

TRAILER_BYTES = _TRAILER.size + _CRC.size
MAX_RECORD_OVERHEAD_BYTES = HEADER_BYTES + ALIGN_BYTES + _ENTRY.size + TRAILER_BYTES
"""Most that one record can add to the disk beside its payload, a footer of its own included."""


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where a footer's entries start and how many there are."""

    start_bytes: int
    num_entries: int
    raw: bytes

    @property
    def entries_bytes(self) -> int:
        return self.num_entries * _ENTRY.size


def aligned(num_bytes: int) -> int:
    """Round up to the next record boundary."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def record_bytes(block_bytes: int) -> int:
    """Room one block takes in a segment, header and padding included."""
    return HEADER_BYTES + aligned(block_bytes)


def footer_bytes(num_records: int) -> int:
    """Length of the footer of that many records."""
    return num_records * _ENTRY.size + TRAILER_BYTES


def pack_header(location: BlockLocation, *, epoch: int, created_seconds: float) -> bytes:
    """Return the 4 KiB that stand before the payload; the last four bytes are the CRC-32 of the others."""
    fields = _HEADER.pack(
        _RECORD_MAGIC,
        _FORMAT,
        location.retention,
        location.crc32,
        epoch,
        location.offset_bytes,
        location.block_bytes,
        created_seconds,
        location.key,
        location.fingerprint,
    )
    header = fields + _HEADER_PADDING
    return header + _CRC.pack(zlib.crc32(header))


def parse_header(header: bytes | memoryview, *, segment: int, epoch: int, offset_bytes: int) -> BlockLocation | None:
    """Return the record whose header these 4 KiB are; None when they are damaged or belong to another place."""
    if len(header) != HEADER_BYTES or header[: len(_RECORD_MAGIC)] != _RECORD_MAGIC:
        return None
    if _CRC.unpack_from(header, HEADER_BYTES - _CRC.size)[0] != zlib.crc32(header[: -_CRC.size]):
        return None
    _, version, retention, crc32, in_epoch, in_offset, block_bytes, _, key, fingerprint = _HEADER.unpack_from(header)
    if (version, in_epoch, in_offset) != (_FORMAT, epoch, offset_bytes):
        return None
    return BlockLocation(key, fingerprint, segment, offset_bytes, block_bytes, crc32, retention)


def pack_footer(locations: Sequence[BlockLocation], *, epoch: int, start_bytes: int) -> bytes:
    """Return the footer that seals a segment whose records end at `start_bytes`."""
    entries = b"".join(
        _ENTRY.pack(one.key, one.fingerprint, one.offset_bytes, one.block_bytes, one.crc32, one.retention)
        for one in locations
    )
    body = entries + _TRAILER.pack(_FOOTER_MAGIC, _FORMAT, len(locations), epoch, start_bytes)
    return body + _CRC.pack(zlib.crc32(body))


def parse_trailer(raw: bytes, *, epoch: int, file_bytes: int) -> Trailer | None:
    """Return what the last bytes of a file say about its footer; None when it has no footer of this epoch."""
    if len(raw) != TRAILER_BYTES:
        return None
    magic, version, num_entries, in_epoch, start_bytes = _TRAILER.unpack_from(raw)
    trailer = Trailer(start_bytes, num_entries, raw)
    if (magic, version, in_epoch) != (_FOOTER_MAGIC, _FORMAT, epoch):
        return None
    if start_bytes + trailer.entries_bytes + TRAILER_BYTES != file_bytes:
        return None
    return trailer


def parse_footer(entries: bytes, trailer: Trailer, *, segment: int) -> list[BlockLocation] | None:
    """Return the records a footer lists; None when any byte of it is damaged."""
    crc32 = zlib.crc32(trailer.raw[: -_CRC.size], zlib.crc32(entries))
    if len(entries) != trailer.entries_bytes or _CRC.unpack_from(trailer.raw, _TRAILER.size)[0] != crc32:
        return None
    return [
        BlockLocation(key, fingerprint, segment, offset_bytes, block_bytes, crc, retention)
        for key, fingerprint, offset_bytes, block_bytes, crc, retention in _ENTRY.iter_unpack(entries)
    ]

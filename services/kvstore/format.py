"""What do the bytes of a segment file mean?

A segment is records, then (once sealed) a footer. A record is a 4 KiB header and the stored bytes padded to 4 KiB. The
footer lists the records, so that a restart reads it instead of every header: a table of fingerprints, a table of
tenants, an entry for each record, a trailer. All numbers are little-endian.

The segment's epoch, 64 random bits that are part of the file's name, stands in every header and in the footer: neither
bytes of an earlier life of the disk nor payload bytes that look like a record can be taken for one.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isal.isal_zlib import crc32 as checksum

from services.kvstore.index import SEAL_BYTES, BlockLocation

ALIGN_BYTES = 4096
"""Records and stored bytes start at multiples of this: scans find what lies behind damage, and O_DIRECT wants it."""

HEADER_BYTES = ALIGN_BYTES
TENANT_BYTES = 64
KEY_BYTES = 32
RECORD_MAGIC = b"FKVBLOCK"
_FORMAT = 2
_FOOTER_MAGIC = b"FKVINDEX"
# magic, format, retention, flags, age in minutes, crc32 of the stored bytes, epoch, offset, payload bytes, created
# (Unix seconds), key, fingerprint, tenant
_HEADER = struct.Struct("<8sHHHHIQQQd32s32s64s")
_CRC = struct.Struct("<I")
_HEADER_PADDING = bytes(HEADER_BYTES - _HEADER.size - _CRC.size)
# key, offset, payload bytes, crc32, created, fingerprint's place in its table, age in minutes, tenant's place in its
# table, retention, flags
_ENTRY = struct.Struct("<32sQIIdHHIHH")
# magic, format, number of entries, of fingerprints, of tenants, epoch, offset of the footer, crc32 of all before it
_TRAILER = struct.Struct("<8sHxxIIIQQ")

TRAILER_BYTES = _TRAILER.size + _CRC.size
MAX_RECORD_OVERHEAD_BYTES = (
    HEADER_BYTES + ALIGN_BYTES + SEAL_BYTES + _ENTRY.size + KEY_BYTES + TENANT_BYTES + TRAILER_BYTES
)
"""Most that one record can add to the disk beside its payload, a footer of its own included."""


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where a footer starts and what it holds."""

    start_bytes: int
    num_entries: int
    num_fingerprints: int
    num_tenants: int
    raw: bytes

    @property
    def body_bytes(self) -> int:
        """Length of the footer before its trailer."""
        return self.num_fingerprints * KEY_BYTES + self.num_tenants * TENANT_BYTES + self.num_entries * _ENTRY.size


def aligned(num_bytes: int) -> int:
    """Round up to the next record boundary."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def record_bytes(stored_bytes: int) -> int:
    """Room one block takes in a segment, header and padding included."""
    return HEADER_BYTES + aligned(stored_bytes)


def footer_bytes(locations: Sequence[BlockLocation]) -> int:
    """Length of the footer of these records."""
    num_fingerprints, num_tenants = len({one.fingerprint for one in locations}), len({one.tenant for one in locations})
    return num_fingerprints * KEY_BYTES + num_tenants * TENANT_BYTES + len(locations) * _ENTRY.size + TRAILER_BYTES


def pack_header(location: BlockLocation, *, epoch: int) -> bytes:
    """Return the 4 KiB that stand before the stored bytes; the last four are the CRC-32 of the others."""
    fields = _HEADER.pack(
        RECORD_MAGIC,
        _FORMAT,
        location.retention,
        location.flags,
        location.age_minutes,
        location.crc32,
        epoch,
        location.offset_bytes,
        location.block_bytes,
        location.created_seconds,
        location.key,
        location.fingerprint,
        location.tenant.encode(),
    )
    header = fields + _HEADER_PADDING
    return header + _CRC.pack(checksum(header))


def parse_header(header: bytes | memoryview, *, segment: int, epoch: int, offset_bytes: int) -> BlockLocation | None:
    """Return the record whose header these 4 KiB are; None when they are damaged or belong to another place."""
    if len(header) != HEADER_BYTES or header[: len(RECORD_MAGIC)] != RECORD_MAGIC:
        return None
    if _CRC.unpack_from(header, HEADER_BYTES - _CRC.size)[0] != checksum(header[: -_CRC.size]):
        return None
    (_, version, retention, flags, age, crc32, in_epoch, in_offset, block_bytes, created, key, fingerprint, tenant) = (
        _HEADER.unpack_from(header)
    )
    if (version, in_epoch, in_offset) != (_FORMAT, epoch, offset_bytes):
        return None
    return BlockLocation(
        key, fingerprint, segment, offset_bytes, block_bytes, crc32, retention, created, _name(tenant), flags, age
    )


def pack_footer(locations: Sequence[BlockLocation], *, epoch: int, start_bytes: int) -> bytes:
    """Return the footer that seals a segment whose records end at `start_bytes`."""
    fingerprints = {name: place for place, name in enumerate(dict.fromkeys(one.fingerprint for one in locations))}
    tenants = {name: place for place, name in enumerate(dict.fromkeys(one.tenant for one in locations))}
    entries = b"".join(
        _ENTRY.pack(
            one.key,
            one.offset_bytes,
            one.block_bytes,
            one.crc32,
            one.created_seconds,
            fingerprints[one.fingerprint],
            one.age_minutes,
            tenants[one.tenant],
            one.retention,
            one.flags,
        )
        for one in locations
    )
    names = b"".join(name.encode().ljust(TENANT_BYTES, b"\0") for name in tenants)
    trailer = _TRAILER.pack(_FOOTER_MAGIC, _FORMAT, len(locations), len(fingerprints), len(tenants), epoch, start_bytes)
    body = b"".join(fingerprints) + names + entries + trailer
    return body + _CRC.pack(checksum(body))


def parse_trailer(raw: bytes, *, epoch: int, file_bytes: int) -> Trailer | None:
    """Return what the last bytes of a file say about its footer; None when it has no footer of this epoch."""
    if len(raw) != TRAILER_BYTES:
        return None
    magic, version, num_entries, num_fingerprints, num_tenants, in_epoch, start_bytes = _TRAILER.unpack_from(raw)
    trailer = Trailer(start_bytes, num_entries, num_fingerprints, num_tenants, raw)
    if (magic, version, in_epoch) != (_FOOTER_MAGIC, _FORMAT, epoch):
        return None
    if start_bytes + trailer.body_bytes + TRAILER_BYTES != file_bytes:
        return None
    return trailer


def parse_footer(body: bytes, trailer: Trailer, *, segment: int) -> list[BlockLocation] | None:
    """Return the records a footer lists; None when any byte of it is damaged."""
    crc32 = checksum(trailer.raw[: -_CRC.size], checksum(body))
    if len(body) != trailer.body_bytes or _CRC.unpack_from(trailer.raw, _TRAILER.size)[0] != crc32:
        return None
    start, end = 0, trailer.num_fingerprints * KEY_BYTES
    fingerprints = [body[at : at + KEY_BYTES] for at in range(start, end, KEY_BYTES)]
    start, end = end, end + trailer.num_tenants * TENANT_BYTES
    tenants = [_name(body[at : at + TENANT_BYTES]) for at in range(start, end, TENANT_BYTES)]
    return [
        BlockLocation(
            key,
            fingerprints[model],
            segment,
            offset_bytes,
            block_bytes,
            crc,
            retention,
            created,
            tenants[owner],
            flags,
            age,
        )
        for key, offset_bytes, block_bytes, crc, created, model, age, owner, retention, flags in _ENTRY.iter_unpack(
            memoryview(body)[end:]
        )
    ]


def _name(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")

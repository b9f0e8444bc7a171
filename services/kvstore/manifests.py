"""Which blocks does an object hold, and which objects are there to be believed?

Pure packing and parsing. A sealed segment becomes one object of its blocks' stored bytes, back to back, and one
manifest that lists them. The manifest is created last and only if absent: it is what publishes the object. All numbers
are little-endian. A tombstone says what was deleted when, so that no replica brings it back.

    seg/<class>/<id>                  the bytes
    manifest/<class>/<hour>/<id>      what they are; hour: of the segment's last block, in hours since the Unix epoch
    tombstone/<id>                    what was deleted
    news/, key/, clock/               news.py, tenant_keys.py, store_clock.py
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

MAX_MANIFEST_BYTES = 16 << 20
MAX_TOMBSTONE_BYTES = 4096
MAX_ENTRIES = 100_000
HOUR_SECONDS = 3600
MINUTE_SECONDS = 60
DELETION_SECONDS = 60.0
"""A deletion also covers what is written so soon after it: clocks of replicas differ."""

_MAGIC = b"FKVMANIF"
_VERSION = 1
# magic, version, retention, tenants, fingerprints, entries, epoch, object bytes, created, expires
_HEAD = struct.Struct("<8sHHHHIQQdd")
# key, numbers of fingerprint and tenant, flags, age, created, offset in the object and in the segment, block and stored
# bytes, crc32
_ENTRY = struct.Struct("<32sHHHHdQQIII")
_LENGTH = struct.Struct("<H")
_CRC = struct.Struct("<I")
_FINGERPRINT_BYTES = 32
_TABLE_LIMIT = 1 << 16

_CLASSES = {0: "any", 1: "chat", 2: "agent"}
CLASSES = tuple(_CLASSES)
"""RetentionClass numbers that blocks can have today."""
_CLASS_NUMBERS = {name: number for number, name in _CLASSES.items()}
_MANIFEST_PATH = re.compile(r"manifest/([a-z0-9]+)/(\d{8})/([0-9A-Za-z.-]{1,80})")


class Entry(NamedTuple):
    """One block of an object. A tuple, because a lookup makes hundreds."""

    key: bytes
    """32 bytes."""
    fingerprint: bytes
    """32 bytes."""
    tenant: str
    created_unix_seconds: float
    offset_bytes: int
    """Where its stored bytes start in the object."""
    segment_offset_bytes: int
    """Where its record started in the segment it was written in; encrypted bytes depend on it."""
    block_bytes: int
    """Length of the payload."""
    stored_bytes: int
    """Length in the object."""
    crc32: int
    """CRC-32 of the stored bytes."""
    flags: int
    age_minutes: int = 0
    """How much older the block's first copy is than this one, rounded up; 0 for the first."""

    @property
    def first_created_unix_seconds(self) -> float:
        """When the block was written first, however often it was copied since: never later than it was."""
        return self.created_unix_seconds - MINUTE_SECONDS * self.age_minutes


@dataclass(frozen=True, slots=True)
class PackedEntries(Sequence[Entry]):
    """Entries as they came: an index of millions of blocks keeps 76 bytes each, and not an object."""

    raw: bytes
    fingerprints: tuple[bytes, ...]
    tenants: tuple[str, ...]

    def heads(self) -> Iterator[tuple[bytes, bytes, float]]:
        """Yield key, fingerprint and time of writing of each entry: all that an index needs."""
        for key, fingerprint, _, _, _, created, *_ in _ENTRY.iter_unpack(self.raw):
            yield key, self.fingerprints[fingerprint], created

    def __len__(self) -> int:
        return len(self.raw) // _ENTRY.size

    @overload
    def __getitem__(self, position: int) -> Entry: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, position: int | slice) -> Entry | tuple[Entry, ...]:
        if isinstance(position, slice):
            return tuple(self[one] for one in range(*position.indices(len(self))))
        if not -len(self) <= position < len(self):
            raise IndexError(position)
        fields = _ENTRY.unpack_from(self.raw, position % len(self) * _ENTRY.size)
        key, fingerprint, tenant, flags, age, created, at, segment_at, block_bytes, stored_bytes, crc32 = fields
        whose = (key, self.fingerprints[fingerprint], self.tenants[tenant])
        return Entry(*whose, created, at, segment_at, block_bytes, stored_bytes, crc32, flags, age)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one object holds."""

    retention: int
    """RetentionClass number."""
    epoch: int
    """Of the segment that the blocks were written in."""
    object_bytes: int
    created_unix_seconds: float
    """When the last of the blocks was written."""
    expires_unix_seconds: float
    """When the last block's time is over; each of the others lives as long after its own writing."""
    entries: Sequence[Entry]

    def heads(self) -> Iterator[tuple[bytes, bytes, float]]:
        """Yield key, fingerprint and time of writing of each block."""
        if isinstance(self.entries, PackedEntries):
            return self.entries.heads()
        return ((one.key, one.fingerprint, one.created_unix_seconds) for one in self.entries)

    @property
    def life_seconds(self) -> float:
        """How long each block lives."""
        return self.expires_unix_seconds - self.created_unix_seconds


@dataclass(frozen=True, slots=True)
class ManifestName:
    """Where a manifest lies, and thereby the object that it publishes."""

    retention: int
    hour: int
    id: str

    @property
    def path(self) -> str:
        return f"{class_prefix(self.retention)}{self.hour:08d}/{self.id}"

    @property
    def object_path(self) -> str:
        return f"seg/{class_name(self.retention)}/{self.id}"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A deletion. Fields that are not None must all match; all None is everything."""

    before_unix_seconds: float
    """Blocks first written until then are gone, and all copies of them, whenever those were made."""
    tenant: str | None = None
    fingerprint: bytes | None = None
    retention: int | None = None

    def shreds(self, tenant: str, created_unix_seconds: float) -> bool:
        """Say whether a tenant's key of that age goes with this deletion: it is all of the tenant, and the key older.

        A key that was made in the minute that a deletion covers beyond itself seals nothing that was there before it.
        """
        return (self.tenant, self.fingerprint, self.retention) == (tenant, None, None) and (
            created_unix_seconds <= self.before_unix_seconds - DELETION_SECONDS
        )

    def may_cover(self, manifest: Manifest) -> bool:
        """Say whether a look at each block is worth it."""
        entries = manifest.entries
        return (self.retention is None or self.retention == manifest.retention) and (
            not isinstance(entries, PackedEntries)
            or (
                (self.tenant is None or self.tenant in entries.tenants)
                and (self.fingerprint is None or self.fingerprint in entries.fingerprints)
            )
        )

    def covers(self, entry: Entry, retention: int) -> bool:
        """Say whether a block of a manifest of this class is deleted."""
        return (
            entry.first_created_unix_seconds <= self.before_unix_seconds
            and (self.tenant is None or self.tenant == entry.tenant)
            and (self.fingerprint is None or self.fingerprint == entry.fingerprint)
            and (self.retention is None or self.retention == retention)
        )


def class_name(retention: int) -> str:
    """Return the word that stands for a retention class in paths, for lifecycle rules; unknown ones by number."""
    return _CLASSES.get(retention, f"class{retention}")


def class_prefix(retention: int) -> str:
    """Return what the paths of a class's manifests start with."""
    return f"manifest/{class_name(retention)}/"


def parse_name(path: str) -> ManifestName | None:
    """Return the name whose path this is; None for a path that is none of ours."""
    match = _MANIFEST_PATH.fullmatch(path)
    if match is None:
        return None
    word = match[1]
    number = _CLASS_NUMBERS.get(word)
    if number is None:
        digits = word.removeprefix("class")
        if not (word.startswith("class") and digits.isdecimal() and len(digits) < 5):
            return None
        number = int(digits)
    name = ManifestName(number, int(match[2]), match[3])
    return name if name.path == path else None  # no class has two words


def pack(manifest: Manifest) -> bytes:
    """Return a manifest's bytes; its last four are the CRC-32 of the others. Raises ValueError when it is too large."""
    tenants = _numbered(entry.tenant for entry in manifest.entries)
    fingerprints = _numbered(entry.fingerprint for entry in manifest.entries)
    if len(manifest.entries) > MAX_ENTRIES or max(len(tenants), len(fingerprints)) >= _TABLE_LIMIT:
        raise ValueError(f"a manifest of {len(manifest.entries)} blocks is too large")
    parts = [
        _HEAD.pack(
            _MAGIC,
            _VERSION,
            manifest.retention,
            len(tenants),
            len(fingerprints),
            len(manifest.entries),
            manifest.epoch,
            manifest.object_bytes,
            manifest.created_unix_seconds,
            manifest.expires_unix_seconds,
        )
    ]
    for tenant in tenants:
        name = tenant.encode()
        parts += [_LENGTH.pack(len(name)), name]
    parts += fingerprints
    parts += [
        _ENTRY.pack(
            one.key,
            fingerprints[one.fingerprint],
            tenants[one.tenant],
            one.flags,
            one.age_minutes,
            one.created_unix_seconds,
            one.offset_bytes,
            one.segment_offset_bytes,
            one.block_bytes,
            one.stored_bytes,
            one.crc32,
        )
        for one in manifest.entries
    ]
    body = b"".join(parts)
    if len(body) + _CRC.size > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(body)} bytes is too large")
    return body + _CRC.pack(zlib.crc32(body))


def parse(raw: bytes) -> Manifest | None:
    """Return what a manifest says; None when it is damaged, of another version, or points outside its object."""
    if not _HEAD.size + _CRC.size <= len(raw) <= MAX_MANIFEST_BYTES:
        return None
    body = raw[: -_CRC.size]
    if _CRC.unpack_from(raw, len(body))[0] != zlib.crc32(body):
        return None
    try:
        return _parse_body(body)
    except (struct.error, ValueError):
        return None


def pack_tombstone(tombstone: Tombstone) -> bytes:
    """Return a tombstone's bytes: one JSON object, to be read by people too."""
    fingerprint = tombstone.fingerprint
    return json.dumps(
        {
            "version": _VERSION,
            "before_unix_seconds": tombstone.before_unix_seconds,
            "tenant": tombstone.tenant,
            "fingerprint": None if fingerprint is None else fingerprint.hex(),
            "retention": tombstone.retention,
        }
    ).encode()


def parse_tombstone(raw: bytes) -> Tombstone | None:
    """Return the deletion that these bytes say; None when they say none."""
    try:
        said: Any = json.loads(raw)
        if said["version"] != _VERSION:
            return None
        fingerprint = said["fingerprint"]
        tombstone = Tombstone(
            before_unix_seconds=float(said["before_unix_seconds"]),
            tenant=said["tenant"],
            fingerprint=None if fingerprint is None else bytes.fromhex(fingerprint),
            retention=said["retention"],
        )
    except (ValueError, KeyError, TypeError):
        return None
    good = (
        math.isfinite(tombstone.before_unix_seconds)
        and isinstance(tombstone.tenant, str | None)
        and isinstance(tombstone.retention, int | None)
    )
    return tombstone if good else None


def without(manifest: Manifest, tombstones: Sequence[Tombstone]) -> Manifest:
    """Return the manifest without what was deleted; the same one when nothing was."""
    able = [tombstone for tombstone in tombstones if tombstone.may_cover(manifest)]
    if not able:
        return manifest
    kept = tuple(
        entry
        for entry in manifest.entries
        if not any(tombstone.covers(entry, manifest.retention) for tombstone in able)
    )
    if len(kept) == len(manifest.entries):
        return manifest
    return replace(manifest, entries=kept)


def _parse_body(body: bytes) -> Manifest:
    """Return the manifest; raise ValueError or struct.error when what it says cannot be."""
    magic, version, retention, num_tenants, num_fingerprints, num_entries, epoch, size, created, expires = (
        _HEAD.unpack_from(body)
    )
    if (magic, version) != (_MAGIC, _VERSION) or not math.isfinite(created) or not math.isfinite(expires):
        raise ValueError("not a manifest of this version")
    tenants, start = _read_tenants(body, num_tenants)
    end = start + num_fingerprints * _FINGERPRINT_BYTES
    fingerprints = [body[at : at + _FINGERPRINT_BYTES] for at in range(start, end, _FINGERPRINT_BYTES)]
    if len(body) - end != num_entries * _ENTRY.size:
        raise ValueError("as many entries as are announced must follow the tables")
    entries = PackedEntries(body[end:], tuple(fingerprints), tuple(tenants))
    for _, fingerprint, tenant, _, _, _, offset_bytes, _, _, stored_bytes, _ in _ENTRY.iter_unpack(entries.raw):
        if fingerprint >= num_fingerprints or tenant >= num_tenants or offset_bytes + stored_bytes > size:
            raise ValueError("an entry points outside")
    return Manifest(retention, epoch, size, created, expires, entries)


def _read_tenants(body: bytes, count: int) -> tuple[list[str], int]:
    names, place = [], _HEAD.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        names.append(body[place : place + length].decode())
        place += length
    return names, place


def _numbered(values: Iterator[Any]) -> dict[Any, int]:
    return {value: number for number, value in enumerate(dict.fromkeys(values))}

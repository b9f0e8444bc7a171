"""Where does each stored block lie, whose is it, and how long is the stored prefix of a chain of keys?"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

ENCRYPTED = 1
"""Flag of a block whose stored bytes are sealed with its tenant's key."""
SEAL_BYTES = 28
"""What sealing adds to the stored bytes: a 12-byte nonce before and a 16-byte tag behind."""


class BlockLocation(NamedTuple):
    """One record: whose KV it is and where its bytes are. A tuple, because a start makes one for every block."""

    key: bytes
    """Block key, 32 bytes."""
    fingerprint: bytes
    """Model fingerprint it was written under, 32 bytes."""
    segment: int
    """Number of the segment file."""
    offset_bytes: int
    """Start of the record's header in that file."""
    block_bytes: int
    """Payload length, as its writer gave it."""
    crc32: int
    """CRC-32 of the stored bytes."""
    retention: int = 0
    """RetentionClass number."""
    created_seconds: float = 0.0
    """When the record was written; its life counts from here. Seconds since the Unix epoch."""
    tenant: str = ""
    flags: int = 0
    age_minutes: int = 0
    """How much older the block's first copy is than this one, rounded up; 0 for the first."""

    @property
    def first_created_seconds(self) -> float:
        """When the block was first written, however often it was copied since: what deletions go by. Never later."""
        return self.created_seconds - 60.0 * self.age_minutes

    @property
    def is_encrypted(self) -> bool:
        return bool(self.flags & ENCRYPTED)

    @property
    def stored_bytes(self) -> int:
        """Length of the bytes behind the header."""
        return self.block_bytes + SEAL_BYTES * (self.flags & ENCRYPTED)


_KEY = itemgetter(BlockLocation._fields.index("key"))


@dataclass(slots=True)
class Use:
    """What somebody holds."""

    num_blocks: int = 0
    num_bytes: int = 0
    """Payload."""

    def add(self, location: BlockLocation) -> None:
        self.num_blocks += 1
        self.num_bytes += location.block_bytes

    def subtract(self, location: BlockLocation) -> None:
        self.num_blocks -= 1
        self.num_bytes -= location.block_bytes


@dataclass(slots=True)
class Share:
    """The blocks of one tenant in one segment."""

    use: Use = field(default_factory=Use)
    last_hit: int = 0
    """The store's hit clock when one of them was last found."""
    records: list[BlockLocation] = field(default_factory=list)
    """Every record whose bytes are in the file: some blocks may have moved or been quarantined since."""


class BlockIndex:
    """Finds blocks by fingerprint and key. A key stays where it was first added until it is moved or removed.

    Blocks of one fingerprint are invisible to every other, so a model change can never hit old KV.
    """

    def __init__(self) -> None:
        self._by_fingerprint: dict[bytes, dict[bytes, BlockLocation]] = {}
        self._by_segment: dict[int, dict[str, Share]] = {}
        self._num_blocks = 0
        self.fingerprints: dict[bytes, Use] = {}
        self.tenants: dict[str, Use] = {}
        self.retentions: dict[int, Use] = {}

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[BlockLocation]:
        for blocks in self._by_fingerprint.values():
            yield from blocks.values()

    @property
    def num_bytes(self) -> int:
        """Payload of all blocks."""
        return sum(use.num_bytes for use in list(self.retentions.values()))

    def add(self, location: BlockLocation) -> bool:
        """Make a block findable; False and no change when its key already is (first writer wins)."""
        blocks = self._by_fingerprint.setdefault(location.fingerprint, {})
        if location.key in blocks:
            return False
        self._put(blocks, location)
        return True

    def move(self, old: BlockLocation, new: BlockLocation) -> bool:
        """Let a block be found at its new copy; False and no change when `old` is not where it is found by now."""
        blocks = self._by_fingerprint.get(old.fingerprint, {})
        if blocks.get(old.key) != old:
            return False
        self._forget(blocks, old)
        self._put(self._by_fingerprint.setdefault(new.fingerprint, {}), new)
        return True

    def find(self, fingerprint: bytes, key: bytes) -> BlockLocation | None:
        blocks = self._by_fingerprint.get(fingerprint)
        return blocks.get(key) if blocks else None

    def longest_prefix(self, fingerprint: bytes, keys: Iterable[bytes]) -> Sequence[BlockLocation]:
        """Return the locations of the leading keys that are stored, stopping before the first that is not."""
        blocks = self._by_fingerprint.get(fingerprint)
        if not blocks:
            return ()
        found: list[BlockLocation] = []
        # One pass without a Python loop, for a prompt has hundreds of keys and the caller waits; what was found before
        # the first that is not there stays in the list.
        with suppress(KeyError):
            found.extend(map(blocks.__getitem__, keys))
        return found

    def remove(self, location: BlockLocation) -> bool:
        """Forget one block; False when its key is unknown or lies elsewhere by now."""
        blocks = self._by_fingerprint.get(location.fingerprint, {})
        if blocks.get(location.key) != location:
            return False
        self._forget(blocks, location)
        return True

    def remove_segment(self, segment: int) -> int:
        """Forget every block that lies in a segment; return how many there were."""
        current = list(self.blocks_of(segment))
        for location in current:
            self._forget(self._by_fingerprint[location.fingerprint], location)
        self._by_segment.pop(segment, None)
        return len(current)

    def blocks_of(self, segment: int, tenant: str | None = None) -> Iterator[BlockLocation]:
        """Yield the blocks that are found in a segment (those of one tenant), in the order in which they were added."""
        for owner, share in self._by_segment.get(segment, {}).items():
            if tenant is None or tenant == owner:
                for location in share.records:
                    if self._by_fingerprint.get(location.fingerprint, {}).get(location.key) is location:
                        yield location

    def num_blocks_of(self, segment: int) -> int:
        """Return how many blocks are found in a segment."""
        return sum(share.use.num_blocks for share in self._by_segment.get(segment, {}).values())

    def records_of(self, segment: int) -> list[BlockLocation]:
        """Return every record of a segment whose bytes are there, those that nothing finds any more included."""
        return [record for share in self._by_segment.get(segment, {}).values() for record in share.records]

    def note_stale(self, location: BlockLocation) -> None:
        """Note a record that must not be found and whose bytes are there nevertheless: deleting must erase it too."""
        self._share(location).records.append(location)

    def drop_records(self, segment: int, gone: Iterable[BlockLocation]) -> int:
        """Forget blocks of a segment and that their bytes were there; return how many of them could be found."""
        names = set(gone)
        num_found = sum(self.remove(location) for location in names)
        for share in self._by_segment.get(segment, {}).values():
            share.records = [record for record in share.records if record not in names]
        return num_found

    def shares_of(self, tenant: str) -> list[tuple[int, Share]]:
        """Return (segment, share) wherever the tenant has blocks."""
        return [
            (number, share)
            for number, owners in self._by_segment.items()
            if (share := owners.get(tenant)) is not None and share.use.num_blocks
        ]

    def touch(self, segment: int, tenant: str, hit_clock: int) -> None:
        """Note that the tenant's blocks of a segment were found."""
        share = self._by_segment.get(segment, {}).get(tenant)
        if share is not None:
            share.last_hit = hit_clock

    def _put(self, blocks: dict[bytes, BlockLocation], location: BlockLocation) -> None:
        blocks[location.key] = location
        share = self._share(location)
        share.records.append(location)
        share.use.add(location)
        model = self.fingerprints.get(location.fingerprint)
        if model is None:
            model = self.fingerprints[location.fingerprint] = Use()
        model.add(location)
        owner = self.tenants.get(location.tenant)
        if owner is None:
            owner = self.tenants[location.tenant] = Use()
        owner.add(location)
        kind = self.retentions.get(location.retention)
        if kind is None:
            kind = self.retentions[location.retention] = Use()
        kind.add(location)
        self._num_blocks += 1

    def _share(self, location: BlockLocation) -> Share:
        owners = self._by_segment.setdefault(location.segment, {})
        share = owners.get(location.tenant)
        if share is None:
            share = owners[location.tenant] = Share()
        return share

    def _forget(self, blocks: dict[bytes, BlockLocation], location: BlockLocation) -> None:
        del blocks[location.key]
        self.fingerprints[location.fingerprint].subtract(location)
        if not blocks:
            del self._by_fingerprint[location.fingerprint], self.fingerprints[location.fingerprint]
        self._by_segment[location.segment][location.tenant].use.subtract(location)
        self.retentions[location.retention].subtract(location)
        owner = self.tenants[location.tenant]
        owner.subtract(location)
        if owner.num_blocks == 0:
            del self.tenants[location.tenant]
        self._num_blocks -= 1


class HitMemory:
    """When was each of the recently found blocks last found? Bounded: two generations, the older is dropped whole."""

    def __init__(self, max_keys: int = 200_000) -> None:
        self._half = max_keys // 2
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}
        self._fresh: list[tuple[float, Sequence[BlockLocation]]] = []
        self._num_fresh = 0

    def note(self, found: Sequence[BlockLocation], now: float) -> None:
        """Remember that these were found. Cheap, for a caller waits: fold() does the work."""
        self._fresh.append((now, found))
        self._num_fresh += len(found)
        if self._num_fresh > self._half:
            self.fold()

    def fold(self) -> None:
        """Let last() know what was noted."""
        for now, found in self._fresh:
            if len(self._young) > self._half:
                self._old, self._young = self._young, {}
            self._young.update(dict.fromkeys(map(_KEY, found), now))
        self._fresh.clear()
        self._num_fresh = 0

    def last(self, key: bytes) -> float | None:
        """Return when it was last found, as far as folded; None when that is long ago or never."""
        return self._young.get(key) or self._old.get(key)

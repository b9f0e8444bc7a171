"""What is stored at this moment, who uses it, and what must go or be written again?

The event loop's own: no file work, no waiting. Times come in as values, in seconds since the Unix epoch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from services.kvstore.directory import SegmentFile
from services.kvstore.index import BlockIndex, BlockLocation, HitMemory
from services.kvstore.leases import LeaseTable, PinTable
from services.kvstore.log import SegmentSize
from services.kvstore.recovery import RecoveredSegment
from services.kvstore.retention import RetentionPolicy, SegmentUse
from services.kvstore.tiers import SealedSegment

_SEGMENT = itemgetter(BlockLocation._fields.index("segment"))
_MOSTLY_PINNED = 0.5


@dataclass(slots=True)
class Segment:
    """One segment file as it stands."""

    file: SegmentFile
    num_bytes: int
    physical_bytes: int
    last_hit: int
    first_created: float = 0.0
    last_created: float = 0.0
    is_active: bool = False
    readers: int = 0
    """Reads of the file that are under way."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading blocks that a lookup found."""

    locations: Sequence[BlockLocation]
    segments: frozenset[int]
    stale: Sequence[tuple[BlockLocation, int]] = ()
    """Blocks to write again, with the class to give them, before their life ends."""


class Catalog:
    """Index, segment table, leases and pins of one store."""

    def __init__(self, index: BlockIndex, segments: Iterable[RecoveredSegment], policy: RetentionPolicy) -> None:
        self.index = index
        self.policy = policy
        self.leases = LeaseTable()
        self.pins = PinTable()
        self.hits = HitMemory()
        self.segments = {
            one.file.number: Segment(
                one.file, one.num_bytes, one.physical_bytes, place, one.first_created, one.last_created
            )
            for place, one in enumerate(segments)
        }
        self.doomed: dict[int, Segment] = {}
        """Out of the index, and unlinked as soon as nobody reads or leases them."""
        self._hit_clock = len(self.segments)

    @property
    def physical_bytes(self) -> int:
        """What the file system gave to all segment files."""
        return sum(one.physical_bytes for table in (self.segments, self.doomed) for one in list(table.values()))

    @property
    def disk_bytes(self) -> int:
        """Lengths of all segment files, the footers that active ones will get included."""
        return sum(one.num_bytes for table in (self.segments, self.doomed) for one in list(table.values()))

    def lookup(self, fingerprint: bytes, keys: Collection[bytes], *, wanted: int, now: float) -> Hit:
        """Return the leading blocks that are stored and live. wanted: class of the request, for the refresh."""
        found = self.index.longest_prefix(fingerprint, keys)
        if not found:
            return Hit((), frozenset())
        numbers = frozenset(map(_SEGMENT, found))
        if any(self._begins_to_expire(number, now) for number in numbers):
            found = self._live_prefix(found, now)
            numbers = frozenset(map(_SEGMENT, found))
        self._hit_clock += 1
        stale: list[tuple[BlockLocation, int]] = []
        for number in numbers:
            segment = self.segments[number]
            segment.last_hit = self._hit_clock
            self.index.touch(number, found[0].tenant, self._hit_clock)
            again = self.policy.refreshed(segment.file.retention, segment.first_created, wanted=wanted, now=now)
            if again is not None:
                stale += [(one, again) for one in found if one.segment == number]
        return Hit(found, numbers, stale)

    def find(self, fingerprint: bytes, key: bytes, now: float) -> BlockLocation | None:
        """Return where a live block lies."""
        location = self.index.find(fingerprint, key)
        return None if location is None or self._is_expired(location, now) else location

    def publish(self, location: BlockLocation, replaced: BlockLocation | None = None) -> bool:
        """Make a durable record findable, instead of its former copy if it has one; False when it lost the race.

        A block whose time is over gives way too: its segment stays until the last block of its hour has ended.
        """
        segment = self.segments[location.segment]
        if replaced is None:
            ended = self.index.find(location.fingerprint, location.key)
            replaced = ended if ended is not None and self._is_expired(ended, location.created_seconds) else None
        segment.first_created = segment.first_created or location.created_seconds
        segment.last_created = location.created_seconds
        is_new = self.index.add(location) if replaced is None else self.index.move(replaced, location)
        if not is_new:
            self.index.note_stale(location)
        return is_new

    def note_sizes(self, sizes: Iterable[SegmentSize]) -> None:
        """Take over what the log says of its files."""
        for size in sizes:
            number = size.file.number
            if size.num_bytes == 0:
                self.segments.pop(number, None)
                continue
            segment = self.segments.setdefault(number, Segment(size.file, 0, 0, self._hit_clock))
            segment.num_bytes, segment.physical_bytes = size.num_bytes, size.physical_bytes
            segment.is_active = size.is_active

    def doom(self, number: int) -> int:
        """Take a closed segment out of the index; return how many blocks can no longer be found."""
        self.doomed[number] = self.segments.pop(number)
        return self.index.remove_segment(number)

    def sealed(self, number: int, locations: Sequence[BlockLocation]) -> SealedSegment:
        """Return what the tier behind must know of a closed segment with these records."""
        one = self.segments[number]
        last = locations[-1].created_seconds
        expires_at = self.policy.expires_at(one.file.retention, last)
        return SealedSegment(
            one.file.path, number, one.file.epoch, one.file.retention, locations, one.num_bytes, last, expires_at
        )

    def free_to_unlink(self) -> list[Segment]:
        """Return the doomed segments that nobody reads or leases any more."""
        return [one for number, one in self.doomed.items() if one.readers == 0 and not self.leases.holds(number)]

    def unlinked(self, files: Iterable[SegmentFile]) -> None:
        for file in files:
            self.doomed.pop(file.number, None)

    def expired(self, now: float) -> list[int]:
        """Return the closed segments whose last block's time is over, and those that hold nothing any more."""
        return [
            number
            for number, one in self.segments.items()
            if not one.is_active
            and one.last_created
            and (
                self.policy.expires_at(one.file.retention, one.last_created) <= now
                or self.index.num_blocks_of(number) == 0
            )
        ]

    def uses(self) -> list[SegmentUse]:
        """Return what the choice of victims needs to know."""
        pinned: dict[int, int] = {}
        for fingerprint, key in self.pins.names:
            location = self.index.find(fingerprint, key)
            if location is not None:
                pinned[location.segment] = pinned.get(location.segment, 0) + location.stored_bytes
        return [
            SegmentUse(
                number,
                one.physical_bytes,
                one.last_hit,
                evictable=not one.is_active
                and one.readers == 0
                and not self.leases.holds(number)
                and pinned.get(number, 0) <= one.num_bytes * _MOSTLY_PINNED,
            )
            for number, one in self.segments.items()
        ]

    def tenant_uses(self, tenant: str) -> list[SegmentUse]:
        """Return the tenant's share of each segment, for its own order of eviction."""
        return [
            SegmentUse(number, share.use.num_bytes, share.last_hit, evictable=not self.leases.holds(number))
            for number, share in self.index.shares_of(tenant)
        ]

    def pinned_and_short(self, now: float) -> list[tuple[BlockLocation, int]]:
        """Return the pinned blocks whose pin outlives them and whose end is near, with their class."""
        short: list[tuple[BlockLocation, int]] = []
        for (fingerprint, key), until in self.pins.ends_of().items():
            location = self.index.find(fingerprint, key)
            if location is None or until <= self.policy.expires_at(location.retention, location.created_seconds):
                continue
            again = self.policy.refreshed(location.retention, location.created_seconds, wanted=0, now=now)
            if again is not None:
                short.append((location, again))
        return short

    def _begins_to_expire(self, number: int, now: float) -> bool:
        segment = self.segments[number]
        return self.policy.expires_at(segment.file.retention, segment.first_created) <= now

    def _live_prefix(self, found: Sequence[BlockLocation], now: float) -> Sequence[BlockLocation]:
        for count, location in enumerate(found):
            if self._is_expired(location, now):
                return found[:count]
        return found

    def _is_expired(self, location: BlockLocation, now: float) -> bool:
        return self.policy.expires_at(location.retention, location.created_seconds) <= now

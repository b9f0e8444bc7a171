"""How long is a block kept, what is copied forward, and what makes room for new blocks?

Pure: times and sizes come in as values. Times are seconds since the Unix epoch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.kvstore.index import BlockLocation

UNSPECIFIED, CHAT, AGENT = 0, 1, 2
"""RetentionClass numbers: until room is needed, chat turns, agent loops."""
HIGH, LOW = 0.90, 0.80
"""Fill at which room is made, and down to which. The distance lets many batches pass between two evictions."""
FORWARD = 0.10
"""Share of a victim's bytes that may be saved because they were hit lately."""
_SLOT_SECONDS = 3600.0
_SLOTS_PER_LIFE = 24
_SHORT = 0.25
"""A hit refreshes a block that has less than this share of its life left: at most four copies a life, however hot."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long each class lives, and how much each tenant may hold."""

    agent_seconds: float = 3 * 86_400.0
    chat_seconds: float = 7 * 86_400.0
    quota_bytes: Mapping[str, int] = field(default_factory=dict)
    """By tenant; "*" is for those that are not named."""

    def life_seconds(self, retention: int) -> float:
        """Return how long a block of this class lives; infinity for until room is needed."""
        if retention == AGENT:
            return self.agent_seconds
        return self.chat_seconds if retention == CHAT else math.inf

    def expires_at(self, retention: int, created: float) -> float:
        return created + self.life_seconds(retention)

    def slot(self, retention: int, now: float) -> int:
        """Return which segment of its class a block belongs in now: one an hour, or shorter where lives are short.

        All blocks of a segment then expire within one slot, and expiry is one unlink.
        """
        life = self.life_seconds(retention)
        return 0 if math.isinf(life) else int(now / min(_SLOT_SECONDS, life / _SLOTS_PER_LIFE))

    def refreshed(self, retention: int, created: float, *, wanted: int, now: float) -> int | None:
        """Return the class under which a hit block must be written again, None when it is fine where it is.

        wanted: class of the request that hit it.
        """
        life = self.life_seconds(retention)
        if math.isinf(life):
            return None
        if wanted in {CHAT, AGENT} and self.life_seconds(wanted) > life:
            return wanted
        return retention if created + life - now < life * _SHORT else None

    def quota_of(self, tenant: str) -> int:
        """Return the most that a tenant may hold, in payload bytes; 0 is without bound."""
        return self.quota_bytes.get(tenant, self.quota_bytes.get("*", 0))


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """What the choice needs to know of one segment (or of one tenant's share of it)."""

    segment: int
    """Its number; lower is older."""
    num_bytes: int
    """On disk, headers included."""
    last_hit: int
    """Grows with every lookup or read that touched the segment; any monotonic count."""
    evictable: bool = True
    """False while it is being written or read, is leased, or is mostly pinned."""


def capacity(max_bytes: int, *, physical_bytes: int, free_bytes: int, reserve_bytes: int) -> int:
    """Return how many bytes the segments may take: the cap, or less where the file system has less to give.

    physical_bytes: what they take now.  free_bytes: what the file system has left.  reserve_bytes: left to others.
    """
    return max(0, min(max_bytes, physical_bytes + free_bytes - reserve_bytes))


def victims(segments: Sequence[SegmentUse], *, max_bytes: int, needed_bytes: int) -> tuple[int, ...] | None:
    """Return which segments to drop, coldest first, so that `needed_bytes` more fit.

    Nothing goes below the high watermark; above it, room is made down to the low one as far as segments may go. None
    when even dropping every evictable one would not keep the cap (drop nothing then: a lost block for no gain). Ties go
    to the older segment.
    """
    total = sum(segment.num_bytes for segment in segments) + needed_bytes
    if total <= max_bytes * HIGH:
        return ()
    surplus = total - max_bytes * LOW
    chosen: list[int] = []
    for segment in sorted(segments, key=lambda s: (s.last_hit, s.segment)):
        if surplus <= 0:
            break
        if segment.evictable:
            chosen.append(segment.segment)
            surplus -= segment.num_bytes
    return tuple(chosen) if surplus <= max_bytes * (1 - LOW) else None


def shares_to_drop(
    shares: Sequence[SegmentUse], *, quota_bytes: int, held_bytes: int, new_bytes: int
) -> tuple[int, ...]:
    """Return the segments in which a tenant over its quota gives up its blocks, its own coldest first.

    shares: the tenant's part of each segment, in payload bytes.  Empty while held + new fit the quota (0: no quota).
    """
    surplus = held_bytes + new_bytes - quota_bytes
    chosen: list[int] = []
    if quota_bytes:
        for share in sorted(shares, key=lambda s: (s.last_hit, s.segment)):
            if surplus <= 0:
                break
            if share.evictable:
                chosen.append(share.segment)
                surplus -= share.num_bytes
    return tuple(chosen)


def kept_blocks(
    blocks: Iterable[tuple[BlockLocation, float | None, bool]], *, segment_bytes: int
) -> list[BlockLocation]:
    """Return the blocks of a victim to copy forward: every pinned one, and the latest hit up to FORWARD of its bytes.

    Only hits of this very copy count: a copy's life begins anew, and one hit must not give a block a life without end.

    blocks: (location, when it was last hit, is it pinned).
    """
    pinned: list[BlockLocation] = []
    hot: list[tuple[float, BlockLocation]] = []
    for location, last_hit, is_pinned in blocks:
        if is_pinned:
            pinned.append(location)
        elif last_hit is not None and last_hit >= location.created_seconds:
            hot.append((last_hit, location))
    left = segment_bytes * FORWARD
    kept = pinned
    for _, location in sorted(hot, key=lambda one: (-one[0], one[1].offset_bytes)):
        left -= location.stored_bytes
        if left < 0:
            break
        kept.append(location)
    return kept

"""Which segments make room for new blocks?"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """What the choice needs to know of one segment."""

    segment: int
    """Its number; lower is older."""
    num_bytes: int
    """On disk, headers included."""
    last_hit: int
    """Grows with every lookup or read that touched the segment; any monotonic count."""
    evictable: bool = True
    """False while it is being written or read."""


def victims(segments: Sequence[SegmentUse], *, max_bytes: int, needed_bytes: int) -> tuple[int, ...] | None:
    """Return which segments to drop, coldest first, until `needed_bytes` more stay within `max_bytes`.

    Empty when there is room already; None when even dropping everything evictable would not be enough (drop nothing
    then: a lost block for no gain). Ties go to the older segment.
    """
    surplus = sum(segment.num_bytes for segment in segments) + needed_bytes - max_bytes
    chosen: list[int] = []
    for segment in sorted(segments, key=lambda s: (s.last_hit, s.segment)):
        if surplus <= 0:
            break
        if segment.evictable:
            chosen.append(segment.segment)
            surplus -= segment.num_bytes
    return tuple(chosen) if surplus <= 0 else None

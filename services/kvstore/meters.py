"""What has the store counted and timed since boot?"""

from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Histogram

_HOUR, _DAY = 3600.0, 86_400.0


def _histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"fathom_kvstore_{name}", meaning, buckets=buckets, registry=None)


@dataclass(slots=True)
class StoreCounts:
    """Plain numbers; metrics.py shows them."""

    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    pending_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    short_reads: int = 0
    stored_blocks: int = 0
    duplicate_blocks: int = 0
    damaged_blocks: int = 0
    refreshed_blocks: int = 0
    remote_blocks: int = 0
    shed_calls: int = 0
    local_opens: int = 0
    write_drops: Counter[str] = field(default_factory=Counter)
    """Blocks not stored, by reason: crc, size, memory, quota, room, disk, deleted, stopping."""
    evictions: Counter[str] = field(default_factory=Counter)
    """Blocks removed, by reason: ttl, capacity, quota, tenant (an operator's deletion), key (theirs is gone)."""
    eligible_by_class: Counter[int] = field(default_factory=Counter)
    hit_by_class: Counter[int] = field(default_factory=Counter)
    remote_hit_by_class: Counter[int] = field(default_factory=Counter)
    """Blocks asked for, found here, and found behind only, by RetentionClass of the request."""

    @property
    def refused_blocks(self) -> int:
        return self.write_drops.total()

    @property
    def evicted_blocks(self) -> int:
        """Blocks removed to make room."""
        return self.evictions["capacity"] + self.evictions["quota"]


@dataclass(frozen=True, slots=True)
class Meters:
    """Distributions. Not registered anywhere: metrics.py shows those of the store that is served."""

    lookup_seconds: Histogram = field(
        default_factory=lambda: _histogram(
            "lookup_seconds", "Time of a lookup in the index.", (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2)
        )
    )
    publish_lag_seconds: Histogram = field(
        default_factory=lambda: _histogram(
            "publish_lag_seconds",
            "Time from the moment a block is whole to the moment it can be found.",
            (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
        )
    )
    read_seconds: Histogram = field(
        default_factory=lambda: _histogram(
            "read_seconds",
            "Time of one run of blocks from disk, checks included.",
            (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5),
        )
    )
    hit_age_seconds: Histogram = field(
        default_factory=lambda: _histogram(
            "hit_age_seconds",
            "Time since the deepest found block was last found or written: do the classes live long enough?",
            (1.0, 10.0, 60.0, 300.0, _HOUR, 6 * _HOUR, _DAY, 2 * _DAY, 3 * _DAY, 5 * _DAY, 7 * _DAY),
        )
    )

    def all(self) -> tuple[Histogram, ...]:
        return self.lookup_seconds, self.publish_lag_seconds, self.read_seconds, self.hit_age_seconds

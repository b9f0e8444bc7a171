"""What does the KV store tell Prometheus?"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.directory import CLASSES
from services.kvstore.meters import StoreCounts
from services.kvstore.store import Store

BLOCK_TOKENS = 128
_PREFIX = "fathom_kvstore"
_COUNTERS = {
    "lookups": "Lookup calls.",
    "lookup_blocks": "Keys that lookups asked for.",
    "hit_blocks": "Keys that lookups found.",
    "pending_blocks": "Keys that lookups found to be on their way in.",
    "read_blocks": "Blocks read from disk and verified.",
    "read_bytes": "Bytes of those: with read_seconds, the rate at which one read's runs come.",
    "short_reads": "Reads that ended before their last block: missing, damaged, or not there in time.",
    "remote_blocks": "Blocks read from the object store and verified.",
    "stored_blocks": "Blocks written and published.",
    "duplicate_blocks": "Blocks written that were there already.",
    "damaged_blocks": "Blocks whose bytes on disk were wrong.",
    "refreshed_blocks": "Blocks copied forward before their life or their segment ended.",
    "evicted_blocks": "Blocks removed to make room.",
    "refused_blocks": "Blocks not stored, for whatever reason.",
    "shed_calls": "Read and Write calls that ended Overloaded: too many at once, or the disk behind or full.",
    "local_opens": "Reads by descriptors on the unix socket.",
}


class StoreCollector(Collector):
    """Reads the store's own counts when scraped, so that nothing is counted twice."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        counts = self._store.counts
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=getattr(counts, name))
        leases = self._store.catalog.leases
        yield CounterMetricFamily(f"{_PREFIX}_expired_leases", "Leases that no read ended.", value=leases.num_expired)
        yield _by("write_drops", "Blocks not stored.", "reason", counts.write_drops)
        yield _by("evictions", "Blocks removed: ttl, capacity, quota, tenant, key.", "reason", counts.evictions)
        yield from _tokens(counts)
        for name, meaning, value in self._gauges():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        for histogram in self._store.meters.all():
            yield from histogram.collect()

    def _gauges(self) -> Iterable[tuple[str, str, float]]:
        store, catalog = self._store, self._store.catalog
        yield "blocks", "Blocks that can be found.", store.num_blocks
        yield "segments", "Segment files.", store.num_segments
        yield "disk_bytes", "Lengths of the segment files.", store.disk_bytes
        yield "physical_bytes", "Disk that the file system gave to the segment files.", catalog.physical_bytes
        yield "payload_bytes", "Payload that can be found.", catalog.index.num_bytes
        yield "max_bytes", "Cap on physical_bytes.", store.max_bytes
        yield "waiting_bytes", "Bytes received and not yet on disk.", store.room.used_bytes
        yield "tenants", "Tenants that hold blocks.", len(catalog.index.tenants)
        yield "pinned_blocks", "Blocks kept for sessions.", len(catalog.pins)
        yield "leases", "Leases that are held.", len(catalog.leases)
        yield "direct", "1 while files bypass the page cache.", float(store.disk.is_direct)


def register(store: Store, registry: CollectorRegistry) -> None:
    """Show the store's counts on /metrics."""
    registry.register(StoreCollector(store))


def _tokens(counts: StoreCounts) -> Iterable[Metric]:
    """Yield what share of all that could have been found was, and in which tier."""
    eligible = {CLASSES[retention]: number * BLOCK_TOKENS for retention, number in counts.eligible_by_class.items()}
    yield _by("eligible_tokens", "Tokens that lookups asked for, by the request's class.", "retention", eligible)
    hits = CounterMetricFamily(
        f"{_PREFIX}_hit_tokens",
        "Tokens that lookups found, by the request's class and by tier: on this disk, or in the object store only.",
        labels=["retention", "tier"],
    )
    for tier, blocks in (("disk", counts.hit_by_class), ("objects", counts.remote_hit_by_class)):
        for retention, number in sorted(blocks.items()):
            hits.add_metric([CLASSES[retention], tier], number * BLOCK_TOKENS)
    yield hits


def _by(name: str, meaning: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", meaning, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], number)
    return family

"""What does the KV store tell Prometheus?"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.store import Store

_PREFIX = "fathom_kvstore"
_COUNTERS = {
    "lookups": "Lookup calls.",
    "lookup_blocks": "Keys that lookups asked for.",
    "hit_blocks": "Keys that lookups found.",
    "read_blocks": "Blocks read and verified.",
    "stored_blocks": "Blocks written and published.",
    "duplicate_blocks": "Blocks written that were there already.",
    "damaged_blocks": "Blocks whose bytes on disk were wrong.",
    "evicted_blocks": "Blocks removed to make room.",
    "refused_blocks": "Blocks not stored: wrong CRC-32, disk full or failing.",
    "shed_calls": "Read and Write calls that ended Overloaded: too many at once, or the disk behind or full.",
}


class StoreCollector(Collector):
    """Reads the store's own counts when scraped, so that nothing is counted twice."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=getattr(self._store.counts, name))
        yield GaugeMetricFamily(f"{_PREFIX}_blocks", "Blocks that can be found.", value=self._store.num_blocks)
        yield GaugeMetricFamily(f"{_PREFIX}_segments", "Segment files.", value=self._store.num_segments)
        yield GaugeMetricFamily(f"{_PREFIX}_disk_bytes", "Bytes of the segment files.", value=self._store.disk_bytes)
        yield GaugeMetricFamily(f"{_PREFIX}_max_bytes", "Cap on disk_bytes.", value=self._store.max_bytes)
        yield GaugeMetricFamily(
            f"{_PREFIX}_waiting_bytes", "Bytes received and not yet on disk.", value=self._store.room.used_bytes
        )


def register(store: Store, registry: CollectorRegistry) -> None:
    """Show the store's counts on /metrics."""
    registry.register(StoreCollector(store))

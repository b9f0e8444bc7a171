"""What do prefill and decode tell Prometheus of the window states of their host?"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.chassis.window_store import Counts

_COUNTERS = {
    "hits": "Sequences that started from a saved window state.",
    "misses": "Sequences with found blocks for which no usable window state was here.",
    "saved": "Window states saved.",
    "damaged": "Window states that were not what they should be, and were removed.",
    "evicted": "Window states removed to make room.",
    "dropped": "Window states that were not saved.",
}


class WindowStoreCollector(Collector):
    """Reads the window store's own counts when scraped."""

    def __init__(self, prefix: str, counts: Counts) -> None:
        """prefix: what the names begin with, for example "fathom_prefill"."""
        self._prefix = prefix
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        for name, meaning in _COUNTERS.items():
            value = getattr(self._counts, f"num_{name}")
            yield CounterMetricFamily(f"{self._prefix}_window_{name}", meaning, value=value)
        meaning = "Window states of this host, in bytes, at this replica's last save."
        yield GaugeMetricFamily(f"{self._prefix}_window_bytes", meaning, value=self._counts.num_bytes)

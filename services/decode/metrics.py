"""What does a decode replica tell Prometheus?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.decode.engine import Load

PREFIX = "fathom_decode"
_GAUGES = {
    "total_blocks": "Blocks of the pool.",
    "used_blocks": "Blocks held by sequences and reservations.",
    "cached_blocks": "Blocks that nobody holds and that still can be hit.",
    "free_blocks": "Blocks that can be given out, the cached ones included.",
    "running_sequences": "Sequences that hold blocks.",
    "queued_sequences": "Sequences and reservations that wait for blocks.",
    "kv_tokens": "KV of the running sequences.",
}
_COUNTERS = {
    "num_tokens": "Answer tokens sampled.",
    "num_steps": "Steps.",
    "num_preemptions": "Sequences that lost their blocks and were recomputed.",
}
_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1)


class LoadCollector(Collector):
    """Reads the engine's own counts when scraped, so that nothing is counted twice."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=getattr(load, name))
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name.removeprefix('num_')}", meaning, value=getattr(load, name))


class DecodeMetrics:
    """The counts that the engine does not keep."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoff_bytes = Counter(
            f"{PREFIX}_handoff_bytes", "Bytes taken in from prefill.", ["backend"], registry=registry
        )
        self._handoffs = Counter(f"{PREFIX}_handoffs", "Committed handoffs.", ["backend"], registry=registry)
        self._aborts = Counter(
            f"{PREFIX}_handoff_aborts", "Reservations that were given back.", ["reason"], registry=registry
        )
        self._late_writes = Counter(
            f"{PREFIX}_handoff_late_writes", "Pieces that came after their reservation's end.", registry=registry
        )
        self._write_drops = Counter(
            f"{PREFIX}_kv_write_drops", "Blocks that were not written to the KV store.", ["reason"], registry=registry
        )
        self.step_seconds = Histogram(
            f"{PREFIX}_step_seconds", "Duration of steps.", registry=registry, buckets=_STEP_BUCKETS
        )

    def count_handoff(self, backend: str, num_bytes: int) -> None:
        """Count one committed handoff."""
        self._handoffs.labels(backend).inc()
        self._handoff_bytes.labels(backend).inc(num_bytes)

    def count_abort(self, reason: str) -> None:
        """Count one reservation that did not commit, or was not fetched."""
        self._aborts.labels(reason).inc()

    def count_late_write(self) -> None:
        """Count one piece that came too late."""
        self._late_writes.inc()

    def count_write_drop(self, reason: str, num_blocks: int) -> None:
        """Count blocks that the store will not get."""
        self._write_drops.labels(reason).inc(num_blocks)

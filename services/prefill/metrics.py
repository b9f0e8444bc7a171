"""What does a prefill replica tell Prometheus?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.prefill.engine import Load

PREFIX = "fathom_prefill"
_GAUGES = {
    "total_blocks": "Blocks of the pool.",
    "used_blocks": "Blocks held by prompts.",
    "cached_blocks": "Blocks that nobody holds and that still can be hit.",
    "free_blocks": "Blocks that a new prompt can get, the cached ones included.",
    "queued_sequences": "Prompts waiting for their first chunk.",
    "running_sequences": "Prompts between first chunk and finished handoff.",
    "queued_tokens": "Prompt tokens not yet computed.",
}
_COUNTERS = {"num_tokens": "Prompt tokens computed.", "num_steps": "Steps."}
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


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


class PrefillMetrics:
    """The counts that the engine does not keep."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoff_bytes = Counter(
            f"{PREFIX}_handoff_bytes", "Bytes handed over to decode.", ["backend"], registry=registry
        )
        self._handoffs = Counter(f"{PREFIX}_handoffs", "Finished handoffs.", ["backend"], registry=registry)
        self._aborts = Counter(f"{PREFIX}_handoff_aborts", "Handoffs given up.", ["reason"], registry=registry)
        self._write_drops = Counter(
            f"{PREFIX}_kv_write_drops", "Blocks that were not written to the KV store.", ["reason"], registry=registry
        )
        self._loaded_tokens = Counter(
            f"{PREFIX}_loaded_tokens", "Prompt tokens whose KV came from the KV store.", registry=registry
        )
        self._load_seconds = Counter(f"{PREFIX}_load_seconds", "Time spent loading them.", registry=registry)
        self._saved_seconds = Counter(
            f"{PREFIX}_saved_seconds",
            "What computing them would have taken at the measured speed, less the time spent loading.",
            registry=registry,
        )
        self.step_seconds = Histogram(
            f"{PREFIX}_step_seconds", "Duration of steps.", registry=registry, buckets=_STEP_BUCKETS
        )

    def count_handoff(self, backend: str, num_bytes: int) -> None:
        """Count one finished handoff."""
        self._handoffs.labels(backend).inc()
        self._handoff_bytes.labels(backend).inc(num_bytes)

    def count_abort(self, reason: str) -> None:
        """Count one handoff that was begun and given up."""
        self._aborts.labels(reason).inc()

    def count_load(self, num_tokens: int, *, seconds: float, recompute_seconds: float) -> None:
        """Count one load from the KV store. A load that was slower than computing saved nothing."""
        self._loaded_tokens.inc(num_tokens)
        self._load_seconds.inc(seconds)
        self._saved_seconds.inc(max(recompute_seconds - seconds, 0.0))

    def count_write_drop(self, reason: str, num_blocks: int) -> None:
        """Count blocks that the store will not get."""
        self._write_drops.labels(reason).inc(num_blocks)

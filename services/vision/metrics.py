"""What does a vision replica tell Prometheus?"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class VisionMetrics:
    """The service's own metrics in its process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "fathom_vision_images",
            "Images asked for: encoded, cached, shared (with one on its way), or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self.waiting = Gauge("fathom_vision_waiting", "Images being decoded or encoded, or in line.", registry=registry)
        self.kept_bytes = Gauge("fathom_vision_kept_bytes", "Embeddings kept here.", registry=registry)
        self.sent_bytes = Counter("fathom_vision_sent_bytes", "Embeddings sent.", registry=registry)
        self.decode_seconds = Histogram(
            "fathom_vision_decode_seconds", "From bytes to pixels.", registry=registry, buckets=_BUCKETS
        )
        self.encode_seconds = Histogram(
            "fathom_vision_encode_seconds", "From pixels to embeddings.", registry=registry, buckets=_BUCKETS
        )

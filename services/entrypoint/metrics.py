"""What does an entrypoint count?"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EntrypointMetrics:
    """The entrypoint's own metrics in its process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "fathom_entrypoint_requests",
            "Requests by how they ended: stop, length, cancelled, or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self.in_flight = Gauge("fathom_entrypoint_in_flight", "Requests being answered.", registry=registry)
        self.retries = Counter(
            "fathom_entrypoint_retries", "Parts of requests started again elsewhere.", ["leg"], registry=registry
        )
        self.lookup_failures = Counter(
            "fathom_entrypoint_lookup_failures",
            "Requests for which a replica of the KV store gave no answer.",
            registry=registry,
        )
        self.pending_hit_tokens = Counter(
            "fathom_entrypoint_pending_hit_tokens",
            "Of the hit tokens, those whose blocks were still being written.",
            registry=registry,
        )
        self.hit_tokens = Counter(
            "fathom_entrypoint_hit_tokens", "Prompt tokens that the KV store said it holds.", registry=registry
        )
        self.prompt_tokens = Counter("fathom_entrypoint_prompt_tokens", "Prompt tokens admitted.", registry=registry)
        self.cached_tokens = Counter(
            "fathom_entrypoint_cached_tokens", "Prompt tokens that were not computed again.", registry=registry
        )
        self.completion_tokens = Counter(
            "fathom_entrypoint_completion_tokens", "Answer tokens forwarded.", registry=registry
        )
        self.ttft_seconds = Histogram(
            "fathom_entrypoint_ttft_seconds",
            "From admission to the first token.",
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )

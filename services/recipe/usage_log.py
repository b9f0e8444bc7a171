"""Who used how many tokens? One record for each request, for accounting."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from services.chassis import telemetry
from services.recipe.choices import Spent

KINDS = ("input", "cached", "output", "reasoning")


class UsageLog:
    """Writes usage records to the JSON log and sums them up for Prometheus.

    Labels stay few: tenants and keys are those of the key file, "" for both while keys are off.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "fathom_recipe_usage_tokens",
            "Tokens by tenant and key; cached ones are among input, reasoning ones among output.",
            ["tenant", "key", "kind"],
            registry=registry,
        )
        self._requests = Counter(
            "fathom_recipe_usage_requests",
            "Requests that reached the model, by tenant, key and outcome: done, failed or cancelled.",
            ["tenant", "key", "outcome"],
            registry=registry,
        )
        self._by_key: dict[tuple[str, str], Sequence[Counter]] = {}
        self._refused = Counter(
            "fathom_recipe_refused",
            "Requests refused for who asked or how much: key, model, retention, or the limit that was reached.",
            ["tenant", "key", "reason"],
            registry=registry,
        )

    def _kinds(self, tenant: str, key: str) -> Sequence[Counter]:
        """Return a key's counters in the order of KINDS; finding them takes longer than counting."""
        found = self._by_key.get((tenant, key))
        if found is None:
            found = self._by_key[tenant, key] = [self._tokens.labels(tenant, key, kind) for kind in KINDS]
        return found

    def refused(self, reason: str, *, tenant: str = "", key: str = "") -> None:
        """Count a refusal."""
        self._refused.labels(tenant, key, reason).inc()

    def record(
        self, *, tenant: str, key: str, retention: str, operation: str, model: str, outcome: str, use: Spent
    ) -> None:
        """Record a request that ended, well or not; the log line carries its request id. Never what was said."""
        self._requests.labels(tenant, key, outcome).inc()
        counts = use.prompt_tokens, use.cached_tokens, use.completion_tokens, use.reasoning_tokens
        for counter, count in zip(self._kinds(tenant, key), counts, strict=True):
            counter.inc(count)
        telemetry.log.info(
            "recipe.usage",
            tenant=tenant,
            key=key,
            retention=retention,
            operation=operation,
            model=model,
            outcome=outcome,
            input_tokens=use.prompt_tokens,
            cached_tokens=use.cached_tokens,
            output_tokens=use.completion_tokens,
            reasoning_tokens=use.reasoning_tokens,
        )

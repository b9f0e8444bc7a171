"""What does the recipe count? GenAI names where OpenTelemetry has them."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.recipe.choices import Choice, spent

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Meters:
    """Metrics of the public API, in the service's own registry. operation: `Endpoint.operation`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._first = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to its first token, both at the recipe.",
            ["operation"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the request's arrival to the end of its answer.",
            ["operation", "status"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._tokens = Counter(
            "fathom_recipe_tokens", "Tokens of answered requests.", ["operation", "kind"], registry=registry
        )
        self._by_operation: dict[str, Sequence[Counter]] = {}
        self.open_requests = Gauge("fathom_recipe_open_requests", "Requests being answered.", registry=registry)

    def first_token(self, operation: str, seconds: float) -> None:
        """Count a request whose first token came `seconds` after it arrived."""
        self._first.labels(operation).observe(seconds)

    def done(self, operation: str, status: int, seconds: float, choices: Sequence[Choice]) -> None:
        """Count a request that ended, well or not. status: HTTP, 499 when the caller left."""
        self._duration.labels(operation, str(status)).observe(seconds)
        tokens = spent(choices)
        counts = tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens
        for counter, count in zip(self._kinds(operation), counts, strict=True):
            counter.inc(count)

    def _kinds(self, operation: str) -> Sequence[Counter]:
        """Return an operation's counters of tokens; finding them takes longer than counting."""
        found = self._by_operation.get(operation)
        if found is None:
            kinds = ("prompt", "cached", "completion")
            found = self._by_operation[operation] = [self._tokens.labels(operation, kind) for kind in kinds]
        return found

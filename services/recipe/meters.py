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
        self.open_requests = Gauge("fathom_recipe_open_requests", "Requests being answered.", registry=registry)

    def first_token(self, operation: str, seconds: float) -> None:
        """Count a request whose first token came `seconds` after it arrived."""
        self._first.labels(operation).observe(seconds)

    def done(self, operation: str, status: int, seconds: float, choices: Sequence[Choice]) -> None:
        """Count a request that ended, well or not. status: HTTP, 499 when the caller left."""
        self._duration.labels(operation, str(status)).observe(seconds)
        tokens = spent(choices)
        self._tokens.labels(operation, "prompt").inc(tokens.prompt_tokens)
        self._tokens.labels(operation, "cached").inc(tokens.cached_tokens)
        self._tokens.labels(operation, "completion").inc(tokens.completion_tokens)

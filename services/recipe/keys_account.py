"""What has one key used of its limits, in this process?"""

import math
from dataclasses import dataclass
from http import HTTPStatus

from services.recipe import rate_limits
from services.recipe.keys import ApiKey
from services.recipe.rate_limits import Bucket
from services.recipe.refusals import ApiError

BUSY_SECONDS = 1.0
"""When to come back while all of a key's requests are under way: one may end at any time."""
KINDS = ("requests", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one limit stands. kind: of KINDS; reset_seconds: until all of it is there again."""

    kind: str
    limit: int
    remaining: int
    reset_seconds: float


class LimitReachedError(ApiError):
    """A 429. kind: of KINDS, or "concurrency"."""

    def __init__(self, kind: str, message: str, retry_after_seconds: float) -> None:
        is_hopeless = math.isinf(retry_after_seconds)
        super().__init__(
            HTTPStatus.TOO_MANY_REQUESTS,
            message,
            code="rate_limit_exceeded",
            retry_after_seconds=0.0 if is_hopeless else retry_after_seconds,
        )
        self.kind = kind
        self.is_hopeless = is_hopeless

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return retry-after, or word to the official clients that trying again is no use."""
        return [(b"x-should-retry", b"false")] if self.is_hopeless else super().headers()


class Account:
    """One key's buckets and its requests under way. It outlives changes of the key's limits."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.num_running = 0
        self._buckets: dict[str, Bucket] = {}

    def renew(self, key: ApiKey, now: float) -> None:
        """Take over the limits of the key as it is now."""
        self.key = key
        for kind in KINDS:
            limit: int | None = getattr(key, f"{kind}_per_minute")
            bucket = self._buckets.get(kind)
            if limit is None:
                self._buckets.pop(kind, None)
            elif bucket is None:
                self._buckets[kind] = rate_limits.full(limit, now)
            elif bucket.per_minute != limit:
                self._buckets[kind] = rate_limits.resized(bucket, limit, now)

    def begin(self, now: float) -> None:
        """Take one request; raise LimitReachedError, having taken nothing, when a limit stands against it.

        Tokens are not known yet, but with none left there is no need to look.
        """
        most = self.key.max_concurrency
        if most is not None and self.num_running >= most:
            raise LimitReachedError("concurrency", f"this key may have {most} requests under way at once", BUSY_SECONDS)
        for kind in KINDS:
            self._check(kind, 1, now)
        self.spend("requests", 1, now)

    def take_input(self, num_tokens: int, now: float) -> None:
        """Take a prompt's tokens; raise LimitReachedError, having taken nothing, when they are not there."""
        self._check("input_tokens", num_tokens, now)
        self.spend("input_tokens", num_tokens, now)

    def spend(self, kind: str, amount: int, now: float) -> None:
        """Take what was used already, there or not."""
        bucket = self._buckets.get(kind)
        if bucket is not None:
            self._buckets[kind] = rate_limits.spend(bucket, amount, now)

    def standings(self, now: float) -> list[Standing]:
        """Return where the limits that exist stand, in the order of KINDS."""
        return [
            Standing(
                kind,
                bucket.per_minute,
                rate_limits.remaining(bucket, now),
                rate_limits.reset_seconds(bucket, now),
            )
            for kind in KINDS
            if (bucket := self._buckets.get(kind)) is not None
        ]

    def _check(self, kind: str, amount: int, now: float) -> None:
        bucket = self._buckets.get(kind)
        if bucket is None or not (wait := rate_limits.wait_seconds(bucket, amount, now)):
            return
        limit = f"{bucket.per_minute} {kind.replace('_', ' ')} per minute"
        if math.isinf(wait):
            raise LimitReachedError(kind, f"this request has {amount}, more than this key's {limit}", wait)
        raise LimitReachedError(kind, f"this key's limit of {limit} is reached; try again in {wait:.1f} s", wait)

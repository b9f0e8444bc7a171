"""How much of a per-minute limit is left, and when will there be more?

Token buckets: each holds at most one minute's worth and refills evenly. What is known beforehand (a request, a prompt)
is taken or refused; what is known only afterwards (an answer's tokens) is spent, if need be into debt, which must be
refilled before the next request may begin. So in any time of T minutes at most (1 + T) limits are taken.

Times are seconds of one monotonic clock, given by the caller.
"""

import math
from dataclasses import dataclass, replace

MINUTE_SECONDS = 60.0
# Refilling in parts and at once may differ by a rounding: whoever waited as long as told must not be told again.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Bucket:
    """One limit's state: `level` units were there at `at_seconds`; below 0 is debt."""

    per_minute: int
    level: float
    at_seconds: float


def full(per_minute: int, now: float) -> Bucket:
    """Return a bucket that nobody has taken from."""
    return Bucket(per_minute, float(per_minute), now)


def refilled(bucket: Bucket, now: float) -> Bucket:
    """Return the bucket as it is at `now`; a time before its last one changes nothing."""
    passed = max(0.0, now - bucket.at_seconds)
    level = min(float(bucket.per_minute), bucket.level + passed * bucket.per_minute / MINUTE_SECONDS)
    return Bucket(bucket.per_minute, level, max(now, bucket.at_seconds))


def resized(bucket: Bucket, per_minute: int, now: float) -> Bucket:
    """Return the bucket under another limit: what was taken or owed before still counts."""
    current = refilled(bucket, now)
    return replace(current, per_minute=per_minute, level=current.level + per_minute - current.per_minute)


def wait_seconds(bucket: Bucket, amount: float, now: float) -> float:
    """Return how long until `amount` is there: 0 now, infinity when the bucket can never hold so much."""
    if amount > bucket.per_minute:
        return math.inf
    missing = amount - refilled(bucket, now).level
    return 0.0 if missing <= _ROUNDING else missing * MINUTE_SECONDS / bucket.per_minute


def spend(bucket: Bucket, amount: float, now: float) -> Bucket:
    """Return the bucket with `amount` gone, in debt if it was not there."""
    current = refilled(bucket, now)
    return replace(current, level=current.level - amount)


def reset_seconds(bucket: Bucket, now: float) -> float:
    """Return how long until the bucket is full again."""
    return max(0.0, (bucket.per_minute - refilled(bucket, now).level) * MINUTE_SECONDS / bucket.per_minute)


def remaining(bucket: Bucket, now: float) -> int:
    """Return how many whole units are there; 0 in debt."""
    return max(0, math.floor(refilled(bucket, now).level + _ROUNDING))

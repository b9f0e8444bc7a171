"""Promises of the token buckets, whatever is asked when."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from services.recipe.rate_limits import full, refilled, remaining, reset_seconds, resized, spend, wait_seconds

LIMITS = st.integers(1, 10_000_000)
TIMES = st.floats(0, 1e7, allow_nan=False)
ASKS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 500)), max_size=40)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(st.integers(1, 500), ASKS)
def test_no_span_of_time_takes_more_than_its_share(per_minute: int, asks: list[tuple[float, int]]) -> None:
    """What is taken in T minutes is at most (1 + T) limits, from wherever T begins."""
    now, bucket = 0.0, full(per_minute, 0.0)
    taken: list[tuple[float, int]] = []
    for pause, amount in asks:
        now += pause
        if wait_seconds(bucket, amount, now) == 0:
            bucket = spend(bucket, amount, now)
            taken.append((now, amount))

    for i, (start, _) in enumerate(taken):
        for j in range(i, len(taken)):
            minutes = (taken[j][0] - start) / 60
            assert sum(amount for _, amount in taken[i : j + 1]) <= per_minute * (1 + minutes) + 1e-3


@FEW
@given(LIMITS, TIMES, st.integers(0, 20_000_000), st.floats(0.001, 1))
def test_whoever_waits_as_long_as_told_gets_it_and_not_before(
    per_minute: int, start: float, debt: int, share: float
) -> None:
    """Retry-After is neither too short nor more than needed."""
    bucket, amount = spend(full(per_minute, start), debt, start), max(1, int(per_minute * share))
    wait = wait_seconds(bucket, amount, start)

    assert 0 == wait_seconds(bucket, amount, start + wait * (1 + 1e-9) + 1e-6)
    if wait > 1:
        assert 0 < wait_seconds(bucket, amount, start + wait - 0.9)


@FEW
@given(LIMITS, st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_looking_changes_nothing(per_minute: int, pauses: list[float]) -> None:
    """Refilling in steps comes to the same as at once, and never to more than the limit."""
    bucket = stepped = spend(full(per_minute, 0.0), per_minute * 2, 0.0)
    now = 0.0
    for pause in pauses:
        now += pause
        stepped = refilled(stepped, now)

    assert math.isclose(refilled(bucket, now).level, stepped.level, rel_tol=1e-6, abs_tol=per_minute * 1e-9)
    assert stepped.level <= per_minute


def test_more_than_the_limit_never_comes() -> None:
    """A prompt above the whole limit is told so instead of a time."""
    assert math.inf == wait_seconds(full(100, 0.0), 101, 0.0)


def test_debt_is_paid_before_anything_else() -> None:
    """An answer that went 50 over a limit of 100 a minute costs 30 s, and half a second for the next token."""
    bucket = spend(full(100, 0.0), 150, 0.0)

    assert (0, 30.6, 90.0) == (remaining(bucket, 0.0), wait_seconds(bucket, 1, 0.0), reset_seconds(bucket, 0.0))


def test_a_clock_that_steps_back_gives_nothing() -> None:
    """Nor does it take anything."""
    bucket = spend(full(60, 100.0), 60, 100.0)

    assert 0 == remaining(bucket, 50.0)
    assert 1 == remaining(refilled(bucket, 50.0), 101.0)


def test_a_new_limit_keeps_what_was_used() -> None:
    """Raising it gives the difference, lowering it may leave a debt."""
    bucket = spend(full(100, 0.0), 80, 0.0)

    assert 120 == remaining(resized(bucket, 200, 0.0), 0.0)
    assert -30 == resized(bucket, 50, 0.0).level

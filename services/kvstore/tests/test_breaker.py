"""Does the breaker open, try and close when it should, and only then?"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.breaker import Breaker, BreakerRules, BreakerState

RULES = BreakerRules(window_calls=10, max_bad_calls=3, open_seconds=2.0, max_open_seconds=8.0)


def call(breaker: Breaker, now: float, *, is_good: bool) -> bool:
    """Make a call if it may be made; say whether it was."""
    permit = breaker.begin(now)
    if permit is not None:
        breaker.end(permit, is_good=is_good, now=now)
    return permit is not None


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(3):
        call(breaker, now, is_good=False)
    return breaker


def test_three_bad_calls_of_ten_open_it():
    """Calls in between that went well do not hide a backend that fails every other time."""
    breaker = Breaker(RULES)
    for number in range(5):
        assert call(breaker, 0.0, is_good=number % 2 == 1)

    assert BreakerState.OPEN is breaker.state(0.0)
    assert not call(breaker, 1.9, is_good=True)
    assert 1 == breaker.num_opened


def test_rare_failures_do_not_open_it():
    """Two bad ones among ten are normal."""
    breaker = Breaker(RULES)
    for number in range(100):
        assert call(breaker, 0.0, is_good=number % 5 > 0)

    assert BreakerState.CLOSED is breaker.state(0.0)


def test_one_trial_at_a_time_decides():
    """After the pause a single call goes through; only its success lets the others pass."""
    breaker = opened()
    assert BreakerState.HALF_OPEN is breaker.state(2.0)
    trial = breaker.begin(2.0)

    assert trial is not None
    assert breaker.begin(2.0) is None
    breaker.end(trial, is_good=True, now=2.1)
    assert call(breaker, 2.1, is_good=True)


def test_failed_trials_double_the_pause_up_to_a_limit():
    """A backend that stays away is asked less and less often; success starts over."""
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(4):
        pauses.append(breaker.seconds_to_trial(now))
        now += pauses[-1]
        call(breaker, now, is_good=False)

    assert [2.0, 4.0, 8.0, 8.0] == pauses
    now += 8.0
    assert call(breaker, now, is_good=True)
    for _ in range(3):
        call(breaker, now, is_good=False)
    assert 2.0 == breaker.seconds_to_trial(now)


def test_a_trial_whose_caller_left_makes_room_for_the_next():
    """A cancelled trial says nothing and blocks nothing."""
    breaker = opened()
    trial = breaker.begin(2.0)
    assert trial is not None
    breaker.abandon(trial)

    assert call(breaker, 2.0, is_good=True)
    assert BreakerState.CLOSED is breaker.state(2.0)


def test_late_news_of_earlier_calls_changes_nothing():
    """Calls that began before it opened neither close it nor count once it is closed again."""
    breaker = Breaker(RULES)
    early = [breaker.begin(0.0) for _ in range(4)]
    for permit in early[:3]:
        assert permit is not None
        breaker.end(permit, is_good=False, now=0.0)
    assert early[3] is not None
    breaker.end(early[3], is_good=True, now=0.5)

    assert BreakerState.OPEN is breaker.state(0.5)
    assert call(breaker, 2.0, is_good=True)
    for permit in early[:3]:
        assert permit is not None
        breaker.end(permit, is_good=False, now=2.0)
    assert BreakerState.CLOSED is breaker.state(2.0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["good", "bad", "left"])), max_size=60))
def test_it_never_stays_shut_for_longer_than_the_limit(steps):
    """Whatever happened, a call is let through after the longest pause, and a good one closes it."""
    breaker, now = Breaker(RULES), 0.0
    for pause, outcome in steps:
        now += pause
        permit = breaker.begin(now)
        if permit is None:
            assert 0 < breaker.seconds_to_trial(now) <= RULES.max_open_seconds
        elif outcome == "left":
            breaker.abandon(permit)
        else:
            breaker.end(permit, is_good=outcome == "good", now=now)

    assert call(breaker, now + RULES.max_open_seconds, is_good=True)
    assert BreakerState.CLOSED is breaker.state(now + RULES.max_open_seconds)

"""May the object store be called now, or is it better left alone?

Closed: calls pass. When too many of the latest calls failed or were slow it opens: calls are refused at once, so that
serving goes on without what is stored there. After a while one call is let through as a trial (half-open); its outcome
closes it again, or keeps it open for twice as long. Times come in as values.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether calls pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When it opens and for how long."""

    window_calls: int = 10
    """Latest calls that are looked at."""
    max_bad_calls: int = 3
    """So many bad ones among them open it."""
    open_seconds: float = 2.0
    """First pause; it doubles with every failed trial."""
    max_open_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Permit:
    """One call that was let through."""

    period: int
    """Counts the breaker's changes of state: what a call says that began before the last one no longer counts."""
    is_trial: bool


class Breaker:
    """Judges calls by their outcomes. Every `begin` that gave a permit needs one `end` or `abandon`."""

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._bad: deque[bool] = deque(maxlen=rules.window_calls)
        self._period = 0
        self._closed = True
        self._trial_at = 0.0
        self._pause_seconds = rules.open_seconds
        self._has_trial = False
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        """Tell whether calls pass at `now`; any steady clock, in seconds."""
        if self._closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._trial_at else BreakerState.OPEN

    def seconds_to_trial(self, now: float) -> float:
        """How long calls will still be refused; 0 when they pass or a trial is due."""
        return 0.0 if self._closed else max(0.0, self._trial_at - now)

    def begin(self, now: float) -> Permit | None:
        """Let a call through; None when it must not be made."""
        if self._closed:
            return Permit(self._period, is_trial=False)
        if now < self._trial_at or self._has_trial:
            return None
        self._has_trial = True
        return Permit(self._period, is_trial=True)

    def end(self, permit: Permit, *, is_good: bool, now: float) -> None:
        """Note how a call ended: good, or bad because it failed or took too long."""
        if permit.period != self._period:
            return
        if permit.is_trial:
            self._end_trial(is_good=is_good, now=now)
            return
        self._bad.append(not is_good)
        if sum(self._bad) >= self._rules.max_bad_calls:
            self._open(self._rules.open_seconds, now)

    def abandon(self, permit: Permit) -> None:
        """Take a call back that ended without saying anything of the other side, for its caller went away."""
        if permit.is_trial and permit.period == self._period:
            self._has_trial = False

    def _end_trial(self, *, is_good: bool, now: float) -> None:
        if not is_good:
            self._open(min(2 * self._pause_seconds, self._rules.max_open_seconds), now)
            return
        self._closed = True
        self._has_trial = False
        self._period += 1
        self._bad.clear()

    def _open(self, pause_seconds: float, now: float) -> None:
        self.num_opened += self._closed
        self._closed = False
        self._has_trial = False
        self._period += 1
        self._pause_seconds = pause_seconds
        self._trial_at = now + pause_seconds

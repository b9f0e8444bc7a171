"""What time is it, by the object store's clock?

All replicas share that clock, and no replica can set it: it says how long one was away even when its own clock jumped,
or is days late. Every listing dates what it lists, which is a lower bound; an object that is written for the purpose
and listed says it to the second. Between two looks a steady clock goes on.
"""

import time
from collections.abc import Callable

from services.kvstore.wall_clock import steady_seconds

ASK_SECONDS = 3600.0
"""How often an object is written to be dated."""
_JUMP_SECONDS = 60.0
"""The clock here went by so much more or less than the steady one: somebody set it, or the machine stood still."""


class StoreClock:
    """The object store's time, at least: never later than it is there. Unix seconds."""

    def __init__(self, *, now: Callable[[], float] = time.time, steady: Callable[[], float] = steady_seconds) -> None:
        """now: the clock here."""
        self.is_set = False
        """Whether an object was ever dated for it; until then there may be nothing but a bound."""
        self._now = now
        self._steady = steady
        self._seen: float | None = None
        self._seen_at = 0.0
        self._asked_at: float | None = None
        self._offset = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to have an object dated again."""
        if self._asked_at is None or self._steady() - self._asked_at >= ASK_SECONDS:
            return True
        return abs(self._now() - self._steady() - self._offset) >= _JUMP_SECONDS

    @property
    def ahead_seconds(self) -> float:
        """How much later it is by the clock here; 0 before the other one was set."""
        there = self.now()
        return self._now() - there if there is not None and self.is_set else 0.0

    def now(self) -> float | None:
        """Return what time it is there at least; None while nothing is known."""
        return None if self._seen is None else self._seen + self._steady() - self._seen_at

    def saw(self, unix_seconds: float) -> None:
        """Note the date of something that was listed."""
        known = self.now()
        if known is None or unix_seconds > known:
            self._seen, self._seen_at = unix_seconds, self._steady()

    def set(self, unix_seconds: float) -> None:
        """Note the date of an object that was written just now."""
        self._seen = unix_seconds
        self._seen_at = self._asked_at = self._steady()
        self._offset = self._now() - self._asked_at
        self.is_set = True

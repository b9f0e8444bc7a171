"""What time is it here, when somebody may just have set the clock?

What a store writes is dated by it, and what has ended by it is unlinked: neither can be taken back when the clock was
wrong for a moment. So a clock that jumps ahead is believed when it still says so after an hour, and until then a steady
one goes on. One that is set back is believed at once: that deletes nothing.
"""

import time
from collections.abc import Callable

BELIEVED_SECONDS = 3600.0
_JUMP_SECONDS = 60.0


def steady_seconds() -> float:
    """Return a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_seconds() -> float:
    """Return what the clock of this machine shows."""
    return time.time()


class WallClock:
    """Unix seconds. Begins with what the clock of the machine shows: there is nothing else to go by at a start."""

    def __init__(
        self, *, now: Callable[[], float] = unix_seconds, steady: Callable[[], float] = steady_seconds
    ) -> None:
        self._now = now
        self._steady = steady
        self._offset = now() - steady()
        self._jumped_at: float | None = None

    def now(self) -> float:
        """Return the time; to be asked now and then, or a jump is believed later."""
        steady = self._steady()
        offset = self._now() - steady
        if offset <= self._offset + _JUMP_SECONDS:
            self._offset, self._jumped_at = offset, None
        elif self._jumped_at is None:
            self._jumped_at = steady
        elif steady - self._jumped_at >= BELIEVED_SECONDS:
            self._offset, self._jumped_at = offset, None
        return self._offset + steady

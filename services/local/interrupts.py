"""How does `fathom up` hear that it is to end, and where does that reach it?"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from services.local.down import GIVE_UP

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, GIVE_UP)


class Interrupted(KeyboardInterrupt):
    """Someone asked this command to end: Ctrl-C, SIGTERM or a closed terminal. No library takes this kind for its own.

    Its text is the last thing that a person reads.
    """

    def __init__(self, farewell: str = "stopped") -> None:
        super().__init__(farewell)


class StoppedByDown(Interrupted):
    """It was `fathom down`, elsewhere."""

    def __init__(self) -> None:
        super().__init__("stopped by fathom down")


class Ears:
    """Hears the signals that end a command, the first of them only: the end takes a while and must not be cut short."""

    def __init__(self) -> None:
        self._is_held = False
        self._heard: Interrupted | None = None

    def listen(self) -> None:
        """Raise Interrupted in the main thread from now on, wherever it is when a signal comes."""
        for number in ENDS:
            signal.signal(number, self._hear)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise at the end of the block what comes within: an event loop would tear it apart, task by task."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._heard is not None:
                raise self._heard

    def _hear(self, number: int, _frame: object) -> None:
        for later in ENDS:
            signal.signal(later, signal.SIG_IGN)
        self._heard = StoppedByDown() if number == GIVE_UP else Interrupted()
        if not self._is_held:
            raise self._heard

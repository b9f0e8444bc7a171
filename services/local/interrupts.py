"""How do `fathom up` and its supervisor hear signals, and where does that reach them?"""

import os
import select
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


class Bell:
    """Rings whenever a signal comes that has a handler.

    No Event: its lock may be held where a handler interrupts the main thread, by another handler say when two children
    end at once, and whoever waits for that would wait for itself.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for each in (self._read, write):
            os.set_blocking(each, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Return when it rings, or has since the last wait, or after this time."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)


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

"""Is a `fathom up` still starting here, and how far has it come?

Before its supervisor has written anything down, only the command itself knows: it says so in a file while it starts.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from services.local.health import Health
from services.local.home import Home
from services.local.progress import Display, share
from services.local.state import Identity

WRITE_SECONDS = 0.3
"""A download reports far more often than anybody looks."""
NOTHING_RUNS = "nothing is running here: run fathom up"


class NotStarted(Exception):  # noqa: N818 - reads as what happened
    """The suite did not come up; the text is the reason, for the person who started it."""


def gone(home: Home) -> str:
    """Return why a start ends whose folder is not there any more."""
    return f"{home.root} was removed or moved away: without it nobody could find this suite, or stop it"


class Starting(BaseModel):
    """What a start is at."""

    model_config = ConfigDict(frozen=True)

    command: Identity
    """The `fathom up`."""
    phase: str
    done: int = 0
    total: int = 0

    @property
    def words(self) -> str:
        """The phase, and how much of it is done where that is known."""
        return f"{self.phase} {share(self.done, self.total)}".rstrip()


def read(home: Home) -> Starting | None:
    """Return what is starting here, None when nothing is. A file that a killed command left counts as none."""
    try:
        begun = Starting.model_validate_json(home.starting.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None
    return begun if begun.command.process() is not None else None


def reason_to_wait(home: Home) -> str:
    """Return why nobody can be asked here, where no suite runs: what it is at, or that there is none."""
    begun = read(home)
    return f"fathom up is still starting here: {begun.words}" if begun is not None else NOTHING_RUNS


@contextmanager
def announced(home: Home, display: Display, lock: int) -> Iterator[Display]:
    """Yield a display that shows what `display` does, and lets other commands know of it until the block ends.

    lock: a descriptor of the lock's file, which tells our folder from one that another suite made in its place.
    """
    show = _Announcing(home, display, lock)
    show.note("beginning")
    try:
        yield show
    finally:
        show.forget()


class _Announcing:
    """Writes down what a display is told."""

    def __init__(self, home: Home, display: Display, lock: int) -> None:
        self._home = home
        self._lock = lock
        self._display = display
        self._command = Identity.of(os.getpid())
        self._phase = ""
        self._written = float("-inf")

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)

    def install(self, stage: str, done: int, total: int) -> None:
        self._display.install(stage, done, total)
        self.note(f"preparing the model: {stage}", done, total)

    def services(self, health: Sequence[Health]) -> None:
        self._display.services(health)
        num_ready = sum(one.ready for one in health)
        self.note(f"starting the services, {num_ready} of {len(health)} are ready")

    def say(self, line: str) -> None:
        self._display.say(line)

    def note(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Write down what the start is at; not every step of one phase. Raise NotStarted where that cannot be done."""
        now = time.monotonic()
        if phase == self._phase and now - self._written < WRITE_SECONDS:
            return
        self._phase, self._written = phase, now
        if not self._home.is_held_by(self._lock):
            raise NotStarted(gone(self._home))
        begun = Starting(command=self._command, phase=phase, done=done, total=total)
        draft = self._home.starting.with_name(f"{self._home.starting.name}.{os.getpid()}")
        try:
            draft.write_text(begun.model_dump_json(), encoding="utf-8")
            draft.replace(self._home.starting)
        except OSError as reason:
            is_here = self._home.is_held_by(self._lock)
            cause = f"{self._home.root} cannot be written any more: {reason}" if is_here else gone(self._home)
            raise NotStarted(cause) from None

    def forget(self) -> None:
        """Remove what we wrote down, and nothing that another start did: the lock may be free for it by now."""
        if not self._home.is_held_by(self._lock):
            return
        begun = read(self._home)
        if begun is None or begun.command == self._command:
            self._home.starting.unlink(missing_ok=True)

"""How long has this store not heard of deletions, and what of it may therefore have been deleted?

The object store remembers a deletion for TOMBSTONE_SECONDS. A replica that was away for longer cannot know what it
missed: whatever it has from before that time could be what an operator deleted, and goes. What is younger cannot be:
its deletion would still be remembered. A file in the store's folder says when it last heard of all of them.

How long that is ago the object store's own clock says, as soon as it was asked. Until then: in the process that heard,
a steady clock that nobody sets; after a restart the clock of this machine, for want of a better one.

A replica that may only read never sets that clock. It goes by the dates of what others write: a deletion is forgotten
only by one that dated the object store within the hour, so that whoever lists it sees that a month has gone by.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.kvstore.remote_catalog import TOMBSTONE_SECONDS
from services.kvstore.store_clock import StoreClock
from services.kvstore.wall_clock import steady_seconds

MAX_ABSENCE_SECONDS = TOMBSTONE_SECONDS - 86_400.0
"""A day less: clocks of replicas differ, and blocks are dated by the clock of any of them."""
FILE_NAME = "deletions.heard"
_NOTE_SECONDS = 3600.0


class Absence:
    """One store's file, for one object store. Times are Unix seconds."""

    def __init__(
        self,
        path: Path,
        url: str,
        there: StoreClock,
        *,
        now: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_seconds,
    ) -> None:
        """url: the object store's; what another one said does not count.  now: the clock here."""
        self._path = path
        self._url = url
        self._there = there
        self._now = now
        self._steady = steady
        self._heard_here, self._heard_there = self._read()
        self._has_heard = False
        self._noted_at: float | None = None
        self._forgot_before = 0.0
        self._begin()

    def doubted_before(self) -> float | None:
        """Return the time before which what is here may have been deleted; None when nothing is in doubt.

        Without a file, or with one from the future, nobody knows how long the store was away: then it was too long.
        """
        passed = self._steady() - self._since
        here, there = self._began + passed, self._there.now()
        away, now = here - self._heard_here, here
        is_known = away >= 0.0
        if there is not None and self._there.is_set:
            away, now = there - self._heard_there, there
            is_known = away > -_NOTE_SECONDS
        elif there is not None:
            away, now = max(away, there - self._heard_there), max(here, there)
        return None if is_known and away <= MAX_ABSENCE_SECONDS else now - MAX_ABSENCE_SECONDS

    def has_forgotten(self, before: float) -> bool:
        """Say whether next to nothing can be left from before that time."""
        return before - self._forgot_before < _NOTE_SECONDS

    def forgot(self, before: float) -> None:
        """Remember that nothing is left from before that time."""
        self._forgot_before = before

    def heard(self) -> None:
        """Remember that all deletions until now are known and obeyed. Not while nothing over there has a date.

        A bound will do, as one has who may not write there: a time that is too early counts as a longer absence.
        """
        there = self._there.now()
        if there is None:
            return
        self._begin()
        self._heard_here, self._heard_there = self._began, there
        self._has_heard = True

    def note(self) -> None:
        """Let the next life know it too, once an hour. Blocks for a moment."""
        if not self._has_heard or (self._noted_at is not None and self._since - self._noted_at < _NOTE_SECONDS):
            return
        self._noted_at = self._since
        said = {"url": self._url, "unix_seconds": self._heard_here, "object_store_unix_seconds": self._heard_there}
        draft = self._path.with_suffix(".new")
        with draft.open("w") as file:
            json.dump(said, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)

    def _begin(self) -> None:
        """From here on the steady clock counts."""
        self._began, self._since = self._now(), self._steady()

    def _read(self) -> tuple[float, float]:
        """Return when it last heard, by the clock here and by the object store's."""
        try:
            said: Any = json.loads(self._path.read_bytes())
            if said["url"] != self._url:
                return 0.0, 0.0
            here = float(said["unix_seconds"])
            return here, float(said.get("object_store_unix_seconds", here))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0.0, 0.0

"""How long has this store not heard of deletions, and what of it may therefore have been deleted?

The object store remembers a deletion for TOMBSTONE_SECONDS. A replica that was away for longer cannot know what it
missed: whatever it has from before that time could be what an operator deleted, and goes. What is younger cannot be:
its deletion would still be remembered. A file in the store's folder says when it last heard of all of them.
"""

import json
import os
from pathlib import Path
from typing import Any

from services.kvstore.remote_catalog import TOMBSTONE_SECONDS

MAX_ABSENCE_SECONDS = TOMBSTONE_SECONDS - 86_400.0
"""A day less: clocks of replicas differ, and deletions end by the clock of any of them."""
FILE_NAME = "deletions.heard"
_NOTE_SECONDS = 3600.0


class Absence:
    """One store's file, for one object store. Methods block for a moment."""

    def __init__(self, path: Path, url: str) -> None:
        """url: the object store's; what another one said does not count."""
        self._path = path
        self._url = url
        self._heard = self._read()
        self._forgot_before = 0.0

    def doubted_before(self, now: float) -> float | None:
        """Return the time before which what is here may have been deleted; None when nothing is in doubt.

        Without a file, or with one from the future, nobody knows how long the store was away: then it was too long.
        """
        if 0.0 <= now - self._heard <= MAX_ABSENCE_SECONDS:
            return None
        before = now - MAX_ABSENCE_SECONDS
        return before if before - self._forgot_before >= _NOTE_SECONDS else None

    def forgot(self, before: float) -> None:
        """Remember that nothing is left from before that time."""
        self._forgot_before = before

    def heard(self, now: float) -> None:
        """Note that all deletions until now are known and obeyed."""
        if 0.0 <= now - self._heard < _NOTE_SECONDS:
            return
        self._heard = now
        draft = self._path.with_suffix(".new")
        with draft.open("w") as file:
            json.dump({"url": self._url, "unix_seconds": now}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)

    def _read(self) -> float:
        try:
            said: Any = json.loads(self._path.read_bytes())
            return float(said["unix_seconds"]) if said["url"] == self._url else 0.0
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

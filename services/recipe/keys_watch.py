"""How do changes of the key file reach a running recipe?"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from services.chassis import telemetry
from services.chassis.config import EXIT_CONFIG
from services.chassis.service import Service
from services.recipe.keys import MAX_FILE_BYTES, KeyFile, Keyring, KeysFileError, parse_keys

POLL_SECONDS = 1.0
"""A revoked key stops working within this time."""


class KeyWatch:
    """The keys of a file, read again every second.

    Contents are compared, not times: a mounted Secret is swapped by its symlink, and an editor may keep the times. A
    file that is broken, half written or away leaves the last good keys in force, and says so in log and metrics.
    """

    def __init__(self, path: Path, metrics: CollectorRegistry) -> None:
        """Read the file. Raises KeysFileError when there are no keys to begin with."""
        self._path = path
        self._is_broken = Gauge(
            "fathom_recipe_keys_file_broken", "1 while the key file cannot be read; older keys hold.", registry=metrics
        )
        self._seen: bytes | str = _read(path)
        if isinstance(self._seen, str):
            raise KeysFileError(f"{path} {self._seen}")
        try:
            self.keyring = Keyring(parse_keys(self._seen).keys)
        except KeysFileError as exc:
            raise KeysFileError(f"{path}: {exc}") from None
        telemetry.log.info("recipe.keys.read", num_keys=len(self.keyring))

    async def follow(self) -> None:
        """Keep `keyring` fresh, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file now, and take its keys if they are others."""
        found = await asyncio.to_thread(_read, self._path)  # the volume may be slow
        if found == self._seen:
            return
        self._seen = found
        try:
            parsed = _parsed(found)
        except KeysFileError as exc:
            self._is_broken.set(1)
            telemetry.log.error("recipe.keys.broken", file=str(self._path), reason=str(exc), num_keys=len(self.keyring))
            return
        self._is_broken.set(0)
        self.keyring = Keyring(parsed.keys)
        telemetry.log.info("recipe.keys.read", num_keys=len(self.keyring))


def open_keys(service: Service, keys_file: str) -> Callable[[], Keyring] | None:
    """Return what tells the keys that hold now, None without a file; a file of no use ends the service, exit 78."""
    if not keys_file:
        return None
    try:
        watch = KeyWatch(Path(keys_file), service.metrics)
    except KeysFileError as exc:
        # As other bad settings are told: people and launchers look for that.
        sys.stderr.write(f"recipe: bad settings\n  FATHOM_RECIPE_KEYS_FILE: {exc}\n")
        service.stop(EXIT_CONFIG)
        raise
    service.spawn(watch.follow(), "follow keys")
    return lambda: watch.keyring


def _parsed(found: bytes | str) -> KeyFile:
    if isinstance(found, str):
        raise KeysFileError(found)
    return parse_keys(found)


def _read(path: Path) -> bytes | str:
    """Return the file's bytes, or the reason why there are none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"

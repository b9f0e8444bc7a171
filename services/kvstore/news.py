"""What did other replicas publish in the last moments?

Whoever publishes a manifest or a tombstone also puts an empty object whose name says so and sorts by time. The others
list those of the last half minute every two seconds: one call, whatever the store holds. It is a hint: what it misses
(clocks that differ by more, a publisher that died in between) the next listing of manifests finds.

    news/<milliseconds>_<path, with "_" for "/">
"""

import contextlib
import re
from collections.abc import Callable

from services.kvstore.blobs import BlobBackend, BlobError

NEWS_SECONDS = 30.0
"""What is older is not looked at: clocks may differ by about so much."""
OLD_SECONDS = 300.0
"""What is older is deleted, by whoever put it, and by others in a sweep."""
MAX_NEWS = 10_000
_PREFIX = "news"
_NAME = re.compile(rf"{_PREFIX}/(\d{{13}})_([0-9A-Za-z._-]{{1,160}})")


class News:
    """What was told, and what was heard. Calls raise BlobError where not said otherwise."""

    def __init__(self, blobs: BlobBackend, now: Callable[[], float]) -> None:
        """now: seconds since the Unix epoch."""
        self._blobs = blobs
        self._now = now
        self._told: list[str] = []
        """Own news that are still there, oldest first."""

    async def tell(self, path: str) -> None:
        """Let others know that this path was published. Never raises: they find it without, later."""
        name = _name(self._now(), path.replace("/", "_"))
        with contextlib.suppress(BlobError):
            await self._blobs.put_if_absent(name, b"")
            self._told.append(name)

    async def heard(self) -> list[str]:
        """Return the paths that were published lately, again and again as long as they are news."""
        after = _name(self._now() - NEWS_SECONDS, "")
        found = await self._blobs.list(_PREFIX, after=after, max_blobs=MAX_NEWS)
        return [match[2].replace("_", "/") for one in found if (match := _NAME.fullmatch(one.path)) is not None]

    async def tidy(self) -> None:
        """Delete one's own that nobody looks at any more."""
        before = _name(self._now() - OLD_SECONDS, "")
        while self._told and self._told[0] < before:
            await self._blobs.delete(self._told[0])
            self._told.pop(0)

    async def sweep(self) -> None:
        """Delete those that others left behind."""
        before = _name(self._now() - 2 * OLD_SECONDS, "")
        for one in await self._blobs.list(_PREFIX, max_blobs=MAX_NEWS):
            if one.path < before:
                await self._blobs.delete(one.path)


def _name(unix_seconds: float, rest: str) -> str:
    return f"{_PREFIX}/{int(unix_seconds * 1000):013d}_{rest}"

"""Which blocks are on their way in, and when will they be there?"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.kvstore.leases import Name

_FIRST_LAG_SECONDS = 0.05
_WEIGHT = 0.2


@dataclass(slots=True)
class _Coming:
    done: asyncio.Event | None = None
    """Made by the first who waits."""
    is_settled: bool = False
    num_writers: int = 0


class PendingBlocks:
    """Blocks between the first byte of a writer and their publication (or its failure). Event loop only."""

    def __init__(self) -> None:
        self._coming: dict[Name, _Coming] = {}
        self.lag_seconds = _FIRST_LAG_SECONDS
        """Moving average of the time from announcement to publication."""

    def __contains__(self, name: Name) -> bool:
        return name in self._coming

    def __len__(self) -> int:
        return len(self._coming)

    @contextmanager
    def announce(self, name: Name) -> Iterator[None]:
        """Count a block as coming while a writer brings it."""
        coming = self._coming.get(name)
        if coming is None:
            coming = self._coming[name] = _Coming()
        coming.num_writers += 1
        try:
            yield
        finally:
            coming.num_writers -= 1
            if coming.num_writers == 0:
                self.settle(name)

    def settle(self, name: Name) -> None:
        """Wake those who wait for the block: it is published, or it will not be."""
        coming = self._coming.get(name)
        if coming is not None:
            coming.is_settled = True
            if coming.done is not None:
                coming.done.set()
            if coming.num_writers == 0:
                del self._coming[name]

    def note_lag(self, seconds: float) -> None:
        """Learn from a publication how long the next may take."""
        self.lag_seconds += _WEIGHT * (seconds - self.lag_seconds)

    async def wait(self, name: Name, *, timeout_seconds: float) -> bool:
        """Wait until a coming block is settled; False when it is not within the time, or is not coming at all."""
        coming = self._coming.get(name)
        if coming is None or timeout_seconds <= 0:
            return False
        if coming.is_settled:
            return True
        if coming.done is None:
            coming.done = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_seconds):
                await coming.done.wait()
        except TimeoutError:
            return False
        return True

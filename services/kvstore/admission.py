"""How many calls may run, how many bytes of blocks may wait in memory for the disk, and what waits for a deletion?"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from services.chassis.errors import Overloaded


class ByteBudget:
    """Lends bytes up to a limit, first come first served: a slow disk makes writers wait instead of filling memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    async def take(self, num_bytes: int, *, timeout_seconds: float) -> None:
        """Take `num_bytes` (at most the limit) now or when they come free; raise Overloaded after the timeout."""
        if not self._waiting and self._used_bytes + num_bytes <= self._limit_bytes:
            self._used_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():
                self.give_back(num_bytes)  # granted in the same tick in which the wait ended
            else:
                self._waiting.remove((num_bytes, turn))
                self._admit()
            if isinstance(exc, TimeoutError):
                raise Overloaded(f"the disk is {timeout_seconds:g} s behind the writers", retry_after=5.0) from None
            raise

    def give_back(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if self._used_bytes + num_bytes > self._limit_bytes:
                return
            self._waiting.popleft()
            if not turn.done():
                self._used_bytes += num_bytes
                turn.set_result(None)


class CallLimit:
    """Bounds the calls of one kind that run at once; those beyond it are refused, not queued."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._running = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the places; raise Overloaded when all are taken."""
        if self._running >= self._limit:
            raise Overloaded(f"{self._limit} {self._name} calls are running already", retry_after=1.0)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class Deletions:
    """Lets blocks in side by side, or one deletion: none may be checked before it and written after it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @asynccontextmanager
    async def held_off(self) -> AsyncIterator[None]:
        """Let no deletion begin; waits for the one that has, or is next."""
        async with self._turn:
            self._num_inside += 1
            self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Delete: nobody comes in meanwhile, and whoever was in is out."""
        async with self._turn:
            await self._is_empty.wait()
            yield

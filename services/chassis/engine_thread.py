"""How do asyncio and the one engine thread talk?

Two queues and no locks. Jobs go in and run between two turns of the engine; results come back as callbacks on the
event loop. Neither side polls: an idle engine sleeps in the queue and wakes with the first job.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from services.chassis.errors import InternalError

T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], "Reply[Any] | None"]


class Reply(Generic[T]):
    """A result that the engine thread owes to a coroutine. Set it once, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[T] = loop.create_future()

    def set(self, value: T) -> None:
        self._on_loop(self._set, value)

    def fail(self, error: BaseException) -> None:
        self._on_loop(self._fail, error)

    def __await__(self) -> Generator[Any, None, T]:
        return self._future.__await__()

    def _on_loop(self, act: Callable[..., None], value: object) -> None:
        # A closed loop means that the process is ending: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, value)

    def _set(self, value: T) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def _fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class EngineThread:
    """Runs jobs and, once it drives an engine, turn after turn while there is work; else it sleeps."""

    def __init__(self, name: str) -> None:
        self._turn: Callable[[], bool] = _nothing_to_do
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._stopping = False
        self._is_over = False
        self._ended: Reply[None] = Reply(self._loop)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drive(self, turn: Callable[[], bool]) -> None:
        """Call `turn` between jobs from now on: again at once when it answers True, after the next job when False."""
        self.post(self._take_turn, turn)

    def post(self, job: Callable[..., object], *arguments: object) -> None:
        """Run a job in the engine thread, before its next turn. Any thread may post; order is kept."""
        self._jobs.put((job, arguments, None))

    def call(self, job: Callable[..., T], *arguments: object) -> Reply[T]:
        """Post a job, at once; await the result for what it returns or raises."""
        reply: Reply[T] = Reply(self._loop)
        self._jobs.put((job, arguments, reply))
        if self._is_over:  # nobody takes jobs any more
            self._refuse_jobs()
        return reply

    def reply(self) -> Reply[Any]:
        """Return a promise to hand to a job that will answer in a later turn."""
        return Reply(self._loop)

    def tell(self, deliver: Callable[..., object], *arguments: object) -> None:
        """Call from the engine thread: run `deliver` on the event loop, at once and in order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(deliver, *arguments)

    async def run(self) -> None:
        """Wait until the thread has ended; raise what killed it, if anything did."""
        await self._ended

    async def stop(self) -> None:
        """End the thread after the turn it is in. Jobs not yet run fail."""
        self.post(self._stop)
        with contextlib.suppress(Exception):  # whoever awaits run() gets it; stopping twice is harmless
            await self._ended

    def _take_turn(self, turn: Callable[[], bool]) -> None:
        self._turn = turn

    def _stop(self) -> None:
        self._stopping = True

    def _main(self) -> None:
        try:
            busy = False
            while not self._stopping:
                self._run_jobs(wait=not busy)
                busy = not self._stopping and self._turn()
        except BaseException as error:  # noqa: BLE001 - handed to run(), which stops the service
            self._ended.fail(error)
        else:
            self._ended.set(None)
        self._is_over = True
        self._refuse_jobs()

    def _run_jobs(self, *, wait: bool) -> None:
        try:
            job = self._jobs.get(block=wait)
            while True:
                _run(job)
                job = self._jobs.get_nowait()
        except queue.Empty:
            return

    def _refuse_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                reply = self._jobs.get_nowait()[2]
                if reply is not None:
                    reply.fail(InternalError("the engine has stopped"))


def _nothing_to_do() -> bool:
    return False


def _run(job: _Job) -> None:
    act, arguments, reply = job
    if reply is None:
        act(*arguments)
        return
    try:
        value = act(*arguments)
    except Exception as error:  # noqa: BLE001 - raised again by the coroutine that asked
        reply.fail(error)
    else:
        reply.set(value)

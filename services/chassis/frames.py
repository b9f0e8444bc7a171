"""How does a server answer on a shared stream: one frame per step for all its requests, until the client is gone?"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from services.chassis import errors, telemetry

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
MAX_PENDING_EVENTS = 65_536
MAX_FRAME_EVENTS = 4096

Event = TypeVar("Event")
Frame = TypeVar("Frame")


class FrameSender(Generic[Event, Frame]):
    """Collects what is put during one turn of the event loop into one numbered frame; empty frames are heartbeats.

    make_frame: builds a frame of events and its number.  Everything here belongs to the event loop's thread; another
    thread uses `loop.call_soon_threadsafe(sender.put, event)`.  `closed` is set once nothing more will be sent.
    """

    def __init__(
        self,
        make_frame: Callable[[Sequence[Event], int], Frame],
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        max_pending_events: int = MAX_PENDING_EVENTS,
    ) -> None:
        self.closed = asyncio.Event()
        self._make_frame = make_frame
        self._heartbeat_seconds = heartbeat_seconds
        self._max_pending_events = max_pending_events
        self._pending: deque[Event] = deque()
        self._wakeup = asyncio.Event()
        self._sequence = 0

    def put(self, event: Event) -> None:
        """Send an event with the next frame; dropped once the stream is closed."""
        if self.closed.is_set():
            return
        self._pending.append(event)
        self._wakeup.set()
        if len(self._pending) > self._max_pending_events:
            # The write in progress is ended by the server's own write timeout.
            telemetry.log.warning("stream.unread", num_events=len(self._pending))
            self._pending.clear()
            self.close()

    def close(self) -> None:
        """Send what is pending, then end the stream. Closing twice is harmless."""
        self.closed.set()
        self._wakeup.set()

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yield the frames, from number 1; give it to gRPC as the handler's response, once."""
        loop = asyncio.get_running_loop()
        try:
            while not (self.closed.is_set() and not self._pending):
                if not self._pending:
                    beat = loop.call_later(self._heartbeat_seconds, self._wakeup.set)
                    await self._wakeup.wait()
                    beat.cancel()
                self._wakeup.clear()
                if self.closed.is_set() and not self._pending:
                    return
                size = min(len(self._pending), MAX_FRAME_EVENTS)
                self._sequence += 1
                yield self._make_frame([self._pending.popleft() for _ in range(size)], self._sequence)
        finally:
            self._pending.clear()
            self.closed.set()


async def serve_shared(
    commands: Any,
    sender: FrameSender[Event, Frame],
    on_command: Callable[[Any], Awaitable[None]],
    *,
    silence_seconds: float = SILENCE_SECONDS,
) -> AsyncGenerator[Frame]:
    """Run one shared stream to its end: hand each command to `on_command`, yield the sender's frames.

    Ends when the client ends the stream, breaks off, or is silent for `silence_seconds` (then with PeerLost). Whoever
    calls it frees the stream's requests afterwards, in a `finally`. An error that concerns one request is the business
    of `on_command`; what it raises ends the stream for everybody.
    """
    listener = _Listener(commands, on_command, silence_seconds)
    tasks = [asyncio.create_task(listener.read()), asyncio.create_task(listener.watch())]
    for task in tasks:
        task.add_done_callback(lambda _done: sender.close())
    try:
        async for frame in sender.frames():
            yield frame
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Listener:
    """Reads a stream's commands and notices when none come."""

    def __init__(self, commands: Any, on_command: Callable[[Any], Awaitable[None]], silence_seconds: float) -> None:
        self._commands = commands
        self._on_command = on_command
        self._silence_seconds = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def read(self) -> None:
        async for command in self._commands:
            self._last = self._loop.time()
            await self._on_command(command)

    async def watch(self) -> None:
        tick = self._silence_seconds / 10
        while True:
            before = self._loop.time()
            await asyncio.sleep(tick)
            now = self._loop.time()
            # When this process itself stood still, commands may lie unread: they get one more tick.
            if now - self._last > self._silence_seconds and now - before < 2 * tick:
                raise errors.PeerLost(f"client was silent for {now - self._last:.1f} s")

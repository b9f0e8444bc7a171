"""Which requests run on a replica's shared streams, and what ends them?

Each request is one task. It ends by itself, by a cancel, with its stream, or, when the replica drains, is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar, cast

from services.chassis.frames import FrameSender, serve_shared
from services.chassis.telemetry import log

Event = TypeVar("Event")
Frame = TypeVar("Frame")


class RequestStream(Generic[Event, Frame]):
    """One peer's stream: where its requests' events go, and whose requests end with it."""

    def __init__(self, tasks: RequestTasks[Event, Frame], sender: FrameSender[Event, Frame]) -> None:
        self.send = sender.put
        """Put an event into the next frame. Event loop only."""
        self.sender = sender
        self.request_ids: set[str] = set()
        self.ended = asyncio.Event()
        self._tasks = tasks

    def start(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a request; it is cancelled when this stream ends."""
        self._tasks.start(request_id, work, self)


class RequestTasks(Generic[Event, Frame]):
    """All requests of a replica, whichever stream they came on."""

    def __init__(self, make_frame: Callable[[Sequence[Event], int], Frame]) -> None:
        """make_frame: builds a frame of events and its number."""
        self.is_draining = False
        self._make_frame = make_frame
        self._running: dict[str, asyncio.Task[None]] = {}
        self._streams: set[RequestStream[Event, Frame]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def serve(
        self, commands: Any, on_command: Callable[[Any, RequestStream[Event, Frame]], None]
    ) -> AsyncIterator[Frame]:
        """Run one shared stream to its end; give it to gRPC as the handler's response."""
        stream = RequestStream(self, FrameSender(self._make_frame))
        self._streams.add(stream)

        async def take(command: Any) -> None:
            on_command(command, stream)

        try:
            served = cast("AsyncGenerator[Frame]", serve_shared(commands, stream.sender, take))
            async with aclosing(served) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._streams.discard(stream)
            stream.ended.set()
            for request_id in tuple(stream.request_ids):
                self.cancel(request_id, "stream")

    def start(self, request_id: str, work: Coroutine[Any, Any, None], stream: RequestStream[Event, Frame]) -> None:
        """Run a request as a task of its own. A second one of the same id is ignored: ids are unique."""
        if request_id in self._running:
            log.warning("request.duplicate", request_id=request_id)
            work.close()
            return
        task = asyncio.create_task(work, name=f"request {request_id}")
        self._running[request_id] = task
        stream.request_ids.add(request_id)

        def forget(done: asyncio.Task[None]) -> None:
            del self._running[request_id]
            stream.request_ids.discard(request_id)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("request.task.failed", request_id=request_id, exc_info=error)

        task.add_done_callback(forget)

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request early; unknown ids are ignored, for it may just have ended."""
        task = self._running.get(request_id)
        if task is not None:
            log.info("request.cancelled", request_id=request_id, reason=reason)
            task.cancel()

    async def drain(self) -> None:
        """Wait until the last request has ended, then end the streams. New ones are for the servicer to refuse."""
        self.is_draining = True
        while self._running:
            await asyncio.wait(self._running.values())
        streams = tuple(self._streams)
        for stream in streams:
            stream.sender.close()
        for stream in streams:  # the last events are on their way
            await stream.ended.wait()

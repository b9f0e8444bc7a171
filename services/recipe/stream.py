"""How do pieces reach the caller while the answer is still being made, and how do we notice that nobody listens?"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.types import Receive, Send

PING_SECONDS = 10.0
FAREWELL_SECONDS = 0.5
"""Longest that telling a caller of the server's end may take."""
PING = b": ping\n\n"
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON = [(b"content-type", b"application/json")]

Headers = Sequence[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The caller closed the connection."""


class EventStream:
    """A text/event-stream response. It starts with its first frame, so that an early failure can still be a status.

    After `ping_seconds` without a frame `ping` is sent (and the response started): proxies and SDKs give up on
    silence, and a long prefill is silent.
    """

    def __init__(self, send: Send, *, ping_seconds: float = PING_SECONDS, ping: bytes = PING) -> None:
        self._send = send
        self._sign = ping
        self._ping_seconds = ping_seconds
        self._lock = asyncio.Lock()  # choices and pings write at once, and only one of them the head
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self.is_started = False

    async def write(self, frames: bytes) -> None:
        """Send whole frames; waits while the caller reads more slowly than we write."""
        if self.is_started:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        else:
            async with self._lock:
                await self._write(frames, is_last=False)
        self._last = self._loop.time()

    async def end(self, frames: bytes) -> None:
        """Send the last frames."""
        async with self._lock:
            await self._write(frames, is_last=True)

    async def _write(self, frames: bytes, *, is_last: bool) -> None:
        if not self.is_started:
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            self.is_started = True  # not before: cancelled in there, nothing was sent
        await self._send({"type": "http.response.body", "body": frames, "more_body": not is_last})

    @asynccontextmanager
    async def pinging(self) -> AsyncIterator[None]:
        """Send pings inside, while nothing else is sent."""
        task = asyncio.create_task(self._ping(), name="ping")
        try:
            yield
        finally:
            task.cancel()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet = loop.time() - self._last
            if quiet >= self._ping_seconds:
                await self.write(self._sign)
            else:
                await asyncio.sleep(self._ping_seconds - quiet)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a JSON response in one go."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside once the caller is gone, and raise ClientGoneError. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    is_inside, is_gone = True, False

    def on_done(watch: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if is_inside and not watch.cancelled():
            is_gone = True
            task.cancel()

    watch = asyncio.create_task(_until_disconnect(receive), name="watch for disconnect")
    watch.add_done_callback(on_done)
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise  # the server is stopping
        task.uncancel()
        raise ClientGoneError from None
    finally:
        is_inside = False
        watch.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

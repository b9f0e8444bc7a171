"""How do many requests share one long gRPC stream, and how does each side notice that the other is gone?

A frame carries one engine step's events of all requests on the stream. Both sides say "still here" every second; ten
seconds of silence, a gap in the frame numbers, or a broken connection mean that the peer, and all it held, is lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, Self, TypeVar

from grpc import aio

from services.chassis import errors, telemetry
from services.chassis.frames import HEARTBEAT_SECONDS, SILENCE_SECONDS, FrameSender, serve_shared

__all__ = ["FrameSender", "PeerStream", "Subscription", "serve_shared"]

CONNECT_SECONDS = 2.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
MAX_QUEUED_EVENTS = 1024
MAX_QUEUED_COMMANDS = 4096


class NumberedFrame(Protocol):
    """What frames have in common: they are counted from 1 on each stream."""

    @property
    def sequence(self) -> int:
        """This frame's number."""
        ...


Command = TypeVar("Command")
Frame = TypeVar("Frame", bound=NumberedFrame)


class Subscription:
    """The events of one request, in order. Iterate it; close it (or leave its `async with`) after the last event.

    Raises PeerLost when the stream breaks, after the events that arrived before. There is no end of its own: the events
    say which one is the last.
    """

    def __init__(self, request_id: str, forget: Callable[["Subscription"], None], max_events: int) -> None:
        self.request_id = request_id
        self._forget = forget
        self._max_events = max_events
        self._events: deque[Any] = deque()
        self._failure: errors.FathomError | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more events; what is queued is dropped. Closing twice is harmless."""
        self._is_closed = True
        self._events.clear()
        self._forget(self)
        self._wake()

    def offer(self, event: Any) -> bool:
        """Queue an event; False when the reader is so slow that its request ends here."""
        if len(self._events) >= self._max_events:
            self.fail(errors.Overloaded(f"request {self.request_id} is read too slowly"))
            return False
        self._events.append(event)
        self._wake()
        return True

    def fail(self, failure: errors.FathomError) -> None:
        """End with an error after the queued events."""
        self._failure = self._failure or failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PeerStream(Generic[Command, Frame]):
    """The client side of a shared stream to one peer: opened on first use, opened again after a loss.

    call: opens the stream, for example `stub.Run`.  heartbeat: makes the message for one beat.  events: takes a frame
    apart into (request id, event) pairs.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        heartbeat: Callable[[], Command],
        events: Callable[[Frame], Iterable[tuple[str, Any]]],
        peer: str,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
        max_events: int = MAX_QUEUED_EVENTS,
    ) -> None:
        self.peer = peer
        self.heartbeat = heartbeat
        self.events = events
        self.heartbeat_seconds = heartbeat_seconds
        self.silence_seconds = silence_seconds
        self.max_events = max_events
        self._call = call
        self._connect_seconds = connect_seconds
        self._connection: _Connection[Command, Frame] | None = None
        self._opening: asyncio.Task[_Connection[Command, Frame]] | None = None
        self._backoff = 0.0
        self._not_before = 0.0
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the stream stands right now."""
        return self._connection is not None and self._connection.loss is None

    async def open_request(self, request_id: str) -> Subscription:
        """Subscribe to a request's events, connecting first if needed. Do it before sending its first command.

        Raises PeerLost when the peer cannot be reached; right after a failure it waits the rest of the backoff first.
        """
        connection = await self._connected()
        return connection.subscribe(request_id)

    async def send(self, command: Command) -> None:
        """Queue a command. Raises PeerLost when the stream is not open, Overloaded when the peer does not read."""
        connection = self._connection
        if connection is None:
            raise errors.PeerLost(f"{self.peer}: stream is not open")
        connection.send(command)

    async def close(self) -> None:
        """End the stream; subscribers get PeerLost."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> "_Connection[Command, Frame]":
        if self._is_closed:
            raise errors.PeerLost(f"{self.peer}: stream was closed")
        if self._connection is not None and self._connection.loss is None:
            return self._connection
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name=f"open stream to {self.peer}")
            # Everybody who waited may have been cancelled; nobody then asks for the outcome.
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Shielded: the caller may be cancelled, and others wait for the same connection.
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            if self._is_closed and self._opening.cancelled():
                raise errors.PeerLost(f"{self.peer}: stream was closed") from None
            raise

    async def _open(self) -> "_Connection[Command, Frame]":
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before - loop.time()))
        call = self._call()
        try:
            async with asyncio.timeout(self._connect_seconds):
                await call.wait_for_connection()
        except (errors.FathomError, aio.AioRpcError, TimeoutError) as exc:
            call.cancel()
            self.note_loss()
            raise errors.PeerLost(f"{self.peer} cannot be reached") from exc
        self._connection = _Connection(self, call)
        return self._connection

    def note_loss(self) -> None:
        """Push the next attempt away: 0.1 s after a first loss, doubling to 2 s while losses follow at once."""
        now = asyncio.get_running_loop().time()
        is_repeated = now < self._not_before + LAST_BACKOFF_SECONDS
        self._backoff = (
            min(self._backoff * 2, LAST_BACKOFF_SECONDS) if is_repeated and self._backoff else FIRST_BACKOFF_SECONDS
        )
        self._not_before = now + self._backoff


class _Connection(Generic[Command, Frame]):
    """One life of a PeerStream, from connect to loss."""

    def __init__(self, stream: PeerStream[Command, Frame], call: Any) -> None:
        self.loss: errors.PeerLost | None = None
        self._stream = stream
        self._call = call
        self._subscriptions: dict[str, Subscription] = {}
        self._commands: asyncio.Queue[Command] = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._last_frame = asyncio.get_running_loop().time()
        # Reads and writes belong to these tasks alone: cancelling a task inside a grpc.aio read or write cancels the
        # whole call, so a request's own task must never be in there.
        self._tasks = [
            asyncio.create_task(work, name=f"{name} {stream.peer}")
            for name, work in (("read", self._read()), ("write", self._write()), ("beat", self._beat()))
        ]
        for task in self._tasks:
            task.add_done_callback(telemetry.report_failure)

    def subscribe(self, request_id: str) -> Subscription:
        if request_id in self._subscriptions:
            raise ValueError(f"request {request_id} is already on the stream to {self._stream.peer}")
        subscription = Subscription(request_id, self._forget, self._stream.max_events)
        self._subscriptions[request_id] = subscription
        if self.loss is not None:
            subscription.fail(errors.PeerLost(self.loss.message))
        return subscription

    def send(self, command: Command) -> None:
        if self.loss is not None:
            raise errors.PeerLost(self.loss.message)
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            raise errors.Overloaded(f"{self._stream.peer} does not read its commands") from None

    async def close(self) -> None:
        self.lose("closed here")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lose(self, reason: str) -> None:
        """Wake everybody with PeerLost, at once."""
        if self.loss is not None:
            return
        peer = self._stream.peer
        self.loss = errors.PeerLost(f"{peer}: stream lost ({reason})")
        for subscription in tuple(self._subscriptions.values()):
            subscription.fail(errors.PeerLost(self.loss.message))
        telemetry.log.info("stream.lost", peer=peer, reason=reason, num_requests=len(self._subscriptions))
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._call.cancel()
        self._stream.note_loss()

    async def _read(self) -> None:
        expected = 0
        try:
            while (frame := await self._call.read()) is not aio.EOF:
                expected += 1
                self._last_frame = asyncio.get_running_loop().time()
                if frame.sequence != expected:
                    self.lose(f"frame {frame.sequence} came instead of {expected}")
                    return
                self._deliver(frame)
            self.lose("ended by the peer")
        except errors.FathomError as exc:
            self.lose(exc.message)
        finally:
            self.lose("closed here")

    def _deliver(self, frame: Frame) -> None:
        for request_id, event in self._stream.events(frame):
            subscription = self._subscriptions.get(request_id)
            if subscription is not None and not subscription.offer(event):
                del self._subscriptions[request_id]

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._commands.get())
        except errors.FathomError as exc:
            self.lose(exc.message)
        finally:
            self.lose("closed here")

    async def _beat(self) -> None:
        """Send heartbeats, and watch for the peer's: a timer here is cheaper than one per read."""
        loop = asyncio.get_running_loop()
        beat = self._stream.heartbeat_seconds
        while True:
            before = loop.time()
            await asyncio.sleep(beat)
            silence = loop.time() - self._last_frame
            # When this process itself stood still, frames may lie unread: they get one more beat.
            if silence > self._stream.silence_seconds and loop.time() - before < 2 * beat:
                self.lose(f"silent for {silence:.1f} s")
                return
            if self._commands.empty():
                self._commands.put_nowait(self._stream.heartbeat())

    def _forget(self, subscription: Subscription) -> None:
        if self._subscriptions.get(subscription.request_id) is subscription:
            del self._subscriptions[subscription.request_id]

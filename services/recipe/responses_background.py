"""How do responses go on without their caller, and how do others, at any replica, follow and stop them?

Whoever generates a response writes its events to the store and says every second that it is alive. Followers read the
store, wherever the response is generated.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson

from services.chassis import telemetry
from services.chassis.errors import NoReplica, Overloaded
from services.recipe.choices import Choice
from services.recipe.generating import Generating
from services.recipe.refusals import as_api_error
from services.recipe.response_state import UNFINISHED, ResponseState, StateAway, Status, StoredEvent, StoredResponse
from services.recipe.responses_events import Event, ResponsesReplies
from services.recipe.stream import PING_SECONDS
from services.recipe.transcript import Piece

BEAT_SECONDS = 1.0
BUSY_SECONDS = 5.0
WRITE_SECONDS = 0.1
"""Events of this long are written together."""

POLL_SECONDS = 0.1
CANCEL_SECONDS = 5.0
"""Longest wait for another replica to notice that a response is to stop."""

MAX_EVENTS = 200
MAX_RUNNING = 512
"""Responses that one process generates in the background at once."""

_LAST: Final = tuple(f'{{"type":"response.{status}"'.encode() for status in ("completed", "incomplete", "failed"))


class Background:
    """The responses that this process generates for nobody in particular. owner: its boot id."""

    def __init__(self, state: ResponseState, owner: str) -> None:
        self.state = state
        self.owner = owner
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._settled: set[str] = set()  # told to stop, or at their end: not to be interrupted (again)
        self._is_ending = False

    async def tend(self) -> None:
        """Say for ever that this process is alive, and stop what is to be stopped."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if not self._tasks:
                continue
            with suppress(StateAway):  # logged where it was found; who is silent for long is given up by others
                for response_id in await self.state.beat(self.owner, list(self._tasks)):
                    self.stop(response_id)

    async def start(self, record: StoredResponse, generating: Generating, replies: ResponsesReplies) -> None:
        """Keep the response and begin to generate it; raise Overloaded when there are too many already."""
        if len(self._tasks) >= MAX_RUNNING:
            raise Overloaded("too many background responses at once", retry_after=BUSY_SECONDS)
        await self.state.add(record)
        journal = _Journal(self.state, record)
        journal.put(replies.begun(is_queued=True))
        work = self._run(record, generating, replies, journal)
        self._tasks[record.id] = task = asyncio.create_task(work, name=f"background {record.id}")
        task.add_done_callback(lambda _task: self._forget(record.id))

    def stop(self, response_id: str) -> None:
        """Cancel a response if it is generated here; what is left to be written of it is written nevertheless."""
        task = self._tasks.get(response_id)
        if task is not None and response_id not in self._settled:
            self._settled.add(response_id)
            task.cancel()

    async def drain(self) -> None:
        """Wait until all that is generated here is finished."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def end(self) -> None:
        """Give up what is still being generated: nobody will go on with it."""
        self._is_ending = True
        for response_id in list(self._tasks):
            self.stop(response_id)
        await self.drain()

    async def cancelled(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Stop a response, wherever it is generated; return it as it then is, None when it is gone."""
        await self.state.cancel(tenant, response_id)
        self.stop(response_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                while (stored := await self.state.get(tenant, response_id)) and stored.status in UNFINISHED:  # noqa: ASYNC110 - elsewhere
                    await asyncio.sleep(POLL_SECONDS)
        return await self.state.get(tenant, response_id)

    async def follow(self, tenant: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """Yield the JSON of each event above number `after` as it is written, to the last; b"" after long silence.

        The last one is told once GET shows it too. A response that was cancelled has none; neither has one whose
        replica was lost, and then it is made up here.
        """
        last = time.monotonic()
        while True:
            for event in await self.state.events(tenant, response_id, after=after, limit=MAX_EVENTS):
                if event.body.startswith(_LAST):
                    break
                after, last = event.number, time.monotonic()
                yield event.body
            stored = await self.state.get(tenant, response_id)
            if stored is None:
                return
            if stored.status not in UNFINISHED:
                async for body in self._rest(stored, after):
                    yield body
                return
            if time.monotonic() - last > PING_SECONDS:
                last = time.monotonic()
                yield b""
            await asyncio.sleep(POLL_SECONDS)

    async def _rest(self, stored: StoredResponse, after: int) -> AsyncIterator[bytes]:
        """Yield what was written between the last look at the events and the response's end."""
        while events := await self.state.events(stored.tenant, stored.id, after=after, limit=MAX_EVENTS):
            for event in events:
                after = event.number
                yield event.body
            if events[-1].body.startswith(_LAST):
                return
        if stored.status == "failed":
            yield orjson.dumps({"type": "response.failed", "response": stored.body, "sequence_number": after + 1})

    async def _run(
        self, record: StoredResponse, generating: Generating, replies: ResponsesReplies, journal: "_Journal"
    ) -> None:
        async def show(_choice: Choice, piece: Piece) -> None:
            journal.put(replies.told(piece))

        status: Status
        try:
            await self.state.finish(record.tenant, record.id, "in_progress", replies.bare("in_progress"))
            journal.put(replies.begun())
            async with journal.writing():
                await generating.run(show)
            event = replies.ended(generating.choices)
            status, body = event["response"]["status"], event["response"]
            journal.put([event])
        except asyncio.CancelledError:
            if self._is_ending:
                event = replies.failed(as_api_error(NoReplica("the server that was generating this is shutting down")))
                status, body = "failed", event["response"]
                journal.put([event])
            else:
                status, body = "cancelled", replies.partial("cancelled")
        except Exception as exc:  # noqa: BLE001 - every error has an answer; strangers are logged with an id
            event = replies.failed(as_api_error(exc))
            status, body = "failed", event["response"]
            journal.put([event])
        self._settled.add(record.id)
        await _persistently(lambda: self._finish(record, status, body, journal))
        telemetry.log.info("recipe.background.done", response_id=record.id, status=status)

    def _forget(self, response_id: str) -> None:
        self._tasks.pop(response_id, None)
        self._settled.discard(response_id)

    async def _finish(self, record: StoredResponse, status: Status, body: dict[str, Any], journal: "_Journal") -> None:
        await journal.flush()
        await self.state.finish(record.tenant, record.id, status, body)


class _Journal:
    """Writes a response's events to the store, some at a time. Nothing is written for responses without a stream."""

    def __init__(self, state: ResponseState, record: StoredResponse) -> None:
        self._state = state
        self._record = record
        self._waiting: list[StoredEvent] = []

    def put(self, events: Sequence[Event]) -> None:
        """Take events; they are written soon."""
        if self._record.keeps_events:
            self._waiting += [StoredEvent(event["sequence_number"], orjson.dumps(event)) for event in events]

    async def flush(self) -> None:
        """Write what waits; when the store is away it goes on waiting."""
        if events := list(self._waiting):
            await self._state.add_events(self._record.tenant, self._record.id, events)
            del self._waiting[: len(events)]

    def writing(self) -> "_Writing":
        """Return a context in which events are written as they come."""
        return _Writing(self)


class _Writing:
    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._write(), name="journal")

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])  # a write is all or nothing, and what it did not do is done by the last one

    async def _write(self) -> None:
        while True:
            with suppress(StateAway):
                await self._journal.flush()
            await asyncio.sleep(WRITE_SECONDS)


async def _persistently(work: Callable[[], Awaitable[None]]) -> None:
    """Try a few times: a store that is away for a moment must not cost an answer that is already there."""
    for pause in (0.5, 2.0, 8.0):
        try:
            await work()
        except StateAway:
            await asyncio.sleep(pause)
        else:
            return
    telemetry.log.warning("recipe.background.lost")

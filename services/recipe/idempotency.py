"""Was this very request answered before? `Idempotency-Key`, for answers that are not streamed.

A client that lost an answer may ask again under the same key and gets the same bytes instead of new tokens. Answers are
kept in this process alone, for an hour, as far as memory allows; streams are not kept: their key has no effect.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.chassis.errors import NoReplica
from services.recipe.body import read_body
from services.recipe.keys_visit import current_visit
from services.recipe.refusals import ApiError, as_api_error, refuse
from services.recipe.shapes import shape_of
from services.recipe.stream import FAREWELL_SECONDS, ClientGoneError, cancelled_on_disconnect, send_whole

KEEP_SECONDS = 3600.0
MAX_KEPT_BYTES = 32 << 20
"""All kept answers together; the oldest make room."""
MAX_ANSWER_BYTES = 2 << 20
"""A larger answer is not kept."""
MAX_KEY_CHARACTERS = 255
_ENTRY_BYTES = 1024  # about what an answer costs besides its body

Slot = tuple[str, str, str]
"""Who, where, and under which key."""


@dataclass(slots=True)
class _Kept:
    """An answer, or that one is on its way. fingerprint: of the body asked with; body None: not there yet."""

    slot: Slot
    fingerprint: bytes
    body: bytes | None = None
    expires: float = 0.0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class AnswerBook:
    """Answers by slot, oldest first, within a bound of bytes."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Slot, _Kept] = OrderedDict()
        self.num_bytes = 0

    def find(self, slot: Slot, now: float) -> _Kept | None:
        """Return what there is for the slot, None when that is nothing, or too old."""
        entry = self._entries.get(slot)
        if entry is not None and entry.body is not None and entry.expires <= now:
            self._drop(slot)
            return None
        return entry

    def begin(self, slot: Slot, fingerprint: bytes) -> _Kept:
        """Say that an answer is on its way."""
        entry = self._entries[slot] = _Kept(slot, fingerprint)
        return entry

    def settle(self, entry: _Kept, answer: "_Copy", now: float) -> None:
        """Keep the answer if it is worth it; either way let those go on who wait for it."""
        if answer.is_whole:
            entry.body, entry.expires = bytes(answer.body), now + KEEP_SECONDS
            self._entries.move_to_end(entry.slot)
            self.num_bytes += _ENTRY_BYTES + len(entry.body)
            for oldest in [slot for slot, kept in self._entries.items() if kept.body is not None]:
                if self.num_bytes <= self._max_bytes:
                    break
                self._drop(oldest)
        else:
            del self._entries[entry.slot]
        entry.settled.set()

    def _drop(self, slot: Slot) -> None:
        body = self._entries.pop(slot).body
        self.num_bytes -= _ENTRY_BYTES + len(body or b"")


class Idempotency:
    """ASGI middleware behind the gate: one answer for all requests of one caller with one key."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._book = AnswerBook()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer again what was answered before; otherwise pass the request on and keep its answer."""
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(key, scope, receive, send)
        except ClientGoneError:
            return
        except ApiError as error:
            await _tell(error, scope, send)

    async def _answer(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isprintable()):
            raise refuse("idempotency-key", f"must be 1 to {MAX_KEY_CHARACTERS} printable characters")
        try:
            body, entry, is_first = await self._listen((current_visit().key_id, scope["path"], key), scope, receive)
        except asyncio.CancelledError:
            await _give_up(scope, send)
            return
        if entry is None:
            await self._app(scope, _again(body, receive), send)
        elif is_first:
            await self._answer_first(entry, scope, _again(body, receive), send)
        else:
            assert entry.body is not None
            await send_whole(send, HTTPStatus.OK, entry.body, [(b"idempotent-replayed", b"true")])

    async def _listen(self, slot: Slot, scope: Scope, receive: Receive) -> tuple[bytes, _Kept | None, bool]:
        """Return the body, and for what is no stream its entry, and whether the caller must make the answer."""
        body = await read_body(Headers(scope=scope), receive, self._max_body_bytes)
        if _is_streamed(body):
            return body, None, False
        async with cancelled_on_disconnect(receive):
            entry, is_first = await self._entry(slot, hashlib.sha256(body).digest())
        return body, entry, is_first

    async def _entry(self, slot: Slot, fingerprint: bytes) -> tuple[_Kept, bool]:
        """Return the kept answer, waiting for one that is on its way; or, if none comes, a new entry, and True.

        Raises a 409 when the key stands for another request.
        """
        while True:
            entry = self._book.find(slot, time.monotonic())
            if entry is None:
                return self._book.begin(slot, fingerprint), True
            if entry.fingerprint != fingerprint:
                rule = "was used with another body; another request needs another key"
                raise refuse("idempotency-key", rule, code="idempotency_conflict", status=HTTPStatus.CONFLICT)
            if entry.body is not None:
                return entry, False
            await entry.settled.wait()

    async def _answer_first(self, entry: _Kept, scope: Scope, receive: Receive, send: Send) -> None:
        copy = _Copy()

        async def send_and_copy(message: Message) -> None:
            await send(message)
            copy.see(message)

        try:
            await self._app(scope, receive, send_and_copy)
        finally:
            self._book.settle(entry, copy, time.monotonic())


class _Copy:
    """What was sent of one answer."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_whole = False
        """Whether all of it was seen and it is worth keeping: errors are not, they may be over next time."""
        self._is_wanted = False

    def see(self, message: Message) -> None:
        """Note a message of the answer."""
        if message["type"] == "http.response.start":
            content_type = Headers(raw=list(message["headers"])).get("content-type", "")
            self._is_wanted = message["status"] == HTTPStatus.OK and content_type == "application/json"
            return
        part = message.get("body", b"")
        self._is_wanted = self._is_wanted and len(self.body) + len(part) <= MAX_ANSWER_BYTES
        if self._is_wanted:
            self.body += part
            self.is_whole = not message.get("more_body", False)


def _is_streamed(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(parsed, dict) and bool(parsed.get("stream"))


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with the body once more."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _tell(error: ApiError, scope: Scope, send: Send) -> None:
    shape = shape_of(scope)
    await send_whole(send, shape.status(error), shape.body(error, str(scope["fathom.shown_id"])), error.headers())


async def _give_up(scope: Scope, send: Send) -> None:
    """Tell the caller that drain_seconds are over; the task was cancelled for that alone, so that ends here."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    async with asyncio.timeout(FAREWELL_SECONDS):
        await _tell(as_api_error(NoReplica("this server is shutting down")), scope, send)

"""What may a connection ask of us before there is a request, and how long may its caller not read?

The HTTP server itself bounds neither: a header may be endless, a half-sent request may stay for ever, and whoever stops
reading keeps an answer in memory.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.recipe.cork import Cork
from services.recipe.refusals import ApiError

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
MAX_HEADERS = 128
HEAD_SECONDS = 30.0
"""A caller has this long for a request's headers, and from connecting to the end of the first ones."""
LINGER_SECONDS = 2.0
"""How long what a refused caller still sends is read and forgotten."""
SLOW_SECONDS = 30.0
"""Longest that nothing, or less than the server's buffer of 64 KiB, is read of an answer that waits to be read."""


class HeadTooLargeError(Exception):
    """Raised into the parser: it stops there."""


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP with bounds, whose own errors are JSON like all others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._fed_bytes = 0  # of what the parser keeps to itself, because it is not whole
        self._has_moved = False
        self._is_in_head = True
        self._is_head_known = False
        self._is_over = False
        self._refusal: ApiError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        self._cork = Cork(transport, self.loop)
        super().connection_made(self._cork)  # type: ignore[arg-type] # one in all but name
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse lines that do not end, before a body or behind it: it shows only whole ones."""
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        self._has_moved = False
        self._feed(data)
        if self._has_moved:
            self._fed_bytes = 0
            return
        self._fed_bytes += len(data)
        if self._fed_bytes > 2 * MAX_HEAD_BYTES and not self._is_over:
            self._refusal = _too_large()
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as exc:
                data = data[exc.args[0] :]
                self._stay()
            except HttpParserError:
                self.send_400_response("")
                return
            else:
                return

    def _stay(self) -> None:
        """Read on in HTTP/1.1 where the caller offered another protocol: as if the offer had not been made.

        Some clients offer HTTP/2 with every request, bodies included, and the parser leaves those unread.
        """
        framing = [header for header in self.headers if header[0] in {b"content-length", b"transfer-encoding"}]
        self.parser = HttpRequestParser(self)
        self._is_head_known = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % header for header in framing) + b"\r\n")
        self._is_head_known = False

    def on_message_begin(self) -> None:
        """Count anew."""
        if self._is_head_known:
            return
        self._is_in_head, self._head_bytes = True, 0
        self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        if self._is_head_known:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        if self._is_head_known:
            return
        self._count(len(name) + len(value) + 4)  # ": " and the end of its line
        if not self._is_in_head:
            return  # what stands after the body is no header, though it looks like one
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = _too_large()
            raise HeadTooLargeError

    def on_headers_complete(self) -> None:
        """Start to answer."""
        if self._is_head_known:
            return
        self._is_in_head, self._has_moved = False, True
        self._cork.expect_head()
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take some of the body."""
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body, unless the parser stopped before it."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - their words are no JSON
        """Answer what is no HTTP request, and close: what follows could be anything."""
        if self.transport.is_closing() or self._is_over:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way, and this would end up inside
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
        error = self._refusal or ApiError(HTTPStatus.BAD_REQUEST, "this is no valid HTTP request", code="invalid_http")
        body = orjson.dumps(error.envelope())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        # Closed at once, what still comes in would be answered by a reset, which can overtake the answer.
        self.transport.write_eof()
        self._is_over = True
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """Give a caller who does not read some time."""
        super().pause_writing()
        if self._slow_timer is None:
            # Not close: that would wait for the caller to read. The request then ends as if the caller had left.
            self._slow_timer = self.loop.call_later(SLOW_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the buffer was read."""
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        super().resume_writing()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise HeadTooLargeError

    def _await_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def _on_late_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._await_head()  # a request came too early, while the one before is being answered

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._slow_timer):
            if timer is not None:
                timer.cancel()


def _too_large() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the headers are more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines",
        code="headers_too_large",
    )

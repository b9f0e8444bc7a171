"""What did a web server answer? Status, where it redirects to, and a body as it stands: never unpacked."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_MAX_HEAD_BYTES: Final = 32 << 10
_MAX_OTHER_BYTES: Final = 2 * _MAX_HEAD_BYTES
"""Of what is no body, besides as much as there is body: chunks have sizes."""


class BadAnswer(Exception):  # noqa: N818 - named by meaning, like the service errors
    """The answer is not one that we can read; the text says why, for logs."""


class Answer:
    """Reads one HTTP/1.1 answer as it comes. The caller bounds the body."""

    def __init__(self) -> None:
        self.status = 0
        self.location = ""
        self.body = bytearray()
        self.is_complete = False
        self._num_head_bytes = self._num_fed_bytes = 0
        self._has_head = False
        self._ends_with_connection = True
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Read more of it; b"" is the end of the connection. Raises BadAnswer."""
        if not data:
            if not self._has_head or not self._ends_with_connection:
                raise BadAnswer("the answer ended early")
            self.is_complete = True
            return
        self._num_fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            # What a callback raised comes back wrapped.
            raise exc.__context__ if isinstance(exc.__context__, BadAnswer) else BadAnswer("no HTTP") from None
        if self._has_head and self.status != HTTPStatus.OK:
            self.is_complete = True  # nobody reads what stands in it
        # The parser shows a header, or a line after the last chunk, only when that is whole.
        elif self._num_fed_bytes > _MAX_OTHER_BYTES + 2 * len(self.body):
            raise BadAnswer("endless headers")

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._has_head:
            raise BadAnswer("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value)
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise BadAnswer("endless headers")
        match name.lower():
            case b"location":
                self.location = value.decode("latin-1")
            case b"content-encoding" if value.strip().lower() not in {b"", b"identity"}:
                raise BadAnswer("a packed body")
            case b"content-length" | b"transfer-encoding":
                self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < HTTPStatus.OK:  # the true one follows
            self.location = ""
            return
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        if self.status == HTTPStatus.OK:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head

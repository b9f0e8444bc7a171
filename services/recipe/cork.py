"""How do a response's head and the beginning of its body leave in one piece, when they are written one by one?

A piece of its own costs a system call here and wakes the caller for a head that says nothing yet.
"""

import asyncio
from typing import Any


class Cork:
    """A transport that keeps a response's head back for what follows it, until the end of the loop's turn at most."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._kept = b""
        self._is_head_next = False

    def expect_head(self) -> None:
        """Take what is written next for a head."""
        self._is_head_next = True

    def write(self, data: bytes) -> None:
        """Send the data, or keep it back if it is a head."""
        if self._is_head_next:
            self._is_head_next = False
            self._kept += data  # a head may be there: the caller's next request was read before its body was written
            self._loop.call_soon(self._flush)
        elif self._kept:
            kept, self._kept = self._kept, b""
            self._transport.write(kept + data)
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        """Send what is kept back, and the end."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what is kept back, and close."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Be the transport in all else."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        kept, self._kept = self._kept, b""
        if kept:
            self._transport.write(kept)

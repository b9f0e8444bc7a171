"""How is a connection served that brings one request and takes one reply? Small enough to live in every process."""

import asyncio
from collections.abc import Awaitable, Callable

READ_SECONDS = 5.0


class OneReplyServer:
    """An HTTP server that reads a request's head, sends what `answer` makes of it, and closes."""

    def __init__(
        self, answer: Callable[[bytes], Awaitable[bytes]], *, busy: bytes, max_connections: int, max_head_bytes: int
    ) -> None:
        """answer: takes a head with its empty line, returns a whole reply.  busy: the reply above `max_connections`."""
        self._answer = answer
        self._busy = busy
        self._max_connections = max_connections
        self._max_head_bytes = max_head_bytes
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, host: str, port: int) -> int:
        """Listen there, port 0 for a free one; return the port. Raises OSError when it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=self._max_head_bytes)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the listening socket."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections > self._max_connections:
                writer.write(self._busy)
            else:
                async with asyncio.timeout(READ_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
            async with asyncio.timeout(READ_SECONDS):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The caller broke off, dawdled or sent no HTTP. Closing alone would keep the reply until it is read.
            writer.transport.abort()
        finally:
            self._num_connections -= 1
            writer.close()

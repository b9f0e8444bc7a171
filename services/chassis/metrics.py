"""How do /metrics and /healthz answer? A server small enough to live in every process: GET, one reply, close."""

import asyncio
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8 << 10
READ_SECONDS = 5.0


class StatusServer:
    """Serves GET /metrics (Prometheus text) and /healthz (JSON: 200 when ready, 503 otherwise; `?live`: always 200)."""

    def __init__(self, metrics: CollectorRegistry, health: Callable[[], Mapping[str, object]]) -> None:
        self._metrics = metrics
        self._health = health
        self._server: asyncio.Server | None = None
        self._num_connections = 0

    async def start(self, address: str) -> str:
        """Listen on host:port, 0 for a free one; return the host:port that it became."""
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the listening socket."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections > MAX_CONNECTIONS:
                writer.write(_reply(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many connections\n"))
            else:
                async with asyncio.timeout(READ_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
            async with asyncio.timeout(READ_SECONDS):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # the caller broke off, dawdled or sent no HTTP: nobody is left to tell
        finally:
            self._num_connections -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path, _, query = rest.partition(" ")[0].partition("?")
        if method != "GET":
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET\n")
        if path == "/metrics":
            return _reply(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._metrics))
        if path == "/healthz":
            health = self._health()
            is_well = "live" in query.split("&") or health["ready"]
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            return _reply(status, "application/json", json.dumps(health).encode() + b"\n")
        return _reply(HTTPStatus.NOT_FOUND, "text/plain", b"there are /metrics and /healthz\n")


def _reply(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

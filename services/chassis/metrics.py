"""How do /metrics and /healthz answer? GET, one reply, close."""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.chassis.one_reply import OneReplyServer

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8 << 10


class StatusServer:
    """Serves GET /metrics (Prometheus text) and /healthz (JSON: 200 when ready, 503 otherwise; `?live`: always 200)."""

    def __init__(self, metrics: CollectorRegistry, health: Callable[[], Mapping[str, object]]) -> None:
        self._metrics = metrics
        self._health = health
        busy = _reply(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many connections\n")
        self._server = OneReplyServer(
            self._answer, busy=busy, max_connections=MAX_CONNECTIONS, max_head_bytes=MAX_HEAD_BYTES
        )

    async def start(self, address: str) -> str:
        """Listen on host:port, 0 for a free one; return the host:port that it became."""
        host, _, port = address.rpartition(":")
        return f"{host}:{await self._server.start(host.strip('[]'), int(port))}"

    async def stop(self) -> None:
        """Close the listening socket."""
        await self._server.stop()

    async def _answer(self, head: bytes) -> bytes:
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

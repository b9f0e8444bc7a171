"""How do spans arrive, and how do they go on to another collector?"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from services.local.console.spans import Malformed, read_spans
from services.local.console.traces import TraceStore

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
MAX_MESSAGE_BYTES = 4 << 20
MAX_CALLS = 32
MAX_WAITING_BYTES = 8 << 20
FORWARD_SECONDS = 2.0
DRAIN_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server behind the first
)


@dataclass(slots=True)
class Counts:
    """What came, since the start of this process."""

    num_spans: int = 0
    num_malformed_messages: int = 0
    num_malformed_spans: int = 0
    num_forwarded_messages: int = 0
    num_unforwarded_messages: int = 0
    """Given up: the other collector was away, slow, or refused them."""


class Forwarder:
    """Passes messages on as they came. What the other side does not take in time is dropped, so nobody waits for it."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], counts: Counts) -> None:
        """endpoint: http://host:port, or https:// for TLS."""
        scheme, _, rest = endpoint.partition("://")
        target = rest.partition("/")[0]
        self._channel = (
            aio.secure_channel(target, grpc.ssl_channel_credentials())
            if scheme == "https"
            else aio.insecure_channel(target)
        )
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._counts = counts
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting_bytes = 0

    def put(self, message: bytes) -> None:
        """Queue a message; the oldest are dropped when too much waits."""
        if not message:
            return
        self._waiting.put_nowait(message)
        self._waiting_bytes += len(message)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.get_nowait())
            self._waiting.task_done()
            self._counts.num_unforwarded_messages += 1

    async def run(self) -> None:
        """Send what is queued, one message after the other, until cancelled."""
        send: Any = self._channel.unary_unary(EXPORT)  # bytes, as they came
        while True:
            message = await self._waiting.get()
            self._waiting_bytes -= len(message)
            try:
                await send(message, timeout=FORWARD_SECONDS, metadata=self._metadata)
                self._counts.num_forwarded_messages += 1
            except aio.AioRpcError:
                self._counts.num_unforwarded_messages += 1
            finally:
                self._waiting.task_done()

    async def drain(self) -> None:
        """Give what still waits a moment to be sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._waiting.join()


class Collector:
    """An OTLP/gRPC receiver of spans on loopback."""

    def __init__(self, store: TraceStore, counts: Counts, forwarder: Forwarder | None) -> None:
        self._store = store
        self._counts = counts
        self._forwarder = forwarder
        # Bytes and not messages: what is no message must be counted here, and what is goes on as it came.
        export: Any = grpc.unary_unary_rpc_method_handler(self._export)
        service, _, method = EXPORT[1:].partition("/")
        self._server = aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: export}),))

    async def start(self, address: str) -> int:
        """Listen on host:port, 0 for a free one; return the port. Raises RuntimeError when it is taken."""
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Take no more."""
        await self._server.stop(0)

    async def _export(self, message: bytes, context: Any) -> bytes:
        try:
            spans, num_dropped = read_spans(message)
        except Malformed:
            self._counts.num_malformed_messages += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no ExportTraceServiceRequest")
        self._counts.num_spans += len(spans)
        self._counts.num_malformed_spans += num_dropped
        self._store.add(spans)
        if self._forwarder is not None:
            self._forwarder.put(message)
        return b""  # an ExportTraceServiceResponse that has nothing to complain of

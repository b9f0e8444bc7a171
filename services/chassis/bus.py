"""How does a process talk on NATS: load reports, and the key-value bucket of the replica registry?

Services start and serve without NATS: connecting goes on in the background for ever, and what is published meanwhile is
lost, which everything sent here may be. This is the only file that imports nats.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.client import JetStreamContext
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError
from prometheus_client import CollectorRegistry, Counter, Gauge

from proto.events_pb2 import LoadReport
from services.chassis import names, telemetry
from services.chassis.tasks import end_tasks

REQUEST_SECONDS = 1.0  # JetStream's default of 5 s would make the first try after a failover that slow
RECONNECT_SECONDS = 0.25
MARKER_SECONDS = 5.0
WATCH_SILENCE_SECONDS = 10.0
_KV = f"$KV.{names.REPLICA_BUCKET}."
_FAILURES = (nats.errors.Error, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one key of the registry's bucket."""

    key: str
    value: bytes
    is_erased: bool
    """Its owner took it back."""
    is_expired: bool
    """Nobody refreshed it."""


class Bus:
    """One process's connection to NATS. All methods are safe, and do nothing, while there is none."""

    def __init__(self, url: str, *, name: str = "", metrics: CollectorRegistry | None = None) -> None:
        registry = metrics or CollectorRegistry(auto_describe=False)
        self.num_denied = 0
        self._url = url
        self._name = name
        self._is_closed = False
        self._client: Client | None = None
        self._js: JetStreamContext | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._patience: set[asyncio.Timeout] = set()
        self._listening: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._loads: list[tuple[str, Callable[[LoadReport], None]]] = []
        self._lost = Counter("fathom_bus_lost", "Messages not sent for want of a connection.", registry=registry)
        self._denied = Counter(
            "fathom_bus_denied", "Publishes and subscriptions that NATS denied us.", registry=registry
        )
        self._gauge = Gauge("fathom_bus_connected", "1 while NATS is connected.", registry=registry)

    @property
    def connected(self) -> bool:
        """Whether NATS is there right now."""
        return self._connected.is_set()

    def connect(self) -> None:
        """Connect in the background, and again whenever the connection breaks."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_connected(), name="keep NATS connected")
            self._keeper.add_done_callback(telemetry.report_failure)

    async def wait_connected(self) -> None:
        """Wait until NATS is there."""
        await self._connected.wait()

    async def close(self) -> None:
        """Flush and disconnect."""
        self._is_closed = True
        if self._keeper is not None:
            await end_tasks([self._keeper])
        if self._client is not None:
            with contextlib.suppress(*_FAILURES):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._client.close()
        self._mark(is_connected=False)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send a message that may be lost, with the current trace context in its headers."""
        if self._client is None or not self.connected:
            self._lost.inc()
            return
        traceparent = telemetry.current_traceparent()
        try:
            await self._client.publish(
                subject, payload, headers={names.TRACEPARENT: traceparent} if traceparent else None
            )
        except _FAILURES:
            self._lost.inc()

    async def publish_load(self, report: LoadReport) -> None:
        """Tell the balancers how busy this replica is."""
        subject = names.LOAD_SUBJECT.format(service=report.service, replica=report.replica)
        await self.publish(subject, report.SerializeToString())

    def subscribe_load(self, service: str, callback: Callable[[LoadReport], None]) -> None:
        """Call `callback` with every load report of a service's replicas, now and after reconnects."""
        self._loads.append((service, callback))
        if self._client is not None:
            self._listening = asyncio.create_task(self._listen(self._client, service, callback), name="subscribe load")
            self._listening.add_done_callback(telemetry.report_failure)

    async def store(self, key: str, value: bytes, *, ttl_seconds: int) -> bool:
        """Write a key of the registry's bucket for `ttl_seconds`; False when it could not be written now.

        A raw publish, because the client's put and update take no TTL.
        """
        headers = {"Nats-TTL": f"{ttl_seconds}s"}
        return await self._write(key, value, headers)

    async def erase(self, key: str) -> bool:
        """Take a key back; watchers see it at once. Its tombstone expires, since keys of old boots never come again."""
        return await self._write(key, b"", {"KV-Operation": "DEL", "Nats-TTL": f"{MARKER_SECONDS:.0f}s"})

    async def watch(self, pattern: str) -> AsyncGenerator[Entry | None]:
        """Yield the present keys that match, then None, then every change.

        Ends when the watch may have become deaf (connection or bucket lost, ten seconds without a word): watch again.
        """
        await self.wait_connected()
        js = self._js
        assert js is not None
        watcher: Any = None  # nats does not type its watchers
        try:
            await self._ensure_bucket(js)
            bucket: Any = await js.key_value(names.REPLICA_BUCKET)
            watcher = await bucket.watch(pattern, inactive_threshold=30.0)
            while self.connected and js is self._js:
                update = await self._next(watcher)
                yield None if update is None else _entry(update)
        except (*_FAILURES, NotFoundError) as exc:
            telemetry.log.debug("bus.watch.ended", pattern=pattern, reason=repr(exc))
        finally:
            if watcher is not None:
                with contextlib.suppress(*_FAILURES):
                    await watcher.stop()

    async def _next(self, watcher: Any) -> Any:
        """Return a watcher's next update; raise TimeoutError after long silence, or at once on a disconnect."""
        async with asyncio.timeout(WATCH_SILENCE_SECONDS) as patience:
            self._patience.add(patience)
            try:
                return await anext(watcher)
            finally:
                self._patience.discard(patience)

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> bool:
        js = self._js
        if js is None or not self.connected:
            self._lost.inc()
            return False
        try:
            try:
                await js.publish(_KV + key, value, timeout=REQUEST_SECONDS, headers=dict(headers))
            except NoStreamResponseError:  # a new NATS, or one that lost its store
                await self._ensure_bucket(js)
                await js.publish(_KV + key, value, timeout=REQUEST_SECONDS, headers=dict(headers))
        except _FAILURES as exc:
            self._lost.inc()
            telemetry.log.debug("bus.write.failed", key=key, reason=repr(exc))
            return False
        return True

    async def _ensure_bucket(self, js: JetStreamContext) -> None:
        config = api.KeyValueConfig(
            bucket=names.REPLICA_BUCKET,
            history=1,
            storage=api.StorageType.MEMORY,  # its content is worth five seconds
            limit_marker_ttl=MARKER_SECONDS,  # without it watchers hear nothing of expired keys
        )
        with contextlib.suppress(BadRequestError):  # it exists, and an operator chose other limits for it
            await js.create_key_value(config)

    async def _keep_connected(self) -> None:
        while not self._is_closed:
            closed = asyncio.Event()
            client = Client()
            try:
                await self._connect(client, closed)
                for service, callback in self._loads:  # those that come meanwhile included
                    await self._listen(client, service, callback)
            except _FAILURES as exc:
                telemetry.log.warning("bus.refused", reason=repr(exc))
            else:
                self._client, self._js = client, client.jetstream(timeout=REQUEST_SECONDS)
                self._mark(is_connected=True)
                # nats reconnects by itself, but closes for good on some errors (a changed password, for one).
                await closed.wait()
                self._mark(is_connected=False)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect(self, client: Client, closed: asyncio.Event) -> None:
        async def on_disconnect() -> None:
            self._mark(is_connected=False)

        async def on_reconnect() -> None:
            self._mark(is_connected=True)

        async def on_close() -> None:
            closed.set()

        options: dict[str, Any] = {
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_SECONDS,
            "connect_timeout": 2,
            "ping_interval": 5,
            "max_outstanding_pings": 2,
            "error_cb": self._on_error,
            "disconnected_cb": on_disconnect,
            "reconnected_cb": on_reconnect,
            "closed_cb": on_close,
        }
        await client.connect([url.strip() for url in self._url.split(",")], **options)

    async def _listen(self, client: Client, service: str, callback: Callable[[LoadReport], None]) -> None:
        async def on_message(message: Msg) -> None:
            try:
                report = LoadReport.FromString(message.data)
            except DecodeError:
                telemetry.log.warning("bus.load.unreadable", subject=message.subject)
                return
            callback(report)

        subject = names.LOAD_SUBJECT.format(service=service, replica="*")
        await client.subscribe(subject, cb=on_message)

    async def _on_error(self, exc: Exception) -> None:
        """Count denials, which NATS reports nowhere else; connection errors repeat and are logged by state instead."""
        if "permissions violation" in str(exc).lower():
            self.num_denied += 1
            self._denied.inc()
            telemetry.log.warning("bus.denied", reason=str(exc))
        else:
            telemetry.log.debug("bus.error", reason=repr(exc))

    def _mark(self, *, is_connected: bool) -> None:
        if is_connected == self.connected:
            return
        if is_connected:
            self._connected.set()
        else:
            self._connected.clear()
            for patience in self._patience:
                patience.reschedule(asyncio.get_running_loop().time())
        self._gauge.set(int(is_connected))
        telemetry.log.info("bus.connected" if is_connected else "bus.disconnected", url_count=len(self._url.split(",")))


def _entry(update: Any) -> Entry:
    is_gone = update.operation is not None or update.value is None
    return Entry(
        update.key, update.value or b"", is_gone and update.operation == "DEL", is_gone and update.operation != "DEL"
    )

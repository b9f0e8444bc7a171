"""How does a service start, say how it is, drain and stop?"""

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, TypeVar

from grpc import aio
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from proto.common_pb2 import ModelCard
from proto.events_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_READY, ReplicaRecord
from services.chassis import config, telemetry
from services.chassis.bus import Bus
from services.chassis.channel import open_channel
from services.chassis.config import ServiceSettings
from services.chassis.memory import keep_freed_memory
from services.chassis.metrics import StatusServer
from services.chassis.registry import Registry
from services.chassis.server import HouseServer
from services.chassis.tasks import end_tasks

STOP_HOOK_SECONDS = 5.0
STREAM_GRACE_SECONDS = 0.2
_USAGE = """usage: python -m services.{service} [--check-config | --help]

Settings come from the environment:
{table}
"""

S = TypeVar("S", bound=ServiceSettings)
Hook = Callable[[], Awaitable[None]]


class Service:
    """One running service: what `build` is handed, and what stops it again.

    settings: the service's own settings class.  name, replica, boot_id: who it is.  server: add servicers to it.
    metrics: a Prometheus registry of its own.  bus, registry: NATS.  address: host:port that peers dial.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings: Any = settings  # each service knows its own class
        self.name = settings.service
        self.replica = config.replica_name(settings)
        self.boot_id = uuid.uuid4().hex
        self.metrics = CollectorRegistry()
        self.server: aio.Server = HouseServer(self.metrics)
        self.bus = Bus(settings.nats_url, name=f"{self.name}/{self.replica}", metrics=self.metrics)
        self.registry = Registry(self.bus)
        self.address = ""
        self.metrics_address = ""
        self.is_ready = False
        self.is_draining = False
        self.stopping = asyncio.Event()
        self.exit_code = 0
        self._status = StatusServer(self.metrics, self.health)
        self._stage: dict[str, Any] = {"stage": "starting", "done": 0, "total": 0}
        self._record: ReplicaRecord | None = None
        self._is_ready_deferred = False
        self._channels: dict[str, aio.Channel] = {}
        self._drain_hooks: list[Hook] = []
        self._stop_hooks: list[Hook] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()

    def on_drain(self, hook: Hook) -> None:
        """Await `hook` once no new work comes: finish what is running, hand over what is owed."""
        self._drain_hooks.append(hook)

    def on_stop(self, hook: Hook) -> None:
        """Await `hook` at the very end, in reverse order of registration."""
        self._stop_hooks.append(hook)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a background task. What it raises is logged and stops the service with exit code 1."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a long start is; any thread may call it. Shown in /healthz; each new stage is logged."""
        is_new = stage != self._stage["stage"]
        self._stage = {"stage": stage, "done": done, "total": total}
        if is_new:
            telemetry.log.info("service.progress", stage=stage, done=done, total=total)

    def defer_ready(self) -> None:
        """Called in `build`: the service will call `set_ready` itself, later."""
        self._is_ready_deferred = True

    def set_ready(self) -> None:
        """Say that new work may come, to health probes and, if this replica is advertised, to its peers."""
        if self.is_draining:
            return
        self.is_ready = True
        self._stage = {"stage": "ready", "done": 1, "total": 1}
        self.spawn(self._house.set_health(is_ready=True), "set health ready")
        if self._record is not None:
            self.registry.register(self._record)
        telemetry.log.info("service.ready", address=self.address, metrics_address=self.metrics_address)

    def advertise(
        self,
        *,
        model: ModelCard | None = None,
        total_blocks: int = 0,
        tiers: Sequence[int] = (),
        ep_group: str = "",
    ) -> None:
        """Announce this replica to its peers from the moment it is ready, and keep the record fresh."""
        self._record = ReplicaRecord(
            service=self.name,
            replica=self.replica,
            boot_id=self.boot_id,
            address=self.address,
            model=model,
            state=REPLICA_STATE_READY,
            version=_version(),
            total_blocks=total_blocks,
            tiers=tiers,
            ep_group=ep_group,
        )
        if self.is_ready and not self.is_draining:
            self.registry.register(self._record)

    def channel(self, address: str, peer: str = "") -> aio.Channel:
        """Return the channel to `address`; one per address, closed when the service stops."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, peer=peer)
        return self._channels[address]

    def stop(self, exit_code: int = 0) -> None:
        """Begin to drain and stop; the first caller's exit code counts."""
        if not self.stopping.is_set():
            self.exit_code = exit_code
            self.stopping.set()

    def health(self) -> dict[str, object]:
        """Return what /healthz shows."""
        return {
            "service": self.name,
            "replica": self.replica,
            "boot_id": self.boot_id,
            "live": True,
            "ready": self.is_ready,
            **self._stage,
            "address": self.address,
        }

    async def start(self) -> None:
        """Bind both ports, answer probes, look for NATS."""
        host, _, _port = self.settings.listen.rpartition(":")
        port = self.server.add_insecure_port(self.settings.listen)
        self.address = self.settings.advertise or f"{host}:{port}"
        await self.server.start()
        self.metrics_address = await self._status.start(self.settings.metrics_listen)
        self.bus.connect()
        telemetry.log.info("service.listening", address=self.address, metrics_address=self.metrics_address)

    async def build(self, build: Callable[["Service"], Awaitable[None]]) -> None:
        """Let the service add itself, then say ready unless it wants to do so later."""
        await build(self)
        self._house.complete()
        if not self._is_ready_deferred:
            self.set_ready()

    async def shut_down(self) -> None:
        """Drain and stop: no new work, finish within drain_seconds, then the stop hooks."""
        self.is_draining, self.is_ready = True, False
        self._stage = {"stage": "draining", "done": 0, "total": 0}
        telemetry.log.info("service.draining", drain_seconds=self.settings.drain_seconds)
        await self._house.set_health(is_ready=False)
        self.registry.update(state=REPLICA_STATE_DRAINING)
        deadline = self._loop.time() + self.settings.drain_seconds
        for hook in self._drain_hooks:
            await self._guarded(hook, deadline - self._loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._house.wait_idle()
        # Shared streams never end by themselves: their requests were the drain hooks' business.
        await self.server.stop(STREAM_GRACE_SECONDS)
        for hook in reversed(self._stop_hooks):
            await self._guarded(hook, STOP_HOOK_SECONDS)
        for task in await end_tasks(tuple(self._tasks)):
            telemetry.log.warning("service.task.stuck", task=task.get_name())
        await self.registry.close()
        await self.bus.close()
        for channel in self._channels.values():
            await channel.close()
        await self._status.stop()
        await asyncio.to_thread(telemetry.shutdown)
        telemetry.log.info("service.stopped", exit_code=self.exit_code)

    @property
    def _house(self) -> HouseServer:
        assert isinstance(self.server, HouseServer)
        return self.server

    async def _guarded(self, hook: Hook, seconds: float) -> None:
        """One hook that fails or dawdles must not keep the others from running."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await hook()
        except TimeoutError:
            telemetry.log.warning("service.hook.late", hook=getattr(hook, "__qualname__", repr(hook)), seconds=seconds)
        except Exception:  # noqa: BLE001 - logged with its traceback; stopping goes on
            self.exit_code = self.exit_code or 1
            telemetry.log.exception("service.hook.failed", hook=getattr(hook, "__qualname__", repr(hook)))

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            telemetry.log.error("service.task.failed", task=task.get_name(), exc_info=exc)
            self.stop(1)


async def serve(service: Service, build: Callable[[Service], Awaitable[None]]) -> int:
    """Run a service until `service.stop()`; return its exit code."""
    try:
        await service.start()
    except OSError as exc:
        telemetry.log.error("service.start.failed", reason=str(exc))
        return 1
    building = asyncio.create_task(service.build(build), name=f"build {service.name}")
    stopping = asyncio.create_task(service.stopping.wait(), name="wait for stop")
    await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if building.done() and (failure := building.exception()) is not None:
        service.stop(_exit_code(service, failure))
    await stopping
    building.cancel()
    await asyncio.gather(building, return_exceptions=True)
    await service.shut_down()
    return service.exit_code


def _exit_code(service: Service, failure: BaseException) -> int:
    """Say why a service could not build itself: for its supervisor and for people."""
    if isinstance(failure, config.BadSettings):
        telemetry.log.error("service.build.refused", reason=str(failure))
        config.complain(type(service.settings), [str(failure)])
        return config.EXIT_CONFIG
    telemetry.log.error("service.build.failed", exc_info=failure)
    return 1


def run(settings_cls: type[S], build: Callable[[Service], Awaitable[None]]) -> NoReturn:
    """Run a service as this process: settings, signals, start, drain, exit.

    --check-config validates the environment and exits 0 or 78; --help lists the settings.
    """
    arguments = sys.argv[1:]
    usage = _USAGE.format(service=settings_cls.service, table=config.settings_table(settings_cls))
    if arguments == ["--help"]:
        sys.stdout.write(usage)
        raise SystemExit(0)
    if arguments not in ([], ["--check-config"]):
        sys.stderr.write(usage)
        raise SystemExit(config.EXIT_CONFIG)
    settings = config.load(settings_cls)
    if arguments:
        raise SystemExit(0)
    keep_freed_memory()
    asyncio.run(_main(settings, build))
    raise AssertionError("_main ends the process")


async def _main(settings: ServiceSettings, build: Callable[[Service], Awaitable[None]]) -> NoReturn:
    replica = config.replica_name(settings)
    telemetry.setup_logging(settings.service, replica, settings.log_level)
    telemetry.setup(settings.service, replica, settings.otlp_endpoint)
    service = Service(settings)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=service.metrics)
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if service.stopping.is_set():
            os._exit(128 + number)
        telemetry.log.info("service.signal", signal=number.name)
        service.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    exit_code = await serve(service, build)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a return: asyncio would wait for a model that still loads in a thread. Everything owed was done in shut_down.
    os._exit(exit_code)


def _version() -> str:
    try:
        return version("fathom")
    except PackageNotFoundError:
        return "0"

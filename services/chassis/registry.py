"""Which replicas run, and how busy are they?

Every replica writes its record to a NATS bucket under "<service>.<replica>.<boot id>" with a TTL and refreshes it;
others watch. What NATS forgets, or is not there to say, is not held against a replica: it leaves the table when it says
so itself, or when a healthy watch has heard nothing of it for the TTL.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from proto.common_pb2 import ModelCard
from proto.events_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_READY, LoadReport, ReplicaRecord, ReplicaState
from services.chassis import telemetry
from services.chassis.bus import Bus, Entry
from services.chassis.errors import NoReplica
from services.chassis.tasks import end_tasks

TTL_SECONDS = 5
REFRESH_SECONDS = 1.5
RETRY_SECONDS = 0.25

__all__ = ["REPLICA_STATE_DRAINING", "REPLICA_STATE_READY", "Registry", "Replica", "ReplicaTable"]


@dataclass(frozen=True, slots=True)
class Replica:
    """A running replica as it last described itself."""

    service: str
    replica: str
    boot_id: str
    address: str
    """host:port of its gRPC server."""
    model: ModelCard | None
    state: ReplicaState.ValueType
    total_blocks: int
    tiers: tuple[int, ...]
    """Length tiers it serves; empty means all."""
    version: str
    ep_group: str
    seen: float
    """When it was last heard of; event-loop seconds."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes new work."""
        return self.state == REPLICA_STATE_READY


class ReplicaTable:
    """What is known of one service's replicas. Reading it never waits."""

    def __init__(self, service: str, clock: Callable[[], float]) -> None:
        self.service = service
        self._clock = clock
        self._boots: dict[tuple[str, str], Replica] = {}
        """(replica, boot id) -> record, in order of first sight: a later boot replaces an earlier one."""
        self._loads: dict[str, LoadReport] = {}
        self._watching_since: float | None = None
        self._changed = asyncio.Event()

    def snapshot(self) -> tuple[Replica, ...]:
        """Return the known replicas, newest boot each, sorted by name."""
        self._expire()
        newest = {replica: record for (replica, _boot), record in self._boots.items()}
        return tuple(newest[name] for name in sorted(newest))

    def ready(self) -> tuple[Replica, ...]:
        """Return those that take new work, sorted by name."""
        return tuple(replica for replica in self.snapshot() if replica.is_ready)

    def load(self, replica: str) -> LoadReport | None:
        """Return a replica's latest load report of its present boot, if any came."""
        report = self._loads.get(replica)
        return report if report is not None and (replica, report.boot_id) in self._boots else None

    async def wait_for(self, num_replicas: int, timeout: float) -> tuple[Replica, ...]:  # noqa: ASYNC109 - a plain wait
        """Wait until that many are ready and return them; raise NoReplica after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while len(self.ready()) < num_replicas:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoReplica(f"{len(self.ready())} of {num_replicas} {self.service} replicas are ready") from None
        return self.ready()

    def take(self, entry: Entry) -> None:
        """Apply one change from the bucket."""
        _service, _, name = entry.key.partition(".")
        replica, _, boot_id = name.partition(".")
        key = replica, boot_id
        if entry.is_erased:
            self._drop(key, "withdrawn")
        elif entry.is_expired:
            # A NATS that was away expires everything on its return. Only our own clock counts.
            self._expire()
        else:
            try:
                record = ReplicaRecord.FromString(entry.value)
            except DecodeError:
                telemetry.log.warning("registry.record.unreadable", key=entry.key)
                return
            self._put(key, record)

    def take_load(self, report: LoadReport) -> None:
        """Keep a load report; latest wins."""
        self._loads[report.replica] = report

    def mark_watching(self, *, is_watching: bool) -> None:
        """Note whether silence means something: replicas expire only while the watch is healthy."""
        self._expire()
        self._watching_since = self._clock() if is_watching else None

    def _put(self, key: tuple[str, str], record: ReplicaRecord) -> None:
        if key not in self._boots:
            for older in [k for k in self._boots if k[0] == key[0]]:
                self._drop(older, "replaced")
            telemetry.log.info(
                "registry.replica.found", peer=f"{record.service}/{record.replica}", boot_id=record.boot_id
            )
        self._boots[key] = Replica(
            service=record.service,
            replica=record.replica,
            boot_id=record.boot_id,
            address=record.address,
            model=record.model if record.HasField("model") else None,
            state=record.state,
            total_blocks=record.total_blocks,
            tiers=tuple(record.tiers),
            version=record.version,
            ep_group=record.ep_group,
            seen=self._clock(),
        )
        self._changed.set()

    def _expire(self) -> None:
        if self._watching_since is None:
            return
        now = self._clock()
        for key, record in tuple(self._boots.items()):
            # A fresh watch gives everybody the time to register again: NATS may have lost its store.
            if now - max(record.seen, self._watching_since) > TTL_SECONDS:
                self._drop(key, "silent")

    def _drop(self, key: tuple[str, str], reason: str) -> None:
        record = self._boots.pop(key, None)
        if record is not None:
            telemetry.log.info("registry.replica.gone", peer=f"{record.service}/{record.replica}", reason=reason)
            self._changed.set()


class Registry:
    """Keeps this process's own record fresh, and tables of the services it watches."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tables: dict[str, ReplicaTable] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._record: ReplicaRecord | None = None
        self._is_stale = asyncio.Event()
        self._is_closed = False

    def register(self, record: ReplicaRecord) -> None:
        """Announce a replica and keep announcing it."""
        is_first = self._record is None
        self._record = record
        self._is_stale.set()
        if is_first:
            self._start(self._refresh(), "refresh replica record")

    def update(self, *, state: ReplicaState.ValueType | None = None, total_blocks: int | None = None) -> None:
        """Change the record and announce it at once; nothing happens while none is registered."""
        if self._record is None:
            return
        if state is not None:
            self._record.state = state
        if total_blocks is not None:
            self._record.total_blocks = total_blocks
        self._is_stale.set()

    async def withdraw(self) -> None:
        """Take the record back; watchers forget the replica at once."""
        record, self._record = self._record, None
        if record is not None:
            self._is_stale.set()
            await self._bus.erase(_key(record))

    def watch(self, service: str) -> ReplicaTable:
        """Return the table of a service's replicas; it fills and follows by itself."""
        if service not in self._tables:
            table = ReplicaTable(service, asyncio.get_running_loop().time)
            self._tables[service] = table
            self._start(self._follow(table), f"watch {service} replicas")
        return self._tables[service]

    async def close(self) -> None:
        """Withdraw and stop watching."""
        await self.withdraw()
        self._is_closed = True
        await end_tasks(self._tasks)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(telemetry.report_failure)
        self._tasks.append(task)

    async def _refresh(self) -> None:
        while (record := self._record) is not None:
            await self._bus.wait_connected()
            self._is_stale.clear()
            is_stored = await self._bus.store(_key(record), record.SerializeToString(), ttl_seconds=TTL_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS if is_stored else RETRY_SECONDS):
                    await self._is_stale.wait()

    async def _follow(self, table: ReplicaTable) -> None:
        self._bus.subscribe_load(table.service, table.take_load)
        while not self._is_closed:
            try:
                async with contextlib.aclosing(self._bus.watch(f"{table.service}.>")) as changes:
                    async for change in changes:
                        if change is None:
                            table.mark_watching(is_watching=True)
                        else:
                            table.take(change)
            finally:
                table.mark_watching(is_watching=False)
            await asyncio.sleep(RETRY_SECONDS)


def _key(record: ReplicaRecord) -> str:
    return f"{record.service}.{record.replica}.{record.boot_id}"

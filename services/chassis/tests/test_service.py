"""Does a service start, say how it is, drain and stop as the house wants it?"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proto.common_pb2 import ModelCard
from proto.kvstore_pb2 import LookupRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.bus import Bus
from services.chassis.config import BadSettings, child_environment
from services.chassis.registry import Registry
from services.chassis.service import Service, serve
from services.chassis.testing import NatsServer, running, until
from services.chassis.tests import probe_service
from services.chassis.tests.echo import EchoKvstore
from services.chassis.tests.probe_service import ProbeSettings

REPOSITORY = Path(__file__).resolve().parents[3]
NO_NATS = "nats://127.0.0.1:1"


def settings(**fields: Any) -> ProbeSettings:
    return ProbeSettings(**{"nats_url": NO_NATS, "drain_seconds": 2, **fields})


async def get(address: str, path: str) -> tuple[int, str]:
    """GET over a plain socket; status and body."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_healthz_and_metrics_tell_the_truth() -> None:
    """503 with the stage while loading, 200 when ready; `?live` always; metrics are the service's own."""
    seen: list[tuple[int, str]] = []

    async def build(service: Service) -> None:
        await asyncio.to_thread(service.progress, "load", 3, 8)
        seen.extend([await get(service.metrics_address, path) for path in ("/healthz", "/healthz?live")])

    async with running(settings(), build) as service:
        ready = await get(service.metrics_address, "/healthz")
        metrics = await get(service.metrics_address, "/metrics")
        wrong = await get(service.metrics_address, "/etc/passwd")

    loading = json.loads(seen[0][1])
    assert [503, 200, 200, 200, 404] == [seen[0][0], seen[1][0], ready[0], metrics[0], wrong[0]]
    assert ("load", 3, 8, False, True) == tuple(loading[key] for key in ("stage", "done", "total", "ready", "live"))
    assert (service.address, service.boot_id, "vision", "vision-0") == tuple(
        json.loads(ready[1])[key] for key in ("address", "boot_id", "service", "replica")
    )
    assert "fathom_bus_connected 0.0" in metrics[1]


async def test_ready_waits_for_a_service_that_says_so_itself() -> None:
    async def build(service: Service) -> None:
        service.defer_ready()

    async with running(settings(), build) as service:
        assert not service.is_ready
        service.set_ready()
        assert service.is_ready


async def test_draining_finishes_calls_and_runs_the_hooks_in_order() -> None:
    """Ready goes first, then drain hooks, then calls end, then stop hooks backwards; one failing hook stops nobody."""
    servicer = EchoKvstore()
    servicer.hold = asyncio.Event()
    order: list[str] = []

    async def build(started: Service) -> None:
        servicer.add(started.server)

        async def drain() -> None:
            order.append(f"drain ready={started.is_ready}")

        async def fail() -> None:
            order.append("failing")
            raise ValueError("hook")

        async def stop(name: str) -> None:
            order.append(name)

        started.on_drain(drain)
        started.on_stop(lambda: stop("first registered"))
        started.on_stop(fail)
        started.on_stop(lambda: stop("last registered"))

    async with running(settings(), build) as service:
        stub = KvstoreStub(service.channel(service.address))
        call = asyncio.ensure_future(stub.Lookup(LookupRequest(block_keys=[b"k"]), timeout=30))
        await until(lambda: servicer.num_lookups == 1)
        asyncio.get_running_loop().call_later(0.1, servicer.hold.set)
    assert 1 == (await call).num_blocks
    assert ["drain ready=False", "last registered", "failing", "first registered"] == order
    assert 1 == service.exit_code


async def test_a_background_task_that_fails_stops_the_service() -> None:
    async with running(settings(), probe_service.build) as service:
        service.spawn(asyncio.sleep(0), "harmless")

        async def doomed() -> None:
            raise ValueError("doomed")

        service.spawn(doomed(), "doomed")
        await asyncio.wait_for(service.stopping.wait(), 30)
        assert 1 == service.exit_code


async def test_settings_that_do_not_fit_the_machine_end_with_78(capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor need not retry; the reason stands where refused settings stand, above what is allowed."""

    async def build(_: Service) -> None:
        raise BadSettings("device memory: 1.00 GiB free = 2.00 GiB weights - 1.00 GiB missing")

    assert 78 == await serve(Service(settings()), build)
    said = capsys.readouterr().err
    assert "vision: bad settings\n  device memory: 1.00 GiB free" in said
    assert said.index("missing") < said.index("allowed:") < said.index("FATHOM_VISION_LISTEN")


async def test_channels_are_shared_by_address() -> None:
    async with running(settings(), probe_service.build) as service:
        assert service.channel("127.0.0.1:1") is service.channel("127.0.0.1:1")
        assert service.channel("127.0.0.1:1") is not service.channel("127.0.0.1:2")


async def test_an_advertised_replica_appears_when_ready_drains_and_leaves() -> None:
    """Peers see it from ready on, see it drain, and forget it when it stops."""
    async with NatsServer() as nats:
        bus = Bus(nats.url)
        bus.connect()
        registry = Registry(bus)
        table = registry.watch("vision")
        states: list[int] = []

        async def build(service: Service) -> None:
            service.advertise(model=ModelCard(name="m"), total_blocks=5)

            async def drain() -> None:
                await until(lambda: not table.ready() and len(table.snapshot()) == 1)
                states.append(table.snapshot()[0].state)

            service.on_drain(drain)
            await asyncio.sleep(0.1)
            assert table.snapshot() == ()

        async with running(settings(nats_url=nats.url, advertise="10.0.0.7:5000"), build) as service:
            (replica,) = await table.wait_for(1, 30)
            assert ("10.0.0.7:5000", service.boot_id, 5) == (replica.address, replica.boot_id, replica.total_blocks)
        assert [2] == states
        await until(lambda: table.snapshot() == ())
        await registry.close()
        await bus.close()


@contextlib.asynccontextmanager
async def process(**fields: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A probe service as a process; stdout is its log."""
    environment = child_environment("vision", {"nats_url": NO_NATS, **fields}, extra={"PYTHONPATH": str(REPOSITORY)})
    started = await asyncio.create_subprocess_exec(
        sys.executable, probe_service.__file__, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def until_event(started: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    assert started.stdout is not None
    async with asyncio.timeout(20):
        while line := await started.stdout.readline():
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields
    raise AssertionError(f"ended without {event}")


async def exit_code(started: asyncio.subprocess.Process, seconds: float = 20) -> int:
    assert started.stdout is not None
    async with asyncio.timeout(seconds):
        await started.stdout.read()
        return await started.wait()


@pytest.mark.slow
async def test_a_process_is_light_and_ends_on_sigterm_with_0() -> None:
    """Idle, torch-free, everything loaded that every service has: far below the 120 MiB a service may take."""
    async with process() as started:
        ready = await until_event(started, "service.ready")
        status = Path(f"/proc/{started.pid}/status").read_text()
        rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        assert 200 == (await get(ready["metrics_address"], "/healthz"))[0]
        started.send_signal(signal.SIGTERM)
        assert 0 == await exit_code(started)
    assert rss_kib < 90 * 1024


@pytest.mark.slow
async def test_a_second_signal_ends_at_once() -> None:
    """Whoever asks twice does not want to wait for the drain."""
    async with process(mode="slow") as started:
        await until_event(started, "service.ready")
        started.send_signal(signal.SIGINT)
        await until_event(started, "service.draining")
        started.send_signal(signal.SIGINT)
        assert 128 + signal.SIGINT == await exit_code(started)


@pytest.mark.slow
async def test_a_drain_that_dawdles_ends_after_drain_seconds() -> None:
    async with process(mode="slow", drain_seconds=0.5) as started:
        await until_event(started, "service.ready")
        started.send_signal(signal.SIGTERM)
        assert 0 == await exit_code(started)


@pytest.mark.slow
async def test_a_signal_while_the_model_loads_ends_the_process() -> None:
    """A thread that cannot be interrupted does not keep it alive."""
    async with process(mode="hang") as started:
        await until_event(started, "service.listening")
        await asyncio.sleep(0.2)
        started.send_signal(signal.SIGTERM)
        assert 0 == await exit_code(started)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "event"), [("crash", "service.task.failed"), ("refuse", "service.build.failed")])
async def test_a_failure_is_logged_and_ends_with_1(mode: str, event: str) -> None:
    async with process(mode=mode) as started:
        assert "ValueError" in (await until_event(started, event))["exception"]
        assert 1 == await exit_code(started)


@pytest.mark.slow
async def test_a_taken_port_ends_with_1_and_a_reason() -> None:
    async with process() as first:
        address = (await until_event(first, "service.ready"))["address"]
        async with process(listen=address) as second:
            assert address in (await until_event(second, "service.start.failed"))["reason"]
            assert 1 == await exit_code(second)

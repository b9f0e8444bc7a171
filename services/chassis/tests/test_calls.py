"""Do calls between services keep the house rules: errors, deadlines, retries, limits, metadata?"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from proto.kvstore_pb2 import BlockChunk, GetStatsRequest, LookupRequest, ReadRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis import telemetry, testing
from services.chassis.channel import MAX_MESSAGE_BYTES, open_channel
from services.chassis.errors import DeadlinePassed, InternalError, NoReplica, Overloaded, PeerLost, PromptTooLong
from services.chassis.server import HouseServer
from services.chassis.tests.echo import EchoKvstore

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest_asyncio.fixture
async def store() -> AsyncIterator[tuple[EchoKvstore, KvstoreStub]]:
    """A served EchoKvstore and a stub that talks to it."""
    servicer = EchoKvstore()
    async with testing.serve(servicer.add) as address, open_channel(address, peer="kvstore") as channel:
        yield servicer, KvstoreStub(channel)


async def test_an_error_arrives_as_it_was_raised(store) -> None:
    """Unary and streaming alike: class, message, field and retry_after."""
    servicer, stub = store
    servicer.errors = [PromptTooLong("9 tokens; at most 8", field="messages")]
    with pytest.raises(PromptTooLong, match="9 tokens; at most 8") as unary:
        await stub.Lookup(LookupRequest(), timeout=30)
    assert "messages" == unary.value.field

    servicer.errors = [Overloaded("full", retry_after=2.5)]
    with pytest.raises(Overloaded, match="full") as streaming:
        _ = [chunk async for chunk in stub.Read(ReadRequest(block_keys=[b"a"]), timeout=30)]
    assert 2.5 == streaming.value.retry_after


async def test_a_stranger_arrives_as_an_id_without_text(store) -> None:
    """The traceback is in the server's log, under the id the caller sees."""
    servicer, stub = store
    servicer.errors = [ValueError("the secret prompt")]
    with capture_logs() as logs, pytest.raises(InternalError) as caught:
        await stub.Lookup(LookupRequest(), timeout=30)

    assert "secret" not in caught.value.message
    assert caught.value.error_id == logs[0]["error_id"]
    assert isinstance(logs[0]["exc_info"], ValueError)


async def test_a_call_without_a_deadline_is_a_programming_error(store) -> None:
    _, stub = store
    with pytest.raises(TypeError, match="timeout="):
        await stub.Lookup(LookupRequest())
    with pytest.raises(TypeError, match="timeout="):
        stub.Read(ReadRequest())
    with pytest.raises(TypeError, match="timeout="):
        stub.Write(iter(()))


async def test_a_deadline_reaches_the_server_and_ends_the_call(store) -> None:
    """The caller gets DeadlinePassed on time, and the handler is cancelled."""
    servicer, stub = store
    servicer.hold = asyncio.Event()
    started = asyncio.get_running_loop().time()
    with pytest.raises(DeadlinePassed):
        await stub.Lookup(LookupRequest(), timeout=0.2)

    assert 0.15 < asyncio.get_running_loop().time() - started < 20.0
    # gRPC rounds the deadline it sends up, by at most a hundredth here.
    assert 0 < servicer.seen_remaining <= 0.21
    await asyncio.wait_for(servicer.cancelled.wait(), 30)


async def test_cancelling_our_own_task_stays_a_cancellation(store) -> None:
    """asyncio's CancelledError is not turned into an error of ours, and the server learns of it."""
    servicer, stub = store
    servicer.hold = asyncio.Event()

    async def ask() -> None:
        await stub.Lookup(LookupRequest(), timeout=30)

    task = asyncio.create_task(ask())
    await testing.until(lambda: servicer.num_lookups == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(servicer.cancelled.wait(), 30)


async def test_only_idempotent_unary_calls_are_retried(store) -> None:
    """Lookup survives two failures and not three; GetStats' own error is no reason; Read never runs twice."""
    servicer, stub = store
    servicer.errors = [PeerLost("a"), NoReplica("b")]
    assert 1 == (await stub.Lookup(LookupRequest(block_keys=[b"k"]), timeout=30)).num_blocks
    assert 3 == servicer.num_lookups

    servicer.errors = [PeerLost("a"), PeerLost("b"), PeerLost("c")]
    with pytest.raises(PeerLost, match="c"):
        await stub.Lookup(LookupRequest(), timeout=30)
    assert 6 == servicer.num_lookups

    servicer.errors = [PeerLost("a")]
    with pytest.raises(PeerLost, match="a"):
        _ = [chunk async for chunk in stub.Read(ReadRequest(block_keys=[b"a"]), timeout=30)]


async def test_nobody_there_is_peer_lost_within_the_deadline() -> None:
    """The name of the peer is in the message."""
    async with open_channel(f"127.0.0.1:{testing.free_port()}", peer="kvstore-7") as channel:
        with pytest.raises(PeerLost, match="kvstore-7"):
            await KvstoreStub(channel).Lookup(LookupRequest(), timeout=2)


async def test_messages_up_to_the_cap_pass_and_beyond_it_fail(store) -> None:
    """8 MiB less a little both ways; one more is a defect, not something to retry."""
    _, stub = store
    big = b"x" * (MAX_MESSAGE_BYTES - 1024)
    chunks = [chunk async for chunk in stub.Read(ReadRequest(block_keys=[big]), timeout=30)]
    assert big == chunks[0].block_key

    with pytest.raises(InternalError):
        await stub.Lookup(LookupRequest(block_keys=[b"x" * (MAX_MESSAGE_BYTES + 1)]), timeout=30)


async def test_many_requests_one_reply(store) -> None:
    _, stub = store
    assert 3 == (await stub.Write((BlockChunk() for _ in range(3)), timeout=30)).num_stored


async def test_request_id_and_trace_context_travel_with_a_call(store) -> None:
    """Both are on the other side without anybody passing them."""
    servicer, stub = store

    async def ask() -> None:
        telemetry.bind_request("req-7")
        with telemetry.span("caller", traceparent=PARENT):
            await stub.Lookup(LookupRequest(), timeout=30)

    await asyncio.create_task(ask())

    assert "req-7" == servicer.seen_request_id
    assert PARENT.split("-")[1] == servicer.seen_traceparent.split("-")[1]


async def test_health_tells_live_from_ready() -> None:
    """While it starts or drains a server is live and not ready, and says so under every name."""
    server = HouseServer(CollectorRegistry())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:

        async def check(name: str) -> int:
            stub: Any = HealthStub(channel)
            return int((await stub.Check(HealthCheckRequest(service=name), timeout=30)).status)

        assert [1, 2, 2] == [await check(name) for name in ("live", "ready", "")]
        await server.set_health(is_ready=True)
        assert [1, 1, 1] == [await check(name) for name in ("live", "ready", "")]
        await server.set_health(is_ready=False)
        assert [1, 2, 2] == [await check(name) for name in ("live", "ready", "")]
    await server.stop(0)


async def test_a_method_not_added_yet_is_unavailable_and_later_served() -> None:
    """A peer that calls while the model loads may retry; a method that never comes is a defect."""
    server = HouseServer(CollectorRegistry())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        stub = KvstoreStub(channel)
        with pytest.raises(NoReplica, match="still starting"):
            await stub.Lookup(LookupRequest(), timeout=30)
        server.complete()
        with pytest.raises(InternalError):
            await stub.GetStats(GetStatsRequest(), timeout=30)
        EchoKvstore().add(server)
        assert 0 == (await stub.Lookup(LookupRequest(), timeout=30)).num_blocks
    await server.stop(0)


async def test_a_taken_port_is_an_error() -> None:
    async with testing.serve() as address:
        with pytest.raises(OSError, match=address):
            HouseServer(CollectorRegistry()).add_insecure_port(address)


async def test_reflection_lists_the_real_services(store) -> None:
    async with testing.serve(EchoKvstore().add) as address:
        services = await asyncio.to_thread(_reflected, address)

    assert {"fathom.v1.Kvstore", "grpc.health.v1.Health"} <= set(services)


def _reflected(address: str) -> list[str]:
    with grpc.insecure_channel(address) as channel:
        return list(ProtoReflectionDescriptorDatabase(channel).get_services())


async def test_calls_are_counted_by_method_and_code() -> None:
    metrics = CollectorRegistry()
    server = HouseServer(metrics)
    servicer = EchoKvstore()
    servicer.add(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        await KvstoreStub(channel).Lookup(LookupRequest(), timeout=30)
        servicer.errors = [Overloaded("full")]
        with pytest.raises(Overloaded):
            await KvstoreStub(channel).Lookup(LookupRequest(), timeout=30)
    await server.stop(0)

    for code in ("OK", "RESOURCE_EXHAUSTED"):
        labels = {"method": "fathom.v1.Kvstore/Lookup", "code": code}
        assert 1 == metrics.get_sample_value("fathom_rpc_server_seconds_count", labels)

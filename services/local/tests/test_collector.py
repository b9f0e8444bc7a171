"""Do spans arrive, go on, and hold nobody up?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from services.chassis import telemetry
from services.chassis.testing import OtlpReceiver, free_port, until
from services.local.console.collector import EXPORT, MAX_WAITING_BYTES, Collector, Counts, Forwarder
from services.local.console.traces import TraceStore
from services.local.tests.span_makers import message

GOOD = message({"name": "good"}).SerializeToString()


@contextlib.asynccontextmanager
async def collecting(forward_to: str = "") -> AsyncIterator[tuple[str, TraceStore, Counts]]:
    """A collector on a free port; yields its address, what it keeps and what it counts."""
    store, counts = TraceStore(), Counts()
    forwarder = Forwarder(forward_to, {}, counts) if forward_to else None
    collector = Collector(store, counts, forwarder)
    port = await collector.start("127.0.0.1:0")
    forwarding = asyncio.create_task(forwarder.run()) if forwarder is not None else None
    yield f"127.0.0.1:{port}", store, counts
    await collector.stop()
    if forwarding is not None:
        forwarding.cancel()


async def send(address: str, *messages: bytes) -> list[grpc.StatusCode]:
    """Send messages as an exporter does; return how each was answered."""
    answers = []
    async with aio.insecure_channel(address) as channel:
        for each in messages:
            try:
                call: Any = channel.unary_unary(EXPORT)
                await call(each, timeout=30)
                answers.append(grpc.StatusCode.OK)
            except aio.AioRpcError as error:
                answers.append(error.code())
    return answers


async def test_what_the_services_send_arrives() -> None:
    """With their own exporter, which is the SDK's."""
    async with collecting() as (address, store, _):
        telemetry.setup("recipe", "recipe-0", f"http://{address}")
        with telemetry.span("entrypoint.generate") as sent:
            sent.set_attribute("fathom.replica", "prefill-0")
            sent.set_attribute("prompt", "my diary")
        await asyncio.to_thread(telemetry.shutdown)

        ((span,),) = store.newest()
        assert ("recipe", "recipe-0", "entrypoint.generate") == (span.service, span.replica, span.name)
        assert {"fathom.replica": "prefill-0"} == span.attributes


async def test_nonsense_is_counted_and_the_rest_goes_on() -> None:
    """Bytes that are no message, and one that is too large, are refused; the next good one is kept."""
    async with collecting() as (address, store, counts):
        answers = await send(address, b"\xff\xff", bytes(5 << 20), GOOD)

        assert [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK] == answers
        assert (1, 1, 1) == (len(store), counts.num_malformed_messages, counts.num_spans)


async def test_spans_go_on_to_another_collector() -> None:
    """As they came, with attributes that we do not keep ourselves."""
    async with OtlpReceiver() as other, collecting(other.endpoint) as (address, _, counts):
        await send(address, message({"name": "good", "attributes": {"their.own": "x"}}).SerializeToString())
        spans = await other.wait_for(bool)

        assert [("good", {"their.own": "x"})] == [(span.name, span.attributes) for span in spans]
        await until(lambda: counts.num_forwarded_messages == 1)


async def test_a_collector_that_is_away_costs_nobody_anything() -> None:
    """Senders are answered at once; what could not go on is counted."""
    async with collecting(f"http://127.0.0.1:{free_port()}") as (address, store, counts):
        async with asyncio.timeout(30):
            assert 20 * [grpc.StatusCode.OK] == await send(address, *(20 * [GOOD]))

        assert 1 == len(store)
        await until(lambda: counts.num_unforwarded_messages > 0)


async def test_a_collector_that_hangs_makes_the_oldest_be_dropped() -> None:
    """What waits for it is bounded in bytes."""
    counts = Counts()
    forwarder = Forwarder("http://127.0.0.1:1", {}, counts)
    for _ in range(5):
        forwarder.put(bytes(MAX_WAITING_BYTES // 4))

    assert 1 == counts.num_unforwarded_messages


async def test_a_taken_port_is_an_error() -> None:
    """The supervisor then starts the console again, rather than two sharing the spans."""
    async with collecting() as (address, _, _):
        with pytest.raises(RuntimeError):
            await Collector(TraceStore(), Counts(), None).start(address)

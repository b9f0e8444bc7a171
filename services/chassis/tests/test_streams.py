"""Does a shared stream carry many requests, and notice at once when its other end is gone?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from proto.common_pb2 import Heartbeat, Request, TokenEvent, TokenFrame
from proto.decode_pb2 import DecodeCommand, DecodeSubmit
from proto.decode_pb2_grpc import DecodeStub
from services.chassis import names, telemetry, testing
from services.chassis import server as server_module
from services.chassis.channel import open_channel
from services.chassis.errors import Overloaded, PeerLost
from services.chassis.streams import FrameSender, PeerStream
from services.chassis.tests.echo import EchoDecode, token_frame

Stream = PeerStream[DecodeCommand, TokenFrame]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def events_of(frame: TokenFrame) -> Iterable[tuple[str, TokenEvent]]:
    return ((event.request_id, event) for event in frame.events)


def submit(request_id: str, *token_ids: int) -> DecodeCommand:
    return DecodeCommand(submit=DecodeSubmit(request=Request(request_id=request_id, prompt_token_ids=token_ids)))


@contextlib.asynccontextmanager
async def stream_to(address: str, **options: Any) -> AsyncIterator[Stream]:
    async with open_channel(address, peer="decode-0") as channel:
        stub = DecodeStub(channel)
        stream: Stream = PeerStream(
            stub.Run, lambda: DecodeCommand(heartbeat=Heartbeat()), events_of, "decode-0", **options
        )
        try:
            yield stream
        finally:
            await stream.close()


async def take(subscription: Any, count: int) -> list[int]:
    async with asyncio.timeout(30):
        return [(await anext(subscription)).token_ids[0] for _ in range(count)]


async def test_requests_share_one_stream_and_keep_their_order() -> None:
    """Two requests, one RPC; each sees its own events only, in order."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address) as stream:
        a, b = await stream.open_request("a"), await stream.open_request("b")
        await stream.send(submit("a", 1, 2, 3))
        await stream.send(submit("b", 7, 8))
        assert [1, 2, 3] == await take(a, 3)
        assert [7, 8] == await take(b, 2)
    assert 1 == servicer.num_streams


async def test_a_shared_stream_names_no_request() -> None:
    """It outlives the request that opened it; others must not be logged or traced under that one's name."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address) as stream:

        async def ask() -> None:
            telemetry.bind_request("req-7")
            with telemetry.span("caller", traceparent=PARENT):
                subscription = await stream.open_request("req-7")
                await stream.send(submit("req-7", 5))
                assert [5] == await take(subscription, 1)

        await asyncio.create_task(ask())

    assert servicer.seen_metadata
    assert set() == servicer.seen_metadata & {names.TRACEPARENT, names.REQUEST_ID_METADATA}


async def test_a_lost_peer_wakes_every_request_within_milliseconds() -> None:
    """Events that had come are still read; then PeerLost; the next request opens a new stream."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address) as stream:
        waiting = [await stream.open_request(name) for name in ("a", "b", "c")]
        await stream.send(submit("a", 5))
        await testing.until(lambda: bool(servicer.commands))
        assert servicer.sender is not None
        servicer.sender.close()
        started = asyncio.get_running_loop().time()
        assert [5] == await take(waiting[0], 1)
        for subscription in waiting:
            with pytest.raises(PeerLost, match="decode-0"):
                await asyncio.wait_for(anext(subscription), 30)
        assert (
            asyncio.get_running_loop().time() - started < 5.0
        )  # milliseconds, where nothing else runs; not the silence limit
        with pytest.raises(PeerLost):
            await stream.send(submit("a", 6))

        again = await stream.open_request("a2")
        await stream.send(submit("a2", 9))
        assert [9] == await take(again, 1)
    assert 2 == servicer.num_streams


async def test_nobody_there_is_peer_lost_and_backoff_grows_and_ends() -> None:
    """Attempts in a row wait longer each; the stream works once somebody listens."""
    port = testing.free_port()
    async with stream_to(f"127.0.0.1:{port}") as stream:
        for _ in range(3):
            with pytest.raises(PeerLost, match="cannot be reached"):
                await asyncio.wait_for(stream.open_request("a"), 15)
        assert not stream.is_open


async def test_silence_is_a_loss() -> None:
    """A peer that sends not even heartbeats is lost after the silence limit."""
    servicer = EchoDecode(heartbeat_seconds=60)
    async with (
        testing.serve(servicer.add) as address,
        stream_to(address, heartbeat_seconds=0.05, silence_seconds=0.3) as stream,
    ):
        subscription = await stream.open_request("a")
        with pytest.raises(PeerLost, match="silent"):
            await asyncio.wait_for(anext(subscription), 30)


async def test_heartbeats_keep_an_idle_stream_alive() -> None:
    """Nothing to say for longer than the silence limit is no loss, on either side."""
    servicer = EchoDecode(heartbeat_seconds=0.05, silence_seconds=1.5)
    async with (
        testing.serve(servicer.add) as address,
        stream_to(address, heartbeat_seconds=0.05, silence_seconds=1.5) as stream,
    ):
        subscription = await stream.open_request("a")
        await asyncio.sleep(2)
        await stream.send(submit("a", 4))
        assert [4] == await take(subscription, 1)


async def test_a_silent_client_is_noticed_by_the_server() -> None:
    """Its stream ends, so that its requests are freed."""
    servicer = EchoDecode(silence_seconds=0.2)
    async with testing.serve(servicer.add) as address, stream_to(address, heartbeat_seconds=60) as stream:
        subscription = await stream.open_request("a")
        await asyncio.wait_for(servicer.ended.wait(), 30)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(anext(subscription), 30)


async def test_a_client_that_leaves_ends_the_servers_stream() -> None:
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address:
        async with stream_to(address) as stream:
            await stream.open_request("a")
            await testing.until(lambda: servicer.num_streams == 1)
        await asyncio.wait_for(servicer.ended.wait(), 30)
        assert servicer.sender is not None
        assert servicer.sender.closed.is_set()


async def test_a_gap_in_the_frame_numbers_is_a_loss() -> None:
    """Tokens are missing somewhere: no request on the stream may go on."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address) as stream:
        subscription = await stream.open_request("a")
        await testing.until(lambda: servicer.sender is not None)
        assert servicer.sender is not None
        servicer.sender._sequence += 1
        await stream.send(submit("a", 1))
        with pytest.raises(PeerLost, match="frame 2 came instead of 1"):
            await asyncio.wait_for(anext(subscription), 30)


async def test_a_slow_reader_ends_its_own_request_and_no_other() -> None:
    """Its queue is bounded; what was queued is still read, then Overloaded; the neighbour runs on."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address, max_events=4) as stream:
        slow, quick = await stream.open_request("slow"), await stream.open_request("quick")
        await stream.send(submit("slow", *range(10)))
        await stream.send(submit("quick", 1, 2))
        assert [1, 2] == await take(quick, 2)
        assert [0, 1, 2, 3] == await take(slow, 4)
        with pytest.raises(Overloaded):
            await take(slow, 1)
        await stream.send(submit("quick", 3))
        assert [3] == await take(quick, 1)


async def test_cancelling_a_sender_or_reader_leaves_the_stream_whole() -> None:
    """A request's task may be cancelled anywhere without hurting the requests beside it."""
    servicer = EchoDecode()
    async with testing.serve(servicer.add) as address, stream_to(address) as stream:
        kept = await stream.open_request("kept")

        async def other() -> None:
            async with await stream.open_request("other") as subscription:
                await stream.send(submit("other", 1))
                while True:
                    await anext(subscription)

        for delay in (0, 0.001, 0.01):
            task = asyncio.create_task(other())
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await stream.send(submit("kept", 1))
        assert [1] == await take(kept, 1)
    assert 1 == servicer.num_streams


async def test_what_is_put_in_one_turn_leaves_in_one_frame() -> None:
    """One message per step, however many requests it concerns; frames are counted from 1; silence gives empty ones."""
    sender = FrameSender(token_frame, heartbeat_seconds=0.05)
    frames = sender.frames()
    first = asyncio.create_task(anext(frames))
    await asyncio.sleep(0)
    for name in ("a", "b", "c"):
        sender.put(TokenEvent(request_id=name))

    frame = await asyncio.wait_for(first, 30)
    beat = await asyncio.wait_for(anext(frames), 30)

    assert (["a", "b", "c"], 1) == ([event.request_id for event in frame.events], frame.sequence)
    assert ([], 2) == (list(beat.events), beat.sequence)
    sender.put(TokenEvent(request_id="d"))
    sender.close()
    assert ["d"] == [event.request_id for event in (await anext(frames)).events]
    with pytest.raises(StopAsyncIteration):
        await anext(frames)


async def test_a_peer_that_never_reads_closes_the_sender() -> None:
    """The buffer is bounded, and `closed` tells the engine to free the requests."""
    sender = FrameSender(token_frame, max_pending_events=10)
    for _ in range(11):
        sender.put(TokenEvent())

    assert sender.closed.is_set()
    assert [] == [frame async for frame in sender.frames()]


async def test_a_client_that_stops_reading_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's write gives up after its limit and the handler's cleanup runs."""
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.2)
    servicer = EchoDecode(silence_seconds=60)
    async with testing.serve(servicer.add) as address, open_channel(address) as channel:
        call: Any = DecodeStub(channel).Run()
        await call.write(submit("a", 1))
        assert 1 == (await call.read()).sequence
        assert servicer.sender is not None
        for _ in range(40):
            servicer.sender.put(TokenEvent(token_ids=[2**31] * 100_000))
            await asyncio.sleep(0.005)
        await asyncio.wait_for(servicer.ended.wait(), 15)
        call.cancel()

"""Who listens for blocks that come past gRPC, and how do they reach the engine?"""

import asyncio
import socket
import struct
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proto.decode_pb2 import AbortRequest
from services.chassis.errors import BlocksLost, FathomError, InvalidRequest, PeerLost
from services.chassis.handoff import PeerStaging, block_xxh3
from services.chassis.handoff_lane import LaneUnavailableError, connect_beside, end_runs, send_run
from services.decode import lanes as subject
from services.decode.tests.lane_peer import open_lane, send
from services.decode.tests.rig import collect, decode_replica, request, tokens_of, until

SOON = 8.0
"""Seconds. One is the promise, where nobody else uses the machine; nothing else that ends a handoff comes so early."""


@pytest.fixture
async def rig(folder):
    """A replica that shares no memory and listens."""
    async with decode_replica(folder, has_lanes=True) as running:
        yield running
        await running.idle()


def used(rig):
    return rig.replica.engine.load.used_blocks


def late_writes(rig):
    return rig.replica.intake._counters._late_writes._value.get()


async def outcome(call):
    """Return the error that ends the call that holds room."""
    try:
        async with asyncio.timeout(SOON):
            while True:
                await call.read()
    except FathomError as error:
        return error


async def test_blocks_that_travel_on_a_lane_give_the_one_process_answer(rig):
    """And are counted as such."""
    wanted = request("travels", 100)
    expected = rig.source.answer(wanted)

    assert expected == await rig.answer(wanted)
    assert 1 == rig.replica.intake._counters._handoffs.labels("tcp")._value.get()


async def test_blocks_land_before_the_commit_where_nobody_finds_them(rig):
    """While others still travel; the pool has no name for them before the sequence starts."""
    wanted = request("early", 40)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    landing = rig.replica.intake._handoffs[reply.ticket.epoch].landing
    lane = await open_lane(reply, shares_file=False)
    send_run(lane, 0, 2, [memoryview(block) for block in computed.blocks[:2]])
    await until(lambda: {0, 1} == set(landing._checksums))
    pool = rig.replica.engine._pool
    assert (0, 3) == (len(pool._block_of), pool.used_blocks)
    send_run(lane, 2, 1, [memoryview(computed.blocks[2])])
    end_runs(lane)
    lane.close()
    events = await rig.submit(wanted)
    await rig.commit(wanted, reply, [block_xxh3(block) for block in computed.blocks], computed.first_token_id)
    assert rig.source.answer(wanted)[1:] == tokens_of(await collect(events))


async def test_what_is_written_to_the_file_after_the_commit_changes_nothing(folder, tmp_path):
    """Decode sums its own copy: whoever still maps the file writes where nobody reads."""
    async with decode_replica(folder, shm=tmp_path, has_lanes=True) as rig:
        wanted = request("after", 40)
        expected = rig.source.answer(wanted)
        computed = rig.source.prompt(wanted)
        reply = await rig.reserve(wanted)
        size = rig.source.executor.layout.block_bytes
        area = PeerStaging(reply.shm_path, nonce=reply.ticket.nonce, num_blocks=3, block_bytes=size)
        crcs = await rig.push(reply, computed.blocks)
        await rig.commit(wanted, reply, crcs, computed.first_token_id)
        for place in range(3):
            area.block(place)[:] = bytes(size)
        events = await rig.submit(wanted)
        assert expected[1:] == tokens_of(await collect(events))
        await rig.idle()


@pytest.mark.parametrize("trouble", ["corrupted", "swapped", "missing"])
async def test_what_is_not_what_was_summed_starts_nothing(rig, trouble):
    """A flipped bit, two blocks in each other's place, a block that never came."""
    wanted = request(trouble, 40)
    first, second, third = rig.source.prompt(wanted).blocks
    crcs = [block_xxh3(block) for block in (first, second, third)]
    sent = {
        "corrupted": (bytes([first[0] ^ 4]) + first[1:], second, third),
        "swapped": (second, first, third),
        "missing": (first, second),
    }[trouble]
    reply = await rig.reserve(wanted)
    await asyncio.to_thread(send, await open_lane(reply, shares_file=False), sent)
    with pytest.raises(BlocksLost, match="damaged"):
        await rig.commit(wanted, reply, crcs, 5)
    await rig.idle()
    assert 0 == rig.replica.engine.load.cached_blocks


@pytest.mark.parametrize("change", [{"nonce": bytes(16)}, {"epoch": 999}], ids=["nonce", "epoch"])
async def test_a_ticket_that_is_stale_or_guessed_is_not_let_in(rig, change):
    """Nor is a second connection of the right one, or one after the end."""
    reply = await rig.reserve(request("door", 40))
    true = reply.ticket.SerializeToString()
    for field, value in change.items():
        setattr(reply.ticket, field, value)
    with pytest.raises(LaneUnavailableError):
        await open_lane(reply, shares_file=False)
    reply.ticket.ParseFromString(true)
    lane = await open_lane(reply, shares_file=False)
    with pytest.raises(LaneUnavailableError):
        await open_lane(reply, shares_file=False)
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
    assert b"" == await asyncio.to_thread(lane.recv, 1)
    lane.close()
    with pytest.raises(LaneUnavailableError):
        await open_lane(reply, shares_file=False)


async def test_late_runs_reach_nothing(rig):
    """The engine takes what it was given after the abort for nobody's: the next sequence has those blocks."""
    wanted, other = request("aborted", 40), request("other", 40)
    computed, theirs = rig.source.prompt(wanted), rig.source.prompt(other)
    expected = rig.source.answer(other)
    reply = await rig.reserve(wanted)
    landing = rig.replica.intake._handoffs[reply.ticket.epoch].landing
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
    await until(lambda: not used(rig))
    room = await rig.reserve(other)
    crcs = await rig.push(room, theirs.blocks)
    landing.land(0, [memoryview(block) for block in computed.blocks], lambda: None)
    events = await rig.submit(other)
    await rig.commit(other, room, crcs, theirs.first_token_id)

    assert expected[1:] == tokens_of(await collect(events))
    assert 1 == late_writes(rig)


async def test_a_lane_that_breaks_in_the_middle_of_a_run_ends_the_handoff(rig):
    """The holder hears so within a second, and the room is free."""
    wanted = request("breaks", 40)
    call, reply = await rig.hold(wanted)
    lane = await open_lane(reply, shares_file=False)
    lane.sendall(struct.pack("<IIIQ", 0, 1, 0, rig.source.executor.layout.block_bytes) + b"half")
    lane.close()

    assert isinstance(await outcome(call), PeerLost)


@pytest.mark.parametrize(
    ("first", "num_blocks", "num_bytes"),
    [(3, 1, None), (2, 2, None), (0, 1, 5), (0, 1, 0), (0, 0, 5), (1 << 31, 1 << 31, 1 << 50)],
)
async def test_nonsense_on_a_lane_ends_the_handoff(rig, first, num_blocks, num_bytes):
    """A run outside the reservation or of another size never reaches the pool, and takes no memory."""
    call, reply = await rig.hold(request("nonsense", 40))
    lane = await open_lane(reply, shares_file=False)
    size = num_blocks * rig.source.executor.layout.block_bytes if num_bytes is None else num_bytes
    lane.sendall(struct.pack("<IIIQ", first, num_blocks, 0, size))

    assert isinstance(await outcome(call), InvalidRequest)
    lane.close()


async def test_a_block_that_comes_twice_ends_the_handoff(rig):
    """The second one could land when the sums of the first were compared already."""
    wanted = request("again", 40)
    block = memoryview(rig.source.prompt(wanted).blocks[0])
    call, reply = await rig.hold(wanted)
    lane = await open_lane(reply, shares_file=False)
    send_run(lane, 0, 1, [block])
    send_run(lane, 0, 1, [block])

    assert "twice" in (await outcome(call)).message
    lane.close()


async def test_a_lane_and_a_push_do_not_bring_the_same_blocks(rig):
    """Whichever is second is refused while the first is open, and the first goes on."""
    wanted = request("both", 40)
    computed = rig.source.prompt(wanted)
    crcs = [block_xxh3(block) for block in computed.blocks]
    expected = rig.source.answer(wanted)[1:]
    reply = await rig.reserve(wanted)
    lane = await open_lane(reply, shares_file=False)
    with pytest.raises(BlocksLost, match="a lane brings"):
        await rig.stub.Push(rig._chunks(reply, computed.blocks, b""), timeout=30)
    await asyncio.to_thread(send, lane, computed.blocks)
    events = await rig.submit(wanted)
    await rig.commit(wanted, reply, crcs, computed.first_token_id)
    assert expected == tokens_of(await collect(events))

    other = request("push", 40)
    computed = rig.source.prompt(other)
    call, reply = await rig.hold(other)
    pushing, go_on = await rig.begin_push(reply, list(rig._chunks(reply, computed.blocks, b"")))
    handoff = rig.replica.intake._handoffs[reply.ticket.epoch]
    with pytest.raises(LaneUnavailableError):
        await open_lane(reply, shares_file=False)
    go_on.set()
    await pushing
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
    with pytest.raises(BlocksLost, match="aborted"):
        await call.read()
    assert not handoff.is_pushed


def test_a_lane_for_which_nothing_has_to_travel_is_refused():
    """With an error that says so."""
    landing: Any = SimpleNamespace(num_blocks=0, block_bytes=100, window_bytes=0)
    staging: Any = None
    ours, theirs = socket.socketpair()
    with ours, theirs, asyncio.Runner() as runner:

        async def receive():
            return subject.Lane(ours, landing, staging, shares_file=False).receive()

        error = runner.run(receive())
    assert isinstance(error, InvalidRequest)
    assert "no bytes" in error.message


async def test_who_shares_the_folder_needs_no_port(folder):
    """The lane beside the files lets the same tickets in; a folder with too long a name has none."""
    with tempfile.TemporaryDirectory() as short:
        async with decode_replica(folder, shm=Path(short), has_lanes=True) as rig:
            reply = await rig.reserve(request("beside", 40))
            file = Path(reply.shm_path)
            reply.ticket.nonce = bytes(16)
            with pytest.raises(LaneUnavailableError, match="ticket"):
                await asyncio.to_thread(connect_beside, file, reply.ticket)
            reply.ticket.nonce = bytes.fromhex(file.name)
            (await asyncio.to_thread(connect_beside, file, reply.ticket)).close()
            rig.replica.intake.abort(reply.ticket, "enough")
        assert [] == [*Path(short).iterdir()]
        long = Path(short) / ("x" * 100)
        long.mkdir()
        async with decode_replica(folder, shm=long, has_lanes=True) as rig:
            wanted = request("long", 40)
            assert rig.source.answer(wanted) == await rig.answer(wanted)
            await rig.idle()


async def test_who_says_nothing_is_hung_up_on(rig, monkeypatch):
    """A stranger on the port costs a moment, and neither a thread nor a reservation."""
    monkeypatch.setattr(subject, "CONNECT_SECONDS", 0.1)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(30)):
        with socket.create_connection(("127.0.0.1", rig.replica.intake.lane_port), timeout=30) as stranger:
            stranger.sendall(said)
            began = time.monotonic()
            assert b"" == await asyncio.to_thread(_read, stranger)
            assert time.monotonic() - began < SOON


def _read(connection):
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


async def test_a_lane_that_is_still_open_at_the_commit_is_no_commit(rig, monkeypatch):
    """Nothing may come behind what was verified."""
    monkeypatch.setattr("services.decode.intake.LAND_SECONDS", 0.1)
    wanted = request("open", 40)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    with await open_lane(reply, shares_file=False) as lane:
        send_run(lane, 0, 3, [memoryview(block) for block in computed.blocks])
        with pytest.raises(BlocksLost, match="still open"):
            await rig.commit(wanted, reply, [block_xxh3(block) for block in computed.blocks], computed.first_token_id)
    await rig.idle()

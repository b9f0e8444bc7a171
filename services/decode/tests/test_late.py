"""Which tickets and pieces come too late?"""

import asyncio
import threading

import pytest

from proto.decode_pb2 import CommitRequest, PushChunk
from services.chassis.errors import BlocksLost, InvalidRequest
from services.chassis.handoff import block_crc32, block_xxh3
from services.chassis.handoff_push import parse_piece
from services.decode.tests.rig import collect, decode_replica, request, tokens_of, until


async def test_a_ticket_commits_once_also_while_nobody_asks_for_its_sequence(rig):
    """The first commit stands, before the request itself has come."""
    wanted = request("twice", 40, max_tokens=6)
    expected = rig.source.answer(wanted)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    crcs = await rig.push(reply, computed.blocks)
    await rig.commit(wanted, reply, crcs, computed.first_token_id)
    with pytest.raises(BlocksLost):
        await rig.commit(wanted, reply, crcs, computed.first_token_id + 1)
    events = await rig.submit(wanted)

    assert expected[1:] == tokens_of(await collect(events))


async def test_a_piece_that_comes_during_the_commit_ends_the_handoff(folder):
    """What was verified is what is written: an open Push cannot change it behind the commit's back."""
    async with decode_replica(folder, shm=None) as rig:
        wanted = request("late", 40)
        computed = rig.source.prompt(wanted)
        reply = await rig.reserve(wanted)
        intake = rig.replica.intake
        handoff = intake._handoffs[reply.ticket.epoch]
        chunks = list(rig._chunks(reply, computed.blocks, b""))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def pieces():
            for chunk in chunks:
                yield parse_piece(chunk.SerializeToString())
            begun.set()
            await go_on.wait()
            yield parse_piece(chunks[0].SerializeToString())

        pushing = asyncio.create_task(intake.push(pieces()))
        await begun.wait()
        held = threading.Event()
        intake._thread.post(held.wait, 40)
        commit = CommitRequest(
            ticket=reply.ticket,
            block_xxh3=[block_xxh3(b) for b in computed.blocks],
            kv_tokens=40,
            first_token_id=computed.first_token_id,
        )
        committing = asyncio.create_task(intake.commit(commit))
        await until(lambda: handoff.state.value in {"committing", "landed"})
        go_on.set()
        try:
            with pytest.raises(BlocksLost):
                await asyncio.wait_for(pushing, 30)
        finally:
            held.set()
            await asyncio.gather(committing, return_exceptions=True)
        intake.abort_request("late")
        await rig.idle()


async def test_a_second_push_on_a_ticket_is_refused_and_harms_nothing(folder):
    """What lands is counted by one writer. The first one goes on; after it there may be another."""
    async with decode_replica(folder, shm=None) as rig:
        wanted = request("two", 40)
        computed = rig.source.prompt(wanted)
        call, reply = await rig.hold(wanted)
        chunks = list(rig._chunks(reply, computed.blocks, b""))
        first, go_on = await rig.begin_push(reply, chunks[:2])
        with pytest.raises(BlocksLost, match="a push brings"):
            await rig.stub.Push(iter(chunks), timeout=30)
        go_on.set()
        await first
        chunks[2].ticket.CopyFrom(reply.ticket)
        await rig.stub.Push(iter(chunks[2:]), timeout=30)
        events = await rig.submit(wanted)
        await rig.commit(wanted, reply, [block_xxh3(b) for b in computed.blocks], computed.first_token_id)
        assert rig.source.answer(wanted)[1:] == tokens_of(await collect(events))
        call.cancel()
        await rig.idle()


@pytest.mark.parametrize("piece_bytes", [4 << 20, 1000], ids=["whole", "parts"])
async def test_pieces_land_while_others_travel_whole_or_in_parts(folder, monkeypatch, piece_bytes):
    """The commit has only their sums to compare; a block that comes again ends the handoff."""
    monkeypatch.setattr("services.chassis.handoff_push.PIECE_BYTES", piece_bytes)
    async with decode_replica(folder, shm=None) as rig:
        wanted, again = request("early", 40), request("again", 40)
        computed = rig.source.prompt(wanted)
        reply = await rig.reserve(wanted)
        landing = rig.replica.intake._handoffs[reply.ticket.epoch].landing
        assert landing is not None
        crcs = await rig.push(reply, computed.blocks)
        await until(lambda: {0, 1, 2} == set(landing._checksums))
        events = await rig.submit(wanted)
        await rig.commit(wanted, reply, crcs, computed.first_token_id)
        assert rig.source.answer(wanted)[1:] == tokens_of(await collect(events))

        reply = await rig.reserve(again)
        await rig.push(reply, computed.blocks)
        with pytest.raises(InvalidRequest, match="twice"):
            await rig.push(reply, computed.blocks[:1])
        await rig.idle()


@pytest.mark.parametrize(
    "where", [{"block_index": 3}, {"is_window": True}, {"block_index": 1 << 31}], ids=["behind", "window", "far"]
)
async def test_whole_pieces_that_nobody_waits_for_are_refused(folder, where):
    """They would be counted as one of those that are missing."""
    async with decode_replica(folder, shm=None) as rig:
        reply = await rig.reserve(request("nowhere", 40))
        block = bytes(0 if "is_window" in where else rig.source.executor.layout.block_bytes)
        piece = PushChunk(ticket=reply.ticket, data=block, crc32=block_crc32(block), **where)
        with pytest.raises(InvalidRequest):
            await rig.stub.Push(iter([piece]), timeout=30)
        await rig.idle()


async def test_an_engine_that_takes_nothing_is_not_waited_for_for_ever(folder, monkeypatch):
    """Neither by the commit, nor by a Push that has brought as much as may wait."""
    monkeypatch.setattr("services.decode.landing.LAND_SECONDS", 0.2)
    monkeypatch.setattr("services.decode.landing.QUEUED_BYTES", 0)
    async with decode_replica(folder, shm=None) as rig:
        wanted = request("stuck", 40)
        computed = rig.source.prompt(wanted)
        for is_pushed in (True, False):
            reply = await rig.reserve(wanted)
            held = threading.Event()
            rig.replica.intake._thread.post(held.wait, 40)
            try:
                with pytest.raises(BlocksLost, match="in time"):
                    if is_pushed:
                        await rig.push(reply, computed.blocks)
                    await rig.commit(wanted, reply, [block_xxh3(b) for b in computed.blocks], 5)
            finally:
                held.set()
        await rig.idle()


async def test_a_push_that_has_brought_as_much_as_may_wait_goes_on_when_the_engine_has_taken_it(folder, monkeypatch):
    """The engine's thread says so: it may be in a long step, and the event loop does not look again by itself."""
    monkeypatch.setattr("services.decode.landing.LAND_SECONDS", 5.0)
    monkeypatch.setattr("services.decode.landing.QUEUED_BYTES", 0)
    async with decode_replica(folder, shm=None) as rig:
        wanted = request("waits", 40)
        computed = rig.source.prompt(wanted)
        reply = await rig.reserve(wanted)
        landing = rig.replica.intake._handoffs[reply.ticket.epoch].landing
        assert landing is not None
        held = threading.Event()
        rig.replica.intake._thread.post(held.wait, 40)
        pushing = asyncio.create_task(rig.push(reply, computed.blocks))
        await until(lambda: landing._has_room is not None)
        assert {0} == landing._begun
        held.set()
        await rig.commit(wanted, reply, await pushing, computed.first_token_id)
        events = await rig.submit(wanted)
        assert rig.source.answer(wanted)[1:] == tokens_of(await collect(events))
        await rig.idle()

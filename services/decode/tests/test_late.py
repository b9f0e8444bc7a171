"""Which tickets and pieces come too late?"""

import asyncio
import threading

import pytest

from proto.decode_pb2 import CommitRequest
from services.chassis.errors import BlocksLost
from services.chassis.handoff import block_xxh3
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
                yield chunk
            begun.set()
            await go_on.wait()
            yield chunks[0]

        pushing = asyncio.create_task(intake.push(pieces()))
        await begun.wait()
        held = threading.Event()
        intake._thread.post(held.wait, 10)
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
                await asyncio.wait_for(pushing, 9)
        finally:
            held.set()
            await asyncio.gather(committing, return_exceptions=True)
        intake.abort_request("late")
        await rig.idle()

"""Who hears of it, and how soon, when one side of a handoff goes?"""

import asyncio
import sys
import time

import pytest
from grpc import aio

from proto.decode_pb2 import AbortRequest
from services.chassis.errors import BlocksLost, Cancelled, FathomError, PeerLost
from services.chassis.handoff import PeerStaging
from services.decode.tests.rig import BLOCK, collect, decode_replica, request, tokens_of, until

SOON = 5.0
"""Seconds. One is the promise, on a quiet machine; nothing else that ends a handoff comes so early."""


async def outcome(call):
    """Return what ends the call that holds room: None after a commit; fail when it takes longer than promised."""
    try:
        async with asyncio.timeout(SOON):
            while await call.read() is not aio.EOF:
                pass
    except FathomError as error:
        return error
    return None


def aborts(rig, reason):
    return rig.replica.intake._counters._aborts.labels(reason)._value.get()


async def test_a_held_handoff_ends_well_with_its_commit(rig):
    """The holder hears of the commit, and the answer is the one-process answer."""
    wanted = request("held", 40)
    expected = rig.source.answer(wanted)
    computed = rig.source.prompt(wanted)
    events = await rig.submit(wanted)
    call, reply = await rig.hold(wanted)
    await rig.commit(wanted, reply, await rig.push(reply, computed.blocks), computed.first_token_id)

    assert await outcome(call) is None
    assert expected[1:] == tokens_of(await collect(events))


async def test_a_holder_that_goes_frees_its_room_at_once(rig):
    """Long before the ticket expires; the request that waits for the KV is told, and its id is refused from then on."""
    wanted = request("gone", 40)
    events = await rig.submit(wanted)
    call, reply = await rig.hold(wanted)
    await rig.push(reply, rig.source.prompt(wanted).blocks)
    gone = time.monotonic()
    call.cancel()
    (event,) = await collect(events)

    assert ("PeerLost", True) == (event.error.kind, time.monotonic() - gone < SOON)
    await rig.idle()
    assert 1 == aborts(rig, "lost")
    with pytest.raises(Cancelled):
        await rig.reserve(wanted)


async def test_an_abort_ends_the_hold(rig):
    """With the reason that was given."""
    wanted = request("aborted", 40)
    call, reply = await rig.hold(wanted)
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket, reason="changed its mind"), timeout=30)

    error = await outcome(call)
    assert isinstance(error, BlocksLost)
    assert "changed its mind" in error.message
    assert 1 == aborts(rig, "abort")


async def test_a_cancel_on_the_decode_side_reaches_the_holder(rig):
    """Prefill need not find out by pushing."""
    wanted = request("cancelled", 40)
    await rig.submit(wanted)
    call, _ = await rig.hold(wanted)
    await rig.cancel(wanted.request_id)

    assert isinstance(await outcome(call), Cancelled)


async def test_damage_is_said_to_the_holder_too(rig):
    """The push's own status may get lost on the way; this one does not."""
    wanted = request("damaged", 40)
    call, reply = await rig.hold(wanted)
    computed = rig.source.prompt(wanted)
    crcs = await rig.push(reply, computed.blocks)
    with pytest.raises(BlocksLost):
        await rig.commit(wanted, reply, [crcs[0] ^ 1, *crcs[1:]], computed.first_token_id)

    error = await outcome(call)
    assert isinstance(error, BlocksLost)
    assert "damaged" in error.message


async def test_a_cancel_that_overtakes_the_reservation_wins(rig):
    """KV that comes for a request that has ended here is not waited for: no room, no thirty seconds."""
    wanted = request("overtaken", 40)
    await rig.submit(wanted)
    await rig.cancel(wanted.request_id)
    refused = rig.replica.intake._refused  # another connection carries Hold: the cancel must have come before it
    await until(lambda: wanted.request_id in refused)
    with pytest.raises(Cancelled):
        await rig.hold(wanted)
    unknown = request("never-seen", 40)
    await rig.cancel(unknown.request_id)
    await until(lambda: unknown.request_id in refused)
    with pytest.raises(Cancelled):
        await rig.reserve(unknown)


async def test_a_holder_that_goes_while_it_waits_for_room_leaves_nothing(folder):
    """Its place in the line is given up with the call."""
    async with decode_replica(folder, num_blocks=9) as rig:
        call, _ = await rig.hold(request("first", 6 * BLOCK))
        waiting = asyncio.create_task(rig.hold(request("second", 4 * BLOCK)))
        await until(lambda: rig.replica.engine.load.queued_sequences)
        waiting.cancel()
        await until(lambda: not rig.replica.engine.load.queued_sequences)
        call.cancel()
        await rig.idle()


async def test_late_pieces_are_counted_and_kept_from_everybody(rig):
    """After the abort another handoff has the room; what still comes for the first one changes nothing."""
    wanted, other = request("late", 40), request("other", 40, max_tokens=6)
    computed = rig.source.prompt(wanted)
    expected = rig.source.answer(other)
    call, reply = await rig.hold(wanted)
    mapped = _map(rig, reply, len(computed.blocks)) if reply.shm_path else None
    call.cancel()
    await rig.idle()
    events = await rig.submit(other)
    second, room = await rig.hold(other)
    theirs = rig.source.prompt(other)
    crcs = await rig.push(room, theirs.blocks)
    if mapped is not None:
        for block in range(len(computed.blocks)):
            mapped.block(block)[:] = computed.blocks[block]
    reply.shm_path, reply.lane_port = "", 0
    with pytest.raises((BlocksLost, PeerLost)):
        await rig.push(reply, computed.blocks)
    await rig.commit(other, room, crcs, theirs.first_token_id)

    assert await outcome(second) is None
    assert expected[1:] == tokens_of(await collect(events))
    assert 1 <= rig.replica.intake._counters._late_writes._value.get()


def _map(rig, reply, num_blocks):
    size = rig.source.executor.layout.block_bytes
    return PeerStaging(reply.shm_path, nonce=reply.ticket.nonce, num_blocks=num_blocks, block_bytes=size)


@pytest.mark.slow
async def test_prefill_killed_in_the_middle_of_its_push(rig):
    """SIGKILL, with half of the blocks written: decode is told within a second and gives everything back."""
    wanted = request("killed", 40)
    events = await rig.submit(wanted)
    command = [sys.executable, "-m", "services.decode.tests.pushing_peer", rig.address]
    arguments = [rig.ask(wanted).SerializeToString().hex(), str(rig.source.executor.layout.block_bytes)]
    peer = await asyncio.create_subprocess_exec(*command, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            assert peer.stdout is not None
            assert b"pushed" in await peer.stdout.readline()
        assert 1 == rig.replica.intake.num_open
        killed = time.monotonic()
        peer.kill()
        (event,) = await collect(events)
        assert ("PeerLost", True) == (event.error.kind, time.monotonic() - killed < SOON)
        await rig.idle()
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()

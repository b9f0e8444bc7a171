"""Who may put blocks here, and when do they become a sequence's?"""

import asyncio
import time

import pytest

from proto.common_pb2 import Ticket
from proto.decode_pb2 import AbortRequest, PushChunk
from services.chassis.errors import BlocksLost, DeadlinePassed, InvalidRequest, Overloaded, PeerLost, PromptTooLong
from services.chassis.handoff import StagingUnavailableError, block_xxh3
from services.decode.tests.rig import BLOCK, collect, decode_replica, keys_of, request, tokens_of, until
from services.decode.tests.tiny_model import CONTEXT


async def test_a_handoff_starts_the_sequence_in_either_order(rig):
    """Submit and commit may come in any order; the answer is the same."""
    expected = rig.source.answer(request("order", 40))
    late = request("order", 40)
    computed = await rig.hand_over(late)
    events = await rig.submit(late)

    assert expected == [computed.first_token_id, *tokens_of(await collect(events))]
    await rig.idle()
    assert expected == await rig.answer(request("order", 40))


async def test_blocks_that_are_here_do_not_travel(rig):
    """A second request with the same prompt sends only what is missing."""
    wanted = request("present", 2 * BLOCK + 3)
    expected = await rig.answer(wanted)
    again = request("present", 2 * BLOCK + 3)
    reply = await rig.reserve(again)
    assert 2 == reply.present_blocks

    computed = rig.source.prompt(again)
    events = await rig.submit(again)
    await rig.commit(again, reply, await rig.push(reply, computed.blocks), computed.first_token_id)
    assert expected[1:] == tokens_of(await collect(events))


async def test_nothing_needs_to_travel_when_all_is_here(rig):
    """A prompt of whole blocks that are all present commits without a byte."""
    expected = await rig.answer(request("whole", 2 * BLOCK))
    again = request("whole", 2 * BLOCK)
    reply = await rig.reserve(again)
    events = await rig.submit(again)
    await rig.commit(again, reply, [], expected[0])

    assert (2, "") == (reply.present_blocks, reply.shm_path)
    assert expected[1:] == tokens_of(await collect(events))


async def test_damaged_bytes_are_refused(rig):
    """A wrong checksum ends the handoff; the blocks are free and unnamed."""
    wanted = request("damaged", 40)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    crcs = await rig.push(reply, computed.blocks)
    with pytest.raises(BlocksLost, match="damaged"):
        await rig.commit(wanted, reply, [crcs[0], crcs[1] ^ 1, crcs[2]], computed.first_token_id)
    await rig.idle()

    assert 0 == rig.replica.engine.load.cached_blocks
    with pytest.raises(BlocksLost):  # and the ticket is gone
        await rig.commit(wanted, reply, crcs, computed.first_token_id)


async def test_missing_bytes_are_refused(rig):
    """A commit of blocks that were never sent fails on their checksums or their number."""
    wanted = request("missing", 40)
    computed = rig.source.prompt(wanted)
    for send in (lambda crcs: crcs[:2], lambda crcs: crcs):
        reply = await rig.reserve(wanted)
        crcs = [1, 2, 3]
        with pytest.raises(BlocksLost):
            await rig.commit(wanted, reply, send(crcs), computed.first_token_id)


@pytest.mark.parametrize("trouble", ["corrupted", "truncated", "swapped"])
async def test_pieces_that_are_not_what_was_summed_are_refused(rig, trouble):
    """A flipped bit, a block cut short, two blocks in each other's place: in a file or in pieces, nothing starts."""
    wanted = request(trouble, 40)
    computed = rig.source.prompt(wanted)
    first, *rest = computed.blocks
    match trouble:
        case "corrupted":
            sent = (bytes([first[0] ^ 4]) + first[1:], *rest)
        case "truncated":
            sent = (first[: len(first) // 2] + bytes(len(first) // 2), *rest)
        case _:
            sent = (rest[0], first, *rest[1:])
    reply = await rig.reserve(wanted)
    await rig.push(reply, sent)
    with pytest.raises(BlocksLost, match="damaged"):
        await rig.commit(wanted, reply, [block_xxh3(each) for each in computed.blocks], computed.first_token_id)
    await rig.idle()
    assert 0 == rig.replica.engine.load.cached_blocks


async def test_a_piece_with_a_wrong_checksum_ends_the_push(folder):
    """At once, not at the commit; the room is free, and the ticket is worth nothing any more."""
    async with decode_replica(folder) as rig:
        wanted = request("piece", 40)
        call, reply = await rig.hold(wanted)
        piece = PushChunk(ticket=reply.ticket, data=b"x" * 10, crc32=1)
        with pytest.raises(BlocksLost, match="damaged"):
            await rig.stub.Push(iter([piece]), timeout=30)
        await rig.idle()
        with pytest.raises(BlocksLost, match="damaged"):
            await call.read()


async def test_without_shared_memory_left_blocks_come_over_grpc(folder, tmp_path):
    """Room that cannot be made in the folder is made in plain memory, and offered without a file."""
    async with decode_replica(folder, shm=tmp_path / "full") as rig:
        wanted = request("full", 40)
        reply = await rig.reserve(wanted)
        assert "" == reply.shm_path
        await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
        expected = rig.source.answer(wanted)
        assert expected == await rig.answer(wanted)


async def test_a_ticket_commits_once(rig):
    """The second commit of a ticket is refused and changes nothing."""
    wanted = request("twice", 40, max_tokens=30)
    expected = rig.source.answer(wanted)
    computed = rig.source.prompt(wanted)
    events = await rig.submit(wanted)
    reply = await rig.reserve(wanted)
    crcs = await rig.push(reply, computed.blocks)
    await rig.commit(wanted, reply, crcs, computed.first_token_id)
    with pytest.raises(BlocksLost):
        await rig.commit(wanted, reply, crcs, computed.first_token_id)

    assert expected[1:] == tokens_of(await collect(events))


async def test_stale_and_foreign_tickets_are_refused(rig):
    """Another nonce, another boot or an unknown epoch names nothing here."""
    wanted = request("stale", 40)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    true = Ticket()
    true.CopyFrom(reply.ticket)
    for field, value in (("nonce", bytes(16)), ("boot_id", "boot-0"), ("epoch", 999)):
        reply.ticket.CopyFrom(true)
        setattr(reply.ticket, field, value)
        reply.shm_path, reply.lane_port = "", 0
        with pytest.raises(BlocksLost):
            await rig.push(reply, computed.blocks)
        with pytest.raises(BlocksLost):
            await rig.commit(wanted, reply, [1, 2, 3], computed.first_token_id)
        await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
    assert 1 == rig.replica.intake.num_open
    await rig.stub.Abort(AbortRequest(ticket=true), timeout=30)


async def test_a_late_push_after_abort_is_harmless(rig):
    """The next sequence has the aborted one's blocks; a late writer cannot change them."""
    wanted = request("aborted", 300, max_tokens=4)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    for _ in range(2):  # aborting twice is harmless
        await rig.stub.Abort(AbortRequest(ticket=reply.ticket, reason="test"), timeout=30)
    await rig.idle()

    other = request("other", 300, max_tokens=20)
    expected = rig.source.answer(other)
    events = await rig.submit(other)
    await rig.hand_over(other)
    with pytest.raises((BlocksLost, PeerLost, StagingUnavailableError)):
        await rig.push(reply, computed.blocks)
    assert expected[1:] == tokens_of(await collect(events))


async def test_pieces_outside_the_reservation_are_refused(rig):
    """A block index that was not reserved never reaches the pool."""
    wanted = request("outside", 40)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    reply.shm_path, reply.lane_port = "", 0
    with pytest.raises(InvalidRequest):
        await rig.push(reply, (*computed.blocks, computed.blocks[0]))
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"boot_id": "boot-0"}, BlocksLost),
        ({"fingerprint": b"x" * 32}, BlocksLost),
        ({"kv_tokens": 20}, InvalidRequest),
        ({"kv_tokens": CONTEXT, "block_keys": [bytes([n]) * 32 for n in range(CONTEXT // BLOCK)]}, PromptTooLong),
        ({"window_bytes": 9}, InvalidRequest),
    ],
)
async def test_what_cannot_be_held_is_refused(rig, change, error):
    """A reservation for another boot, another model or too much KV is refused at once."""
    with pytest.raises(error):
        await rig.reserve(request("refused", 40), **change)


async def test_blocks_of_another_prompt_are_never_used(rig):
    """Committed blocks whose keys are not the submitted prompt's end the request, not with wrong tokens."""
    wanted, other = request("mine", 40), request("their", 40)
    events = await rig.submit(wanted)
    computed = rig.source.prompt(other)
    other.request_id = wanted.request_id
    reply = await rig.reserve(other)
    await rig.commit(other, reply, await rig.push(reply, computed.blocks), computed.first_token_id)

    assert "BlocksLost" == (await collect(events))[-1].error.kind


async def test_a_reservation_expires(folder, tmp_path):
    """A prefill replica that died frees its blocks here by itself, uncommitted or never submitted."""
    async with decode_replica(folder, shm=tmp_path, reservation_seconds=2.5) as rig:
        wanted = request("expires", 40)
        began = time.time()
        reply = await rig.reserve(wanted)
        assert began + 2.5 <= reply.ticket.expires_unix_seconds <= time.time() + 2.5
        await rig.hand_over(request("unsubmitted", 40))
        assert 2 == rig.replica.intake.num_open
        await rig.idle()
        with pytest.raises(BlocksLost):
            await rig.commit(wanted, reply, [1, 2, 3], 5)
        assert [] == list(tmp_path.iterdir())


async def test_without_room_a_reservation_waits_and_then_gives_up(folder):
    """It gets its blocks as soon as somebody ends; after the bound the answer is Overloaded."""
    async with decode_replica(folder, num_blocks=9, wait_seconds=0.3) as rig:
        first = await rig.reserve(request("first", 6 * BLOCK))
        with pytest.raises(Overloaded):
            await rig.reserve(request("second", 4 * BLOCK))
        rig.replica.intake._wait_seconds = 20.0
        waiting = asyncio.create_task(rig.reserve(request("third", 4 * BLOCK)))
        await until(lambda: 1 == rig.replica.engine.load.queued_sequences)
        await rig.stub.Abort(AbortRequest(ticket=first.ticket), timeout=30)
        third = await waiting
        await rig.stub.Abort(AbortRequest(ticket=third.ticket), timeout=30)
        await rig.idle()


async def test_a_caller_that_stops_waiting_leaves_nothing(folder):
    """A reservation whose caller went away is not held for it."""
    async with decode_replica(folder, num_blocks=9) as rig:
        first = await rig.reserve(request("first", 6 * BLOCK))
        waiting = asyncio.create_task(rig.reserve(request("second", 4 * BLOCK)))
        await until(lambda: 1 == rig.replica.engine.load.queued_sequences)
        waiting.cancel()
        await until(lambda: 0 == rig.replica.engine.load.queued_sequences)
        await rig.stub.Abort(AbortRequest(ticket=first.ticket), timeout=30)
        await rig.idle()


async def test_a_write_that_fails_ends_the_room(rig):
    """The sequence may be about to start, by then: it must not find a room in which a block is missing."""
    wanted = request("half", 2 * BLOCK)
    reply = await rig.reserve(wanted)
    thread, rooms, epoch = rig.replica.intake._thread, rig.replica.engine.rooms, reply.ticket.epoch
    with pytest.raises(ValueError, match="bytes"):
        await thread.call(rooms.land, epoch, 0, [memoryview(b"short")])
    with pytest.raises(BlocksLost):
        await thread.call(rooms.take, epoch, keys_of(wanted))
    await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)


async def test_a_deadline_that_is_no_number_has_passed(rig):
    """Among the event loop's timers it would put all of them out of order."""
    with pytest.raises(DeadlinePassed):
        await rig.reserve(request("nan", 40), deadline_unix_seconds=float("nan"))


async def test_a_request_that_comes_back_is_taken_again(rig):
    """It was cancelled here when another replica was tried; then that one was lost."""
    wanted = request("back", 40)
    expected = rig.source.answer(request("back", 40))
    refused, tasks = rig.replica.intake._refused, rig.replica.servicer.tasks
    events = await rig.submit(wanted)
    await rig.cancel(wanted.request_id)
    await until(lambda: wanted.request_id in refused and not len(tasks))
    events.close()
    events = await rig.submit(wanted)
    await until(lambda: len(tasks))
    computed = await rig.hand_over(wanted)

    assert expected[1:] == tokens_of(await collect(events))
    assert expected[0] == computed.first_token_id

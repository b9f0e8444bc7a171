"""How does a prompt's KV get to the decode replica?"""

import asyncio
import sys
import threading
import time

import pytest

from proto.prefill_pb2 import PrefillDeliver
from services.chassis.errors import BlocksLost, Cancelled, Overloaded, PeerLost
from services.prefill.handoff import Cargo, Handoff, _aborting, aborts_said
from services.prefill.tests.rig import BLOCK, BOOT, keys_of, kinds, prefill_replica, request, until

CARGO = Cargo("other", b"f" * 32, [], kv_tokens=5, num_blocks=1, block_bytes=100, window_bytes=0)


@pytest.fixture
async def rig(folder, tmp_path):
    async with prefill_replica(folder, shm=tmp_path) as running:
        yield running
        await running.idle()


@pytest.mark.parametrize("backend", ["shm", "grpc", "unreachable", "foreign"])
async def test_the_bytes_arrive_on_every_way(rig, backend, tmp_path):
    """Shared memory where both see it, gRPC where they do not, also when the path leads to another's file."""
    if backend == "grpc":
        rig.decode.folder = None
    elif backend != "shm":
        rig.decode.wrong_path = str(tmp_path / "elsewhere")
        if backend == "foreign":
            (tmp_path / "elsewhere").write_bytes(bytes(5000))
    wanted = request("way", 3 * BLOCK + 3)
    done = (await rig.serve(wanted))[-1].handoff_done
    ((commit, blocks),) = rig.decode.committed

    assert rig.source.prompt(wanted)[0][:3] == blocks[:3]
    assert (4 * rig.decode.block_bytes, "decode-0") == (done.num_bytes, done.replica)
    assert ("shm" if backend == "shm" else "grpc") == done.backend
    assert 3 * BLOCK + 3 == commit.kv_tokens


@pytest.mark.parametrize("way", ["shm", "grpc"])
async def test_a_prompt_that_is_released_while_it_is_copied_commits_nothing(rig, monkeypatch, way):
    """The copies are made beside the engine's steps: what they hold may be the next prompt's."""
    if way == "grpc":
        rig.decode.folder = None
    engine, thread = rig.replica.engine, rig.replica.servicer._around.thread
    copy_block = engine._executor.copy_block

    def release_all(is_released):
        for prompt in tuple(engine._prompts.values()):
            engine.release(prompt)
        is_released.set()

    def release_and_copy(block, place):
        is_released = threading.Event()
        thread.post(release_all, is_released)  # as everybody does: never in the middle of a turn
        assert is_released.wait(10)
        copy_block(block, place)

    monkeypatch.setattr(engine._executor, "copy_block", release_and_copy)
    events = await rig.serve(request("released", 40))

    assert "BlocksLost" == events[-1].failed.kind
    assert [] == rig.decode.committed


async def test_the_reservation_names_boot_keys_and_length(rig):
    """What decode needs to refuse a stale pick, and to find blocks it has."""
    wanted = request("names", 2 * BLOCK + 1)
    await rig.serve(wanted)
    ((asked, _),) = rig.decode.reserved.values()

    assert (BOOT, rig.fingerprint, 2 * BLOCK + 1) == (asked.boot_id, asked.fingerprint, asked.kv_tokens)
    assert list(keys_of(wanted)) == list(asked.block_keys)


@pytest.mark.parametrize("folder_of", ["shm", "grpc"])
async def test_present_blocks_stay_home(rig, folder_of):
    """Only what decode lacks travels."""
    rig.decode.present = 2
    if folder_of == "grpc":
        rig.decode.folder = None
    wanted = request("present", 3 * BLOCK + 3)
    done = (await rig.serve(wanted))[-1].handoff_done
    ((_, blocks),) = rig.decode.committed

    assert rig.source.prompt(wanted)[0][2] == blocks[0]
    assert 2 * rig.decode.block_bytes == done.num_bytes


@pytest.mark.parametrize("method", ["Reserve", "Push", "Commit"])
async def test_a_failing_handoff_ends_the_request_and_gives_the_ticket_back(rig, method):
    """The error reaches the entrypoint; decode is told; the blocks are free."""
    rig.decode.folder = None
    rig.decode.errors[method] = Overloaded("full") if method == "Reserve" else BlocksLost("gone")
    events = await rig.serve(request("failing", 40))
    # Also when decode ends the push while pieces are still written, which gRPC reports as a lost peer.
    assert ("Overloaded" if method == "Reserve" else "BlocksLost") == events[-1].failed.kind
    await rig.idle()
    await until(lambda: len(rig.decode.aborted) >= len(rig.decode.reserved))


async def test_a_dead_target_is_a_lost_peer(rig):
    """Nobody listens there: the request fails at once, not after a timeout."""
    async with asyncio.timeout(20), await rig.submit(request("dead", 40)) as events:
        async for event in events:
            if event.HasField("last_chunk_started"):
                await rig.deliver("dead", "127.0.0.1:1")
            if event.HasField("failed"):
                break
    assert "PeerLost" == event.failed.kind


async def test_a_later_target_takes_the_place_of_an_earlier_one(rig):
    """The entrypoint found another replica: the KV goes there, and the first ticket goes back."""
    async with asyncio.timeout(20), await rig.submit(request("moved", 40)) as events:
        rig.decode.gate.clear()
        seen = []
        async for event in events:
            seen.append(event)
            if event.HasField("last_chunk_started"):
                await rig.deliver("moved", "127.0.0.1:1")
                await rig.deliver("moved")
            if event.HasField("first_token"):
                rig.decode.gate.set()
            if event.HasField("handoff_done") or event.HasField("failed"):
                break
    assert ["last_chunk_started", "first_token", "handoff_done"] == kinds(seen)


async def test_nobody_says_where_the_kv_goes(folder):
    """The wait is bounded; then the request fails and its blocks are free."""
    async with prefill_replica(folder, deliver_seconds=0.1) as rig:
        async with asyncio.timeout(20), await rig.submit(request("lonely", 40)) as events:
            async for event in events:
                if event.HasField("failed"):
                    break
        assert "DeadlinePassed" == event.failed.kind
        await rig.idle()


async def test_what_decode_says_on_the_held_call_ends_the_handoff_at_once(rig):
    """Decode gave the room back, for whatever reason: nothing more is pushed, and the request fails with that reason."""
    rig.decode.passing.add("Reserve")
    rig.decode.gate.clear()
    async with asyncio.timeout(20), await rig.submit(request("told", 40)) as events:
        async for event in events:
            if event.HasField("last_chunk_started"):
                await rig.deliver("told")
                await until(lambda: rig.decode.held)
                rig.decode._end(1, Cancelled("the caller went away"))
            if event.HasField("failed"):
                break
    rig.decode.gate.set()
    assert ("Cancelled", "the caller went away") == (event.failed.kind, event.failed.message)


async def test_the_reason_always_arrives(rig):
    """gRPC forgets the status of a call when a write crosses its end; whoever holds room writes nothing and hears it."""
    for round_number in range(1, 31):
        target = PrefillDeliver(boot_id=BOOT)
        handoff = Handoff(rig.channel(), target, CARGO, deadline_unix_seconds=time.time() + 5)
        await until(lambda: round_number in rig.decode.held)  # noqa: B023 - used in this round
        await asyncio.sleep(0.002)
        rig.decode._end(round_number, Overloaded("the reason"))
        with pytest.raises(Overloaded, match="the reason"):
            await handoff._holding


async def test_a_lost_answer_to_the_commit_is_no_lost_handoff(rig):
    """The held call ends well only after a commit: decode has the KV, whatever became of the answer."""
    rig.decode.errors["Answer"] = PeerLost("cut")
    events = await rig.serve(request("cut", 40))

    assert "decode-0" == events[-1].handoff_done.replica
    assert 1 == len(rig.decode.committed)


async def test_shutting_down_waits_until_the_kv_is_taken(rig):
    """A drain ends with the handoff, not before it; the abort of another one is said before the process goes."""
    rig.decode.passing.add("Reserve")
    rig.decode.gate.clear()
    async with asyncio.timeout(20), await rig.submit(request("draining", 40)) as events:
        async for event in events:
            if event.HasField("last_chunk_started"):
                await rig.deliver("draining")
                await until(lambda: rig.decode.held)
                draining = asyncio.create_task(rig.replica.servicer.tasks.drain())
            if event.HasField("first_token"):
                await asyncio.wait([draining], timeout=0.2)
                assert not draining.done()
                assert rig.replica.engine.load.used_blocks
                rig.decode.gate.set()
            if event.HasField("handoff_done"):
                break
        await draining
    assert 1 == len(rig.decode.committed)
    Handoff(rig.channel(), PrefillDeliver(), CARGO, deadline_unix_seconds=time.time() + 5).abandon("test")
    await aborts_said()
    assert not _aborting


@pytest.mark.slow
async def test_decode_killed_in_the_middle_of_a_push(rig):
    """SIGKILL: the request fails within a second as one whose peer is lost, and its blocks are free."""
    command = [sys.executable, "-m", "services.prefill.tests.dying_decode"]
    peer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert peer.stdout is not None
    try:
        async with asyncio.timeout(30), await rig.submit(request("killed", 40)) as events:
            address = (await peer.stdout.readline()).decode().strip()
            async for event in events:
                if event.HasField("last_chunk_started"):
                    await rig.deliver("killed", address)
                if event.HasField("first_token"):
                    assert b"pushing" in await peer.stdout.readline()
                    peer.kill()
                    killed = time.monotonic()
                if event.HasField("failed"):
                    break
        assert ("PeerLost", True) == (event.failed.kind, time.monotonic() - killed < 9.0)
        await rig.idle()
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()


@pytest.mark.slow
async def test_the_deadline_ends_a_slow_handoff(rig):
    """A decode replica that does not answer costs no more than the request's deadline."""
    rig.decode.gate.clear()
    events = await rig.serve(request("slow", 40, seconds=0.5))
    rig.decode.gate.set()

    assert "DeadlinePassed" == events[-1].failed.kind


async def test_a_cancel_that_comes_together_with_the_target_still_cancels(rig):
    """Nothing is handed over for a request that nobody wants any more."""
    async with asyncio.timeout(20), await rig.submit(request("both", 40)) as events:
        async for event in events:
            if event.HasField("first_token"):
                break
    target = PrefillDeliver(request_id="both", replica="decode-0", address=rig.decode_address, boot_id=BOOT)
    rig.replica.servicer._flows["both"].deliver_to(target)
    rig.replica.servicer.tasks.cancel("both", "test")
    await rig.idle()
    await asyncio.sleep(0.05)  # the room may be asked for and given back, or never be asked for
    await until(lambda: len(rig.decode.aborted) == len(rig.decode.reserved))

    assert [] == rig.decode.committed
    await until(lambda: not _aborting)

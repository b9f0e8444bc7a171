"""Do sequences of a model with windows keep, lose and rebuild them without a change of a token?"""

import asyncio

import pytest

from kernels.batch import Batch, Image, Row
from kernels.tests.shallow_v41 import shallow_v41
from proto.decode_pb2 import AbortRequest
from services.chassis.errors import BlocksLost, InvalidRequest, Overloaded
from services.chassis.handoff import block_xxh3
from services.chassis.tests.memory_vision import memory_vision
from services.chassis.window_store import folders
from services.decode.sampling import sampling_params
from services.decode.tests.rig import BLOCK, NUM_WINDOWS, collect, decode_replica, keys_of, request, tokens_of, until

SLOW = pytest.mark.slow
LONG = pytest.mark.long
FIRST, OTHERS = 322, 321


@pytest.fixture(scope="session")
def v41():
    return shallow_v41()


@pytest.fixture(params=["shm", "grpc"])
async def rig(request, v41, tmp_path):
    async with decode_replica(v41, shm=tmp_path if request.param == "shm" else None) as running:
        yield running
        await running.idle()
        running.replica.engine._pool.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=SLOW), BLOCK, pytest.param(100, marks=SLOW)])
async def test_a_handed_over_window_goes_on(rig, num_tokens):
    """The answer is what one process alone computes, also when only the window had to travel."""
    wanted = request("same", num_tokens, max_tokens=5)
    expected = rig.source.answer(wanted)

    assert expected == await rig.answer(wanted)
    again = request("same", num_tokens, max_tokens=5)
    again.request_id = "again"
    assert expected == await rig.answer(again)


async def test_a_damaged_window_is_refused(rig):
    """A wrong checksum ends the handoff; blocks and window are free, and the ticket is gone."""
    wanted = request("damaged", 20)
    computed = rig.source.prompt(wanted)
    reply = await rig.reserve(wanted)
    crcs = await rig.push(reply, computed.blocks, computed.window)
    with pytest.raises(BlocksLost, match="window state arrived damaged"):
        await rig.commit(wanted, reply, crcs, computed.first_token_id, block_xxh3(computed.window) ^ 1)
    await rig.idle()
    with pytest.raises(BlocksLost):
        await rig.commit(wanted, reply, crcs, computed.first_token_id, block_xxh3(computed.window))


async def test_another_layout_is_refused(rig):
    """A prefill replica whose windows have another size is told so before anything travels."""
    with pytest.raises(InvalidRequest, match="layouts differ"):
        await rig.reserve(request("layout", 20), window_bytes=5)


@SLOW
async def test_a_window_is_waited_for_like_blocks(v41):
    """Tickets hold windows; the next one gets the first that is given back, or gives up."""
    async with decode_replica(v41, wait_seconds=0.3) as rig:
        held = [await rig.reserve(request(f"holder-{n}", 20)) for n in range(NUM_WINDOWS)]
        with pytest.raises(Overloaded):
            await rig.reserve(request("late", 20))
        rig.replica.intake._wait_seconds = 20.0
        waiting = asyncio.create_task(rig.reserve(request("next", 20)))
        await asyncio.sleep(0.05)
        await rig.stub.Abort(AbortRequest(ticket=held[0].ticket), timeout=30)
        for reply in (await waiting, *held[1:]):
            await rig.stub.Abort(AbortRequest(ticket=reply.ticket), timeout=30)
        await rig.idle()


def window_at(rig, wanted, position):
    """The whole state after that many tokens of the prompt."""
    part = request("part", 1)
    part.CopyFrom(wanted)
    del part.prompt_token_ids[position:]
    return rig.source.prompt(part).window


@SLOW
@pytest.mark.parametrize("has_states", [False, True])
async def test_preemption_changes_no_token(v41, tmp_path, has_states):
    """The youngest loses blocks and window; it starts again from a state of this host, or from nothing."""
    async with decode_replica(v41, num_blocks=10, recompute_tokens=9, states=tmp_path) as rig:
        wanted = [request(f"tight-{n}", 54 + n, max_tokens=20) for n in range(2)]
        expected = [rig.source.answer(each) for each in wanted]
        for each in wanted if has_states else ():
            assert rig.states.store.save(keys_of(each)[1], 2 * BLOCK, window_at(rig, each, 2 * BLOCK))
        assert expected == list(await asyncio.gather(*(rig.answer(each) for each in wanted)))
        assert rig.replica.engine.load.num_preemptions > 0
        assert has_states == (rig.states.store.counts.num_hits > 0)
        await rig.idle()


@pytest.fixture(scope="session")
def replaying(v41, tmp_path_factory):
    """Folders of the model whose fathom.json names a replay mode."""

    def make(mode):
        folder = tmp_path_factory.mktemp("replay") / mode
        folder.mkdir()
        for file in v41.iterdir():
            if not file.name.startswith("."):
                (folder / file.name).symlink_to(file)
        (folder / "fathom.json").write_text(f'{{"replay": "{mode}"}}', encoding="utf-8")
        return folder

    return make


def replayed(rig, wanted, tokens, hit, state):
    """The rest of an answer whose first tokens are known, in one process that replays as the hit says."""
    executor, tokens, start = rig.source.executor, list(tokens), hit.compute_from
    end = len(wanted.prompt_token_ids) + wanted.stop.max_tokens
    if state is None:
        executor.reset_window(1)
    else:
        executor.write_window(1, state)
    while len(tokens) < end:
        row = Row(
            0,
            tokens[start:],
            start,
            range(1, 40),
            sampling_params(wanted.sampling),
            window=1,
            preceding=tokens[max(start - 3, 0) : start],
            replay=hit.replay,
        )
        start = len(tokens)
        tokens.append(executor.collect(executor.launch(Batch((row,))))[0].token_id)
    return tokens[len(wanted.prompt_token_ids) :]


@SLOW
@pytest.mark.parametrize(
    ("mode", "has_states"),
    [pytest.param("mask", True, marks=LONG), ("compact", True), pytest.param("compact", False, marks=LONG)],
)
async def test_a_preempted_bounded_answer_is_what_one_process_replays(
    replaying, tmp_path, monkeypatch, mode, has_states
):
    """From an encoder state, or a block back: the folder's mode counts after a preemption as it does in prefill."""
    async with decode_replica(replaying(mode), num_blocks=10, recompute_tokens=9, states=tmp_path) as rig:
        wanted = [request(f"tight-{n}", 54 + n, max_tokens=20) for n in range(2)]
        expected = [rig.source.answer(each) for each in wanted]
        for each in wanted if has_states else ():
            state = window_at(rig, each, 2 * BLOCK)[: rig.states.store._state_bytes]
            assert rig.states.store.save(keys_of(each)[1], 2 * BLOCK, state)
        begun = []
        begin = rig.replica.engine.begin

        def beginning(sequence, attempt, hit, state):
            begun.append((list(sequence.token_ids), hit, state))
            begin(sequence, attempt, hit, state)

        monkeypatch.setattr(rig.replica.engine, "begin", beginning)
        found = await asyncio.gather(*(rig.answer(each) for each in wanted))
        [(tokens, hit, state)] = begun
        assert (2 * BLOCK if has_states else BLOCK, has_states) == (hit.compute_from, state is not None)
        which = int(tokens[0] != wanted[0].prompt_token_ids[0])
        rig.source.answer(wanted[which])  # its blocks are those of the replay
        expected[which] = replayed(rig, wanted[which], tokens, hit, state)
        assert expected == list(found)
        await rig.idle()
        await rig.states.flush()
        assert {".encoder"} == {path.suffix for path in folders(tmp_path)[0].glob("*.*.*")}


@SLOW
async def test_a_long_sequence_rebuilds_its_windows_exactly(v41, monkeypatch):
    """Without any state, found blocks are used and 90 tokens before them computed a second time, unwritten."""
    async with decode_replica(v41, num_blocks=18) as rig:
        wanted = [request(f"long-{n}", 125 + n, max_tokens=14) for n in range(2)]
        expected = [rig.source.answer(each) for each in wanted]
        starts = []
        begin = rig.replica.engine.begin

        def beginning(sequence, attempt, hit, state):
            starts.append(hit.compute_from)
            begin(sequence, attempt, hit, state)

        monkeypatch.setattr(rig.replica.engine, "begin", beginning)
        assert expected == list(await asyncio.gather(*(rig.answer(each) for each in wanted)))
        assert [start for start in starts if start > 0]
        await rig.idle()


@SLOW
async def test_the_answers_last_whole_block_is_saved(v41, tmp_path):
    """The next turn starts there, on any prefill replica of this host; the state is that of a cold run."""
    async with decode_replica(v41, states=tmp_path) as rig:
        wanted = request("saved", 46, max_tokens=22)
        answer = await rig.answer(wanted)
        await rig.idle()
        await rig.states.flush()
        turn = request("turn", 1)
        turn.prompt_token_ids[:] = [*wanted.prompt_token_ids, *answer]
        (saved,) = folders(tmp_path)[0].glob("*.whole")
        key = keys_of(turn)[3]

        assert f"{key.hex()}.{4 * BLOCK}.whole" == saved.name
        assert window_at(rig, turn, 4 * BLOCK) == rig.states.store.load(key, 4 * BLOCK)


def with_image(name, num_tokens, image):
    wanted = request(name, num_tokens, max_tokens=18)
    end = image.position + image.num_tokens
    wanted.prompt_token_ids[image.position : end] = [FIRST] + [OTHERS] * (image.num_tokens - 1)
    wanted.images.append(image)
    return wanted


@SLOW
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_preempted_image_is_fetched_again(v41, is_lost):
    """The answer stays the same; when vision has forgotten the image, the request ends with BlocksLost."""
    async with memory_vision(hidden_size=128) as vision, decode_replica(v41, num_blocks=8, recompute_tokens=9) as rig:
        images = [vision.image(f"cat-{n}", position=5, num_tokens=20) for n in range(2)]
        wanted = [with_image(f"image-{n}", 46, image) for n, image in enumerate(images)]
        spliced = [(Image(i.position, i.num_tokens, vision.embeddings[i.content_hash]),) for i in images]
        expected = [rig.source.answer(each, parts) for each, parts in zip(wanted, spliced, strict=True)]
        if is_lost:
            vision.embeddings.clear()
        events = [await rig.submit(each) for each in wanted]
        handed = await asyncio.gather(*(rig.hand_over(*each) for each in zip(wanted, spliced, strict=True)))
        found = await asyncio.gather(*(collect(each) for each in events))
        answers = [[each.first_token_id, *tokens_of(answer)] for each, answer in zip(handed, found, strict=True)]

        assert rig.replica.engine.load.num_preemptions > 0
        assert vision.fetched
        if is_lost:
            assert expected[0] == answers[0]
            assert "BlocksLost" == found[1][-1].error.kind
        else:
            assert expected == answers
        await rig.idle()
        await until(lambda: not rig.replica.servicer._around.embeddings.room.held_bytes)

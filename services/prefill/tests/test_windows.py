"""Do prompts of a model with windows start where found blocks and saved states let them, and give the same bits?"""

import asyncio

import pytest

from kernels.batch import Batch, Replay, Row
from kernels.tests.shallow_v41 import NUM_LAYERS, shallow_v41
from services.chassis.tests.memory_kvstore import memory_kvstore
from services.chassis.window_store import folders
from services.prefill.sampling import sampling_params
from services.prefill.tests.rig import BLOCK, NUM_WINDOWS, keys_of, prefill_replica, request, until

SLOW = pytest.mark.slow
LONG = pytest.mark.long
OTHER_REPLAYS = [(23, "compact"), (55, "mask"), (150, "mask"), (150, "compact")]
REACH = 22  # window and the six tokens that can be taken back
EXACT = NUM_LAYERS * 15  # tokens that make the windows of all layers exact


@pytest.fixture(scope="session")
def v41():
    return shallow_v41()


@pytest.fixture
async def rig(v41, tmp_path):
    async with prefill_replica(v41, states=tmp_path) as running:
        yield running
        await running.idle()


def with_state(num_tokens):
    return max(num_tokens - REACH, 0) // BLOCK * BLOCK


async def first_of(rig, wanted, hit_tokens=0):
    events = await rig.serve(wanted, hit_tokens=hit_tokens)
    assert not events[-1].HasField("failed"), events[-1].failed
    return next(event.first_token for event in events if event.HasField("first_token"))


def same_as_alone(rig, wanted, first):
    """Whether token, blocks and window that were handed over last are those of the prompt computed whole and alone."""
    blocks, token = rig.source.prompt(wanted)
    (_, handed), window = rig.decode.committed[-1], rig.decode.windows[-1]
    whole = len(wanted.prompt_token_ids) // BLOCK
    return (blocks[:whole], token, rig.source.window()) == (handed[:whole], first.token.token_ids[0], window)


def lose_states(root):
    for path in folders(root)[0].glob("*.*.*"):
        path.unlink()


def saved(root):
    """Positions of the saved states."""
    return sorted(int(path.name.split(".")[1]) for path in folders(root)[0].glob("*.whole"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "grpc"])
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=SLOW), BLOCK, pytest.param(53, marks=SLOW)])
async def test_the_window_travels_behind_the_blocks(v41, tmp_path, backend, num_tokens):
    """On both ways, byte for byte; also when no block has to travel."""
    async with prefill_replica(v41, shm=tmp_path if backend == "shm" else None, chunk_tokens=7) as rig:
        wanted = request("travels", num_tokens)
        first = await first_of(rig, wanted)
        assert same_as_alone(rig, wanted, first)
        rig.decode.present = -(-num_tokens // BLOCK) if num_tokens == BLOCK else 0
        again = request("travels", num_tokens)
        done = (await rig.serve(again))[-1].handoff_done
        missing = -(-num_tokens // BLOCK) - rig.decode.present
        layout = rig.source.executor.layout

        assert (missing * layout.block_bytes + layout.window_bytes, backend) == (done.num_bytes, done.backend)
        assert rig.source.window() == rig.decode.windows[-1]
        await rig.idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_tokens", [38, pytest.param(37, marks=SLOW), pytest.param(129, marks=SLOW), pytest.param(257, marks=LONG)]
)
async def test_a_warm_prompt_starts_from_its_saved_state(rig, tmp_path, num_tokens):
    """Whole blocks that leave a window and its reserve are cached, and every bit is that of a cold run."""
    cold = await first_of(rig, request("warm", num_tokens))
    await rig.states.flush()
    warm = await first_of(rig, request("warm", num_tokens))

    assert (0, with_state(num_tokens)) == (cold.cached_tokens, warm.cached_tokens)
    assert num_tokens - with_state(num_tokens) == warm.computed_tokens
    assert same_as_alone(rig, request("warm", num_tokens), warm)
    expected = {with_state(num_tokens), num_tokens // BLOCK * BLOCK} - {0}
    assert sorted(expected) == saved(tmp_path)


@SLOW
@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [(100, 0), (127, with_state(127) - EXACT), pytest.param(300, 272 - EXACT, marks=LONG)],
)
async def test_without_states_windows_are_computed_again_or_it_is_a_miss(v41, num_tokens, cached):
    """The bits stay the same; blocks that were found are neither written nor offered to the KV store again."""
    async with memory_kvstore() as store, prefill_replica(v41, kvstore=store.stores) as rig:
        wanted = request("stateless", num_tokens)
        whole = num_tokens // BLOCK
        await first_of(rig, wanted)
        await until(lambda: whole == store.num_written)  # the writer hears of a chunk's blocks behind its token
        used = dict(rig.replica.engine._pool._block_of)
        warm = await first_of(rig, request("stateless", num_tokens))

        assert cached == warm.cached_tokens
        assert same_as_alone(rig, wanted, warm)
        # The blocks behind the longest possible hit are computed each time.
        behind = whole - with_state(num_tokens) // BLOCK
        await until(lambda: whole + behind == store.num_written)
        assert used == rig.replica.engine._pool._block_of
        await rig.idle()
        await asyncio.wait_for(rig.writer.flush(), 20)
        assert whole + behind == store.num_written


@SLOW
async def test_blocks_come_from_the_store_and_the_state_from_the_host(v41, tmp_path):
    """Another replica of this host starts as if it had computed the prompt itself."""
    async with memory_kvstore() as store:
        async with prefill_replica(v41, kvstore=store.stores, states=tmp_path) as rig:
            await first_of(rig, request("moved", 100))
            await asyncio.wait_for(rig.writer.flush(), 20)
        async with prefill_replica(v41, num_blocks=40, kvstore=store.stores, states=tmp_path) as rig:
            wanted = request("moved", 100)
            warm = await first_of(rig, wanted, hit_tokens=96)

            assert with_state(100) == warm.cached_tokens
            assert same_as_alone(rig, wanted, warm)
            assert (1, 0) == (rig.states.store.counts.num_hits, rig.states.store.counts.num_misses)
            await rig.idle()


@SLOW
async def test_what_would_be_no_hit_is_not_even_loaded(v41, tmp_path):
    """Without a state a short prompt is a miss whatever the KV store has: it is not asked."""
    async with memory_kvstore() as store, prefill_replica(v41, kvstore=store.stores, states=tmp_path) as rig:
        store.gate.clear()
        wanted = request("useless", 100)
        first = await first_of(rig, wanted, hit_tokens=96)
        store.gate.set()

        assert 0 == first.cached_tokens
        assert same_as_alone(rig, wanted, first)


@SLOW
async def test_a_partial_load_starts_from_an_older_state(v41, tmp_path):
    """When the store lacks the end of the hit, the plan is made again for what came."""
    async with memory_kvstore() as store:
        async with prefill_replica(v41, kvstore=store.stores, states=tmp_path) as rig:
            await first_of(rig, request("partial", 100))
            await first_of(rig, request("partial", 70))  # its state at 48 is the older one
            await asyncio.wait_for(rig.writer.flush(), 20)
        wanted = request("partial", 100)
        del store.blocks[keys_of(wanted)[3]]
        async with prefill_replica(v41, num_blocks=40, kvstore=store.stores, states=tmp_path) as rig:
            warm = await first_of(rig, wanted, hit_tokens=96)

            assert with_state(70) == 48 == warm.cached_tokens
            assert same_as_alone(rig, wanted, warm)
            await rig.idle()


@SLOW
async def test_a_damaged_state_is_a_miss_and_never_a_wrong_token(rig, tmp_path):
    """The next best start is taken: here the prompt's own."""
    await first_of(rig, request("damaged", 60))
    await rig.states.flush()
    for path in folders(tmp_path)[0].glob("*.whole"):
        content = bytearray(path.read_bytes())
        content[500] ^= 1
        path.write_bytes(content)
    warm = await first_of(rig, request("damaged", 60))

    assert 0 == warm.cached_tokens
    assert same_as_alone(rig, request("damaged", 60), warm)
    assert 1 == rig.states.store.counts.num_damaged


@SLOW
async def test_prompts_wait_for_windows(rig):
    """More prompts than windows are served in turn, with the tokens they have alone."""
    wanted = [request(f"many-{n}", 20 + n) for n in range(NUM_WINDOWS + 2)]
    firsts = await asyncio.gather(*(first_of(rig, each) for each in wanted))

    assert [rig.source.prompt(each)[1] for each in wanted] == [first.token.token_ids[0] for first in firsts]


@SLOW
@pytest.mark.parametrize("has_store", [True, False])
async def test_a_miss_waits_for_blocks_of_its_own(v41, tmp_path, has_store):
    """What it found is shared with others: in a full pool it waits again, and is computed whole."""
    async with prefill_replica(v41, num_blocks=12, states=tmp_path if has_store else None) as rig:
        await first_of(rig, request("shared", 80, max_tokens=1))
        wanted = [request("shared", 80, max_tokens=1) for _ in range(3)]
        for n, each in enumerate(wanted):
            each.request_id = f"shared-{n}"
        if has_store:
            await rig.states.flush()
            lose_states(tmp_path)
        firsts = await asyncio.gather(*(first_of(rig, each) for each in wanted))

        if not has_store:  # else one may start from what another just saved
            assert [0] * 3 == [first.cached_tokens for first in firsts]
        assert {rig.source.prompt(wanted[0])[1]} == {first.token.token_ids[0] for first in firsts}
        await rig.idle()


@SLOW
async def test_cancel_while_the_start_is_sought(v41, tmp_path):
    """Window and blocks are given back, whatever the prompt waits for."""
    async with memory_kvstore() as store:
        async with prefill_replica(v41, kvstore=store.stores, states=tmp_path) as rig:
            await first_of(rig, request("cancel", 100))
            await asyncio.wait_for(rig.writer.flush(), 20)
        async with prefill_replica(v41, num_blocks=40, kvstore=store.stores, states=tmp_path) as rig:
            store.gate.clear()
            await rig.submit(request("cancel", 100), hit_tokens=96)
            async with asyncio.timeout(20):
                while not rig.replica.engine.load.used_blocks:  # noqa: ASYNC110 - looks at what the engine shows
                    await asyncio.sleep(0.002)
            await rig.cancel("cancel")
            await rig.idle()


def replayed(rig, wanted, mode, *, position=0, hit=0):
    """Token, blocks and window of one process that replays at the same positions, in the blocks it computed before."""
    ids, executor = list(wanted.prompt_token_ids), rig.source.executor
    table = range(1, 1 - (-len(ids) // BLOCK))
    replay = Replay(window_from=position, write_from=hit, keep_from=max(len(ids) - REACH, 0), compact=mode == "compact")
    executor.reset_window(1)
    row = Row(
        0,
        ids[position:],
        position,
        table,
        sampling_params(wanted.sampling),
        history=ids,
        window=1,
        preceding=ids[max(position - 3, 0) : position],
        replay=replay,
    )
    (sampled,) = executor.collect(executor.launch(Batch((row,))))
    return sampled.token_id, [executor.read_block(block) for block in table], executor.read_window(1)


def handed(rig, first):
    """Of the last handoff, as `replayed`."""
    return first.token.token_ids[0], rig.decode.committed[-1][1], rig.decode.windows[-1]


@SLOW
@pytest.mark.parametrize(
    ("num_tokens", "mode"),
    [(23, "mask"), (55, "compact"), *(pytest.param(*case, marks=LONG) for case in OTHER_REPLAYS)],
)
async def test_bounded_replay_is_what_one_process_replays(replaying, tmp_path, mode, num_tokens):
    """The folder names the mode. From an encoder state a hit changes no bit; without one a block is computed again."""
    hit = with_state(num_tokens)
    again = max(hit - BLOCK, 0)
    async with prefill_replica(replaying(mode), states=tmp_path, chunk_tokens=7) as rig:
        cold = replayed(rig, request("bounded", num_tokens), mode)
        assert cold == handed(rig, await first_of(rig, request("bounded", num_tokens)))
        await rig.states.flush()
        with_one = await first_of(rig, request("bounded", num_tokens))
        assert (hit, cold) == (with_one.cached_tokens, handed(rig, with_one))
        assert {".encoder"} == {path.suffix for path in folders(tmp_path)[0].glob("*.*.*")}
        lose_states(tmp_path)
        without = await first_of(rig, request("bounded", num_tokens))
        expected = replayed(rig, request("bounded", num_tokens), mode, position=again, hit=hit if again else 0)
        assert (again, expected) == (without.cached_tokens, handed(rig, without))
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

"""Does a long conversation keep its KV, whatever happens to the stores that hold it?"""

import asyncio
import itertools
import json
import random
import shutil
import signal
import time

import grpc
import httpx
import pytest
import pytest_asyncio

from e2e.client import Answer, complete
from e2e.suite import CALL_SECONDS, Suite
from proto.kvstore_pb2 import GetStatsRequest, KvstoreStats
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.block_keys import block_keys, key_root
from services.chassis.kvstore_shards import GROUP_BLOCKS, split
from services.entrypoint.admission import tenant_salt
from services.kvstore.tests.seaweedfs import BUCKET, seaweedfs
from services.prefill.tests.tiny_model import VOCAB, write_tiny_model
from services.prefill.tests.tiny_tokenizer import FIRST, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

BLOCK_TOKENS = 128
STORES = ("kvstore-0", "kvstore-1", "kvstore-2")
NUM_TURNS = 20
CONTEXT_TOKENS = 12_288
TURN_TOKENS, ANSWER_TOKENS = 420, 4  # three groups of blocks by the last turn
RESTART_TURN, LOSS_TURN = 6, 12
PLACED_BLOCKS = 2
# Soon enough that a test need not wait, and one cannot be taken for the other.
OPTIONS = {"seal_seconds": 0.4, "refresh_seconds": 0.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def small_model(folder):
    """Random weights, for speed; a plain transformer, whose hits depend on its blocks alone."""
    model = write_tiny_model(folder / "small")
    write_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(small_model, folder):
    """Three stores that share the blocks out, with an S3 server behind them."""
    (folder / "weed").mkdir()
    with seaweedfs(folder / "weed") as server:
        options = folder / "options.json"
        options.write_text(json.dumps(server.options | OPTIONS))
        env = {"FATHOM_KVSTORE_OBJECT_STORE_OPTIONS_FILE": str(options)}
        made = Suite(folder, model=small_model, dtype="bf16", env=env)
        made.up_words = (*made.up_words, "--kvstore", str(len(STORES)), "--kv-url", f"s3://{BUCKET}/kv")
        await made.start()
        try:
            yield made
        except BaseException:
            print(made.log_tails())
            raise
        finally:
            await made.stop()


async def stats_of(suite: Suite, name: str) -> KvstoreStats:
    async with grpc.aio.insecure_channel(suite.address(name)) as channel:
        found: KvstoreStats = await KvstoreStub(channel).GetStats(GetStatsRequest(), timeout=CALL_SECONDS)
    return found


async def settled(suite: Suite, num_blocks: int, *, everywhere: bool = False) -> None:
    """Wait until so many blocks are stored; everywhere: until every store finds all of them in the object store."""
    give_up = time.monotonic() + 30
    while True:
        stats = [await stats_of(suite, name) for name in STORES]
        if everywhere and all(one.num_remote_blocks >= num_blocks for one in stats):
            return
        if not everywhere and sum(one.num_blocks for one in stats) >= num_blocks:
            return
        assert time.monotonic() < give_up, f"{num_blocks} blocks wanted: {stats}"
        await asyncio.sleep(0.05)


async def hit_tokens(suite: Suite) -> int:
    """What the stores said they hold, over all requests."""
    return await counted(suite, "entrypoint-0", "fathom_entrypoint_hit_tokens_total")


async def loaded_tokens(suite: Suite) -> int:
    """What the prefill replica has read from the stores since it was started."""
    return await counted(suite, "prefill-0", "fathom_prefill_loaded_tokens_total")


async def counted(suite: Suite, name: str, metric: str) -> int:
    url = suite.state()[name].health_url.replace("/healthz", "/metrics")
    async with httpx.AsyncClient(timeout=CALL_SECONDS) as http:
        lines = (await http.get(url)).text.splitlines()
    (value,) = (line.split(" ")[1] for line in lines if line.startswith(metric))
    return int(float(value))


class Conversation:
    """Turns that each repeat all that was said before."""

    def __init__(self, suite: Suite, client: httpx.AsyncClient) -> None:
        self.suite = suite
        self.client = client
        self.ids: list[int] = []
        self.num_computed = 0
        """Tokens whose KV somebody computed: all but the last one of the last answer."""
        self._random = random.Random(5)

    @property
    def num_blocks(self) -> int:
        """Full blocks so far."""
        return self.num_computed // BLOCK_TOKENS

    @property
    def num_prompt_blocks(self) -> int:
        """Full blocks before the last answer: its prompt's last token is always computed."""
        return (self.num_computed - ANSWER_TOKENS) // BLOCK_TOKENS

    async def turn(self, num_tokens: int) -> tuple[int, int, Answer]:
        """Say something and be answered; return the tokens that should hit, those the stores held, and the answer."""
        expected, before = self.num_blocks * BLOCK_TOKENS, await hit_tokens(self.suite)
        self.ids += [self._random.randrange(FIRST, VOCAB) for _ in range(num_tokens)]
        answer = await complete(self.client, self.ids, max_tokens=ANSWER_TOKENS)
        self.ids += answer.token_ids
        self.num_computed = len(self.ids) - 1
        return expected, await hit_tokens(self.suite) - before, answer

    async def again(self) -> tuple[int, Answer]:
        """Ask for the last answer once more; return what the stores held, and the answer."""
        before = await hit_tokens(self.suite)
        answer = await complete(self.client, self.ids[:-ANSWER_TOKENS], max_tokens=ANSWER_TOKENS)
        return await hit_tokens(self.suite) - before, answer


async def test_a_conversation_hits_all_its_full_blocks_in_every_turn(suite):
    """Twenty turns: over a store that is killed and started again, and over the loss of one with its disk.

    The stores have, and the answers use, all that was computed but the last partial block; and engines that start
    anew after either trouble answer from the stores' bytes what was answered before it.
    """
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=120) as client:
        talk = Conversation(suite, client)
        hits, wanted, held = [], [], []
        for number in range(NUM_TURNS):
            num_late = suite.num_late()
            expected, stored, answer = await talk.turn(TURN_TOKENS)
            hits.append(answer.cached_tokens)
            wanted.append(expected)
            if num_late == suite.num_late():
                held.append((expected, stored))
            await settled(suite, talk.num_blocks, everywhere=number >= LOSS_TURN)
            if number == RESTART_TURN:
                await restart_fullest(suite, talk, answer)
            if number == LOSS_TURN:
                await lose_fullest(suite, talk, answer)

        assert wanted == hits
        assert [expected for expected, _ in held] == [stored for _, stored in held]
        assert len(held) > NUM_TURNS // 2
        assert talk.num_blocks > 2 * GROUP_BLOCKS


async def test_blocks_lie_on_the_stores_that_their_keys_name(suite):
    """Prompts chosen so that every store is to have one: each has just its own, by the placement that callers use."""
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=120) as client:
        root = await key_root_of(suite, client)
        prompts = one_for_each_store(root)
        before = {name: (await stats_of(suite, name)).num_blocks for name in STORES}
        for number, tokens in enumerate(prompts.values(), start=1):
            await complete(client, tokens, max_tokens=ANSWER_TOKENS)
            await settled(suite, sum(before.values()) + number * PLACED_BLOCKS)

        after = {name: (await stats_of(suite, name)).num_blocks for name in STORES}
        assert {name: before[name] + PLACED_BLOCKS for name in STORES} == after


async def key_root_of(suite: Suite, client: httpx.AsyncClient) -> bytes:
    """Return the root of the suite's block keys; something is stored for that, which tells model and tenant."""
    already = sum([(await stats_of(suite, name)).num_blocks for name in STORES])
    await complete(client, random_tokens("first", BLOCK_TOKENS + 8), max_tokens=ANSWER_TOKENS)
    await settled(suite, already + 1)
    stats = [await stats_of(suite, name) for name in STORES]
    ((fingerprint,), (tenant,)) = (
        {one.fingerprint for each in stats for one in each.fingerprints},
        {one.tenant for each in stats for one in each.tenants},
    )
    return key_root(bytes.fromhex(suite.home.cluster_key()), fingerprint, tenant_salt(tenant))


def one_for_each_store(root: bytes) -> dict[str, list[int]]:
    """Return prompts by the store that placement gives their blocks to."""
    found: dict[str, list[int]] = {}
    for number in itertools.count():
        tokens = random_tokens(f"placed {number}", PLACED_BLOCKS * BLOCK_TOKENS + 8)
        (run,) = split(block_keys(root, tokens, block_tokens=BLOCK_TOKENS), 0, STORES)
        found.setdefault(run.replica, tokens)
        if len(found) == len(STORES):
            return found
    raise AssertionError("unreachable")


def random_tokens(seed: str, count: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(FIRST, VOCAB) for _ in range(count)]


async def restart_fullest(suite: Suite, talk: Conversation, answer: Answer) -> None:
    """Kill the store that has most of the conversation; it comes back with its disk."""
    await asyncio.gather(suite.restart(await fullest(suite), signal.SIGKILL), forget(suite))
    await answer_from_stores(suite, talk, answer)


async def forget(suite: Suite) -> None:
    """Give prefill an empty pool: what it has from now on it computed, or read from the stores."""
    await suite.restart("prefill-0", signal.SIGKILL)


async def lose_fullest(suite: Suite, talk: Conversation, answer: Answer) -> None:
    """Kill the store that has most of the conversation, and delete its disk; the others answer at once, and alike."""
    lost = await fullest(suite)
    await suite.kill(lost)
    shutil.rmtree(suite.home.kv_of(lost))
    stored, again = await talk.again()
    assert talk.num_prompt_blocks * BLOCK_TOKENS <= stored
    assert answer.token_ids == again.token_ids

    await asyncio.gather(suite.wait_ready(lost), forget(suite))
    await settled(suite, talk.num_blocks, everywhere=True)
    await answer_from_stores(suite, talk, answer)


async def answer_from_stores(suite: Suite, talk: Conversation, answer: Answer) -> None:
    """Ask a prefill replica that remembers nothing: it reads every full block, and with the right bytes says the same."""
    stored, again = await suite.from_stores(talk.again, lambda: forget(suite))
    wanted = talk.num_prompt_blocks * BLOCK_TOKENS
    assert (wanted, wanted) == (await loaded_tokens(suite), again.cached_tokens)
    assert wanted <= stored
    assert answer.token_ids == again.token_ids


async def fullest(suite: Suite) -> str:
    stats = {name: await stats_of(suite, name) for name in STORES}
    return max(stats, key=lambda name: stats[name].num_blocks)

"""Do the same tokens come out whichever path they took?

The yardstick is one process without services. Every other path must give exactly its ids, greedy and seeded.
"""

import pytest

from e2e.client import GREEDY, SEEDED
from e2e.one_process import alone, together, with_model
from e2e.paths import MAX_TOKENS, answers_of, ids_of, in_turn, mixed_tokens_of, of_each, tokens_of
from e2e.prompts import BLOCK_TOKENS, Prompt, prompts, whole_block_hit
from e2e.suite import Suite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


MIXED = (
    *("short-question", "emoji", "cjk", "chat-multi-turn"),
    *("length-128", "length-129", "length-200", "length-385"),
)


SHORT = ("length-127", "length-128", "cjk")
"""Find nothing, whoever asked before: all other short ones are answered as if they came first."""


def stored(wanted):
    """Those that find blocks of an earlier run."""
    return [p for p in wanted if whole_block_hit(len(p.token_ids))]


@pytest.fixture(scope="module")
def fp32_prompts(model_dir):
    return prompts(model_dir)


@pytest.fixture(scope="module")
def one_process(model_dir, fp32_prompts):
    """What one process answers: to every prompt alone, and to eight of them in chunks."""

    def compute(executor):
        chunks = {"chunk_tokens": BLOCK_TOKENS, "at_once": len(MIXED), "max_tokens": MAX_TOKENS}
        some = ids_of([p for p in fp32_prompts if p.name in MIXED])
        whole = alone(executor, ids_of(fp32_prompts), max_tokens=MAX_TOKENS)
        return whole, together(executor, some, samplings=[SEEDED], **chunks)

    return with_model(model_dir, compute, dtype="fp32")


@pytest.fixture(scope="module")
def fp32_expected(one_process):
    return one_process[0]


def test_at_least_24_prompts_of_every_kind(fp32_prompts):
    """Short, over one block, exactly n*128 and one more or less, emoji and CJK, several turns."""
    lengths = {len(p.token_ids) for p in fp32_prompts}

    assert 24 <= len(fp32_prompts)
    assert {127, 128, 129, 255, 256, 257, 385} <= lengths


def test_chunked_prefill_gives_the_same_tokens(one_process):
    """Eight prompts in chunks of 128, in the same steps: chunks and decode steps mixed, as no service mixes them.

    All prompts go through services in chunks of 128 and of 256 below; the yardstick computes them whole.
    """
    whole, chunked = one_process
    assert {name: whole["seeded"][name] for name in MIXED} == chunked["seeded"]


async def test_split_then_batched_then_warm_from_the_store(model_dir, fp32_prompts, fp32_expected, tmp_path_factory):
    """One prefill and one decode, in chunks of 256: alone and cold, then with seven batch mates, then from kvstore
    after a restart.
    """
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "256"}
    async with Suite.running(tmp_path_factory.mktemp("split"), model=model_dir, dtype="fp32", env=env) as suite:
        cold = await answers_of(suite, fp32_prompts, [GREEDY] * len(fp32_prompts), at_once=1)
        assert fp32_expected["greedy"] == {p.name: a.token_ids for p, a in zip(fp32_prompts, cold, strict=True)}
        assert [0] * len(cold) == [a.cached_tokens for a in cold]

        batched = await tokens_of(suite, fp32_prompts, at_once=8, samplings=[SEEDED])
        assert {"seeded": fp32_expected["seeded"]} == batched

        await suite.restart_engines()  # empty pools: every hit now comes from the store
        wanted = [p for p in fp32_prompts if p in stored(fp32_prompts) or p.name in SHORT]
        warm = await suite.from_stores(
            lambda: answers_of(suite, wanted, [SEEDED] * len(wanted), at_once=1), suite.restart_engines
        )
        assert [fp32_expected["seeded"][p.name] for p in wanted] == [a.token_ids for a in warm]
        assert [whole_block_hit(len(p.token_ids)) for p in wanted] == [a.cached_tokens for a in warm]


async def test_two_prefill_and_two_decode_replicas_in_chunks_of_128(
    model_dir, fp32_prompts, fp32_expected, tmp_path_factory
):
    """Which replica computed what does not show in the tokens: of cold prompts, and of those that find blocks."""
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "128"}
    async with Suite.running(
        tmp_path_factory.mktemp("two"), model=model_dir, dtype="fp32", prefill=2, decode=2, env=env
    ) as suite:
        for wanted, first in ((fp32_prompts, 0), (stored(fp32_prompts), 1)):
            each = in_turn(len(wanted), first=first)
            assert of_each(fp32_expected, wanted, each) == await mixed_tokens_of(suite, wanted, each, at_once=8)
        loads = await suite.decode_loads()
        assert 2 == len(loads)


@pytest.mark.long  # test_handoff.py has the same promise with both replicas in one process
async def test_preempted_sequences_give_the_same_tokens(model_dir, fp32_prompts, tmp_path_factory):
    """A decode pool too small for three growing sequences: one loses its blocks, is recomputed, and nobody can tell."""
    longer = [p for p in fp32_prompts if len(p.token_ids) > 2 * BLOCK_TOKENS - 2][:3]
    wanted = [Prompt(p.name, p.token_ids[: 195 + index]) for index, p in enumerate(longer)]
    max_tokens = 75  # from two blocks to three each, late enough for all to be there: nine blocks in a pool of eight
    expected = with_model(
        model_dir, lambda executor: alone(executor, ids_of(wanted), max_tokens=max_tokens), dtype="fp32"
    )
    block_bytes = 30 * 2 * 3 * 64 * 4 * BLOCK_TOKENS
    env = {"FATHOM_DECODE_KV_BYTES": str(9 * block_bytes)}
    async with Suite.running(tmp_path_factory.mktemp("tight"), model=model_dir, dtype="fp32", env=env) as suite:
        assert expected == await tokens_of(suite, wanted, at_once=3, max_tokens=max_tokens)
        assert 0 < sum(load.num_preemptions for load in await suite.decode_loads())

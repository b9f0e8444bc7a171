"""Do the same tokens come out whichever path they took?

The yardstick is one process without services. Every other path must give exactly its ids, greedy and seeded.
"""

import httpx
import pytest

from e2e.client import SEEDED, complete, complete_all
from e2e.paths import MAX_TOKENS, expected_tokens, tokens_of
from e2e.prompts import BLOCK_TOKENS, Prompt, bf16_prompts, prompts
from e2e.suite import Suite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def whole_block_hit(num_tokens: int) -> int:
    """The last prompt token is always computed: sampling needs its logits."""
    return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def fp32_prompts(model_dir):
    return prompts(model_dir)


@pytest.fixture(scope="module")
def fp32_expected(model_dir, fp32_prompts):
    return expected_tokens(model_dir, fp32_prompts, dtype="fp32")


def test_at_least_24_prompts_of_every_kind(fp32_prompts):
    """Short, over one block, exactly n*128 and one more or less, emoji and CJK, several turns."""
    lengths = {len(p.token_ids) for p in fp32_prompts}

    assert 24 <= len(fp32_prompts)
    assert {127, 128, 129, 255, 256, 257, 385} <= lengths


@pytest.mark.parametrize("chunk_tokens", [128, 256])
def test_chunked_prefill_gives_the_same_tokens(model_dir, fp32_prompts, fp32_expected, chunk_tokens):
    """Chunk budgets of 128, 256 and whole prompts agree, also with seven others in the same steps."""
    # Short prompts are whole in both budgets.
    wanted = [p for p in fp32_prompts if chunk_tokens == BLOCK_TOKENS or len(p.token_ids) > BLOCK_TOKENS]
    found = expected_tokens(model_dir, wanted, dtype="fp32", chunk_tokens=chunk_tokens, at_once=8)
    assert {name: {p.name: answers[p.name] for p in wanted} for name, answers in fp32_expected.items()} == found


async def test_split_then_batched_then_warm_from_the_store(model_dir, fp32_prompts, fp32_expected, tmp_path_factory):
    """One prefill and one decode: alone and cold, then with seven batch mates, then from kvstore after a restart."""
    async with Suite.running(tmp_path_factory.mktemp("split"), model=model_dir, dtype="fp32") as suite:
        cold = await complete_all(suite.base_url, [p.token_ids for p in fp32_prompts], at_once=1, max_tokens=MAX_TOKENS)
        assert fp32_expected["greedy"] == {p.name: a.token_ids for p, a in zip(fp32_prompts, cold, strict=True)}
        assert [0] * len(cold) == [a.cached_tokens for a in cold]

        batched = await tokens_of(suite, fp32_prompts, at_once=8, samplings=[SEEDED])
        assert {"seeded": fp32_expected["seeded"]} == batched

        await suite.restart_engines()  # empty pools: every hit now comes from the store
        warm = await complete_all(
            suite.base_url, [p.token_ids for p in fp32_prompts], at_once=1, max_tokens=MAX_TOKENS, sampling=SEEDED
        )
        assert fp32_expected["seeded"] == {p.name: a.token_ids for p, a in zip(fp32_prompts, warm, strict=True)}
        assert [whole_block_hit(len(p.token_ids)) for p in fp32_prompts] == [a.cached_tokens for a in warm]


async def test_two_prefill_and_two_decode_replicas_in_chunks_of_128(
    model_dir, fp32_prompts, fp32_expected, tmp_path_factory
):
    """Which replica computed what does not show in the tokens."""
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": "128"}
    async with Suite.running(
        tmp_path_factory.mktemp("two"), model=model_dir, dtype="fp32", prefill=2, decode=2, env=env
    ) as suite:
        assert fp32_expected == await tokens_of(suite, fp32_prompts, at_once=8)
        loads = await suite.decode_loads()
        assert 2 == len(loads)


@pytest.mark.long  # test_handoff.py has the same promise with both replicas in one process
async def test_preempted_sequences_give_the_same_tokens(model_dir, fp32_prompts, tmp_path_factory):
    """A decode pool too small for three growing sequences: one loses its blocks, is recomputed, and nobody can tell."""
    longer = [p for p in fp32_prompts if len(p.token_ids) > 2 * BLOCK_TOKENS - 2][:3]
    wanted = [Prompt(p.name, p.token_ids[: 195 + index]) for index, p in enumerate(longer)]
    max_tokens = 75  # from two blocks to three each, late enough for all to be there: nine blocks in a pool of eight
    expected = expected_tokens(model_dir, wanted, dtype="fp32", at_once=3, max_tokens=max_tokens)
    block_bytes = 30 * 2 * 3 * 64 * 4 * BLOCK_TOKENS
    env = {"FATHOM_DECODE_KV_BYTES": str(9 * block_bytes)}
    async with Suite.running(tmp_path_factory.mktemp("tight"), model=model_dir, dtype="fp32", env=env) as suite:
        assert expected == await tokens_of(suite, wanted, at_once=3, max_tokens=max_tokens)
        assert 0 < sum(load.num_preemptions for load in await suite.decode_loads())


@pytest.mark.asyncio(loop_scope="session")
async def test_bf16_keeps_the_promise_too(model_dir, shared_suite):
    """Six prompts: one process, chunked, split, batched, warm, all in bf16."""
    wanted = bf16_prompts(model_dir)
    expected = expected_tokens(model_dir, wanted, dtype="bf16")
    assert 6 == len(wanted)
    assert expected == expected_tokens(model_dir, wanted, dtype="bf16", chunk_tokens=128, at_once=6)
    assert expected == await tokens_of(shared_suite, wanted, at_once=1)
    assert expected == await tokens_of(shared_suite, wanted, at_once=6)
    async with httpx.AsyncClient(base_url=shared_suite.base_url, timeout=60) as client:
        last = wanted[-1]
        warm = await complete(client, last.token_ids, max_tokens=MAX_TOKENS)
    assert expected["greedy"][last.name] == warm.token_ids
    assert whole_block_hit(len(last.token_ids)) == warm.cached_tokens

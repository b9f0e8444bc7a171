"""Do the same tokens come out in bf16, too, whichever path they took?"""

import httpx
import pytest

from e2e.client import SEEDED, complete
from e2e.one_process import Answers, alone, together, with_model
from e2e.paths import MAX_TOKENS, ids_of, in_turn, mixed_tokens_of, of_each
from e2e.prompts import BLOCK_TOKENS, bf16_prompts, whole_block_hit
from kernels.executor import Executor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.asyncio(loop_scope="session")
async def test_bf16_keeps_the_promise_too(model_dir, shared_suite):
    """Six prompts: one process, chunked, split, batched, warm, all in bf16."""
    wanted = bf16_prompts(model_dir)
    ids, first, then = ids_of(wanted), in_turn(len(wanted)), in_turn(len(wanted), first=1)

    def compute(executor: Executor) -> tuple[Answers, Answers]:
        chunks = {"chunk_tokens": BLOCK_TOKENS, "at_once": len(ids), "max_tokens": MAX_TOKENS}
        return alone(executor, ids, max_tokens=MAX_TOKENS), together(executor, ids, samplings=[SEEDED], **chunks)

    expected, chunked = with_model(model_dir, compute, dtype="bf16")
    assert 6 == len(wanted)
    assert expected["seeded"] == chunked["seeded"]
    assert of_each(expected, wanted, first) == await mixed_tokens_of(shared_suite, wanted, first, at_once=1)
    assert of_each(expected, wanted, then) == await mixed_tokens_of(shared_suite, wanted, then, at_once=len(wanted))
    async with httpx.AsyncClient(base_url=shared_suite.base_url, timeout=60) as client:
        last = wanted[-1]
        warm = await complete(client, last.token_ids, max_tokens=MAX_TOKENS)
    assert expected["greedy"][last.name] == warm.token_ids
    assert whole_block_hit(len(last.token_ids)) == warm.cached_tokens

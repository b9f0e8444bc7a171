"""Do the same tokens come out in bf16, too, whichever path they took?"""

import httpx
import pytest

from e2e.client import complete
from e2e.paths import MAX_TOKENS, expected_tokens, tokens_of
from e2e.prompts import bf16_prompts, whole_block_hit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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

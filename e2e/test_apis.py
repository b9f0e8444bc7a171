"""Do the three APIs say the same with a real model, and is the likelihood of a text the model's own?"""

from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
import torch

from e2e.client import model_name
from kernels.batch import Batch, Row
from kernels.executor import Executor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

SYSTEM, USER = "You answer in one short sentence.", "Which colour has a ripe lemon, and why?"
TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps in the sun, and nobody minds. " * 16
NUM_TOKENS = 300  # stored blocks, and more than the suite's chunk
ONE_BY_ONE = (*range(3), *range(251, 260))
"""Positions of tokens that are computed here too, in a step of their own: at the start, and around the chunk's end."""


@pytest.fixture
def suite(shared_suite):
    return shared_suite


@pytest_asyncio.fixture(loop_scope="session")
async def client(suite):
    async with httpx.AsyncClient(base_url=suite.base_url, timeout=60) as client:
        yield client


async def test_three_apis_one_model(suite, client):
    """Same prompt ids, same greedy text, same counts; what one API computed the others find in the cache."""
    name = await model_name(client)
    turns: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    ids = (await client.post("/tokenize", json={"messages": turns})).json()["tokens"]
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
    async with (
        openai.AsyncOpenAI(base_url=f"{suite.base_url}/v1", **options) as theirs,
        anthropic.AsyncAnthropic(base_url=suite.base_url, **options) as other,
    ):
        own = {"return_token_ids": True}
        chat = await theirs.chat.completions.create(
            model=name, messages=turns, temperature=0, max_tokens=8, extra_body=own
        )
        response = await theirs.responses.create(
            model=name, instructions=SYSTEM, input=USER, temperature=0, max_output_tokens=8
        )
        message = await other.messages.create(
            model=name,
            system=SYSTEM,
            messages=[{"role": "user", "content": USER}],
            max_tokens=8,
            extra_body={"temperature": 0},
        )
        streamed = await theirs.responses.create(
            model=name, instructions=SYSTEM, input=USER, temperature=0, max_output_tokens=8, stream=True
        )
        deltas = [event.delta async for event in streamed if event.type == "response.output_text.delta"]
    usage, other_usage, told = chat.usage, response.usage, message.usage
    block = message.content[0]

    assert usage is not None
    assert other_usage is not None
    assert block.type == "text"
    assert ids == chat.choices[0].model_dump()["prompt_token_ids"]
    text = chat.choices[0].message.content
    assert text
    assert text == response.output_text == block.text == "".join(deltas)
    assert len(ids) == usage.prompt_tokens == other_usage.input_tokens
    assert len(ids) == told.input_tokens + (told.cache_read_input_tokens or 0)
    assert usage.completion_tokens == other_usage.output_tokens == told.output_tokens


def plain_logprobs(model_dir, token_ids: list[int]) -> list[float]:
    """Of the tokens after those at ONE_BY_ONE: a forward each in this process, and one for what lies between."""
    executor = Executor.load(model_dir, dtype="bf16", threads=1, num_blocks=8)
    table = range(1, 8)
    found, computed = [], 0
    for at in ONE_BY_ONE:
        if computed < at:
            executor.logits(Batch((Row(0, token_ids[computed:at], computed, table),)))
        (logits,) = executor.logits(Batch((Row(0, [token_ids[at]], at, table),)))
        found.append(float(torch.log_softmax(logits.double(), 0)[token_ids[at + 1]]))
        computed = at + 1
    return found


async def test_likelihoods_are_the_model_s(client, model_dir):
    """As evaluation harnesses ask: echo and logprobs, no token of answer. Chunks, batch mates and stored prefixes are
    of no account: twice the same numbers, those of plain forwards and their sum.
    """
    name = await model_name(client)
    ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"][:NUM_TOKENS]
    warm = {"model": name, "prompt": ids, "max_tokens": 2}
    assert 200 == (await client.post("/v1/completions", json=warm)).status_code
    asked = {"model": name, "prompt": [ids, ids[:70]], "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    first = (await client.post("/v1/completions", json=asked)).json()
    again = (await client.post("/v1/completions", json=asked | {"prompt": ids, "max_tokens": 1})).json()
    expected = plain_logprobs(model_dir, ids)
    long, short = (choice["logprobs"]["token_logprobs"] for choice in first["choices"])
    checked = [long[at + 1] for at in ONE_BY_ONE]

    assert (None, None) == (long[0], short[0])
    assert len(ids) == len(long) == NUM_TOKENS
    assert expected == pytest.approx(checked, abs=1e-5)
    assert sum(expected) == pytest.approx(sum(checked), abs=1e-3)
    assert long[:70] == short
    assert [*long, again["choices"][0]["logprobs"]["token_logprobs"][-1]] == again["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    assert (0, 0) == (first["usage"]["completion_tokens"], first["usage"]["prompt_tokens_details"]["cached_tokens"])

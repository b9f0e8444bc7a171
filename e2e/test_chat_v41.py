"""Does a DeepSeek-V4.1 model with its whole vocabulary chat, with text and with an image, through all eight services?"""

import httpx
import openai
import pytest
import pytest_asyncio

from e2e.suite import Suite
from services.recipe.tests.deepseek import data_url, png

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 6
IMAGE_TOKENS = 10  # at least: the tiny tower makes few of a small picture, its marks included
LONG_TEXT = "Look at this carefully, and tell me in your own words what you see in it, line by line. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chat")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(folder):
    """A suite on a model made by `fathom tiny-model`."""
    made = Suite(folder, model=folder / "deep", dtype="fp32")
    done = await made.console("tiny-model", str(folder / "deep"), "--seed", "7", "--full-vocabulary", timeout=120)
    assert 0 == done.returncode, done.stderr
    await made.start()
    try:
        yield made
    except BaseException:
        print(made.log_tails())
        raise
    finally:
        await made.stop()


@pytest.fixture(scope="module")
def client(suite):
    return openai.AsyncOpenAI(base_url=f"{suite.base_url}/v1", api_key="none", max_retries=0, timeout=120)


async def ask(client, *parts, **fields):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return await client.chat.completions.create(
        model="deep",
        messages=[{"role": "user", "content": content}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        logprobs=True,
        reasoning_effort="none",
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **fields,
    )


def image(width, height, noise_bytes=0):
    return {"type": "image_url", "image_url": {"url": data_url(png(width, height, noise_bytes=noise_bytes))}}


def tokens(reply):
    return reply.choices[0].model_extra["token_ids"]


def cached(reply):
    return reply.usage.prompt_tokens_details.cached_tokens


async def test_text_is_answered_and_streamed_alike(client):
    """The same tokens, whole or streamed, and what was cached is said."""
    first = await ask(client, LONG_TEXT)
    again = await ask(client, LONG_TEXT)

    assert MAX_TOKENS == len(tokens(first)) == first.usage.completion_tokens
    assert tokens(first) == tokens(again)
    assert (0, True) == (cached(first), cached(again) > 0)


async def test_an_image_is_part_of_the_prompt_and_of_what_is_cached(client):
    """It takes its places, its twin is a hit, and another picture in the same places is not."""
    plain = await ask(client, LONG_TEXT)
    seen = await ask(client, image(120, 90), LONG_TEXT)
    again = await ask(client, image(120, 90), LONG_TEXT)
    other = await ask(client, image(120, 90, noise_bytes=1), LONG_TEXT)

    assert plain.usage.prompt_tokens + IMAGE_TOKENS <= seen.usage.prompt_tokens == other.usage.prompt_tokens
    assert tokens(seen) == tokens(again) == tokens(other)  # the noise is not in the pixels
    assert cached(again) > 0
    assert cached(again) > cached(other)


async def test_all_eight_services_had_their_part(suite, client):
    """The request's journey: every service logged nothing worse than information, and vision encoded."""
    await ask(client, image(200, 100), "What is this?")
    async with httpx.AsyncClient(timeout=30) as http:
        found = await http.get(suite.state()["vision-0"].health_url.replace("/healthz", "/metrics"))
    encoded = [line for line in found.text.splitlines() if line.startswith("fathom_vision_") and " 0.0" not in line]

    assert encoded
    assert 8 == len({process.service for process in suite.recorded().processes} - {"nats"})


async def test_a_bad_image_is_a_400_that_names_it(client):
    """Nothing dies of it."""
    broken = {"type": "image_url", "image_url": {"url": data_url(png(120, 90)[:60])}}
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, broken, "What is this?")

    assert "image" in str(refused.value).lower()
    assert MAX_TOKENS == len(tokens(await ask(client, "Still there?")))

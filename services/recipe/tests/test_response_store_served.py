"""What do callers of a recipe notice when its database is away, and when it is PostgreSQL?"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proto.common_pb2 import ModelCard, Request
from services.recipe.tests.balancer import round_robin
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.response_rig import empty_database
from services.recipe.tests.running import serve_recipe
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import answering
from services.recipe.tests.test_openapi import check_answer

CARD = ModelCard(name="deep", context_tokens=4096)


async def test_without_its_database_the_recipe_serves_what_needs_none(tmp_path: Path) -> None:
    """Only requests about what is kept get a 503; the recipe starts, and others are answered."""
    state_url = f"postgresql://me@localhost/x?host={tmp_path}"
    folder = write_folder(tmp_path / "deep")
    async with serve_recipe(answering("</think>ok"), folder, card=CARD, state_url=state_url) as recipe:
        kept: dict[str, Any] = {"model": "deep", "input": "hello"}
        answer = await recipe.sdk.responses.create(**kept, store=False)
        chat = await recipe.sdk.chat.completions.create(model="deep", messages=[{"role": "user", "content": "hello"}])
        for refused in (
            recipe.sdk.responses.create(**kept, store=True),
            recipe.sdk.responses.create(**kept, background=True),
            recipe.sdk.responses.create(**kept, store=False, previous_response_id="resp_1"),
            recipe.sdk.responses.retrieve("resp_1"),
            recipe.sdk.responses.delete("resp_1"),
            recipe.sdk.conversations.create(),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await refused
            assert 503 == caught.value.status_code
        health = await recipe.http.get("/health")

    assert ("ok", "ok", 200) == (answer.output_text, chat.choices[0].message.content, health.status_code)


@pytest.mark.slow
async def test_two_recipes_on_postgresql_are_one(tmp_path: Path, postgresql: str) -> None:
    """A background response is created at one, streamed, polled and deleted at the other."""
    state_url, folder = empty_database(postgresql), write_folder(tmp_path / "deep")
    async with (
        serve_recipe(answering("hm</think>ok"), folder, card=CARD, state_url=state_url) as one,
        serve_recipe(lambda _request: (), folder, card=CARD, state_url=state_url) as other,
    ):
        created = await one.sdk.responses.create(model="deep", input="hello", background=True, stream=True)
        first = await anext(aiter(created))
        assert first.type == "response.created"
        async with asyncio.timeout(20):
            stream = await other.sdk.responses.retrieve(first.response.id, stream=True, starting_after=0)
            seen = [event async for event in stream]
        found = await other.sdk.responses.retrieve(first.response.id)
        await other.sdk.responses.delete(first.response.id)
        with pytest.raises(openai.NotFoundError):
            await one.sdk.responses.retrieve(first.response.id)

    assert list(range(1, len(seen) + 1)) == [event.sequence_number for event in seen]
    assert ("completed", "ok") == (found.status, found.output_text)


@pytest.mark.slow
async def test_any_replica_will_do(tmp_path: Path, state_url: str) -> None:
    """Behind a balancer that sends every request elsewhere: background responses are made at one recipe, and polled,
    followed, built upon, listed, cancelled and deleted at whichever comes next.
    """
    folder = write_folder(tmp_path / "deep")
    text = "hm</think>" + "one two three four " * 10
    scripts = [answering(text, after=0.004)]

    def script(request: Request) -> Iterable[Step]:
        return scripts[-1](request)

    async with (
        serve_recipe(script, folder, card=CARD, state_url=state_url) as one,
        serve_recipe(script, folder, card=CARD, state_url=state_url) as other,
        round_robin([one.url, other.url]) as (url, went),
        httpx.AsyncClient(headers={"connection": "close"}, timeout=60) as plain,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, default_headers={"connection": "close"}) as sdk,
    ):  # fmt: skip
        asked: dict[str, Any] = {"model": "deep", "input": "hello", "background": True}
        queued = await sdk.responses.create(**asked)
        async with asyncio.timeout(30):
            while (found := await sdk.responses.retrieve(queued.id)).status in {"queued", "in_progress"}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        created = await sdk.responses.create(**asked, stream=True)
        begun = await anext(aiter(created))
        assert begun.type == "response.created"
        followed = await sdk.responses.retrieve(begun.response.id, stream=True, starting_after=1)
        numbers, kinds = zip(*[(event.sequence_number, event.type) async for event in followed], strict=True)
        built = await sdk.responses.create(
            model="deep", input="and?", previous_response_id=queued.id, max_output_tokens=3
        )
        listed = [item async for item in sdk.responses.input_items.list(built.id)]
        scripts.append(answering(text, after=0.5))  # nothing is so slow that it ends before it is cancelled
        running = await sdk.responses.create(**asked)
        cancelled = await sdk.responses.cancel(running.id)
        after = await sdk.responses.retrieve(running.id)
        described = (await plain.get(f"{url}/openapi.json")).json()
        path = "/v1/responses/{response_id}"
        check_answer(described, "get", path, await plain.get(f"{url}/v1/responses/{queued.id}"))
        check_answer(
            described, "get", f"{path}/input_items", await plain.get(f"{url}/v1/responses/{built.id}/input_items")
        )
        check_answer(described, "delete", path, await plain.delete(f"{url}/v1/responses/{queued.id}"))
        check_answer(described, "get", path, await plain.get(f"{url}/v1/responses/{queued.id}"))
        await one.until(lambda: bool(one.entrypoint.cancelled or other.entrypoint.cancelled))
        await asyncio.sleep(0.1)
        cancels = [*one.entrypoint.cancelled, *other.entrypoint.cancelled]

    assert "completed" == found.status
    assert list(range(2, 2 + len(numbers))) == list(numbers)
    assert "response.completed" == kinds[-1]
    assert (["message"], "incomplete") == ([item.type for item in listed], built.status)
    assert ("cancelled", "cancelled") == (cancelled.status, after.status)
    assert 1 == len(cancels), "the engines were told, once"
    assert {one.url, other.url} == set(went)

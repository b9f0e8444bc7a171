"""What do callers of a recipe notice when its database is away, and when it is PostgreSQL?"""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from proto.common_pb2 import ModelCard
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.response_rig import empty_database
from services.recipe.tests.running import serve_recipe
from services.recipe.tests.speaking import answering

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

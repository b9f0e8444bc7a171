"""Promises of the Responses API's state, through the official SDK: cases 74 to 81 of the checklist."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import Response, ResponseItemList

from proto.common_pb2 import ModelCard
from services.chassis import errors
from services.recipe.conversation import Tool, Turn
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import answering, ids_of, rendered, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
WEATHER: Any = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
TOOL = Tool("weather", "d", SCHEMA)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, Running]]:
    """Two recipes that share their state."""
    path = tmp_path_factory.mktemp("state")
    folder, state_url = write_folder(path / "deep"), f"sqlite:///{path / 'state.sqlite3'}"
    card = ModelCard(name="deep", context_tokens=4096, takes_images=True)
    async with (
        serve_recipe(lambda _request: (), folder, card=card, state_url=state_url) as one,
        serve_recipe(lambda _request: (), folder, card=card, state_url=state_url) as other,
    ):
        yield one, other


@pytest.fixture
def kept(pair: tuple[Running, Running]) -> Iterator[Running]:
    """The first of them, which answers."""
    pair[0].play(answering("hm</think>ok"))
    yield pair[0]
    pair[0].play(lambda _request: ())


@pytest.fixture
def other(pair: tuple[Running, Running]) -> Running:
    """The second, which is only asked about what the first does."""
    return pair[1]


async def ask(kept: Running, **options: Any) -> Response:
    response: Response = await kept.sdk.responses.create(model="deep", **({"input": "hello"} | options))
    return response


def prompt_of(kept: Running) -> list[int]:
    return list(kept.entrypoint.submitted[-1].prompt_token_ids)


async def test_previous_response(kept: Running) -> None:
    """Cases 74 and 75: what was said is recalled, reasoning included; instructions are not."""
    first = await ask(kept, instructions="be brief")
    second = await ask(kept, input="more", previous_response_id=first.id, tools=[WEATHER])
    third = await ask(kept, input="and more", previous_response_id=second.id, instructions="be long", tools=[WEATHER])
    said = Turn("assistant", ("ok",), reasoning="hm")

    expected = rendered(
        Turn("system", ("be long",)), user("hello"), said, user("more"), said, user("and more"), tools=(TOOL,)
    )
    assert expected == prompt_of(kept)
    assert first.id == second.previous_response_id
    counted = await kept.sdk.responses.input_tokens.count(
        model="deep", input="x", previous_response_id=third.id, tools=[WEATHER]
    )
    turns = (user("hello"), said, user("more"), said, user("and more"), said, user("x"))
    assert counted.input_tokens == len(rendered(*turns, tools=(TOOL,)))
    with pytest.raises(openai.BadRequestError) as unknown:
        await ask(kept, previous_response_id="resp_unknown")
    assert "previous_response_not_found" == unknown.value.code


async def test_calls_are_answered_in_the_next_request(kept: Running) -> None:
    """Case 75: a result needs no more than the call's id."""
    kept.play(
        answering(
            '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        )
    )
    first = await ask(kept, tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept.play(answering("</think>ok"))
    second = await ask(kept, input=[result], previous_response_id=first.id, tools=[WEATHER])

    assert "ok" == second.output_text


async def test_what_is_not_stored(kept: Running) -> None:
    """Case 76: store false leaves nothing behind, for GET and for those who would go on."""
    response = await ask(kept, store=False)
    with pytest.raises(openai.NotFoundError):
        await kept.sdk.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        await ask(kept, previous_response_id=response.id)

    assert response.store is False  # type: ignore[attr-defined] # a field that the SDK has no name for


@pytest.mark.parametrize("stream", [False, True])
async def test_retrieve_and_delete(kept: Running, other: Running, stream: bool) -> None:
    """Cases 72 and 77: the same object, from the other replica too, equal to the stream's last event; then gone."""
    if stream:
        events = [event async for event in await kept.sdk.responses.create(model="deep", input="hello", stream=True)]
        last = events[-1]
        assert last.type == "response.completed"
        response = last.response
    else:
        response = await ask(kept)
    found = await other.sdk.responses.retrieve(response.id)
    await other.sdk.responses.delete(response.id)

    assert response.model_dump() == found.model_dump()
    for running in (kept, other):
        with pytest.raises(openai.NotFoundError):
            await running.sdk.responses.retrieve(response.id)


async def test_input_items(kept: Running) -> None:
    """Case 78: newest first unless asked otherwise, in pages."""
    given: Any = [{"role": "user", "content": str(at)} for at in range(5)]
    response = await ask(kept, input=given, instructions="be brief")
    raw = await kept.http.get(f"/v1/responses/{response.id}/input_items", params={"limit": 2, "order": "asc"})
    page = ResponseItemList.model_validate(raw.json())
    newest = [item async for item in kept.sdk.responses.input_items.list(response.id, limit=2)]
    rest = await kept.sdk.responses.input_items.list(response.id, after=page.last_id, order="asc")

    texts = [item.content[0].text for item in newest]  # type: ignore[union-attr,index] # messages with text
    assert (["4", "3", "2", "1", "0"], True) == (texts, page.has_more)
    assert [item.id for item in reversed(newest)] == [item.id for item in (*page.data, *rest.data)]
    assert (page.data[0].id, page.data[1].id) == (page.first_id, page.last_id)


async def until_done(kept: Running, response_id: str) -> Response:
    async with asyncio.timeout(30):
        while True:
            response: Response = await kept.sdk.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)


async def test_background(kept: Running, other: Running) -> None:
    """Case 79: queued at once, completed later, seen from both replicas; a follow-up may build upon it."""
    kept.play(answering("hm</think>ok", after=0.02))
    begun = await ask(kept, background=True)
    done = await until_done(other, begun.id)
    later = await ask(kept, input="more", previous_response_id=begun.id)

    assert ("queued", "completed", "ok") == (begun.status, done.status, done.output_text)
    assert done.usage is not None
    assert begun.id == later.previous_response_id


async def test_background_stream_and_resume(kept: Running, other: Running) -> None:
    """Case 79: its caller may go; anybody may go on behind any event, at any replica, to the same end."""
    kept.play(answering("hm</think>The end of the beginning", after=0.02))
    stream: Any = await kept.sdk.responses.create(model="deep", input="hello", stream=True, background=True)
    first = [await anext(stream) for _ in range(4)]
    await stream.close()
    response_id = first[0].response.id
    rest = [e async for e in await other.sdk.responses.retrieve(response_id, stream=True, starting_after=3)]
    again = [e async for e in await kept.sdk.responses.retrieve(response_id, stream=True)]
    done = await other.sdk.responses.retrieve(response_id)

    assert ["response.created", "response.queued", "response.in_progress"] == [event.type for event in again[:3]]
    assert list(range(len(again))) == [event.sequence_number for event in (*first, *rest)]
    assert again == [*first, *rest]
    last = again[-1]
    assert last.type == "response.completed"
    assert done.model_dump() == last.response.model_dump()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_cancel(kept: Running, other: Running, stream: bool) -> None:
    """Case 79: from the other replica; the engines are told, what there was is kept, and streams end."""
    kept.play(answering("hm</think>" + "The end " * 200, after=0.02))
    raw: Any = await kept.sdk.responses.create(model="deep", input="hello", background=True, stream=stream)
    response_id = (await anext(raw)).response.id if stream else raw.id
    await kept.until(lambda: bool(kept.entrypoint.submitted))
    cancelled = await other.sdk.responses.cancel(response_id)
    again = await kept.sdk.responses.cancel(response_id)
    rest = [event.type async for event in raw] if stream else []

    assert "cancelled" == cancelled.status == again.status == (await until_done(kept, response_id)).status
    await kept.until(lambda: len(kept.entrypoint.cancelled) == 1)
    assert not any(kind in ("response.completed", "response.failed") for kind in rest)


async def test_deleting_stops_a_background_response(kept: Running, other: Running) -> None:
    """Case 77: it is gone at once, and its generation ends at its replica."""
    kept.play(answering("hm</think>" + "The end " * 200, after=0.02))
    begun = await ask(kept, background=True)
    await kept.until(lambda: bool(kept.entrypoint.submitted))
    await other.sdk.responses.delete(begun.id)

    with pytest.raises(openai.NotFoundError):
        await kept.sdk.responses.retrieve(begun.id)
    await kept.until(lambda: len(kept.entrypoint.cancelled) == 1)


async def test_a_background_response_that_fails(kept: Running) -> None:
    """Case 90: failed, with an error that says no internals, in the object and as the last event."""
    lost = errors.to_stream_error(errors.InternalError("secret"))
    kept.play(lambda _request: [Step(ids_of("hm</think>The")), Step(error=lost)])
    events = [
        event async for event in await kept.sdk.responses.create(model="deep", input="x", stream=True, background=True)
    ]
    last = events[-1]
    assert last.type == "response.failed"
    async with asyncio.timeout(20):  # the event is told at once; a busy machine may write the object a moment later
        while (found := await kept.sdk.responses.retrieve(last.response.id)).status == "in_progress":  # noqa: ASYNC110 - a server is asked
            await asyncio.sleep(0.05)

    assert found.error is not None
    assert ("failed", "server_error", "The") == (found.status, found.error.code, found.output_text)
    assert "secret" not in found.model_dump_json()


async def test_only_background_responses_are_cancelled(kept: Running) -> None:
    """Case 80: others are a 400."""
    response = await ask(kept)
    with pytest.raises(openai.BadRequestError):
        await kept.sdk.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError):
        await ask(kept, background=True, store=False)
    with pytest.raises(openai.BadRequestError):
        await kept.sdk.responses.retrieve(response.id, stream=True)


@pytest.mark.slow
async def test_conversations(kept: Running, other: Running) -> None:
    """Case 81: input and output are appended, and come before the next input; not both kinds of context at once."""
    conversation = await kept.sdk.conversations.create(
        metadata={"a": "b"}, items=[{"type": "message", "role": "developer", "content": "be brief"}]
    )
    first = await ask(kept, conversation=conversation.id)
    await ask(other_plays(other), input="more", conversation={"id": conversation.id}, tools=[WEATHER])
    listed = [i async for i in other.sdk.conversations.items.list(conversation.id, order="asc", limit=2)]
    said = Turn("assistant", ("ok",), reasoning="hm")

    Conversation.model_validate(conversation.model_dump())
    assert rendered(Turn("developer", ("be brief",)), user("hello"), said, user("more"), tools=(TOOL,)) == prompt_of(
        other
    )
    assert ["message", "message", "reasoning", "message", "message", "reasoning", "message"] == [i.type for i in listed]
    assert first.output[-1].id == listed[3].id
    assert first.conversation is not None
    assert conversation.id == first.conversation.id
    with pytest.raises(openai.BadRequestError):
        await ask(kept, conversation=conversation.id, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        await ask(kept, conversation="conv_unknown")


def other_plays(other: Running) -> Running:
    other.play(answering("hm</think>ok"))
    return other


async def test_conversations_are_changed_and_deleted(kept: Running) -> None:
    """Case 81: metadata, single items, and the whole."""
    conversations = kept.sdk.conversations
    conversation = await conversations.create()
    added = await conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": text} for text in "ab"]
    )
    first, second = added.data
    assert first.id is not None
    assert second.id is not None
    found = await conversations.items.retrieve(first.id, conversation_id=conversation.id)
    await conversations.items.delete(first.id, conversation_id=conversation.id)
    left = [item async for item in conversations.items.list(conversation.id)]
    changed = await conversations.update(conversation.id, metadata={"a": "c"})
    deleted = await conversations.delete(conversation.id)

    ConversationItemList.model_validate(added.model_dump())
    assert (first.id, [second.id]) == (found.id, [item.id for item in left])
    assert ({"a": "c"}, True) == (changed.metadata, deleted.deleted)
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(conversation.id)
    with pytest.raises(openai.BadRequestError):
        await conversations.create(items=[{"type": "item_reference", "id": "x"}])


@pytest.mark.slow
async def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    """Case 79: what it could not finish in drain_seconds is failed, not lost, and stays to be read."""
    folder, state_url = write_folder(tmp_path / "deep"), f"sqlite:///{tmp_path / 'state.sqlite3'}"
    script = answering("hm</think>" + "The end " * 200, after=0.05)
    card = ModelCard(name="deep", context_tokens=4096)
    async with serve_recipe(script, folder, card=card, state_url=state_url, drain_seconds=1) as running:
        response_id = (await ask(running, background=True)).id
    async with serve_recipe(script, folder, state_url=state_url) as running:
        found = await running.sdk.responses.retrieve(response_id)

    assert found.error is not None
    assert ("failed", "server_error") == (found.status, found.error.code)
    assert "shutting down" in found.error.message


@pytest.mark.slow
async def test_many_cancels_are_one(kept: Running, other: Running) -> None:
    """Case 79: asked from everywhere at once, it is cancelled once, and never left unfinished."""
    kept.play(answering("hm</think>" + "The end " * 200, after=0.01))
    begun = [(await ask(kept, background=True)).id for _ in range(5)]
    asked = [running.sdk.responses.cancel(name) for name in begun for running in (kept, other, kept)]
    told = await asyncio.gather(*asked)

    assert {"cancelled"} == {response.status for response in told}

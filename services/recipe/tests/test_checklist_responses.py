"""Promises of OpenAI's Responses API without state, through the official SDK: cases 71 to 94 of the checklist."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.chassis import errors
from services.recipe.conversation import Tool, ToolCall, Turn
from services.recipe.tests.deepseek import block_of, call_of, data_url, png, value_of
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import answering, ids_of, rendered, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
TOOL = Tool("weather", "d", SCHEMA)
CALLING = "hm\n</think>\nlet me look" + block_of(
    call_of(value_of('a "b"\n👍', "city"), "weather"), call_of("", "weather")
)
NEVER_NULL = (
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "top_p", "tool_choice"),
    *("truncation", "background", "service_tier", "tools", "parallel_tool_calls", "text", "store", "metadata"),
)


async def ask(deep: Running, **options: Any) -> Response:
    """An answer, valid as the SDK and the Open Responses schema have it."""
    raw = await deep.post("/v1/responses", {"model": "deep", "input": "hello"} | options)
    assert 200 == raw.status_code, raw.text
    assert all(raw.json()[field] is not None for field in NEVER_NULL)
    return Response.model_validate(raw.json())


async def frames(deep: Running, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream: named by their types, numbered without gaps, valid as the SDK has it."""
    raw = await deep.post("/v1/responses", {"model": "deep", "input": "hello", "stream": True} | options)
    assert 200 == raw.status_code, raw.text
    events = []
    for part in raw.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS.validate_python(events[-1])
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    return events


async def prompt_of(deep: Running, **options: Any) -> list[int]:
    await ask(deep, **options)
    return list(deep.entrypoint.submitted[-1].prompt_token_ids)


def unlike(body: dict[str, Any]) -> str:
    """A response without what differs from one request to the next: ids and times."""
    text = json.dumps(body | {"created_at": 0, "completed_at": 0})
    return text.replace(body["id"], "ID").replace(body["id"].removeprefix("resp_")[:24], "ID")


async def test_string_input(deep: Running) -> None:
    """Case 71: a response whose output is reasoning and a message."""
    deep.play(answering("hm</think>The end"))
    response = await ask(deep)

    assert ("response", "completed", "deep") == (response.object, response.status, response.model)
    assert response.id.startswith("resp_")
    assert ["reasoning", "message"] == [item.type for item in response.output]
    assert "The end" == response.output_text
    assert rendered(user("hello")) == list(deep.entrypoint.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize("per_step", [1, 3, 500])
async def test_stream_order(deep: Running, per_step: int) -> None:
    """Cases 72 and 73: the order of the page, ids the same in all events, the last event is the whole answer."""
    deep.play(answering(CALLING, per_step=per_step))
    whole = (await deep.post("/v1/responses", {"model": "deep", "input": "hello", "tools": [WEATHER]})).json()
    events = await frames(deep, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith(".delta")]
    items = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.done")}

    said = ["content_part.added", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert [
        *("created", "in_progress", "output_item.added"),
        *("content_part.added", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *said, "output_item.done", *call, *call, "completed"),
    ] == kinds
    for event in events:
        if "item_id" in event:
            assert items[event["output_index"]]["id"] == event["item_id"]
        if event["type"].endswith("item.added"):
            assert items[event["output_index"]]["id"] == event["item"]["id"]
    final = events[-1]["response"]
    assert list(items.values()) == final["output"]
    assert unlike(whole) == unlike(final)


async def test_the_sdk_puts_a_stream_together(deep: Running) -> None:
    """Cases 72 and 73: its accumulated response is the last event's."""
    deep.play(answering(CALLING))
    async with deep.sdk.responses.stream(model="deep", input="hello", tools=[WEATHER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert "response.completed" == kinds[-1]
    assert ["reasoning", "message", "function_call", "function_call"] == [item.type for item in final.output]


@pytest.mark.parametrize("per_step", [1, 500])
async def test_function_calls(deep: Running, per_step: int) -> None:
    """Case 82: flat tools; the deltas are what is done, and what the item says."""
    deep.play(answering(CALLING, per_step=per_step))
    response = await ask(deep, tools=[WEATHER])
    events = await frames(deep, tools=[WEATHER])
    calls = [item for item in response.output if item.type == "function_call"]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    done = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]

    assert [("weather", {"city": 'a "b"\n👍'}), ("weather", {})] == [(c.name, json.loads(c.arguments)) for c in calls]
    assert list(deltas.values()) == done == [call.arguments for call in calls]
    assert 2 == len({call.call_id for call in calls})
    assert [WEATHER | {"strict": False}] == [tool.model_dump(exclude_unset=True) for tool in response.tools]
    assert rendered(user("hello"), tools=(TOOL,)) == list(deep.entrypoint.submitted[-1].prompt_token_ids)


async def test_results_round_trip(deep: Running) -> None:
    """Case 83: what came out goes in again with results, as the same turns as in chat."""
    deep.play(answering(CALLING))
    response = await ask(deep, tools=[WEATHER])
    calls = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    given = [{"role": "user", "content": "hello"}, *(i.model_dump() for i in response.output), *results]
    turns = (
        user("hello"),
        Turn(
            "assistant",
            ("let me look",),
            reasoning="hm",
            calls=tuple(ToolCall(call.call_id, "weather", call.arguments) for call in calls),
        ),
        *(Turn("tool", ("sunny",), call_id=call.call_id) for call in calls),
    )

    assert rendered(*turns, tools=(TOOL,)) == await prompt_of(deep, input=given, tools=[WEATHER])


async def test_tool_choice(deep: Running) -> None:
    """Case 84: allowed_tools shows those alone, none shows none, and each is repeated; one call with parallel off."""
    other = WEATHER | {"name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    deep.play(answering(CALLING, per_step=500))
    some = await ask(deep, tools=[WEATHER, other], tool_choice=allowed, parallel_tool_calls=False)
    prompt = list(deep.entrypoint.submitted[-1].prompt_token_ids)
    none = await ask(deep, tools=[WEATHER], tool_choice="none")

    assert rendered(user("hello"), tools=(TOOL,)) == prompt
    assert (allowed, False) == (some.model_dump()["tool_choice"], some.parallel_tool_calls)
    assert ["reasoning", "message", "function_call"] == [item.type for item in some.output]
    assert ("none", rendered(user("hello"))) == (
        none.tool_choice,
        list(deep.entrypoint.submitted[-1].prompt_token_ids),
    )


async def test_reasoning(deep: Running) -> None:
    """Case 86: effort reaches the prompt, reasoning comes first, and comes back, in full or as encrypted_content."""
    deep.play(answering("hm</think>ok"))
    response = await ask(deep, reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"])
    thought = response.output[0].model_dump()
    prompt = list(deep.entrypoint.submitted[-1].prompt_token_ids)
    sealed = {
        "type": "reasoning",
        "id": thought["id"],
        "summary": [],
        "encrypted_content": thought["encrypted_content"],
    }
    turns = (user("hello"), Turn("assistant", ("ok",), reasoning="hm"), user("more"))

    assert rendered(user("hello"), effort="low") == prompt
    assert ("reasoning", "hm") == (thought["type"], thought["content"][0]["text"])
    for item in (thought, sealed):
        given = [
            {"role": "user", "content": "hello"},
            item,
            response.output[1].model_dump(),
            {"role": "user", "content": "more"},
        ]
        assert rendered(*turns, tools=(TOOL,)) == await prompt_of(deep, input=given, tools=[WEATHER])
    foreign = await deep.post(
        "/v1/responses",
        {"model": "deep", "input": [sealed | {"encrypted_content": "gAAA"}, {"role": "user", "content": "x"}]},
    )
    assert (400, "input[0].encrypted_content") == (foreign.status_code, foreign.json()["error"]["param"])


async def test_logprobs(deep: Running) -> None:
    """Case 87: in deltas, when it is done, and in the item; one per token of the text."""
    deep.play(answering("hm</think>The 👍 end"))
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await frames(deep, **options)
    said = [p for event in events if event["type"] == "response.output_text.delta" for p in event["logprobs"]]
    item = events[-1]["response"]["output"][1]["content"][0]

    assert said == item["logprobs"] == next(e for e in events if e["type"] == "response.output_text.done")["logprobs"]
    assert "The 👍 end".encode() == b"".join(bytes(position["bytes"]) for position in said)
    assert all(2 == len(position["top_logprobs"]) for position in said)
    assert 2 == (await ask(deep, **options)).top_logprobs


async def test_max_output_tokens(deep: Running) -> None:
    """Case 88: incomplete, and why, in the object, in the item that was cut, and as the last event."""
    deep.play(answering("hm</think>The end of the beginning"))
    limit = len(ids_of("hm</think>The"))
    response = await ask(deep, max_output_tokens=limit)
    events = await frames(deep, max_output_tokens=limit)

    assert response.incomplete_details is not None
    assert ("incomplete", "max_output_tokens") == (response.status, response.incomplete_details.reason)
    assert "incomplete" == response.output[-1].status  # type: ignore[union-attr] # a message
    assert ("response.incomplete", limit) == (events[-1]["type"], events[-1]["response"]["usage"]["output_tokens"])


async def test_truncation(deep: Running) -> None:
    """Case 89: auto leaves out the oldest turns and keeps the instructions, disabled is a 400."""
    deep.play(answering("</think>ok"))
    old = [{"role": role, "content": f"{at} " + "1 " * 1200} for at in range(3) for role in ("user", "assistant")]
    given = [*old, {"role": "user", "content": "hello"}]
    refused = await deep.post("/v1/responses", {"model": "deep", "input": given})
    prompt = await prompt_of(deep, input=given, truncation="auto", instructions="be brief")
    kept = [Turn("assistant", ("2 " + "1 " * 1200,)), user("hello")]

    assert (400, "context_length_exceeded") == (refused.status_code, refused.json()["error"]["code"])
    assert rendered(Turn("system", ("be brief",)), *kept) == prompt
    assert "auto" == (await ask(deep, truncation="auto")).truncation


async def test_failure(deep: Running) -> None:
    """Case 90: before the first event a status, after it response.failed with what there is."""
    lost = errors.to_stream_error(errors.InternalError("secret"))
    deep.play(lambda _request: [Step(error=lost)])
    early = await deep.post("/v1/responses", {"model": "deep", "input": "hello", "stream": True})
    deep.play(lambda _request: [Step(ids_of("hm</think>The")), Step(error=lost)])
    events = await frames(deep)
    last = events[-1]["response"]

    assert (500, "server_error") == (early.status_code, early.json()["error"]["type"])
    assert ("response.failed", "failed", "server_error") == (events[-1]["type"], last["status"], last["error"]["code"])
    assert "secret" not in json.dumps(events)


async def test_images_and_files(deep: Running) -> None:
    """Case 91: a picture as a data URL, from users and tools; a file is refused."""
    deep.play(answering("</think>ok"))
    picture = {"type": "input_image", "image_url": data_url(png(100, 80)), "detail": "auto"}
    content = [{"type": "input_text", "text": "look"}, picture]
    await ask(deep, input=[{"role": "user", "content": content}])
    from_user = [image.data for image in deep.entrypoint.submitted[-1].images]
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    await ask(deep, input=[{"role": "user", "content": "x"}, call, result], tools=[WEATHER])
    refused = await deep.post(
        "/v1/responses",
        {"model": "deep", "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    )

    assert [png(100, 80)] == from_user == [image.data for image in deep.entrypoint.submitted[-1].images]
    assert (400, "input[0].content[0].type") == (refused.status_code, refused.json()["error"]["param"])


async def test_usage_and_input_tokens(deep: Running) -> None:
    """Cases 92 and 94: every detail is there; input_tokens says the same beforehand."""
    deep.play(answering("hm\n</think>ok"))
    deep.entrypoint.cached_tokens = 4
    response = await ask(deep, instructions="be brief", tools=[WEATHER])
    counted = await deep.sdk.responses.input_tokens.count(
        model="deep", input="hello", instructions="be brief", tools=[WEATHER]
    )

    assert response.usage is not None
    assert (4, 0) == (
        response.usage.input_tokens_details.cached_tokens,
        response.usage.input_tokens_details.cache_write_tokens,
    )
    assert len(ids_of("hm\n")) == response.usage.output_tokens_details.reasoning_tokens
    assert response.usage.input_tokens + response.usage.output_tokens == response.usage.total_tokens
    assert counted.input_tokens == response.usage.input_tokens == len(deep.entrypoint.submitted[-1].prompt_token_ids)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "{}"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"stop": "x"}, "stop"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
]


async def test_what_is_refused(deep: Running) -> None:
    """Case 93, and everything else that is not served: a 400 that names the field; state, too, where there is none."""
    deep.play(answering("</think>ok"))
    for change, field in REFUSED:
        raw = await deep.post("/v1/responses", {"model": "deep", "input": "hello"} | change)
        assert (400, field) == (raw.status_code, raw.json()["error"]["param"]), (change, raw.text)
    assert [] == deep.entrypoint.submitted
    with pytest.raises(openai.NotFoundError):
        await deep.sdk.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        await deep.sdk.responses.create(model="gpt-9", input="x")


async def test_identity_is_repeated(deep: Running) -> None:
    """What says who asks, and for what, comes back and changes nothing."""
    deep.play(answering("</think>ok"))
    told = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    response = (await ask(deep, service_tier="auto", max_tool_calls=3, **told)).model_dump()

    assert told == {field: response[field] for field in told}
    assert ("default", 3, False) == (response["service_tier"], response["max_tool_calls"], response["store"])

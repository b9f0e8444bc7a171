"""Promises of Anthropic's Messages API, through the official SDK: cases 95 to 113 of the conformance checklist."""

import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from proto.common_pb2 import ModelCard
from services.chassis import errors
from services.recipe import server
from services.recipe.conversation import Tool, ToolCall, Turn
from services.recipe.generating import Front
from services.recipe.tests.deepseek import block_of, call_of, data_url, png, value_of, write_folder
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import TINY, answering, rendered, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = Tool("weather", "d", WEATHER["input_schema"])
CALLING = "hm\n</think>\nlet me look" + block_of(
    call_of(value_of('a "b"\n👍', "city"), "weather"), call_of("", "weather")
)


@pytest_asyncio.fixture
async def claude(deep: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=deep.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def ask(claude: anthropic.AsyncAnthropic, **options: Any) -> Message:
    given: dict[str, Any] = {"model": "deep", "max_tokens": 500, "messages": HELLO} | options
    return Message.model_validate_json((await claude.messages.create(**given)).model_dump_json())


async def frames(deep: Running, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type and valid as the SDK has it."""
    body = {"model": "deep", "max_tokens": 500, "messages": HELLO, "stream": True} | options
    raw = await deep.post("/v1/messages", body)
    assert 200 == raw.status_code, raw.text
    events = []
    for part in raw.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        if events[-1]["type"] != "ping":
            EVENTS.validate_python(events[-1])
    return events


async def prompt_of(deep: Running, **options: Any) -> list[int]:
    body = {"model": "deep", "max_tokens": 500, "messages": HELLO} | options
    answer = await deep.post("/v1/messages", body)
    assert 200 == answer.status_code, answer.text
    return list(deep.entrypoint.submitted[-1].prompt_token_ids)


async def test_basic(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 95: a message with blocks, end_turn and usage."""
    deep.play(answering("hm</think>The end"))
    message = await ask(claude)

    assert ("message", "assistant", "deep") == (message.type, message.role, message.model)
    assert message.id.startswith("msg_")
    assert [("thinking", "hm"), ("text", "The end")] == [
        (block.type, getattr(block, block.type)) for block in message.content
    ]
    assert ("end_turn", None) == (message.stop_reason, message.stop_sequence)
    assert len(deep.entrypoint.submitted[-1].prompt_token_ids) == message.usage.input_tokens
    assert len(TINY.encode("hm</think>The end").ids) + 1 == message.usage.output_tokens


async def test_max_tokens_is_required(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 96: a 400 in Anthropic's shape, with the request's id."""
    raw = await deep.post("/v1/messages", {"model": "deep", "messages": HELLO})
    error = raw.json()

    assert (400, "error", "invalid_request_error") == (raw.status_code, error["type"], error["error"]["type"])
    assert "max_tokens" in error["error"]["message"]
    assert raw.headers["request-id"] == error["request_id"]


@pytest.mark.parametrize("per_step", [1, 3, 500])
async def test_stream(deep: Running, claude: anthropic.AsyncAnthropic, per_step: int) -> None:
    """Case 97: events in order, block indices without gaps; the SDK puts the same message together as without stream."""
    deep.play(answering(CALLING, per_step=per_step))
    whole = await ask(claude, tools=[WEATHER])
    events = await frames(deep, tools=[WEATHER])
    async with claude.messages.stream(model="deep", max_tokens=500, messages=HELLO, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()

    kinds = [event["type"] for event in events]
    assert ["message_start", "content_block_start"] == kinds[:2]
    assert ["content_block_stop", "message_delta", "message_stop"] == kinds[-3:]
    assert [0, 1, 2, 3] == [event["index"] for event in events if event["type"] == "content_block_start"]
    open_block = -1
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            open_block = event["index"]
        assert open_block == event["index"]
    differing: Any = {"id": True, "content": {"__all__": {"id"}}}
    assert whole.model_dump(exclude=differing) == Message.model_validate(final.model_dump()).model_dump(
        exclude=differing
    )


@pytest.mark.slow
async def test_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 98: silence is filled by ping events, which the SDK passes over."""
    monkeypatch.setattr(server, "Front", functools.partial(Front, ping_seconds=0.05))
    card = ModelCard(name="deep", context_tokens=4096)
    async with serve_recipe(answering("</think>ok", after=0.25), write_folder(tmp_path / "deep"), card=card) as slow:
        raw = await slow.post("/v1/messages", {"model": "deep", "max_tokens": 9, "messages": HELLO, "stream": True})
        async with (
            anthropic.AsyncAnthropic(base_url=slow.url, api_key="none") as client,
            client.messages.stream(model="deep", max_tokens=9, messages=HELLO) as stream,
        ):
            said = await stream.get_final_text()

    assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw.text
    assert ": ping" not in raw.text.replace("event: ping", "")
    assert "ok" == said


@pytest.mark.parametrize("per_step", [1, 500])
async def test_stop_sequences(deep: Running, claude: anthropic.AsyncAnthropic, per_step: int) -> None:
    """Case 99: the text is cut before it, and it is named."""
    deep.play(answering("the end</think>The end of the beginning", per_step=per_step))
    message = await ask(claude, stop_sequences=["zz", " of"])
    events = await frames(deep, stop_sequences=["zz", " of"])

    assert ("stop_sequence", " of") == (message.stop_reason, message.stop_sequence)
    assert "The end" == message.content[-1].text  # type: ignore[union-attr] # the last block is text
    assert {"stop_reason": "stop_sequence", "stop_sequence": " of"} == events[-2]["delta"]
    assert "The end" == "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


async def test_max_tokens(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 100: an answer at its limit says so, also inside a call, whose input is then empty."""
    deep.play(answering(CALLING))
    short = await ask(claude, max_tokens=3)
    cut = await ask(claude, tools=[WEATHER], max_tokens=len(TINY.encode(CALLING).ids) - 90)

    assert ("max_tokens", 3) == (short.stop_reason, short.usage.output_tokens)
    assert ("max_tokens", "tool_use", {}) == (cut.stop_reason, cut.content[-1].type, cut.content[-1].input)  # type: ignore[union-attr] # a call


@pytest.mark.parametrize("per_step", [1, 7, 500])
async def test_tools(deep: Running, claude: anthropic.AsyncAnthropic, per_step: int) -> None:
    """Case 101: tool_use blocks with objects; partial_json puts together the same; stop_reason tool_use."""
    deep.play(answering(CALLING, per_step=per_step))
    message = await ask(claude, tools=[WEATHER])
    events = await frames(deep, tools=[WEATHER])
    said: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            said[event["index"]] = said.get(event["index"], "") + event["delta"]["partial_json"]
    calls = [block for block in message.content if block.type == "tool_use"]

    assert [("weather", {"city": 'a "b"\n👍'}), ("weather", {})] == [(call.name, call.input) for call in calls]
    assert [call.input for call in calls] == [json.loads(text) for text in said.values()]
    assert 2 == len({call.id for call in calls})
    assert "tool_use" == message.stop_reason == events[-2]["delta"]["stop_reason"]
    assert rendered(user("hello"), tools=(TOOL,)) == list(deep.entrypoint.submitted[-1].prompt_token_ids)


async def test_tool_choice(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 102: none hides the tools, disable_parallel_tool_use ends the answer after one call."""
    deep.play(answering(CALLING, per_step=500))
    one = await ask(claude, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    none = await prompt_of(deep, tools=[WEATHER], tool_choice={"type": "none"})
    unknown = await deep.post(
        "/v1/messages",
        {"model": "deep", "max_tokens": 5, "messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
    )  # fmt: skip

    assert ["thinking", "text", "tool_use"] == [block.type for block in one.content]
    assert "tool_use" == one.stop_reason
    assert rendered(user("hello")) == none
    assert (400, True) == (unknown.status_code, "tool_choice.name" in unknown.json()["error"]["message"])


async def test_tool_results(deep: Running) -> None:
    """Case 103: texts, lists, failures and pictures; a picture follows the results."""
    call: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}
    other = call | {"id": "t2"}
    source = {"type": "base64", "media_type": "image/png", "data": data_url(png(100, 80)).split(",")[1]}
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
        {"type": "text", "text": "and now?"},
    ]  # fmt: skip
    turns = (
        user("hello"),
        Turn("assistant", (), calls=(ToolCall("t1", "weather", '{"city":"x"}'), ToolCall("t2", "weather", '{"city":"x"}'))),
        Turn("tool", ("sunny",), call_id="t1"),
        Turn("tool", ("Error: no such city",), call_id="t2"),
        user("and now?"),
    )  # fmt: skip
    history = [*HELLO, {"role": "assistant", "content": [call, other]}]
    deep.play(answering("</think>ok"))
    told = await prompt_of(deep, messages=[*history, {"role": "user", "content": results}], tools=[WEATHER])
    results[0]["content"] = [{"type": "image", "source": source}]
    await prompt_of(deep, messages=[*history, {"role": "user", "content": results}], tools=[WEATHER])

    assert rendered(*turns, tools=(TOOL,)) == told
    assert [png(100, 80)] == [image.data for image in deep.entrypoint.submitted[-1].images]


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [
        ({"type": "disabled"}, "none"),
        ({"type": "adaptive"}, "high"),
        ({"type": "enabled", "budget_tokens": 1024}, "low"),
        ({"type": "enabled", "budget_tokens": 100_000}, "max"),
        (None, "high"),
    ],
)
async def test_thinking(deep: Running, claude: anthropic.AsyncAnthropic, thinking: Any, effort: str) -> None:
    """Case 104: a budget is an effort; the signature of a thinking block comes last and is taken back with it."""
    deep.play(answering("hm</think>ok"))
    options = {"thinking": thinking, "max_tokens": 200_000} if thinking else {}
    bounded = await deep.post("/v1/messages", {"model": "deep", "messages": HELLO, "max_tokens": 9} | options)
    if options:
        assert 400 == bounded.status_code  # 200,000 tokens do not fit, but the effort is what counts here
        counted = await claude.messages.count_tokens(model="deep", messages=HELLO, thinking=thinking)
        assert len(rendered(user("hello"), effort=effort)) == counted.input_tokens
    events = await frames(deep)
    block = (await ask(claude)).content[0]
    kinds = [
        event["delta"]["type"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0
    ]
    replay = [*HELLO, {"role": "assistant", "content": [block.model_dump(), {"type": "text", "text": "ok"}]}, *HELLO]

    assert ("thinking", "signature_delta", 1) == (block.type, kinds[-1], kinds.count("signature_delta"))
    assert block.signature == events[kinds.index("signature_delta") + 2]["delta"]["signature"]  # type: ignore[union-attr] # a thinking block
    turns = (user("hello"), Turn("assistant", ("ok",), reasoning="hm"), user("hello"))
    assert rendered(*turns) == await prompt_of(deep, messages=replay)


async def test_effort_and_omitted_thinking(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 104: output_config.effort is the effort; with display omitted the block has a signature and no text."""
    deep.play(answering("hm</think>ok"))
    assert rendered(user("hello"), effort="low") == await prompt_of(deep, output_config={"effort": "low"})
    block = (await ask(claude, thinking={"type": "adaptive", "display": "omitted"})).content[0]

    assert ("thinking", "") == (block.type, block.thinking)  # type: ignore[union-attr] # a thinking block
    assert block.signature  # type: ignore[union-attr] # a thinking block


async def test_redacted_thinking(deep: Running) -> None:
    """Case 105: taken and left out."""
    content = [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "ok"}]
    deep.play(answering("</think>ok"))
    prompt = await prompt_of(deep, messages=[*HELLO, {"role": "assistant", "content": content}, *HELLO])

    assert rendered(user("hello"), Turn("assistant", ("ok",)), user("hello")) == prompt


async def test_system_and_cache_control(deep: Running) -> None:
    """Case 106: a string, blocks, and blocks with cache_control are the same prompt."""
    deep.play(answering("</think>ok"))
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"} | mark]
    content = [{"type": "text", "text": "hello"} | mark]

    expected = rendered(Turn("system", ("be brief",)), user("hello"))
    assert expected == await prompt_of(deep, system="be brief")
    assert expected == await prompt_of(deep, system=blocks, messages=[{"role": "user", "content": content}], **mark)


async def test_usage_and_count_tokens(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Cases 107 and 108: input_tokens leaves out what was cached, both together are what count_tokens says."""
    deep.play(answering("</think>ok"))
    deep.entrypoint.cached_tokens = 4
    message = await ask(claude, tools=[WEATHER])
    events = await frames(deep, tools=[WEATHER])
    count = await claude.messages.count_tokens(model="deep", messages=HELLO, tools=[WEATHER])

    MessageTokensCount.model_validate_json(count.model_dump_json())
    usage, streamed = message.usage, events[-2]["usage"]
    assert (4, 0) == (usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert count.input_tokens == usage.input_tokens + 4 == len(deep.entrypoint.submitted[-1].prompt_token_ids)
    assert usage.output_tokens == streamed["output_tokens"]
    assert (usage.input_tokens, 4) == (streamed["input_tokens"], streamed["cache_read_input_tokens"])
    assert (usage.input_tokens, 4) == (
        events[0]["message"]["usage"]["input_tokens"],
        events[0]["message"]["usage"]["cache_read_input_tokens"],
    )


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.Overloaded("full", retry_after=2.5), 429, "rate_limit_error"),
        (errors.NoReplica("none ready"), 529, "overloaded_error"),
        (errors.InternalError("secret detail"), 500, "api_error"),
        (errors.PromptTooLong("too long"), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_from_behind(
    deep: Running, error: errors.FathomError, status: int, kind: str, stream: bool
) -> None:
    """Case 110: each in Anthropic's words, with retry-after where retrying helps."""
    message = errors.to_stream_error(error)
    deep.play(lambda _request: [Step(error=message)])
    raw = await deep.post("/v1/messages", {"model": "deep", "max_tokens": 5, "messages": HELLO, "stream": stream})

    assert (status, "error", kind) == (raw.status_code, raw.json()["type"], raw.json()["error"]["type"])
    assert (status in {429, 529}) == ("retry-after" in raw.headers)
    assert "secret" not in raw.text


async def test_errors_of_requests(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 110: unknown model, unknown path, wrong method, too large a body, through the SDK's own classes."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(claude, model="claude-9")
    with pytest.raises(anthropic.BadRequestError):
        await ask(claude, messages=[])
    nowhere = await deep.post("/v1/messages/batches", {})
    wrong = await deep.http.get("/v1/messages")
    large = await deep.http.post("/v1/messages", content=b" " * (9 << 20))

    assert "not_found_error" == missing.value.body["error"]["type"]  # type: ignore[index] # an object
    assert (404, "not_found_error") == (nowhere.status_code, nowhere.json()["error"]["type"])
    assert (405, "POST") == (wrong.status_code, wrong.headers["allow"])
    assert (413, "request_too_large") == (large.status_code, large.json()["error"]["type"])


async def test_an_error_in_mid_stream(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 111: an error event ends the stream, and the SDK raises."""
    lost = errors.to_stream_error(errors.InternalError("gone"))
    deep.play(lambda _request: [Step(TINY.encode("hm</think>The").ids), Step(error=lost)])
    body = {"model": "deep", "max_tokens": 50, "messages": HELLO, "stream": True}
    raw = await deep.post("/v1/messages", body)
    with pytest.raises(anthropic.APIStatusError):
        async with claude.messages.stream(model="deep", max_tokens=50, messages=HELLO) as stream:
            await stream.get_final_message()

    last = raw.text.removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert "message_stop" not in raw.text


async def test_headers(deep: Running) -> None:
    """Case 112: request-id on every answer; anthropic-version may be absent."""
    deep.play(answering("</think>ok"))
    answer = await deep.post("/v1/messages", {"model": "deep", "max_tokens": 5, "messages": HELLO})

    assert (200, True) == (answer.status_code, bool(answer.headers["request-id"]))


async def test_a_given_beginning_is_refused(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 113: a last message of the assistant's is a 400 that says why."""
    with pytest.raises(anthropic.BadRequestError, match="must not end with an assistant"):
        await ask(claude, messages=[*HELLO, {"role": "assistant", "content": "The"}])


async def test_models(deep: Running, claude: anthropic.AsyncAnthropic) -> None:
    """Case 68: the list and one model in Anthropic's shape; an unknown one is a 404 in it."""
    listed = [model async for model in claude.models.list()]
    found = await claude.models.retrieve("deep")
    with pytest.raises(anthropic.NotFoundError):
        await claude.models.retrieve("claude-9")

    ModelInfo.model_validate_json(found.model_dump_json())
    assert ["deep"] == [model.id for model in listed]
    assert ("model", "active") == (found.type, found.lifecycle)


BLOCK = "messages[0].content[0]"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, f"{BLOCK}.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, f"{BLOCK}.text"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]}, BLOCK),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
]  # fmt: skip


async def test_what_is_refused(deep: Running) -> None:
    """Nothing is ignored silently: a 400 that begins with the field's name."""
    deep.play(answering("</think>ok"))
    for change, field in REFUSED:
        raw = await deep.post("/v1/messages", {"model": "deep", "max_tokens": 500, "messages": HELLO} | change)
        assert (400, "invalid_request_error") == (raw.status_code, raw.json()["error"]["type"]), change
        assert raw.json()["error"]["message"].startswith(field), (change, raw.text)
    assert [] == deep.entrypoint.submitted

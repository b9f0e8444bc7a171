"""Promises of chat with a DeepSeek V4.1 model, through the official SDK: reasoning, tools and pictures."""

import json
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from proto.common_pb2 import ModelCard
from services.chassis.images import ImageRules, layout_of
from services.recipe.conversation import Conversation, Picture, Tool, Turn
from services.recipe.deepseek_renderer import DeepseekRenderer
from services.recipe.deepseek_words import Mark
from services.recipe.dialect import IMAGE_PLACE
from services.recipe.pictures import MAX_PICTURES_BYTES
from services.recipe.tests.deepseek import (
    block_of,
    call_of,
    data_url,
    make_tiny,
    png,
    system,
    tiny_vocabulary,
    user,
    value_of,
    write_folder,
)
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import Script, saying

pytestmark = pytest.mark.asyncio(loop_scope="session")

TINY = make_tiny()
VOCAB = TINY.get_vocab_size()
END = tiny_vocabulary().ids[Mark.END]
RENDERER = DeepseekRenderer(tiny_vocabulary())
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
TOOL = Tool("weather", "d", {"type": "object", "properties": {}})
CALLING = "t\n</think>c" + block_of(call_of(value_of('a "b"\n👍', "city"), "weather"), call_of("", "weather"))
RULES = ImageRules(14, 3, 64, 7056)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving_deep(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = write_folder(tmp_path_factory.mktemp("models") / "deep")
    card = ModelCard(name="deep", context_tokens=4096, takes_images=True)
    async with serve_recipe(lambda _request: (), folder, card=card) as running:
        yield running


@pytest.fixture
def deep(serving_deep: Running) -> Iterator[Running]:
    """A recipe for a V4.1 model; say what it answers with `play`."""
    yield serving_deep
    serving_deep.play(lambda _request: ())


def answering(text: str, *, per_step: int = 1, eos: int | None = END) -> Script:
    return saying(TINY.encode(text, add_special_tokens=False).ids, per_step=per_step, eos=eos)


async def ask(deep: Running, **options: Any) -> ChatCompletion:
    answer: ChatCompletion = await deep.sdk.chat.completions.create(model="deep", **({"messages": HELLO} | options))
    return answer


async def stream(deep: Running, **options: Any) -> list[ChatCompletionChunk]:
    chunks = await deep.sdk.chat.completions.create(model="deep", stream=True, **({"messages": HELLO} | options))
    return [chunk async for chunk in chunks]


def prompt_of(deep: Running) -> list[int]:
    return list(deep.entrypoint.submitted[-1].prompt_token_ids)


def rendered(*turns: Turn, effort: str = "high", tools: tuple[Tool, ...] = ()) -> list[int]:
    return RENDERER.render(Conversation(turns, tools, effort))


async def test_reasoning_is_told_apart(deep: Running) -> None:
    """reasoning_content in the message and in deltas before the content's; its tokens are counted in usage."""
    deep.play(answering("let me see\n</think>\n\nThe end"))
    whole = await ask(deep)
    chunks = await stream(deep, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]

    assert ("The end", "stop") == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert "let me see" == whole.choices[0].message.model_dump()["reasoning_content"]
    assert "let me see" == "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert "The end" == "".join(delta["content"] or "" for delta in deltas)
    assert deltas[-2]["content"]
    usage = whole.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert len(TINY.encode("let me see\n").ids) == usage.completion_tokens_details.reasoning_tokens
    assert usage == chunks[-1].usage
    assert rendered(user("hello")) == prompt_of(deep)


@pytest.mark.parametrize("effort", ["none", "low", "max"])
async def test_effort_reaches_the_prompt(deep: Running, effort: Any) -> None:
    """And none switches reasoning off, in the answer too."""
    deep.play(answering("The end"))
    whole = await ask(deep, reasoning_effort=effort)

    assert rendered(user("hello"), effort=effort) == prompt_of(deep)
    assert ("The end" if effort == "none" else "") == whole.choices[0].message.content
    assert ("reasoning_content" in whole.choices[0].message.model_dump()) == (effort != "none")


@pytest.mark.parametrize("per_step", [1, 7, 500])
async def test_tool_calls(deep: Running, per_step: int) -> None:
    """id, type and name once, then arguments alone; distinct ids and indices; whole and streamed agree."""
    deep.play(answering(CALLING, per_step=per_step))
    whole = await ask(deep, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True)
    chunks = await stream(deep, tools=[WEATHER])
    message = ChatCompletion.model_validate_json(whole.model_dump_json()).choices[0].message
    calls = message.tool_calls
    assert calls is not None

    assert ("c", "tool_calls") == (message.content, whole.choices[0].finish_reason)
    expected = [("weather", '{"city": "a \\"b\\"\\n👍"}'), ("weather", "{}")]
    assert expected == [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    assert 2 == len({call.id for call in calls})
    assert all(len(call.id) <= 40 for call in calls)

    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    for index, (name, arguments) in enumerate(expected):
        first, *later = [delta for delta in deltas if delta.index == index]
        assert first.function is not None
        assert ("function", name, "") == (first.type, first.function.name, first.function.arguments)
        assert first.id
        assert all(delta.id is None and delta.function and delta.function.name is None for delta in later)
        assert arguments == "".join(delta.function.arguments or "" for delta in later if delta.function)
    assert ["tool_calls"] == [reason for chunk in chunks if (reason := chunk.choices[0].finish_reason)]
    assert rendered(user("hello"), tools=(TOOL,)) == prompt_of(deep)


async def test_the_sdk_puts_streamed_calls_together(deep: Running) -> None:
    """Its own accumulator reads our deltas."""
    deep.play(answering(CALLING))
    async with deep.sdk.chat.completions.stream(model="deep", messages=HELLO, tools=[WEATHER]) as events:  # type: ignore[list-item] # a literal of the right form
        async for _event in events:
            pass
        final = await events.get_final_completion()

    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert {"city": 'a "b"\n👍'} == json.loads(calls[0].function.arguments)


async def test_a_call_and_its_result_come_back(deep: Running) -> None:
    """The message as the SDK returned it, content null included, and the result: as one conversation."""
    deep.play(answering("t</think>" + block_of(call_of(value_of("x", "city"), "weather"))))
    first = (await ask(deep, tools=[WEATHER])).choices[0].message
    assert first.tool_calls
    assert first.content is None
    told = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    deep.play(answering("</think>ok"))
    await ask(deep, messages=[*HELLO, first.model_dump(), told], tools=[WEATHER])
    prompt = TINY.decode(prompt_of(deep), skip_special_tokens=False)

    assert "<think>t</think>\n\n<｜DSML｜ calls>" in prompt
    assert prompt.endswith("<｜User｜><tool_result>sunny</tool_result><｜Assistant｜><think>")


async def test_no_tools_no_calls(deep: Running) -> None:
    """tool_choice none hides the tools; markup in the answer is then text. Histories may still hold calls."""
    deep.play(answering(CALLING))
    whole = await ask(deep, tools=[WEATHER], tool_choice="none")

    assert rendered(user("hello")) == prompt_of(deep)
    assert whole.choices[0].message.tool_calls is None
    assert (whole.choices[0].message.content or "").startswith("c\n\n<｜DSML｜ calls>")


@pytest.mark.slow
@pytest.mark.parametrize("per_step", [1, 100])
async def test_stop_strings_and_limits(deep: Running, per_step: int) -> None:
    """Stop strings are not looked for in reasoning or arguments; a call cut off by the limit ends with length."""
    deep.play(answering("the end</think>The end of it" + block_of(call_of(value_of("the end"))), per_step=per_step))
    cut = await ask(deep, stop="end of", tools=[WEATHER])
    called = await ask(deep, stop="the end", tools=[WEATHER])
    held = [chunk.choices[0].delta for chunk in await stream(deep, stop="of it, too", tools=[WEATHER])]
    limited = await ask(deep, tools=[WEATHER], max_tokens=len(TINY.encode(CALLING).ids) // 2)

    assert ("The ", "stop") == (cut.choices[0].message.content, cut.choices[0].finish_reason)
    assert ("The end of it", "tool_calls") == (called.choices[0].message.content, called.choices[0].finish_reason)
    assert "length" == limited.choices[0].finish_reason
    told = ["call" if delta.tool_calls else "text" for delta in held if delta.tool_calls or delta.content]
    assert sorted(told, reverse=True) == told
    assert "The end of it" == "".join(delta.content or "" for delta in held)


@pytest.mark.parametrize("per_step", [1, 200])
async def test_logprobs_are_the_text_s(deep: Running, per_step: int) -> None:
    """One for every token of the content, told with it; none for reasoning and markup. Streams say the same."""
    deep.play(answering("hm</think>\nThe 👍 end" + block_of(call_of("", "weather")), per_step=per_step))
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "tools": [WEATHER]}
    whole = (await ask(deep, **options)).choices[0]
    chunks = [chunk.choices[0] for chunk in await stream(deep, **options)]
    streamed = [t for choice in chunks if choice.logprobs for t in choice.logprobs.content or ()]
    assert whole.logprobs is not None

    assert whole.logprobs.content == streamed
    assert all(choice.delta.content for choice in chunks if choice.logprobs)
    assert "The 👍 end".encode() == b"".join(bytes(token.bytes or ()) for token in streamed)


async def test_pictures_fill_their_places(deep: Running) -> None:
    """Ids beyond the vocabulary, as many as the layout says; the image itself rides along, as its header calls it."""
    small, wide = png(100, 80), png(300, 40)
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": data_url(small, "image/jpeg"), "detail": "high"}},
        {"type": "image_url", "image_url": {"url": data_url(wide)}},
    ]
    deep.play(answering("</think>ok"))
    whole = await ask(deep, messages=[{"role": "system", "content": "s"}, {"role": "user", "content": content}])
    request, expected = deep.entrypoint.submitted[-1], []
    lengths = iter([layout_of(100, 80, RULES).num_tokens, layout_of(300, 40, RULES).num_tokens])
    picture = Picture("", "")
    for id_ in rendered(system("s"), user("look", picture, picture)):
        filled = [VOCAB + 2, *[VOCAB + 1] * (next(lengths) - 1)] if id_ == IMAGE_PLACE else [id_]
        expected += filled

    assert expected == prompt_of(deep)
    assert [small, wide] == [image.data for image in request.images]
    assert [sha256(small).digest(), sha256(wide).digest()] == [image.content_hash for image in request.images]
    assert {"image/png"} == {image.media_type for image in request.images}
    assert all(VOCAB + 2 == expected[image.position] for image in request.images)
    assert all(
        [VOCAB + 1] * (i.num_tokens - 1) == expected[i.position + 1 : i.position + i.num_tokens] for i in request.images
    )
    assert whole.usage is not None
    assert len(expected) == whole.usage.prompt_tokens


def picture(url: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **more}}]}]}


async def test_as_much_as_is_allowed_gets_through(deep: Running) -> None:
    """4 MiB of picture fit into one message to the entrypoint."""
    large = png(64, 64, noise_bytes=MAX_PICTURES_BYTES - len(png(64, 64)))
    deep.play(answering("</think>ok"))
    answer = await deep.post("/v1/chat/completions", {"model": "deep", **picture(data_url(large))})

    assert (200, MAX_PICTURES_BYTES) == (answer.status_code, len(deep.entrypoint.submitted[-1].images[0].data))


AT = "messages[0].content[0].image_url"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    (picture("https://example.com/a.png"), 400, f"{AT}.url"),
    (picture("file:///etc/passwd"), 400, f"{AT}.url"),
    (picture("data:image/gif;base64,AAAA"), 400, f"{AT}.url"),
    (picture("data:image/png,AAAA"), 400, f"{AT}.url"),
    (picture("data:image/png;base64,???"), 400, f"{AT}.url"),
    (picture(data_url(png(1, 1)) + "*"), 400, f"{AT}.url"),
    (picture(data_url(b"no image at all")), 400, f"{AT}.url"),
    (picture(data_url(png(5, 5)[:20])), 400, f"{AT}.url"),
    (picture(data_url(png(1, 1).replace(b"\0\0\0\1\0\0\0\1", b"\0\0\x4e\x20\0\0\x4e\x20", 1))), 400, f"{AT}.url"),
    (picture(data_url(png(1, 1)), detail="low"), 400, f"{AT}.detail"),
    (picture(None), 400, f"{AT}.url"),
    (picture(data_url(bytes(MAX_PICTURES_BYTES + 300))), 413, "messages"),
    ({"messages": [{"role": "system", "content": picture("x")["messages"][0]["content"]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, 400, "messages[0].content[0].type"),
    ({"reasoning_effort": "huge"}, 400, "reasoning_effort"),
    ({"reasoning_effort": 3}, 400, "reasoning_effort"),
    ({"tools": {}}, 400, "tools"),
    ({"tools": [WEATHER, WEATHER]}, 400, "tools"),
    ({"tools": [{"type": "custom"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, 400, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, 400, "tools[0].function.parameters"),
    ({"tools": [WEATHER], "tool_choice": []}, 400, "tool_choice"),
    ({"tools": [WEATHER], "parallel_tool_calls": 1}, 400, "parallel_tool_calls"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, 400, "tool_choice.function.name"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}, *HELLO]}, 400, "messages[1]"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}]}, 400, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": None}]}, 400, "messages[0].content"),
]  # fmt: skip


async def test_what_is_refused(deep: Running) -> None:
    """Each by name, before anything reaches the engines; what waits for a later version says so."""
    deep.play(answering("</think>ok"))
    for change, status, param in REFUSED:
        answer = await deep.post("/v1/chat/completions", {"model": "deep", "messages": HELLO} | change)
        assert (status, param) == (answer.status_code, answer.json()["error"]["param"]), (change, answer.text[:300])
    nested: Any = "x"
    for _ in range(100):
        nested = {"a": nested}
    tool = {"type": "function", "function": {"name": "a", "parameters": nested}}
    answer = await deep.post("/v1/chat/completions", {"model": "deep", "messages": HELLO, "tools": [tool]})

    assert "tools[0].function.parameters" == answer.json()["error"]["param"]
    assert [] == deep.entrypoint.submitted


async def test_completions_take_ids_of_the_vocabulary_only(deep: Running) -> None:
    """An image's places cannot be forged; control tokens are ids like others."""
    deep.play(answering("ok"))
    forged = await deep.post("/v1/completions", {"model": "deep", "prompt": [VOCAB + 2]})
    control = await deep.post("/v1/completions", {"model": "deep", "prompt": [END, 5]})

    assert (400, 200) == (forged.status_code, control.status_code)


@pytest.mark.slow
@pytest.mark.parametrize("renderer", ["deepseek-recipe", "deepseek-v4.1"])
async def test_either_renderer_serves(tmp_path: Path, renderer: str) -> None:
    """fathom.json chooses; the answers agree."""
    card = ModelCard(name="deep", context_tokens=4096)
    async with serve_recipe(answering(CALLING), write_folder(tmp_path / "x", renderer=renderer), card=card) as running:
        whole = await ask(running, tools=[WEATHER])

    assert rendered(user("hello"), tools=(TOOL,)) == prompt_of(running)
    message = whole.choices[0].message
    assert ("c", "t") == (message.content, message.model_dump()["reasoning_content"])
    assert message.tool_calls is not None
    assert 2 == len(message.tool_calls)

"""Do a ChatML model's tool calls stream as they come, in all three APIs and however tokens are dealt out?"""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from proto.common_pb2 import ModelCard
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import saying
from services.recipe.tests.tiny import make_tokenizer, token_id

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAIN = make_tokenizer()
END = token_id(PLAIN, "<|im_end|>")
ARGUMENTS = '{"path": "a\\n\\"é👩‍👧\\u00e9", "lines": [1, 2.5, true], "deep": {"x": null}}'
SAID = f'Let me.\n<tool_call>\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ASKED = [{"role": "user", "content": "write it"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": ASKED,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": ASKED,
        "store": False,
        "tools": [{"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}],
    },
    "/v1/messages": {"messages": ASKED, "max_tokens": 300, "tools": [{"name": "write", "input_schema": SCHEMA}]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recipe(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """The tiny model, with room for what tells it of tools."""
    roomy = shutil.copytree(folder, tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((roomy / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (roomy / "config.json").write_text(json.dumps(config))
    async with serve_recipe(lambda _: (), roomy, card=ModelCard(name="tiny", context_tokens=4096)) as running:
        yield running


def fragments(path: str, event: dict[str, Any]) -> list[str]:
    """What an event adds to arguments."""
    if path == "/v1/chat/completions":
        calls = [call for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
        return [call["function"]["arguments"] for call in calls]
    if path == "/v1/responses":
        return [event["delta"]] if event["type"] == "response.function_call_arguments.delta" else []
    delta = event.get("delta", {})
    return [delta["partial_json"]] if delta.get("type") == "input_json_delta" else []


async def streamed(recipe: Running, path: str, per_step: int) -> list[list[str]]:
    """The fragments of every event that has some."""
    ids = PLAIN.encode(SAID, add_special_tokens=False).ids
    recipe.play(saying(ids, per_step=per_step, eos=END))
    answer = await recipe.post(path, {"model": "tiny", "stream": True, **BODIES[path]})
    assert 200 == answer.status_code, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found = [fragments(path, orjson.loads(event)) for event in events]
    return [some for some in found if some]


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.rpartition("/")[2])
async def test_arguments_stream_and_add_up(recipe: Running, path: str) -> None:
    """In many fragments, more of them the fewer tokens a step has; the same together, in one piece, and as the model wrote them."""
    one_by_one, in_sevens, at_once = [await streamed(recipe, path, per_step) for per_step in (1, 7, 10_000)]

    assert len(one_by_one) > len(in_sevens) > len(at_once)
    assert len(one_by_one) > 15  # names wait for their values
    assert {ARGUMENTS} == {"".join(map("".join, parts)) for parts in (one_by_one, in_sevens, at_once)}


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.rpartition("/")[2])
async def test_a_stream_says_what_a_whole_answer_does(recipe: Running, path: str) -> None:
    """Name and arguments."""
    recipe.play(saying(PLAIN.encode(SAID, add_special_tokens=False).ids, eos=END))
    whole = (await recipe.post(path, {"model": "tiny", **BODIES[path]})).json()

    if path == "/v1/chat/completions":
        called = whole["choices"][0]["message"]["tool_calls"][0]["function"]
    elif path == "/v1/responses":
        called = whole["output"][1]
    else:
        called = whole["content"][1] | {"arguments": ARGUMENTS}
        assert orjson.loads(ARGUMENTS) == called["input"]
    assert ("write", ARGUMENTS) == (called["name"], called["arguments"])

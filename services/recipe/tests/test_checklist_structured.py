"""Cases 26 to 31, 35 and 36: answers held to a form and to tools, through the official SDK.

What answers is held to the grammar that the recipe sent, and else says anything at all: the worst model there can be.
"""

import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from proto.common_pb2 import ModelCard, Request
from services.recipe.grammars import KIND
from services.recipe.tests.deepseek import write_folder
from services.recipe.tests.guided import guided
from services.recipe.tests.running import Running, serve_recipe
from services.recipe.tests.scripted import LENGTH, Script, Step, saying
from services.recipe.tests.speaking import END, TINY
from services.recipe.tests.tiny import make_tokenizer, token_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHATML = make_tokenizer()
HELLO: list[Any] = [{"role": "user", "content": "hello, json please"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": False}}}


class Edit(BaseModel):
    """What `parse` is to return."""

    kind: Literal["add", "drop"]
    count: int = Field(ge=0, le=9)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving_both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Running]]:
    models = tmp_path_factory.mktemp("models")
    deep_folder = write_folder(models / "deep")
    roomy = Path(shutil.copytree(folder, models / "tiny"))  # told of tools, a prompt of single letters is long
    config = json.loads((roomy / "config.json").read_text())
    (roomy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    async with (
        serve_recipe(lambda _request: (), roomy, card=ModelCard(name="tiny", context_tokens=4096)) as tiny,
        serve_recipe(lambda _request: (), deep_folder, card=ModelCard(name="deep", context_tokens=4096)) as deep,
    ):
        yield {"tiny": tiny, "deep": deep}


@pytest.fixture(params=["tiny", "deep"])
def model(request: pytest.FixtureRequest, serving_both: dict[str, Running]) -> Iterator[Running]:
    """A recipe for a ChatML model, and one for V4.1."""
    running = serving_both[request.param]
    obey(running)
    yield running
    running.play(lambda _request: ())


def obey(running: Running, seed: int = 0) -> Script:
    """Answer by dice from now on."""
    is_deep = name_of(running) == "deep"
    script = guided(TINY, END, seed=seed) if is_deep else guided(CHATML, token_id(CHATML, "<|im_end|>"), seed=seed)
    running.play(script)
    return script


def name_of(model: Running) -> str:
    return model.entrypoint.models[0].name


async def ask(model: Running, **options: Any) -> ChatCompletion:
    asked = {"model": name_of(model), "messages": HELLO} | options
    answer: ChatCompletion = await model.sdk.chat.completions.create(**asked)
    return answer


def content(answer: ChatCompletion) -> str:
    said = answer.choices[0].message.content
    assert said is not None
    return said


async def refused(model: Running, **change: Any) -> dict[str, Any]:
    answer = await model.post("/v1/chat/completions", {"model": name_of(model), "messages": HELLO} | change)
    assert 400 == answer.status_code, answer.text
    assert len(answer.content) <= 8192
    assert [] == model.entrypoint.submitted
    error: dict[str, Any] = answer.json()["error"]
    return error


def schema(body: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": body}}}


async def test_json_object(model: Running) -> None:
    """Case 26: an object, whatever the dice; the grammar travels in the request."""
    answer = await ask(model, response_format={"type": "json_object"}, max_tokens=200)

    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content(answer)), dict)
    assert KIND == model.entrypoint.submitted[-1].grammar.kind


@pytest.mark.parametrize("seed", range(3))
async def test_parse(model: Running, seed: int) -> None:
    """Case 27: the SDK's own parse returns the object; a stream obeys as well."""
    obey(model, seed)
    asked: Any = {"model": name_of(model), "messages": HELLO}
    parsed = await model.sdk.chat.completions.parse(**asked, response_format=Edit)
    streamed = await model.sdk.chat.completions.create(**asked, stream=True, **schema(Edit.model_json_schema()))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])

    assert isinstance(parsed.choices[0].message.parsed, Edit)
    assert isinstance(Edit.model_validate_json(text), Edit)
    assert "stop" == parsed.choices[0].finish_reason


async def test_invalid_schema(model: Running) -> None:
    """Case 28: a 400 before anything reaches the engines."""
    error = await refused(model, **schema({"type": "foo"}))

    assert ("response_format.json_schema.schema", "invalid_schema") == (error["param"], error["code"])


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "if", "contains"])
async def test_unsupported_keyword(model: Running, keyword: str) -> None:
    """Case 29: never silently wrong."""
    error = await refused(model, **schema({"type": "object", "properties": {"a": {keyword: True}}}))

    assert f"response_format.json_schema.schema.properties.a.{keyword}" == error["param"]


@pytest.mark.slow
async def test_schema_bomb(serving_both: dict[str, Running]) -> None:
    """A 400 in time, and the service goes on."""
    model = serving_both["tiny"]
    obey(model)
    bomb = {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 101}]}
    assert "schema_too_complex" == (await refused(model, **schema(bomb)))["code"]

    assert '"ok"' == content(await ask(model, **schema({"const": "ok"})))


async def test_regex_and_grammar(model: Running) -> None:
    """Case 30: the whole answer matches."""

    async def say(**form: str) -> str:
        return content(await ask(model, extra_body={"response_format": form}))

    assert re.fullmatch(r"[a-f]{3}-[0-9]+x", await say(type="regex", pattern="[a-f]{3}-[0-9]+x"))
    assert re.fullmatch(r"a[0-9]b", await say(type="grammar", grammar='start: "a" /[0-9]/ "b"'))
    assert await say(type="grammar", grammar='root ::= "x" | "y"') in {"x", "y"}


async def test_length(model: Running) -> None:
    """Case 31: the beginning of JSON, and the reason."""
    whole = obey(model)

    def cut(request: Request) -> list[Step]:
        steps = [step for step in whole(request) if step.token_ids]
        return [*steps[:-1], Step(steps[-1].token_ids, finish=LENGTH)]

    model.play(cut)
    effort = {"reasoning_effort": "none"} if name_of(model) == "deep" else {}
    many = schema({"type": "array", "items": {"type": "integer"}, "minItems": 9})
    answer = await ask(model, max_tokens=5, **many, **effort)

    assert "length" == answer.choices[0].finish_reason
    assert content(answer).startswith("[")


async def test_completions_take_a_format(serving_both: dict[str, Running]) -> None:
    """As chat does; two choices obey."""
    tiny = serving_both["tiny"]
    obey(tiny)
    body = {"model": "tiny", "prompt": "n: ", "n": 2, "response_format": {"type": "regex", "pattern": "[0-9]{2}"}}
    answer = (await tiny.post("/v1/completions", body)).json()

    assert 2 == len(answer["choices"])
    assert all(re.fullmatch("[0-9]{2}", choice["text"]) for choice in answer["choices"])


async def test_one_call_at_most(model: Running) -> None:
    """Case 35: where calls must not be parallel."""
    for seed in range(3):
        obey(model, seed)
        answer = await ask(model, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
        assert answer.choices[0].message.tool_calls is not None
        assert 1 == len(answer.choices[0].message.tool_calls)


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]


async def test_tool_choice(model: Running) -> None:
    """Case 36: required makes a call; a name makes that call, and the reason is "stop"; none hides the tools."""
    required = await ask(model, tools=[WEATHER, NOW], tool_choice="required")
    named = await ask(model, tools=[NOW, WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})

    assert (None, "tool_calls") == (required.choices[0].message.content, required.choices[0].finish_reason)
    assert {name for name, _ in calls_of(required)} <= {"weather", "now"}
    assert calls_of(required)
    assert calls_of(named)
    for name, arguments in calls_of(named):
        assert ("weather", True) == (name, arguments["city"] in {"Oslo", "Rome"})
    assert "stop" == named.choices[0].finish_reason
    model.play(saying([10]))
    await ask(model, tools=[NOW], tool_choice="none", max_tokens=1)
    await ask(model, max_tokens=1)
    hidden, without = (list(request.prompt_token_ids) for request in model.entrypoint.submitted)
    assert without == hidden

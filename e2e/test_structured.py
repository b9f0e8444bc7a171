"""Does a small model, at temperature 1, say what it was told to say: valid JSON for every schema, parseable calls?"""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped] # ships no types
from openai import AsyncOpenAI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

SEEDS = range(10)
"""Two hundred answers with all; every run of the tests takes the first one."""
AT_ONCE = 8
NAME = {"type": "string", "minLength": 1, "maxLength": 24}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "y": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["x", "y"],
    "additionalProperties": False,
}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object of these properties, all required unless said otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "flat": closed(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 130}, member={"type": "boolean"}),
    "enum": closed(color={"enum": ["red", "green", "blue"]}, size={"enum": [1, 2, 3, None]}),
    "const": closed(kind={"const": "person"}, version={"const": 1.5}),
    "nested": closed(where=closed(city=NAME, at=POINT)),
    "list": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 4},
    "list of objects": closed(points={"type": "array", "items": POINT, "maxItems": 3}),
    "optional": closed([], a=NAME, b={"type": "integer", "minimum": 0, "maximum": 9}, c={"type": "null"}),
    "any of": {"anyOf": [closed(ok={"const": True}, value=NAME), closed(ok={"const": False}, error=NAME)]},
    "one of": {"oneOf": [closed(t={"const": "cat"}, lives={"enum": [7, 9]}), closed(t={"const": "dog"}, tricks=NAME)]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": NAME}, "required": ["a"]}, {"properties": {"b": POINT}, "required": ["b"]}], "additionalProperties": False, "properties": {"a": {}, "b": {}}},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": closed(["v"], v={"enum": [0, 1]}, kids={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1})}},
    "date": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "email": closed(mail={"type": "string", "format": "email", "maxLength": 30}, ip={"type": "string", "format": "ipv4"}),
    "pattern": closed(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}, phone={"type": "string", "pattern": "^\\+[0-9]{6,12}$"}),
    "range": closed(p={"type": "number", "minimum": 0, "exclusiveMaximum": 1}, n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "tuple": {"type": "array", "prefixItems": [NAME, {"type": "integer", "minimum": 0, "maximum": 999}], "items": False, "minItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2, "minProperties": 1},
    "pattern names": {"type": "object", "patternProperties": {"^x_[a-z]{1,8}$": {"enum": ["on", "off"]}}, "additionalProperties": False, "maxProperties": 2},
    "scalar": {"type": "string", "enum": ["yes", "no", "maybe"]},
    "types": closed(v={"type": ["boolean", "null"]}, w={"anyOf": [{"type": "null"}, POINT]}),
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": closed(city=NAME, days={"type": "integer", "minimum": 1, "maximum": 9})}},
    {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": closed()}},
]  # fmt: skip


@pytest_asyncio.fixture(loop_scope="session")
async def sdk(shared_suite):
    async with AsyncOpenAI(
        base_url=f"{shared_suite.base_url}/v1", api_key="none", timeout=300, max_retries=0
    ) as client:
        yield client


async def at_once(works: list[Any]) -> list[Any]:
    """All of them, a few at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(work: Any) -> Any:
        async with places:
            return await work

    return list(await asyncio.gather(*map(one, works)))


@pytest.mark.parametrize("seeds", [SEEDS[:1], pytest.param(SEEDS[1:], marks=pytest.mark.long)], ids=["short", "long"])
async def test_json_is_valid_every_time(sdk, seeds):
    """Twenty schemas, ten seeds: two hundred of two hundred."""
    model = (await sdk.models.list()).data[0].id

    async def ask(name: str, seed: int) -> tuple[str, int, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name], "strict": True}}
        asked: Any = [{"role": "user", "content": f"Give an example of {name} as JSON."}]
        answer = await sdk.chat.completions.create(
            model=model, messages=asked, temperature=1, seed=seed, max_tokens=400, response_format=form
        )
        return name, seed, answer

    answers = await at_once([ask(name, seed) for name in SCHEMAS for seed in seeds])

    wrong = []
    for name, seed, answer in answers:
        choice = answer.choices[0]
        validator = Draft202012Validator(SCHEMAS[name], format_checker=FormatChecker())
        if choice.finish_reason != "stop" or not validator.is_valid(json.loads(choice.message.content)):
            wrong.append((name, seed, choice.finish_reason, choice.message.content))
    assert [] == wrong
    assert len(SCHEMAS) * len(seeds) == len(answers)


async def test_required_calls_are_parseable(sdk):
    """Of a model that was never taught to call anything."""
    model = (await sdk.models.list()).data[0].id

    async def ask(seed: int) -> Any:
        return await sdk.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
            temperature=1,
            seed=seed,
            max_tokens=1500,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=seed % 2 == 0,
        )

    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for seed, answer in enumerate(await at_once([ask(seed) for seed in range(2)])):
        calls = answer.choices[0].message.tool_calls
        assert calls, answer
        assert seed % 2 == 0 or len(calls) == 1
        for call in calls:
            Draft202012Validator(schemas[call.function.name]).validate(json.loads(call.function.arguments))


async def test_masks_agree_with_chat_and_stream(sdk):
    """The same seed gives the same JSON, streamed or whole, and beside other requests."""
    model = (await sdk.models.list()).data[0].id
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS["nested"]}}
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "Where?"}],
        "seed": 5,
        "response_format": form,
    }

    async def streamed() -> str:
        chunks = await sdk.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    whole, *rest = await asyncio.gather(sdk.chat.completions.create(**asked), *(streamed() for _ in range(3)))

    assert [whole.choices[0].message.content] * 3 == rest

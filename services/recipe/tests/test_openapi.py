"""Promises of the API's description: it is true, field by field, and whatever is sent there is no 5xx."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped] # ships no types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.recipe import openapi_fields as fields
from services.recipe.openapi import OPERATIONS
from services.recipe.openapi_parts import Schema
from services.recipe.tests.running import Running
from services.recipe.tests.speaking import answering

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BASES: dict[str, tuple[Schema, dict[str, Any]]] = {
    "/v1/chat/completions": (fields.CHAT, {"model": "deep", "messages": HELLO}),
    "/v1/completions": (fields.COMPLETION, {"model": "deep", "prompt": "hello"}),
    "/v1/responses": (fields.RESPONSE, {"model": "deep", "input": "hello"}),
    "/v1/responses/input_tokens": (fields.INPUT_TOKENS, {"input": "hello"}),
    "/v1/messages": (fields.ANTHROPIC, {"model": "deep", "messages": HELLO, "max_tokens": 99}),
    "/v1/messages/count_tokens": (fields.ANTHROPIC_COUNT, {"model": "deep", "messages": HELLO}),
    "/tokenize": (fields.TOKENIZE, {"messages": HELLO}),
    "/detokenize": (fields.DETOKENIZE, {"tokens": [5]}),
}
FUNCTION: Any = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
SAMPLES: dict[str, list[Any]] = {
    "conversation": [], "previous_response_id": [], "background": [False], "store": [False],  # without state
    "prompt": [], "messages": [HELLO], "model": ["deep"], "tokens": [[5, 6]],
    "include": [["reasoning.encrypted_content"]],
    "input": ["x", HELLO],
    "metadata": [{}],
    "logit_bias": [{"5": 1}],
    "suffix": [""],
    "max_tokens": [1, 20],
    "top_logprobs": [0],
    "tool_choice": ["auto", "none"],
    "stream": [True],
    "stream_options": [],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "text": [{"format": {"type": "text"}, "verbosity": "medium"}],
    "reasoning": [{"effort": "low", "summary": "auto"}],
    "thinking": [{"type": "adaptive"}, {"type": "disabled"}],
    "output_config": [{"effort": "low"}],
    "cache_control": [{"type": "ephemeral"}],
    "system": ["x", [{"type": "text", "text": "x"}]],
}  # fmt: skip
TOOLS: dict[str, list[Any]] = {
    "/v1/chat/completions": [[{"type": "function", "function": FUNCTION}]],
    "/tokenize": [[{"type": "function", "function": FUNCTION}]],
    "/v1/responses": [[{"type": "function", **FUNCTION}]],
    "/v1/responses/input_tokens": [[{"type": "function", **FUNCTION}]],
    "/v1/messages": [[{"name": "f", "input_schema": {}}]],
    "/v1/messages/count_tokens": [[{"name": "f", "input_schema": {}}]],
}


def samples(path: str, name: str, schema: Schema) -> list[Any]:
    """Values of a field that the description allows."""
    if name == "tools":
        return TOOLS[path]
    if name == "tool_choice" and path.startswith("/v1/messages"):
        return [{"type": "none"}]
    if name in SAMPLES:
        return SAMPLES[name]
    plain = schema["anyOf"][0] if "anyOf" in schema else schema
    if "enum" in plain:
        return list(plain["enum"])
    low, high = plain.get("minimum", 1), min(plain.get("maximum", 1), 20)
    by_type: dict[str, list[Any]] = {
        "string": ["x"],
        "boolean": [True, False],
        "integer": [low, high],
        "number": [low, high],
        "array": [[]],
    }
    return by_type[plain["type"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", BASES)
async def test_every_field_is_taken_and_no_other(deep: Running, path: str) -> None:
    """What the description allows is a 200; a field that it does not name is a 400 that does."""
    deep.play(answering("</think>ok"))
    schema, base = BASES[path]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name, inner in schema["properties"].items():
        for value in samples(path, name, inner):
            body = base | {name: value}
            validator.validate(body)
            raw = await deep.post(path, body)
            assert 200 == raw.status_code, (name, value, raw.text)
    raw = await deep.post(path, base | {"foo": 1})
    assert 400 == raw.status_code
    assert "foo: is not a field of this request" in raw.text


async def test_the_description_is_served(deep: Running) -> None:
    """Every path of ours and every method, with answers whose schemas are some, errors in the path's shape, and keys."""
    described = (await deep.http.get("/openapi.json")).json()
    operations = {(method, path) for path, methods in described["paths"].items() for method in methods}

    assert operations == set(OPERATIONS)
    for path, (schema, _base) in BASES.items():
        told = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert json.loads(json.dumps(schema)) == told
    for method, path in OPERATIONS:
        operation = described["paths"][path][method]
        for status, answer in operation["responses"].items():
            schema = answer["content"]["application/json"]["schema"]
            if status == "200":
                jsonschema.Draft202012Validator.check_schema(schema)
            else:
                vendor = "Anthropic" if path.startswith("/v1/messages") else "OpenAi"
                assert schema == {"$ref": f"#/components/schemas/{vendor}Error"}
    assert {"bearer", "header"} == set(described["components"]["securitySchemes"])


async def test_the_documentation_names_every_field_and_path() -> None:
    """docs/api.md is the table of what is served: no field and no endpoint is missing in it."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[A-Za-z_]+", page))
    for path, (schema, _base) in BASES.items():
        assert set(schema["properties"]) <= named, path
    for _method, path in OPERATIONS:
        assert set(re.findall(r"[a-z_]+", re.sub(r"{.*?}", "", path))) <= named, path


async def test_the_page_asks_nobody_else(deep: Running) -> None:
    """No address but our own in it, and a policy that lets nothing but its own style and script run."""
    page = await deep.http.get("/docs")
    policy = page.headers["content-security-policy"]

    assert (200, "text/html; charset=utf-8") == (page.status_code, page.headers["content-type"])
    assert not re.findall(r"https?://|//[a-z]|@import|url\(|<link|<img|<iframe| src=| on[a-z]+=|\.innerHTML", page.text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy


async def test_answers_are_as_described(deep: Running) -> None:
    """Of every endpoint that needs no state, and its errors; the state's are in the test of two recipes."""
    deep.play(answering("hm</think>ok"))
    described = (await deep.http.get("/openapi.json")).json()
    tool = {"type": "function", "function": FUNCTION}
    asked = [(path, base) for path, (_schema, base) in BASES.items()]
    asked += [
        (
            "/v1/chat/completions",
            BASES["/v1/chat/completions"][1] | {"logprobs": True, "top_logprobs": 2, "tools": [tool]},
        ),
        ("/v1/completions", BASES["/v1/completions"][1] | {"logprobs": 2, "echo": True, "return_token_ids": True}),
    ]
    for path, body in asked:
        check_answer(described, "post", path, await deep.post(path, body))
        check_answer(described, "post", path, await deep.post(path, body | {"foo": 1}))
    for path, name in (("/v1/models", "/v1/models"), ("/v1/models/deep", "/v1/models/{name}"), ("/health", "/health")):
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            check_answer(described, "get", name, await deep.http.get(path, headers=headers))


def check_answer(described: Any, method: str, path: str, raw: httpx.Response) -> None:
    """Fails for an answer that is not as the description has it."""
    answer = described["paths"][path][method]["responses"][str(raw.status_code)]
    schema = answer["content"]["application/json"]["schema"] | {"components": described["components"]}
    jsonschema.validate(raw.json(), schema)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
    | st.sampled_from(["auto", "function", "text", "json_schema", "user", "assistant", "tool", "message", "input_text"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "role", "content", "name", "text", "id", "function", "schema", "format", "source", "input"])
        | st.text(max_size=3),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", BASES)
async def test_nothing_breaks_it(deep: Running, path: str, examples: int) -> None:
    """Any JSON in any field is an answer or a 4xx in a small body."""
    deep.play(answering("</think>ok"))
    schema, base = BASES[path]
    bodies: list[dict[str, Any]] = []

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.dictionaries(st.sampled_from(sorted(schema["properties"])), ANY, min_size=1, max_size=3))
    def collect(change: dict[str, Any]) -> None:
        bodies.append(base | change)

    collect()
    for body in bodies:
        try:
            encoded = json.dumps(body).encode()
        except UnicodeEncodeError:
            continue
        raw = await deep.http.post(path, content=encoded)
        assert raw.status_code < 500, (body, raw.text)
        assert 200 == raw.status_code or len(raw.content) < 8192

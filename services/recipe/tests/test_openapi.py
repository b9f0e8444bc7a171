"""Promises of the API's description: it is true, field by field, and whatever is sent there is no 5xx."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped] # ships no types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.recipe import openapi_fields as fields
from services.recipe.tests.running import Running
from services.recipe.tests.speaking import answering

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BASES: dict[str, tuple[fields.Schema, dict[str, Any]]] = {
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


def samples(path: str, name: str, schema: fields.Schema) -> list[Any]:
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
    for name, inner in schema["properties"].items():
        for value in samples(path, name, inner):
            body = base | {name: value}
            jsonschema.validate(body, schema)
            raw = await deep.post(path, body)
            assert 200 == raw.status_code, (name, value, raw.text)
    raw = await deep.post(path, base | {"foo": 1})
    assert 400 == raw.status_code
    assert "foo: is not a field of this request" in raw.text


async def test_the_description_is_served(deep: Running) -> None:
    """As JSON and as a page; it has every path, and its schemas are schemas."""
    described = (await deep.http.get("/openapi.json")).json()
    page = await deep.http.get("/docs")

    assert set(BASES) < set(described["paths"])
    for path, (schema, _base) in BASES.items():
        told = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert json.loads(json.dumps(schema)) == told
        jsonschema.Draft202012Validator.check_schema(told)
    assert "/openapi.json" in page.text


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
@pytest.mark.parametrize("path", BASES)
async def test_nothing_breaks_it(deep: Running, path: str) -> None:
    """Any JSON in any field is an answer or a 4xx in a small body."""
    deep.play(answering("</think>ok"))
    schema, base = BASES[path]
    bodies: list[dict[str, Any]] = []

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
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

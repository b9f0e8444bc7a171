"""Promises of structured outputs in Responses and Messages, through the official SDKs: cases 84, 85, 102 and 109.

The scripted entrypoint obeys no grammar; that the engines do is promised elsewhere. Here: it reaches them, in all APIs.
"""

from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from services.recipe.tests.deepseek import block_of, call_of, value_of
from services.recipe.tests.running import Running
from services.recipe.tests.speaking import answering

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FLAT: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
THEIRS: Any = {"name": "weather", "input_schema": SCHEMA}
CALLING = "hm</think>" + block_of(call_of(value_of("Paris", "city"), "weather"))


class Place(BaseModel):
    """What is to be parsed."""

    city: str


def grammars(deep: Running) -> list[bytes]:
    """What the engines were told to obey, request by request."""
    return [request.grammar.body for request in deep.entrypoint.submitted]


@pytest.mark.slow
async def test_a_schema_in_all_apis(deep: Running) -> None:
    """Cases 85 and 109: parse() works, and the same schema is the same grammar whichever API asked."""
    deep.play(answering('hm</think>{"city": "Paris"}'))
    form = {"name": "place", "schema": SCHEMA}
    response = await deep.sdk.responses.parse(model="deep", input="hello", text_format=Place)
    await deep.post(
        "/v1/responses", {"model": "deep", "input": "x", "text": {"format": {"type": "json_schema", **form}}}
    )
    chat = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": form}}
    await deep.post("/v1/chat/completions", {"model": "deep", **chat})
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with anthropic.AsyncAnthropic(base_url=deep.url, api_key="none") as client:
        message = await client.messages.parse(model="deep", max_tokens=99, messages=HELLO, output_format=Place)
        await client.messages.create(model="deep", max_tokens=99, messages=HELLO, output_config=config)
    parsed, of_response, of_chat, _by_sdk, of_message = grammars(deep)

    assert Place(city="Paris") == response.output_parsed == message.parsed_output
    assert parsed
    assert of_response == of_chat == of_message


async def test_calls_that_must_come(deep: Running) -> None:
    """Cases 84 and 102: required and any, and one tool by name, are the same grammars, and are repeated."""
    deep.play(answering(CALLING))
    named = {"type": "function", "name": "weather"}
    body: dict[str, Any] = {"model": "deep", "input": "hello", "tools": [FLAT]}
    told = [
        (await deep.post("/v1/responses", body | {"tool_choice": choice})).json()["tool_choice"]
        for choice in ("required", named)
    ]
    body = {"model": "deep", "max_tokens": 400, "messages": HELLO, "tools": [THEIRS]}
    messages = [
        (await deep.post("/v1/messages", body | {"tool_choice": choice})).json()
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"})
    ]
    required, by_name, any_, tool = grammars(deep)

    assert ["required", named] == told
    assert ["tool_use", "tool_use"] == [message["stop_reason"] for message in messages]
    assert required
    assert (required, by_name) == (any_, tool)


async def test_what_cannot_be_enforced(deep: Running) -> None:
    """Cases 85 and 109: a 400 that names the field, before anything reaches the engines."""
    deep.play(answering("ok"))
    wrong = {"type": "object", "properties": {"a": {"type": "foo"}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": wrong}}
    response = await deep.post("/v1/responses", {"model": "deep", "input": "x", "text": form})
    config = {"format": {"type": "json_schema", "schema": wrong}}
    body = {"model": "deep", "max_tokens": 9, "messages": HELLO, "output_config": config}
    message = await deep.post("/v1/messages", body)

    assert (400, True) == (response.status_code, response.json()["error"]["param"].startswith("text.format"))
    assert (400, "invalid_request_error") == (message.status_code, message.json()["error"]["type"])
    assert "output_config.format" in message.json()["error"]["message"]
    assert [] == deep.entrypoint.submitted

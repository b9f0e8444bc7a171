"""Promises about requests that cannot be answered: the right status, an OpenAI body that names the field, nothing dies."""

import asyncio
from typing import Any

import orjson
import pytest

from proto.common_pb2 import StreamError
from services.chassis import errors
from services.recipe import body
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step, saying

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    (user(None), "messages[0].content"),
    (user(7), "messages[0].content"),
    (user([]), "messages[0].content"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"00": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 100000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern"),
    ({"response_format": {"type": "grammar", "grammar": "start: <[1]>"}}, "response_format.grammar"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"functions": [{}]}, "functions"),
    ({"foo": 1}, "foo"),
    ({"model": ""}, "model"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 30, "n": 3}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 1.0}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
    ({"echo": True, "suffix": "x"}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
]


def check_envelope(answer: Any, status: int) -> dict[str, Any]:
    assert status == answer.status_code, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert error["message"]
    assert error["type"]
    assert answer.headers["x-request-id"]
    return error


async def test_every_bad_field_is_named(recipe: Running) -> None:
    """One wrong field each: 400, `param` is its name, the message begins with it; no request reaches the entrypoint."""
    recipe.play(saying([10]))
    for path, good, cases in (("/v1/chat/completions", CHAT, BAD_CHAT), ("/v1/completions", TEXT, BAD_TEXT)):
        for change, param in cases:
            error = check_envelope(await recipe.post(path, good | change), 400)
            assert param == error["param"], (change, error)
            assert error["message"].startswith(param)

    assert [] == recipe.entrypoint.submitted


async def test_harmless_values_of_missing_features_are_accepted(recipe: Running) -> None:
    """null, empty lists, "none" ask for nothing; user, metadata and store change nothing."""
    recipe.play(saying([10]))
    chat: dict[str, Any] = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "functions": None}
    free = {"user": "u", "metadata": {"a": "b"}, "store": True, "temperature": None, "stop": None, "n": None}

    assert 200 == (await recipe.post("/v1/chat/completions", CHAT | chat | free)).status_code
    assert 200 == (await recipe.post("/v1/completions", TEXT | free | {"best_of": 1, "suffix": None})).status_code


async def test_an_unknown_model_is_not_found(recipe: Running) -> None:
    """404 with OpenAI's code, on every path that names a model."""
    for answer in (
        await recipe.post("/v1/chat/completions", CHAT | {"model": "gpt-9"}),
        await recipe.post("/v1/completions", TEXT | {"model": "gpt-9"}),
        await recipe.http.get("/v1/models/gpt-9"),
    ):
        assert ("model", "model_not_found") == (check_envelope(answer, 404)["param"], answer.json()["error"]["code"])


async def test_too_long_a_prompt_is_refused_before_any_work(recipe: Running) -> None:
    """Prompt plus answer above the context: context_length_exceeded."""
    recipe.play(saying([10]))
    too_long = [
        await recipe.post("/v1/chat/completions", CHAT | {"max_tokens": 500}),
        await recipe.post("/v1/completions", {"model": "tiny", "prompt": [5] * 512}),
        await recipe.post("/v1/chat/completions", CHAT | user("1 " * 600)),
    ]
    for answer in too_long:
        assert "context_length_exceeded" == check_envelope(answer, 400)["code"]
    fits = await recipe.post("/v1/completions", {"model": "tiny", "prompt": [5] * 511})

    assert 200 == fits.status_code
    assert 1 == len(recipe.entrypoint.submitted)


@pytest.mark.parametrize(
    "given",
    [
        b"{",
        b"",
        b"[1]",
        b'"text"',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
        b'{"a":' * 10_000,
        b"[" * 100_000,
    ],
)
async def test_what_is_no_json_object_is_refused(recipe: Running, given: bytes) -> None:
    """400 whatever is wrong with it."""
    answer = await recipe.http.post("/v1/chat/completions", content=given)

    assert "invalid_json" == check_envelope(answer, 400)["code"]


async def test_too_large_a_body_is_refused(recipe: Running) -> None:
    """413, whether the length is declared or not."""
    big = b" " * (8 << 20) + b"{}"

    async def parts() -> Any:
        for at in range(0, len(big), 1 << 20):
            yield big[at : at + (1 << 20)]

    check_envelope(await recipe.http.post("/v1/chat/completions", content=big), 413)
    check_envelope(await recipe.http.post("/v1/chat/completions", content=parts()), 413)


async def test_a_body_that_stops_is_refused(recipe: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """408 in the usual envelope, and the connection is closed."""
    monkeypatch.setattr(body, "QUIET_SECONDS", 0.1)
    host, port = recipe.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    async with asyncio.timeout(20):
        head, _, told = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()

    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head.lower()
    assert {"message", "type", "param", "code"} == set(orjson.loads(told)["error"])


async def test_other_paths_and_methods(recipe: Running) -> None:
    """404 and 405 in the same envelope, the latter with Allow."""
    for path in ("/v1/embeddings", "/v1/batches", "/v1/chat", "/", "/v1/models/"):
        check_envelope(await recipe.post(path, {}), 405 if path == "/v1/models/" else 404)
    answer = await recipe.http.get("/v1/chat/completions")
    check_envelope(answer, 405)

    assert "POST" in answer.headers["allow"]


async def test_error_bodies_stay_small(recipe: Running) -> None:
    """However large the mistake."""
    wild = [
        CHAT | {"x" * 100_000: 1},
        CHAT | {"messages": [{"role": "r" * 99_999}] * 9},
        CHAT | {"model": "m" * 99_999},
    ]
    for mistake in wild:
        assert len((await recipe.post("/v1/chat/completions", mistake)).content) < 8192


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Overloaded("full", retry_after=2.5), 429, "rate_limit_exceeded"),
        (errors.NoReplica("none ready"), 503, "service_unavailable"),
        (errors.PromptTooLong("too long"), 400, "context_length_exceeded"),
        (errors.DeadlinePassed("too late"), 504, "deadline_passed"),
        (errors.InternalError("secret detail"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_from_behind_keep_their_meaning(
    recipe: Running, error: errors.FathomError, status: int, code: str | None, stream: bool
) -> None:
    """An early error is a status, for streams too; retry-after where retrying helps; no internals leak."""
    message: StreamError = errors.to_stream_error(error)
    recipe.play(lambda _request: [Step(error=message)])
    answer = await recipe.post("/v1/chat/completions", CHAT | {"stream": stream})

    assert code == check_envelope(answer, status)["code"]
    assert (status in {429, 503}) == ("retry-after" in answer.headers)
    assert "secret" not in answer.text
    if status == 429:
        assert "3" == answer.headers["retry-after"]

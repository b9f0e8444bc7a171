"""Promises of Chat Completions about sampling and telling, through the official SDK: cases 1 to 25 and 35 to 43."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step, saying
from services.recipe.tests.speaking import answering, ids_of, rendered, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, Any] = {"reasoning_effort": "none"}


async def ask(deep: Running, **options: Any) -> ChatCompletion:
    given: dict[str, Any] = {"model": "deep", "messages": HELLO} | PLAIN | options
    answer = await deep.sdk.chat.completions.create(**given)
    return ChatCompletion.model_validate_json(answer.model_dump_json())


async def stream(deep: Running, **options: Any) -> list[ChatCompletionChunk]:
    given: dict[str, Any] = {"model": "deep", "messages": HELLO, "stream": True} | PLAIN | options
    chunks = [chunk async for chunk in await deep.sdk.chat.completions.create(**given)]
    return [ChatCompletionChunk.model_validate_json(chunk.model_dump_json()) for chunk in chunks]


async def refused(deep: Running, **change: Any) -> dict[str, Any]:
    """The error of a request with this change, which nothing behind us sees."""
    raw = await deep.post("/v1/chat/completions", {"model": "deep", "messages": HELLO} | change)
    assert 400 == raw.status_code, raw.text
    assert [] == deep.entrypoint.submitted
    error: dict[str, Any] = raw.json()["error"]
    return error


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def test_basic(deep: Running) -> None:
    """Case 1: a chat.completion whose usage adds up."""
    deep.play(answering("The end"))
    answer = await ask(deep)

    assert ("chat.completion", "assistant") == (answer.object, answer.choices[0].message.role)
    assert answer.id.startswith("chatcmpl-")
    assert ("The end", "stop", "default") == (
        answer.choices[0].message.content,
        answer.choices[0].finish_reason,
        answer.service_tier,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


async def test_stream(deep: Running) -> None:
    """Cases 2 and 3: the role first, one finish reason, one [DONE], and no usage."""
    deep.play(answering("The end"))
    chunks = await stream(deep)
    raw = await deep.post("/v1/chat/completions", {"model": "deep", "messages": HELLO, "stream": True} | PLAIN)

    assert "assistant" == chunks[0].choices[0].delta.role
    assert ["stop"] == [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert 1 == raw.text.count("data: [DONE]")
    assert all(chunk.usage is None for chunk in chunks)


async def test_stream_is_the_whole(deep: Running) -> None:
    """Cases 4 and 5: the same text and the same usage, which comes last and alone."""
    deep.play(answering("naïve 👩‍👩‍👧 end"))
    whole = await ask(deep)
    chunks = await stream(deep, stream_options={"include_usage": True})

    assert whole.choices[0].message.content == text_of(chunks)
    assert ([], whole.usage) == (chunks[-1].choices, chunks[-1].usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
async def test_limits(deep: Running, field: str) -> None:
    """Cases 6 and 7: either name limits the answer."""
    deep.play(answering("The end of the beginning"))
    answer = await ask(deep, **{field: 3})

    assert answer.usage is not None
    assert (3, "length") == (answer.usage.completion_tokens, answer.choices[0].finish_reason)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),  # 7
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),  # 8
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 4096}, "max_tokens", "context_length_exceeded"),  # 9
        ({"stop": list("abcde")}, "stop", "invalid_value"),  # 11
        ({"stop": ""}, "stop", "invalid_value"),  # 12
        ({"n": 0}, "n", "invalid_value"),  # 15
        ({"n": 100000}, "n", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),  # 18
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),  # 20
        ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),  # 21
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),  # 24
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),  # 25
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),  # 37
        (
            {"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "messages[1].tool_call_id",
            None,
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", None),  # 42
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", None),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", None),  # 43
        ({"messages": []}, "messages", None),
        ({"foo": 1}, "foo", "unknown_parameter"),  # 65
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"service_tier": "flex"}, "service_tier", "invalid_value"),
    ],
)
async def test_what_is_out_of_range(deep: Running, change: dict[str, Any], param: str, code: str | None) -> None:
    """Cases 7 to 9, 11, 12, 15, 18, 20, 21, 24, 25, 37, 39, 42, 43 and 65: a 400 that names the field."""
    error = await refused(deep, **change)

    assert param == error["param"]
    assert error["message"].startswith(param)
    assert code is None or code == error["code"]


@pytest.mark.parametrize("stop", ["of the", ["zz", "yy", "xx", "of the"], "👍"])
@pytest.mark.parametrize("per_step", [1, 500])
async def test_stops(deep: Running, stop: Any, per_step: int) -> None:
    """Cases 10, 11 and 13: cut exactly before it, nothing leaks, and no character breaks."""
    text = "The end 👍 of the beginning"
    deep.play(answering(text, per_step=per_step))
    cut = text[: text.find(stop if isinstance(stop, str) else stop[-1])]
    whole = await ask(deep, stop=stop)

    assert (cut, "stop") == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert cut == text_of(await stream(deep, stop=stop))


@pytest.mark.parametrize("num_words", [1, 400])
async def test_choices(deep: Running, num_words: int) -> None:
    """Case 14: each with its index, seed and end; the prompt counts once, and a long one is computed once, first."""
    deep.play(lambda _request: [Step(ids_of("The"), after=0.02), *answering("end")(_request)])
    messages = [{"role": "user", "content": "1 " * num_words}]
    answer = await ask(deep, n=3, messages=messages)
    begun = [request.request_id.rpartition("-")[2] for request in deep.entrypoint.submitted]
    chunks = await stream(deep, n=2, messages=messages)
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]

    assert [0, 1, 2] == [choice.index for choice in answer.choices]
    assert ("0", [0, 1]) == (begun[0], sorted(finished))
    assert answer.usage is not None
    assert len(deep.entrypoint.submitted[0].prompt_token_ids) == answer.usage.prompt_tokens
    assert 5 == len({request.sampling.seed for request in deep.entrypoint.submitted})


async def test_a_long_prompt_is_computed_before_its_other_choices_ask(deep: Running) -> None:
    """Case 14: until the first token of the first choice the engines know of no other."""
    seen: list[int] = []

    def script(request: Any) -> Any:
        yield Step((), after=0.1)
        seen.append(len(deep.entrypoint.submitted))
        yield from answering("end")(request)

    deep.play(script)
    await ask(deep, n=3, messages=[{"role": "user", "content": "1 " * 400}])

    assert 1 == seen[0]


async def test_seeds(deep: Running) -> None:
    """Cases 16 and 17: the same seed is the same to the engines, another is not; temperature 0 is greedy."""
    deep.play(lambda request: saying([request.sampling.seed % 200 + 20])(request))
    texts = [(await ask(deep, seed=seed)).choices[0].message.content for seed in (7, 7, 8)]
    await ask(deep, temperature=0)

    assert texts[0] == texts[1] != texts[2]
    assert 0 == deep.entrypoint.submitted[-1].sampling.temperature


async def test_logprobs(deep: Running) -> None:
    """Cases 19, 20 and 22: one per token, in the order of likelihood, bytes as they are, in streams too."""
    deep.play(answering("the 👍 end"))
    whole = await ask(deep, logprobs=True, top_logprobs=5)
    chunks = await stream(deep, logprobs=True, top_logprobs=5)
    scores = whole.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    streamed = [
        score for c in chunks for choice in c.choices if choice.logprobs for score in choice.logprobs.content or ()
    ]

    assert scores.content == streamed
    assert "the 👍 end".encode() == b"".join(bytes(score.bytes or ()) for score in streamed)
    for score in streamed:
        tops = [top.logprob for top in score.top_logprobs]
        assert (5, sorted(tops, reverse=True)) == (len(tops), tops)
    assert any("\\x" in score.token for score in streamed)


async def test_bias_and_penalties(deep: Running) -> None:
    """Cases 23 and 25: the engines are told."""
    deep.play(answering("x"))
    await ask(deep, logit_bias={"5": -100, "6": 100}, frequency_penalty=2, presence_penalty=-2)
    sampling = deep.entrypoint.submitted[-1].sampling

    assert {5: -100.0, 6: 100.0} == {bias.token_id: bias.bias for bias in sampling.logit_bias}
    assert (2.0, -2.0) == (sampling.frequency_penalty, sampling.presence_penalty)


async def test_developer_and_parts(deep: Running) -> None:
    """Cases 40 and 41: developer acts as system, parts are their joined text."""
    deep.play(answering("x"))
    told = []
    for role, content in (
        ("system", "be brief"),
        ("developer", [{"type": "text", "text": t} for t in ("be ", "brief")]),
    ):
        await ask(deep, messages=[{"role": role, "content": content}, *HELLO])
        told.append(list(deep.entrypoint.submitted[-1].prompt_token_ids))

    assert told[0] == told[1]
    assert rendered(user("hello"), effort="none") != told[0]


async def test_who_asks_changes_nothing(deep: Running) -> None:
    """Case 65: user, metadata, store, service_tier and cache keys are taken."""
    deep.play(answering("x"))
    identity = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
    await ask(deep, store=True, service_tier="auto", **identity)

    assert rendered(user("hello"), effort="none") == list(deep.entrypoint.submitted[-1].prompt_token_ids)


async def test_unknown_models_and_bad_bodies(deep: Running) -> None:
    """Cases 52 to 54, 57 and 58: each in the envelope, small, with the server alive."""
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(deep, model="gpt-9")
    bodies = [b"{", b"[1]", b'{"model": "\xff"}', b'{"a":' * 10_000]
    raws = [await deep.http.post("/v1/chat/completions", content=body) for body in bodies]
    many = await deep.post("/v1/chat/completions", {"model": "deep", "messages": [{"role": "x" * 500}] * 4000})
    lost, wrong = await deep.post("/v1/nowhere", {}), await deep.http.get("/v1/chat/completions")

    assert "model_not_found" == missing.value.code
    assert [400] * len(bodies) == [raw.status_code for raw in raws]
    assert (400, 404, 405) == (many.status_code, lost.status_code, wrong.status_code)
    for raw in (*raws, many, lost, wrong):
        assert {"message", "type", "param", "code"} == set(json.loads(raw.text)["error"])
        assert len(raw.content) < 8192

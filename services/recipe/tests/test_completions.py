"""Promises of /v1/completions."""

import json
from typing import Any

import pytest
from openai.types import Completion
from tokenizers import Tokenizer

from services.recipe.tests.running import Running
from services.recipe.tests.scripted import saying

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def said(library: Tokenizer) -> Any:
    """Returns the ids of a text."""
    return lambda text: library.encode(text, add_special_tokens=False).ids


async def test_text_in_text_out(recipe: Running, said: Any) -> None:
    """A text_completion; the prompt is encoded plainly and nothing is added."""
    recipe.play(saying(said(" ten"), eos=2))
    answer = await recipe.sdk.completions.create(model="tiny", prompt="Count to", max_tokens=50)

    Completion.model_validate_json(answer.model_dump_json())
    assert (" ten", "stop", "text_completion") == (
        answer.choices[0].text,
        answer.choices[0].finish_reason,
        answer.object,
    )
    assert answer.id.startswith("cmpl-")
    assert said("Count to") == list(recipe.entrypoint.submitted[0].prompt_token_ids)


async def test_token_ids_are_used_verbatim(recipe: Running, said: Any) -> None:
    """Control ids included, nothing added, nothing taken away; and both sides' ids come back."""
    prompt = [1, 2, 1, 300, 0, 2]
    recipe.play(saying(said("x"), eos=2))
    body = {"model": "tiny", "prompt": prompt, "return_token_ids": True, "max_tokens": 5}
    choice = (await recipe.post("/v1/completions", body)).json()["choices"][0]

    assert prompt == list(recipe.entrypoint.submitted[0].prompt_token_ids)
    assert (prompt, [*said("x"), 2]) == (choice["prompt_token_ids"], choice["token_ids"])


async def test_control_spellings_in_a_text_prompt_are_text(recipe: Running, library: Tokenizer) -> None:
    """Whoever wants control tokens sends their ids."""
    recipe.play(saying([10]))
    await recipe.sdk.completions.create(model="tiny", prompt="<|im_start|>user<think>", max_tokens=1)

    controls = set(library.get_added_tokens_decoder())
    assert controls.isdisjoint(recipe.entrypoint.submitted[0].prompt_token_ids)


@pytest.mark.parametrize("prompts", [["one", "ten"], [[5, 6], [7]], ["one", [7]]])
async def test_a_list_of_prompts_gives_a_choice_each(recipe: Running, said: Any, prompts: Any) -> None:
    """Choices are numbered prompt by prompt; every prompt's choice k has the same seed; usage counts each prompt once."""
    recipe.play(saying(said("x"), eos=2))
    body = {"model": "tiny", "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 5}
    answer = (await recipe.post("/v1/completions", body)).json()
    by_choice = sorted(recipe.entrypoint.submitted, key=lambda request: request.request_id[-1])
    ids = [said(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    assert [0, 1, 2, 3] == [choice["index"] for choice in answer["choices"]]
    assert [ids[0], ids[0], ids[1], ids[1]] == [list(request.prompt_token_ids) for request in by_choice]
    assert by_choice[0].sampling.seed == by_choice[2].sampling.seed == 3
    assert by_choice[1].sampling.seed == by_choice[3].sampling.seed
    assert len(ids[0]) + len(ids[1]) == answer["usage"]["prompt_tokens"]


async def test_streams_end_with_usage_when_asked(recipe: Running, said: Any) -> None:
    """Texts concatenate to the whole; the last chunk is usage alone."""
    recipe.play(saying(said("The 👍 end"), eos=2))
    stream = await recipe.sdk.completions.create(
        model="tiny", prompt="hello", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert "The 👍 end" == "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert ["stop"] == [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert [] == chunks[-1].choices
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("prompt", ["hello ", [3, 4, 1]])
async def test_echo_puts_the_prompt_first(recipe: Running, said: Any, library: Tokenizer, prompt: Any) -> None:
    """In whole and streamed answers alike; special tokens stay unseen."""
    recipe.play(saying(said("world"), eos=2))
    shown = prompt if isinstance(prompt, str) else library.decode(prompt)
    body = {"model": "tiny", "prompt": prompt, "echo": True}
    whole = (await recipe.post("/v1/completions", body)).json()
    raw = (await recipe.post("/v1/completions", body | {"stream": True})).text
    frames = [json.loads(line.removeprefix("data: "))["choices"][0] for line in raw.split("\n\n") if '{"' in line]

    assert shown + "world" == whole["choices"][0]["text"]
    assert shown + "world" == "".join(frame["text"] for frame in frames)


async def test_logprobs_have_the_older_shape(recipe: Running, said: Any) -> None:
    """Four parallel lists; offsets point into the text, in streams too."""
    recipe.play(saying(said("the end"), eos=2))
    whole = await recipe.sdk.completions.create(model="tiny", prompt="hello", logprobs=2)
    stream = await recipe.sdk.completions.create(model="tiny", prompt="hello", logprobs=2, stream=True)
    streamed = [c.logprobs async for chunk in stream for c in chunk.choices if c.logprobs]

    found = whole.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert "the end" == "".join(found.tokens)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert found.token_logprobs == [-0.5] * len(found.tokens)
    for token, top in zip(found.tokens, found.top_logprobs or (), strict=True):
        assert token in top
        assert len(top) in {2, 3}
    assert found.text_offset == [offset for part in streamed for offset in part.text_offset or ()]


async def test_echo_with_logprobs_scores_the_prompt(recipe: Running, said: Any, library: Tokenizer) -> None:
    """Prompt and answer in one set of lists: nothing precedes the first token, offsets point into the whole text."""
    recipe.play(saying(said(" the end"), eos=2))
    prompt = "Count 👍"
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "logprobs": 1, "echo": True}
    whole = (await recipe.post("/v1/completions", asked)).json()["choices"][0]
    raw = (await recipe.post("/v1/completions", asked | {"stream": True})).text
    frames = [json.loads(line.removeprefix("data: "))["choices"][0] for line in raw.split("\n\n") if '{"' in line]
    told = whole["logprobs"]
    num_prompt = len(said(prompt))

    assert prompt + " the end" == whole["text"] == "".join(frame["text"] for frame in frames)
    assert 1 == recipe.entrypoint.submitted[0].num_prompt_logprobs
    assert [None] + [-0.5] * (num_prompt + len(said(" the end")) - 1) == told["token_logprobs"]
    assert told["top_logprobs"][0] is None
    assert all(token in top for token, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True))
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert "\\x" in token or whole["text"][offset:].startswith(token)
    for name, listed in told.items():
        assert listed == [value for frame in frames if frame["logprobs"] for value in frame["logprobs"][name]]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_tokens_at_all_may_be_asked_for_with_echo(recipe: Running, said: Any, is_stream: bool) -> None:
    """Which is how likelihoods are measured: the engine's one token is neither shown nor counted."""
    recipe.play(saying(said("x"), eos=2))
    asked: dict[str, Any] = {"model": "tiny", "prompt": [[5, 6, 7], [8]], "logprobs": 0, "echo": True, "max_tokens": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    raw = await recipe.post("/v1/completions", asked | options)
    frames = [json.loads(part.removeprefix("data: ")) for part in raw.text.split("\n\n") if '{"' in part]
    choices = [choice for frame in frames for choice in frame["choices"]]
    usage = frames[-1]["usage"]
    scores = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"]]

    assert [[None], [None, -0.5, -0.5]] == sorted(scores, key=len)
    assert {"length"} == {choice["finish_reason"] for choice in choices} - {None}
    assert (4, 0) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert {1} == {request.stop.max_tokens for request in recipe.entrypoint.submitted}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 6}, "logprobs"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"suffix": 7}, "suffix"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 5, "prompt": [[5] * 400] * 20, "n": 3}, "prompt"),
    ],
)
async def test_what_completions_refuse(recipe: Running, fields: dict[str, Any], param: str) -> None:
    """By name, before anything is computed; this model was not taught to fill in."""
    recipe.play(saying([5]))
    raw = await recipe.post("/v1/completions", {"model": "tiny", "prompt": "x"} | fields)

    assert (400, param) == (raw.status_code, raw.json()["error"]["param"])
    assert not recipe.entrypoint.submitted
    assert fields != {"suffix": "x"} or "suffix_not_supported" == raw.json()["error"]["code"]

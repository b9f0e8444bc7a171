"""Are grammars compiled apart, remembered, and given up in time? By real worker processes."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import llguidance
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped] # ships no types

from services.recipe.grammar_limits import INVALID, TOO_COMPLEX
from services.recipe.grammar_worker import Checker, _Bytes
from services.recipe.grammars import KIND, GrammarCompiler, Part, Sketch, json_object, json_schema, lark, regex
from services.recipe.refusals import ApiError

BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
WHERE = "response_format"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(b"tokenizer", num_workers=1)
    yield made
    await made.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refusal(compiler: GrammarCompiler, part: Part) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await compiler.compile(Sketch((part,)))
    assert 400 == caught.value.status
    return caught.value


def takes(part: Part, text: str) -> bool:
    """Whether the compiled language has this text, whole."""
    answer = Checker().answer({"frame": "", "parts": [part.job]})
    assert "body" in answer, answer
    matcher = llguidance.LLMatcher(BYTES, answer["body"], log_level=0)
    for byte in text.encode():
        mask = matcher.compute_bitmask()
        if not mask[byte >> 3] >> (byte & 7) & 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


def pid_of(compiler: GrammarCompiler) -> int:
    return compiler._idle[0]._process.pid


async def test_a_schema_becomes_a_grammar_and_is_remembered(compiler: GrammarCompiler) -> None:
    """The same bytes each time, and the worker is not asked twice."""
    sketch = Sketch((json_schema({"type": "object", "title": "x", "properties": {"b": {}, "a": {}}}, WHERE),))

    first = await compiler.compile(sketch)
    os.kill(pid_of(compiler), signal.SIGSTOP)
    again = await compiler.compile(sketch)
    os.kill(pid_of(compiler), signal.SIGCONT)

    assert KIND == first.kind
    assert first == again
    assert ["b", "a"] == list(json.loads(first.body)["grammars"][0]["json_schema"]["properties"])


async def test_equal_requests_share_one_compilation(compiler: GrammarCompiler) -> None:
    """A hundred at once, one of which is given up by its caller."""
    sketch = Sketch((json_object(WHERE), regex("[a-z]+", WHERE)), "start: @part0 | @part1")
    tasks = [asyncio.create_task(compiler.compile(sketch)) for _ in range(100)]
    await asyncio.sleep(0)
    assert 1 == len(compiler._running)
    tasks[0].cancel()

    bodies = {grammar.body for grammar in await asyncio.gather(*tasks[1:])}

    assert 1 == len(bodies)


@pytest.mark.parametrize(
    "part",
    [
        json_schema({"type": "foo"}, WHERE),
        json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}, WHERE),
        json_schema({"$ref": "#/$defs/x"}, WHERE),
        json_schema({"type": "integer", "minimum": 5, "maximum": 3}, WHERE),
        regex("(a", WHERE),
        regex(r"(a)\1", WHERE),
        regex("(?=a)a", WHERE),
        lark("start: b", WHERE),
        lark('root ::= "a', WHERE),
    ],
    ids=lambda part: str(part.job)[:40],
)
async def test_what_cannot_be_obeyed_is_refused(compiler: GrammarCompiler, part: Part) -> None:
    """A 400 with a reason, without anything of the compiler's inside."""
    error = await refusal(compiler, part)

    assert (INVALID, WHERE) == (error.code, error.param)
    assert len(error.body()) <= 8192
    assert not any(word in error.message for word in (".rs", "/home", "backtrace", "Traceback"))


async def test_a_schema_that_costs_too_much_ends_its_worker_alone(compiler: GrammarCompiler) -> None:
    """In bounded time, as a 400 that is remembered; the next caller gets a new process."""
    compiler._job_seconds = 0.5
    slow = json_schema(
        {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 101}]}, WHERE
    )
    await compiler.compile(Sketch((json_object("before"),)))
    old = pid_of(compiler)
    os.kill(old, signal.SIGKILL)  # it was started with more time
    await compiler._idle[0]._process.wait()
    started = time.monotonic()

    first, second = await refusal(compiler, slow), await refusal(compiler, slow)

    assert time.monotonic() - started < 10
    assert TOO_COMPLEX == first.code == second.code
    assert [] == compiler._idle
    await compiler.compile(Sketch((json_object("after"),)))
    assert old != pid_of(compiler)


async def test_what_nothing_satisfies_is_refused(compiler: GrammarCompiler) -> None:
    """An answer could not even begin."""
    assert TOO_COMPLEX == (await refusal(compiler, json_schema({"$ref": "#"}, WHERE))).code


async def test_workers_are_small(compiler: GrammarCompiler) -> None:
    """They hold no tokenizer."""
    await compiler.compile(Sketch((json_object("small"),)))

    assert 0 < compiler.resident_bytes < 60 << 20


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "a": "x"}'),
        ({"properties": {"a/b": {"type": "integer"}}}, '{"a\\/b": "x"}'),
        ({"type": "string", "format": "date"}, '"2024-02-29"'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"1900-02-29"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"'),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"1999-01-01"'),
        ({"type": "string", "format": "uuid"}, '"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, '"aaaa"'),
        ({"type": "string", "pattern": "b"}, '"abc"'),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, '{"a": 1}'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}], "maxLength": 2}, '"aaa"'),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, '{"x": "a"}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 1}'),
        ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}'),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, '"c"'),
        ({"type": "number", "multipleOf": 0.5}, "1.25"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}, "minimum": 5}, "3"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1]"),
    ],
)
async def test_the_language_of_a_schema_is_its_validator_s(schema: dict[str, Any], text: str) -> None:
    """Neither an escape nor a second key gets around it: what parsers read is what was asked for."""
    expected = Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(json.loads(text))

    assert expected == takes(json_schema(schema, WHERE), text)


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        (json_object(WHERE), '{\n    "a": [1, {"b": null}]\n}', True),
        (json_object(WHERE), "[]", False),
        (json_object(WHERE), '{"a":1}\n', False),
        (json_object(WHERE), '{  "a":1}', False),
        (json_schema({"type": "string", "format": "time"}, WHERE), '"23:59:59Z"', True),
        (json_schema({"type": "string", "format": "time"}, WHERE), '"23:59:60Z"', False),
        (json_schema({"type": "string", "format": "date-time"}, WHERE), '"2024-02-29T00:00:00.5+01:00"', True),
        (json_schema({"type": "string", "format": "date-time"}, WHERE), '"2023-02-29T00:00:00Z"', False),
        (regex("^a/b|c$", WHERE), "a/b", True),
        (regex("a|b", WHERE), "ab", False),
        (lark('start: "a" B\nB: /[0-9]+/', WHERE), "a12", True),
        (lark('root ::= "a" | "b" root', WHERE), "bba", True),
        (lark('root ::= "a" | "b" root', WHERE), "bb", False),
    ],
)
async def test_other_languages(part: Part, text: str, expected: bool) -> None:
    """JSON of any shape, whose white space ends; expressions and grammars match the whole answer."""
    assert expected == takes(part, text)

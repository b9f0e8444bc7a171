"""Is whatever a bound V4.1 answer may be read back as what was asked for?"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator  # type: ignore[import-untyped] # ships no types

from services.recipe.constraint import Constraint, Format, ToolUse
from services.recipe.conversation import Conversation, Tool, Turn
from services.recipe.deepseek_frame import DeepseekFraming
from services.recipe.deepseek_parser import DeepseekParser
from services.recipe.dialect import CallArguments, CallBegun, Event, Text
from services.recipe.framing import sketch_of
from services.recipe.grammars import GrammarCompiler
from services.recipe.refusals import ApiError
from services.recipe.tests.deepseek import tiny_vocabulary
from services.recipe.tests.guided import said_by
from services.recipe.tests.speaking import END, TINY

pytestmark = pytest.mark.asyncio(loop_scope="module")
FRAMING = DeepseekFraming(tiny_vocabulary())
BOOK = Tool(
    "book",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "class": {"type": "string", "enum": ["first", "se</cond"]},
            "nights": {"type": "integer", "minimum": 1, "maximum": 9},
            "code": {"type": "string", "maxLength": 3},
            "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "maxItems": 2},
        },
        "required": ["city", "nights"],
        "$defs": {
            "guest": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["age"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = Tool("now", "", {})
TOOLS = {tool.name: tool for tool in (BOOK, NOW)}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = Format("json_schema", POINT, "response_format.json_schema.schema")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(b"tiny", num_workers=1)
    yield made
    await made.close()


async def answers(
    compiler: GrammarCompiler, constraint: Constraint, tools: tuple[Tool, ...] = (), effort: str = "none", num: int = 8
) -> list[list[Event]]:
    """What the parser makes of random answers that the grammar allows."""
    conversation = Conversation((Turn("user", ("hi",)),), tools, effort)
    sketch = sketch_of(constraint, conversation, FRAMING)
    assert sketch is not None
    grammar = await compiler.compile(sketch)
    read = []
    for seed in range(num):
        parser = DeepseekParser(tiny_vocabulary(), thinks=effort != "none", takes_calls=bool(tools))
        read.append(parser.feed(said_by(TINY, grammar, seed, END)) + parser.rest(is_whole=True))
    return read


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, CallBegun)]
    told = [
        "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == at) for at in range(len(names))
    ]
    return [(name, json.loads(arguments)) for name, arguments in zip(names, told, strict=True)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["none", "high"])
async def test_required_calls_are_made_and_valid(compiler: GrammarCompiler, effort: str) -> None:
    """At least one, of declared tools, with arguments that their schemas accept; and no text."""
    for events in await answers(compiler, Constraint(tools=ToolUse(must_call=True)), (BOOK, NOW), effort):
        calls = calls_of(events)
        assert calls
        assert "" == text_of(events)
        for name, arguments in calls:
            Draft202012Validator(TOOLS[name].parameters).validate(arguments)


async def test_a_named_tool_is_the_one_called_and_once_when_asked(compiler: GrammarCompiler) -> None:
    """The other one is declared, and never called."""
    use = ToolUse(must_call=True, names=("now",), is_parallel=False)

    for events in await answers(compiler, Constraint(tools=use), (BOOK, NOW)):
        assert [("now", {})] == calls_of(events)


@pytest.mark.parametrize("effort", ["none", "high"])
async def test_a_form_binds_the_text_alone(compiler: GrammarCompiler, effort: str) -> None:
    """What is thought before is free."""
    for events in await answers(compiler, Constraint(FORMAT), effort=effort):
        Draft202012Validator(POINT).validate(json.loads(text_of(events)))


async def test_with_tools_an_answer_has_the_form_or_is_a_call(compiler: GrammarCompiler) -> None:
    """Both happen."""
    read = await answers(compiler, Constraint(FORMAT), (NOW,), num=30)

    assert {True, False} == {bool(calls_of(events)) for events in read}
    for events in read:
        if not calls_of(events):
            Draft202012Validator(POINT).validate(json.loads(text_of(events)))


@pytest.mark.slow
async def test_strict_tools_leave_text_free_and_bind_calls(compiler: GrammarCompiler) -> None:
    """Auto stays auto; a call that is made obeys."""
    read = await answers(compiler, Constraint(tools=ToolUse(strict_names=("book",))), (BOOK,), num=14)

    assert {True, False} == {bool(calls_of(events)) for events in read}
    for events in read:
        for _, arguments in calls_of(events):
            Draft202012Validator(BOOK.parameters).validate(arguments)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"anyOf": [{}]}, "tools[0].parameters.anyOf"),
        ({"type": "array"}, "tools[0].parameters.type"),
        ({"properties": {"a": {"not": {}}}}, "tools[0].parameters.properties.a.not"),
        ({"properties": {'a"b': {}}}, 'tools[0].parameters.properties.a"b'),
        ({"properties": {"a": {}}, "required": ["b"]}, "tools[0].parameters.required"),
        ({"properties": {"a": {"type": "foo"}}}, "tools[0].parameters.properties.a"),
    ],
)
async def test_tools_that_cannot_be_bound_to_are_refused(compiler: GrammarCompiler, schema: Any, where: str) -> None:
    """By the place in the schema."""
    with pytest.raises(ApiError) as caught:
        await answers(compiler, Constraint(tools=ToolUse(must_call=True)), (Tool("a", "", schema),))

    assert (400, where) == (caught.value.status, caught.value.param)

"""What is read from answers that speak of tools as Hermes does?"""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recipe.dialect import CallArguments, CallBegun, Event, Text
from services.recipe.hermes_parser import HermesParser
from services.recipe.tests.deepseek import merged
from services.recipe.tests.tiny import make_tokenizer
from services.recipe.tokenizer import PromptTokenizer

PLAIN = make_tokenizer()
NAMES = {"book", "now"}
PIECES = PromptTokenizer(make_tokenizer()).pieces


def ids_of(text: str) -> list[int]:
    return list(PLAIN.encode(text, add_special_tokens=False).ids)


def read(text: str, *, is_whole: bool = True, cuts: tuple[int, ...] = ()) -> list[Event]:
    parser, ids, events, at = HermesParser(PIECES, NAMES), ids_of(text), [], 0
    for cut in (*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)):
        events += parser.feed(ids[at:cut])
        at = cut
    return merged([*events, *parser.rest(is_whole=is_whole)])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_and_text_are_told_apart() -> None:
    """Newlines around calls, a list of calls in one tag, the older word for arguments."""
    assert [Text("so:"), CallBegun(0, "now"), CallArguments(0, "{}")] == read("so:\n\n" + call("now", "{}"))
    both = read(call("now", "{}") + "\n" + call("book", '{"nights": 2, "city": "é"}'))
    assert [CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "book")] == both[:3]
    assert [CallArguments(1, '{"nights": 2, "city": "é"}')] == both[3:]
    listed = read('<tool_call>[{"name": "now", "parameters": {}}, {"name": "now", "arguments": {}}]</tool_call>')
    assert ["now", "now"] == [event.name for event in listed if isinstance(event, CallBegun)]


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call>",
        "<tool_call>{}</tool_call>",
        call("other", "{}"),
        call("other", "{")[: -len("</tool_call>")],
        call("now", "[]"),
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "x"}]</tool_call>',
        '<tool_call>{"arguments": {"a": 1,}, "name": "now"}</tool_call>',
        "<tool_call",
        "x\n\n",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Nothing is lost."""
    assert [Text(text)] == read(text)


def test_a_call_that_is_cut_off_shows_its_beginning() -> None:
    """As OpenAI does at the token limit."""
    assert [CallBegun(0, "book"), CallArguments(0, '{"nights": ')] == read(
        '<tool_call>\n{"name": "book", "arguments": {"nights": ', is_whole=False
    )
    assert [CallBegun(0, "now"), CallArguments(0, "{}")] == read(call("now", "{}")[:-5], is_whole=False)


def test_arguments_are_told_as_they_come() -> None:
    """The name as soon as they begin; of a text as much as was said, but for half characters and half escapes."""
    parser = HermesParser(PIECES, NAMES)

    def fed(text: str) -> list[Event]:
        return parser.feed(ids_of(text))

    assert [] == fed('<tool_call>\n{"name": "book", "arguments": ')
    assert [CallBegun(0, "book"), CallArguments(0, "{")] == fed('{"ci')
    assert [CallArguments(0, '"city": "Par')] == merged(fed('ty": "Par'))
    *first, last = ids_of("é")
    assert [[], [CallArguments(0, "é")]] == [parser.feed(first), parser.feed([last])]
    assert [] == fed("\\u00")
    assert [CallArguments(0, '\\u00e9"')] == fed('e9"')
    assert [CallArguments(0, "}")] == fed("}")
    assert [] == fed("}\n</tool_call>") + parser.rest(is_whole=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"city": "</tool_call>", "nights": 2}', '{"city": "</tool_call>", "nights": 2}'),
        ('{"city": "a\nb\\d",}', '{"city": "a\\u000ab\\\\d"}'),
        ('{"nights": True, "city": "x"}', "{}"),
        ('{"city": "x", "nights": 2]', '{"city": "x", "nights": 2}'),
        ("{", "{}"),
    ],
)
def test_arguments_that_are_wrong_end_where_they_were_right(arguments: str, told: str) -> None:
    """What is plain all the same is mended; the next call is read as ever."""
    after = [CallBegun(1, "now"), CallArguments(1, "{}")]
    assert [CallBegun(0, "book"), CallArguments(0, told), *after] == read(call("book", arguments) + call("now", "{}"))


def test_a_text_that_is_not_closed_ends_with_the_answer() -> None:
    """Nobody can tell where it was meant to."""
    told = [CallBegun(0, "book"), CallArguments(0, '{"city": "Paris}}"}')]
    assert told == read('<tool_call>{"name": "book", "arguments": {"city": "Paris}}')


@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "a",
                    "\n",
                    "<tool",
                    "_call>",
                    "</tool_call>",
                    "<tool_call>",
                    "é",
                    "👩‍👧",
                    '"',
                    "\\",
                    ", ",
                    "{",
                    "}}",
                    "]",
                ),
                *(call("now", "{}"), call("x", "{}"), call("book", '{"c": "\\n😀"}'), '{"name": "book", "arguments": '),
                *("\\u00e9", "\\ud83d", '{"a": [1, "é', '"b": tru', '{"arguments": {}, "name": "now"}'),
                '[{"name": "now", "arguments": {}}]',
            ]
        ),
        max_size=10,
    ),
    st.lists(st.integers(0, 400), max_size=6),
    st.booleans(),
)
def test_any_split_gives_the_same_events(texts: list[str], cuts: list[int], is_whole: bool) -> None:
    """Frames are dealt out by luck. Arguments are JSON objects in the end."""
    events = read("".join(texts), is_whole=is_whole)

    assert events == read("".join(texts), cuts=tuple(cuts), is_whole=is_whole)
    if is_whole:
        for event in events:
            assert not isinstance(event, CallArguments) or isinstance(orjson.loads(event.text), dict)

"""What is read from answers that speak of tools as Hermes does?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recipe.dialect import CallArguments, CallBegun, Event, Text
from services.recipe.hermes_parser import HermesParser
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


def merged(events: list[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        if isinstance(event, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


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
        call("now", "[]"),
        call("now", "{"),
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


@given(
    st.lists(
        st.sampled_from(["a", "\n", "<tool", "_call>", "</tool_call>", call("now", "{}"), call("x", "{}"), "é"]),
        max_size=8,
    ),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_split_gives_the_same_events(texts: list[str], cuts: list[int]) -> None:
    """Frames are dealt out by luck."""
    assert read("".join(texts)) == read("".join(texts), cuts=tuple(cuts))

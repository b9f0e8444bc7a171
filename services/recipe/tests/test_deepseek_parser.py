"""Promises about DeepSeek V4.1 answers: tokens to reasoning, text and calls, the same however they are dealt out."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.recipe.conversation import Conversation, ToolCall
from services.recipe.deepseek_library import LibraryParser
from services.recipe.deepseek_parser import MAX_TAG_CHARACTERS, DeepseekParser
from services.recipe.deepseek_renderer import DeepseekRenderer
from services.recipe.deepseek_words import Mark
from services.recipe.dialect import CallArguments, CallBegun, Event, Reasoning, Text
from services.recipe.tests.deepseek import (
    DSML,
    NOW,
    assistant,
    block_of,
    call_of,
    make_tiny,
    merged,
    read_all,
    tiny_library,
    tiny_vocabulary,
    user,
    value_of,
)

TINY = make_tiny()
VOCABULARY = tiny_vocabulary()
WORDS = [
    *map(str, Mark), "<｜ref｜>", "<", "</", "<" + DSML, "</" + DSML, " calls>", "tool_calls>", ' invoke name="f">',
    " invoke>", ' parameter name="a" string="true">', ' parameter name="b>" string="false">', " parameter>", "\n",
    "\n\n", "x", '"', ">", "👍", "é", "[1, 2]", " foo>", " invoke", "<｜▁pad▁｜>", "x" * MAX_TAG_CHARACTERS,
]  # fmt: skip
quick = settings(max_examples=40, deadline=None)


def ids_of(text: str) -> list[int]:
    """Control spellings become control tokens: what a model would have sampled."""
    return list(TINY.encode(text, add_special_tokens=False).ids)


def parser(*, thinks: bool = True, takes_calls: bool = True) -> DeepseekParser:
    return DeepseekParser(VOCABULARY, thinks=thinks, takes_calls=takes_calls)


def parsed(text: str, *, thinks: bool = False, takes_calls: bool = True, is_whole: bool = True) -> list[Event]:
    return read_all(parser(thinks=thinks, takes_calls=takes_calls), [ids_of(text)], is_whole=is_whole)


def called(arguments: str, name: str = "f") -> list[Event]:
    return [CallBegun(0, name), CallArguments(0, arguments)]


sampled = st.lists(st.sampled_from(WORDS), max_size=14).map(lambda words: ids_of("".join(words))) | st.lists(
    st.integers(0, len(VOCABULARY.pieces) + 2), max_size=30
)


@quick
@given(sampled, st.lists(st.integers(0, 5), max_size=30), st.booleans(), st.booleans(), st.booleans())
@example(ids_of(block_of(call_of(value_of("x", "a>b")))), [1] * 200, False, True, True)
@example(ids_of(f"a\n\n<{DSML}" + "x" * MAX_TAG_CHARACTERS + ">y"), [1] * 200, True, True, True)
def test_chunks_do_not_matter(
    token_ids: list[int], cuts: list[int], thinks: bool, takes_calls: bool, is_whole: bool
) -> None:
    """One event, or any number: the same events, and the same count of reasoning tokens."""
    parts, at = [], 0
    for cut in cuts:
        parts.append(token_ids[at : at + cut])
        at += cut
    whole, split = (parser(thinks=thinks, takes_calls=takes_calls) for _ in range(2))
    expected = read_all(whole, [token_ids], is_whole=is_whole)

    assert expected == read_all(split, [*parts, token_ids[at:]], is_whole=is_whole)
    assert whole.num_reasoning_tokens == split.num_reasoning_tokens
    kinds = [type(event) for event in expected]
    order = [Reasoning, Text, CallBegun, CallArguments]
    assert sorted(map(order.index, kinds[:2])) == [order.index(kind) for kind in kinds[:2]]
    if is_whole:
        assert all(json.loads(event.text) is not None for event in expected if isinstance(event, CallArguments))


inner = st.text('ab \n<>/"\\é👍｜', max_size=12)
spoken = inner.map(lambda text: text.strip("\n<>/"))
values = st.dictionaries(
    st.text("ab_é", min_size=1, max_size=3), inner | st.integers(0, 9) | st.lists(inner, max_size=2), max_size=3
)


@quick
@given(spoken, spoken, st.lists(values, max_size=2))
def test_what_was_rendered_is_read_back(reasoning: str, text: str, called_with: list[dict[str, object]]) -> None:
    """An answer, told as a turn of the next prompt, is the same answer; the library reads it so, too."""
    calls = [ToolCall(str(i), "f", json.dumps(a, ensure_ascii=False)) for i, a in enumerate(called_with)]
    prompt = DeepseekRenderer(VOCABULARY).render(
        Conversation((user("x"), assistant(text, reasoning, *calls)), (NOW,), "high")
    )
    begins, ends = prompt.index(VOCABULARY.ids[Mark.ASSISTANT]), prompt.index(VOCABULARY.ids[Mark.END])
    answer = prompt[begins + 2 : ends]  # behind <think>
    events = read_all(parser(), [answer])
    theirs = LibraryParser(tiny_library(), Conversation((user("x"),), (NOW,), "high"))

    expected: list[Event] = [Reasoning(reasoning)] if reasoning else []
    expected += [Text(text)] if text else []
    for i, call in enumerate(calls):
        expected += [CallBegun(i, "f"), CallArguments(i, call.arguments)]
    assert expected == events
    assert expected == read_all(theirs, [[id_] for id_ in answer])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("\n\nthink \n\n</think>\n\nanswer\n", [Reasoning("think "), Text("answer\n")]),
        ("a <b\n\nc<</think>d", [Reasoning("a <b\n\nc<"), Text("d")]),
        ("never ends\n\n", [Reasoning("never ends\n\n")]),
        ("</think>", []),
        ("t</think>c</think>d<think>e", [Reasoning("t"), Text("cde")]),
        ("t" + block_of(call_of("")), [Reasoning("t"), *called("{}")]),
    ],
)
def test_reasoning_ends_where_the_model_says(answer: str, expected: Sequence[Event]) -> None:
    """At </think>, or with the first call. Newlines around it are the format's; more thinking marks mean nothing."""
    assert expected == parsed(answer, thinks=True)


def test_half_a_character_before_markup_is_none() -> None:
    """It can no longer become one, and does not spoil the next."""
    half = ids_of("👍")[:2]
    events = read_all(parser(), [[*ids_of("a"), *half, *ids_of("</think>é")]])

    assert [Reasoning("a\ufffd"), Text("é")] == events


def test_reasoning_tokens_are_counted() -> None:
    """Without the token that ends it."""
    reader = parser()
    reader.feed([*ids_of("a b c"), *ids_of("</think>d")])

    assert len(ids_of("a b c")) == reader.num_reasoning_tokens


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (value_of('Par"is\n</x> é👍 '), '{"a": "Par\\"is\\n</x> é👍 "}'),
        (value_of("{ [1,2]", is_string=False), '{"a": "{ [1,2]"}'),
        (value_of(" [1,2]\n", is_string=False), '{"a": [1,2]}'),
        (value_of("x", "a>b"), '{"a>b": "x"}'),
        (value_of("NaN", is_string=False), '{"a": "NaN"}'),
        (value_of("", is_string=False), '{"a": ""}'),
        (value_of("1") + "\n" + value_of("2", "b", is_string=False), '{"a": "1", "b": 2}'),
        (value_of("use <think> and </think><｜User｜>"), '{"a": "use <think> and </think>"}'),
        (value_of(f"an <{DSML} invoke"), f'{{"a": "an <{DSML} invoke"}}'),
        (f'noise <{DSML} parameter name="a">x</{DSML} parameter> noise', '{"a": "x"}'),
        (f'<{DSML} parameter name="a" string="true">not closed', '{"a": "not closed\\n"}'),
        (f'<{DSML} parameter name="q\\"" string="true">x</{DSML} parameter>', '{"q\\\\\\"": "x"}'),
    ],
)
def test_arguments_are_json(value: str, expected: str) -> None:
    """Whatever the model writes, the arguments can be loaded."""
    assert called(expected) == parsed(block_of(call_of(value)))
    json.loads(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("c" + block_of(call_of(""), call_of("", "g")) + "\n\nmore", [Text("c"), *called("{}"), CallBegun(1, "g"), CallArguments(1, "{}")]),
        (f"c\n\n<{DSML}tool_calls>\n" + call_of(value_of("x", space=""), space="") + f"</{DSML}tool_calls>", [Text("c"), *called('{"a": "x"}')]),
        ("c " + call_of(""), [Text("c "), *called("{}")]),
        (f"c <{DSML} foo> d", [Text(f"c <{DSML} foo> d")]),
        (f"c </{DSML} calls> d", [Text(f"c </{DSML} calls> d")]),
        (f"c {DSML} d", [Text(f"c {DSML} d")]),
        (f"c\n{DSML} calls>", [Text(f"c\n{DSML} calls>")]),
        ("c\n\n<b>\n", [Text("c\n\n<b>\n")]),
        (f'<{DSML} calls><{DSML} invoke name="f"><{DSML} invoke name="g">', [*called("{}"), CallBegun(1, "g"), CallArguments(1, "{}")]),
        ("<｜ref｜>cat<｜/ref｜><｜table｜><｜User｜><｜▁pad▁｜>", [Text("<｜ref｜>cat<｜/ref｜><｜table｜>")]),
    ],
)  # fmt: skip
def test_tags(answer: str, expected: Sequence[Event]) -> None:
    """Both spellings; what is no tag is text; what follows a block is not shown; grounding is, other controls are not."""
    assert expected == parsed(answer)


def test_markup_in_ordinary_tokens_is_text() -> None:
    """A model that quotes a user's markup calls nothing."""
    quoted = block_of(call_of("")) + "</think>"
    ids = VOCABULARY.tokenizer.plain_ids(quoted)

    assert [Text(quoted.lstrip("\n"))] == read_all(parser(thinks=False), [ids])


def test_without_tools_there_are_no_calls() -> None:
    """DSML is then as readable as it was written."""
    answer = "c" + block_of(call_of(""))

    assert [Text(answer)] == parsed(answer, takes_calls=False)


@pytest.mark.parametrize(
    ("cut_off", "expected"),
    [
        (f'<{DSML} parameter name="a" string="true">x y</', [CallBegun(0, "f"), CallArguments(0, '{"a": "x y')]),
        (f'<{DSML} parameter name="a" string="false">[1,', [CallBegun(0, "f"), CallArguments(0, '{"a": [1,')]),
        ("", [CallBegun(0, "f")]),
    ],
)
def test_a_call_that_the_limit_cut_off_stays_open(cut_off: str, expected: Sequence[Event]) -> None:
    """What was said of it is told, and it is not made to look whole."""
    begun = f'<{DSML} calls>\n<{DSML} invoke name="f">\n{cut_off}'

    assert [Text("c"), *expected] == parsed("c\n\n" + begun, is_whole=False)
    assert [Text("c")] == parsed(f"c\n\n<{DSML} cal", is_whole=False)


def test_text_flows_unless_it_may_be_markup() -> None:
    """Only newlines and the beginning of a tag wait."""
    reader = parser(thinks=False)
    shown = [merged(reader.feed(ids_of(text))) for text in ("a", "b\n", "\n", "<", "c", "<", DSML)]

    assert [[Text("a")], [Text("b")], [], [], [Text("\n\n<c")], [], []] == shown

"""How much of a JSON object can be shown while it is written, and is it always one in the end?"""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.recipe.json_object import JsonObject

FEW = settings(max_examples=50, deadline=None)
CUTS = st.lists(st.integers(0, 200), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
SCRAPS = [*'{}[]",:\\u\n -1.eE0', "tru", "null", "\\ud83d", "\\ude00", "\\n", '"a": ', "é", "😀", "x", "\x01", "1e999"]


def shown(text: str, cuts: list[int] | None = None, *, is_whole: bool = True) -> str:
    read, told, at = JsonObject(max_depth=8), "", 0
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts or ()), len(text)]:
        if not read.is_over:
            told += read.feed(text[at:cut])
        at = cut
    if read.is_over:
        return told
    return told + (read.close() if is_whole else read.cut())


@FEW
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_right_is_shown_as_it_stands(value: Any, cuts: list[int], is_ascii: bool, indent: int | None) -> None:
    """Every character, spaces included, however it is dealt out."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)

    assert text == shown(text, cuts)


@FEW
@given(st.lists(st.sampled_from(SCRAPS), max_size=14).map(lambda parts: "{" + "".join(parts)), CUTS)
def test_what_is_wrong_is_an_object_all_the_same(text: str, cuts: list[int]) -> None:
    """Whatever it is, and however it is dealt out."""
    told = shown(text, cuts)

    assert isinstance(orjson.loads(told), dict)
    assert told == shown(text)
    assert shown(text, is_whole=False) == shown(text, cuts, is_whole=False)


@FEW
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3).map(json.dumps), st.integers(1, 100))
def test_a_cut_shows_what_was_written(text: str, at: int) -> None:
    """At the token limit nothing is added and nothing held back."""
    assert text[:at] == shown(text[:at], is_whole=False)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"a": "\t\n"}', '{"a": "\\u0009\\u000a"}'),
        ('{"a": "\\d \\u12 \\\'"}', '{"a": "\\\\d \\\\u12 \\\\\'"}'),
        ('{"a": "\\ud83d \\ude00 \\ud83d\\ude00"}', '{"a": "\\ufffd \\ufffd \\ud83d\\ude00"}'),
        ('{"a": [1, 2,], }', '{"a": [1, 2] }'),
        ('{"a": 1, "b": None}', '{"a": 1}'),
        ('{"a": 1e999}', "{}"),
        ('{"a}": "if (x) { y; }"}', '{"a}": "if (x) { y; }"}'),
        ('{"a": 1 "b": 2}', '{"a": 1}'),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a": ' * 9 + "{}" + "}" * 9, '{"a": ' * 7 + "{" + "}" * 8),
        ("[1]", ""),
    ],
)
def test_what_is_plain_is_mended_and_the_rest_left_out(written: str, told: str) -> None:
    """An object is closed where it was last right."""
    assert told == shown(written)


def test_what_comes_after_is_left_to_others() -> None:
    """Once."""
    read = JsonObject(max_depth=8)

    assert ('{"a": {}}', "} x", True) == (read.feed('{"a": {}}} x'), read.unread, read.is_over)

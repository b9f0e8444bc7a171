"""Which schemas, patterns and grammars are taken, and is what is not taken refused by name?"""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recipe.grammar_limits import (
    FORMATS,
    INVALID,
    SPELLING,
    TOO_COMPLEX,
    read_grammar,
    read_pattern,
    read_schema,
)
from services.recipe.refusals import ApiError

WHERE = "response_format.json_schema.schema"


def refused(schema: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_schema(schema, WHERE)
    assert 400 == caught.value.status
    assert len(caught.value.body()) <= 8192
    return caught.value


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "then", "else", "uniqueItems", "contains", "minContains", "propertyNames", "dependentRequired",
     "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$anchor", "nullable",
     "contentEncoding", "x-guidance", "$id", "foo"],
)  # fmt: skip
def test_keywords_that_would_not_be_enforced_are_refused_by_name(keyword: str) -> None:
    """Deep inside as at the top: never silently wrong."""
    error = refused({"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {keyword: True}]}}})

    assert INVALID == error.code
    assert f"{WHERE}.properties.a.anyOf[1].{keyword}" == error.param
    assert repr(keyword) in error.message


def test_annotations_leave_and_properties_of_their_names_stay() -> None:
    """What says nothing about the answer costs nothing; `title` may be a property as well."""
    schema = {
        "$id": "https://example.com/x",
        "title": "T",
        "description": "D",
        "x-order": 1,
        "type": "object",
        "properties": {
            "title": {"type": "string", "default": "", "examples": ["a"]},
            "a": {"type": "array", "uniqueItems": False},
        },
        "required": ["title"],
    }

    assert {
        "type": "object",
        "properties": {"title": {"type": "string"}, "a": {"type": "array"}},
        "required": ["title"],
        "x-guidance": dict(SPELLING),
    } == read_schema(schema, WHERE)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ([], ""),
        ({"properties": {"a": 5}}, ".properties.a"),
        ({"properties": []}, ".properties"),
        ({"anyOf": {}}, ".anyOf"),
        ({"enum": "a"}, ".enum"),
        ({"format": "regex"}, ".format"),
        ({"minLength": -1}, ".minLength"),
        ({"maxItems": True}, ".maxItems"),
        ({"maxLength": 1.5}, ".maxLength"),
        ({"multipleOf": 0}, ".multipleOf"),
        ({"pattern": 5}, ".pattern"),
        ({"$ref": "https://example.com/x"}, ".$ref"),
        ({"$ref": "#x"}, ".$ref"),
        ({"$schema": "https://example.com/x"}, ".$schema"),
        ({"const": {"a": ["b\x01"]}}, ".const"),
        ({"properties": {"a\x1f": {}}}, ".properties"),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}, ".minProperties"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, where: str) -> None:
    """The error names the place."""
    assert (INVALID, WHERE + where) == (refused(schema).code, refused(schema).param)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(64),
        nested(5000),
        {"description": "x" * (65 << 10)},
        {"properties": {f"p{i}": {} for i in range(513)}},
        {"anyOf": [{"anyOf": [{} for _ in range(100)]} for _ in range(11)]},
        {"enum": list(range(2049))},
        {"multipleOf": 10_001},
        {"multipleOf": 1.00001},
    ],
)
def test_schemas_that_cost_too_much_are_refused(schema: Any) -> None:
    """By size, before anything recursive or expensive looks at them."""
    assert TOO_COMPLEX == refused(schema).code


def test_dates_exist() -> None:
    """The pattern beside the format knows leap years; a schema's own conditions stay."""
    read = read_schema({"format": "date", "allOf": [{"maxLength": 9}]}, WHERE)

    assert {"maxLength": 9} == read["allOf"][0]
    assert ["pattern"] == list(read["allOf"][1])
    assert "date" in FORMATS


@pytest.mark.slow
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "properties", "items", "enum", "not", "$ref", "anyOf", "minProperties", "required", "multipleOf", "x"]), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_read_or_refused(given_: Any) -> None:
    """No shape of schema is a server's error."""
    with suppress(ApiError):
        read_schema(given_, WHERE)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|im_end|>",
        'start: "a" <[5]>',
        'start: %json {"not": {}}',
        "%llguidance {}\nstart: A",
        "start: @part0",
        " ",
        5,
        "x" * (65 << 10),
    ],
)
def test_grammars_cannot_name_what_is_not_text(grammar: Any) -> None:
    """Control tokens, the compiler's settings and other grammars are the service's own."""
    with pytest.raises(ApiError):
        read_grammar(grammar, "response_format.grammar")


@pytest.mark.parametrize(
    "grammar", ['start: "<a>" /<[b]>/ A\nA: /[<"@]+/ // @x <y>\n', 'root ::= [<>@] "%json"', 'start: "a"i # <x>']
)
def test_text_may_look_like_control_tokens(grammar: str) -> None:
    """In literals, expressions and comments."""
    assert grammar == read_grammar(grammar, "response_format.grammar")


@pytest.mark.parametrize("pattern", ["", 5, None, "a" * 2049])
def test_patterns_are_short_texts(pattern: Any) -> None:
    """Anything else is a 400."""
    with pytest.raises(ApiError):
        read_pattern(pattern, "response_format.pattern")

"""Which requests does the API's own description allow, and which ones lie just beside those?

Bounded strategies made from /openapi.json: bodies that are as described, bodies in which one value is not, and bytes
that are no JSON any more.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
Values = st.SearchStrategy[Any]

WORDS = (
    "hello", "x", "", " ", "auto", "function", "system", "user", "assistant", "tool", "text", "json", "<|im_end|>",
    "</think>", "<｜User｜>", "👩‍👩‍👧", "\u0000", "\ue000", "é" * 40, "1", "-1", "null", "data:image/png;base64,AAAA",
    "https://127.0.0.1/a.png", "file:///etc/passwd", "resp_1", "$ref", "a" * 300, "(a+)+$", "[ab]*a[ab]{13}", "../..",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 0.5, 1e-9, 1e308, -1e308, 255, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30)
TEXTS = st.sampled_from(WORDS) | st.text(max_size=12)
ODD: Values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "name", "text", "id", "function", "schema", "properties", "items"]
            )
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
SCHEMAS: Values = st.recursive(
    st.sampled_from(
        [
            {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}, {"enum": ["a", 1]},
            {"type": "string", "pattern": "^[a-c]{1,4}$"}, {"not": {}}, {"type": "foo"}, {"$ref": "#/$defs/a"}, {},
            {"type": "string", "format": "date"}, {"type": "array", "uniqueItems": True}, {"const": None},
        ]
    ),
    lambda inner: st.builds(lambda x, y: {"type": "object", "properties": {"a": x, "b": y}, "required": ["a"]}, inner, inner)
    | st.builds(lambda x: {"type": "array", "items": x, "maxItems": 2}, inner)
    | st.builds(lambda x, y: {"anyOf": [x, y]}, inner, inner)
    | st.builds(lambda x: {"$defs": {"a": x}, "$ref": "#/$defs/a"}, inner),
    max_leaves=6,
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


def values_of(schema: Schema, name: str = "") -> Values:  # noqa: PLR0911 - one kind, one answer
    """Values that a schema allows, small ones. name: the field's; some hold more than their schema says."""
    if "anyOf" in schema:
        return st.one_of([values_of(each, name) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    match schema.get("type"):
        case "string":
            return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else TEXTS
        case "boolean":
            return st.booleans()
        case "integer":
            low = schema.get("minimum", -(2**53))
            return st.integers(low, min(schema.get("maximum", 2**53), low + 40))
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum", -1e9)),
                schema.get("maximum", 1e9),
                exclude_min="exclusiveMinimum" in schema,
            )
        case "array":
            most = min(schema.get("maxItems", 3), 3)
            return st.lists(values_of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)
        case "object" if "properties" in schema:
            return _object(schema)
        case "object" if "additionalProperties" in schema:
            return st.dictionaries(TEXTS, values_of(schema["additionalProperties"]), max_size=3)
        case "object":
            return SCHEMAS if "schema" in name or name == "parameters" else st.dictionaries(TEXTS, ODD, max_size=3)
    return ODD


def _object(schema: Schema) -> Values:
    properties = {name: values_of(inner, name) for name, inner in schema["properties"].items()}
    needed = set(schema.get("required", ()))
    optional = {name: values for name, values in properties.items() if name not in needed}
    some = st.sets(st.sampled_from(sorted(optional)), max_size=4) if optional else st.just(set())
    return some.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: properties[name] for name in sorted(needed | chosen) if name in properties}
        )
    )


@st.composite
def asks(draw: st.DrawFn, described: Schema, model: str, known_ids: Sequence[str]) -> Ask:
    """A request of some endpoint. known_ids: of responses, conversations and items that may be there."""
    operations = [(path, method) for path, methods in described["paths"].items() for method in methods]
    path, method = draw(st.sampled_from(operations))
    operation = described["paths"][path][method]
    for part in [part for part in path.split("/") if part.startswith("{")]:
        path = path.replace(part, draw(st.sampled_from([*known_ids[-20:], model, "resp_x", "%00", "a" * 200])))
    query = {
        one["name"]: draw(values_of(one["schema"]) | TEXTS) for one in operation["parameters"] if one["in"] == "query"
    }
    chosen = {name: str(value) for name, value in query.items() if draw(st.booleans())}
    if chosen:
        path += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in chosen.items())
    headers = {
        name: draw(st.sampled_from(values))
        for name, values in {
            "anthropic-version": ["2023-06-01", "x"],
            "idempotency-key": ["k1", "k2", "k" * 300],
            "x-request-id": ["ok", "not ok"],
            "x-fathom-retention": ["chat", "agent", "for ever"],
        }.items()
        if draw(st.sampled_from(range(10))) == 7
    }
    body = None
    if method == "post" and "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = draw(_bodies(schema, model))
    return Ask(method, path, body, headers)


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@st.composite
def _bodies(draw: st.DrawFn, schema: Schema, model: str) -> bytes:
    body = draw(values_of(schema))
    if "model" in schema["properties"]:
        body["model"] = model
    limits = [name for name in LIMITS if name in schema["properties"]]
    for name in limits:
        body.pop(name, None)
    if limits and draw(st.sampled_from(range(40))) != 17:
        # Nearly always a short answer: it is requests that are tried here.
        body[draw(st.sampled_from(limits))] = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("plain",) * 6 + ("odd",) * 3 + ("torn",)))
    if kind == "odd" and body:
        _spoil(draw, body)
    encoded = json.dumps(body).encode()
    if kind == "torn":
        at = draw(st.integers(0, len(encoded)))
        encoded = encoded[:at] + draw(st.binary(max_size=3)) + encoded[at + draw(st.integers(0, 3)) :]
    return encoded


def _spoil(draw: st.DrawFn, value: Any) -> None:
    """Put something odd somewhere in it."""
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not places:
        return
    at = draw(st.sampled_from(places))
    if isinstance(value[at], dict | list) and value[at] and draw(st.booleans()):
        _spoil(draw, value[at])
    elif isinstance(value, dict) and draw(st.integers(0, 4)) == 0:
        value[draw(st.text(min_size=1, max_size=4))] = draw(ODD)
    else:
        value[at] = draw(ODD)


def _quoted(value: str) -> str:
    return "".join(f"%{byte:02X}" for byte in value.encode("utf-8", "surrogatepass"))

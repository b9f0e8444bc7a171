"""Which JSON schemas, patterns and grammars may bind an answer, and what is left of them for the compiler?

What the compiler would not enforce is refused here by name: whatever a caller asked for holds, or the request does not
run. Looked at before the compiler sees it, since each of the limits below was found by a schema that cost it seconds.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from services.recipe.nesting import is_deeper
from services.recipe.refusals import ApiError, refuse

INVALID, TOO_COMPLEX = "invalid_schema", "schema_too_complex"

MAX_BYTES = 64 << 10
MAX_DEPTH = 64
MAX_PROPERTIES = 512
MAX_SCHEMAS = 1024
MAX_VALUES = 2048
"""Of all enums together."""
MAX_COUNT = 100_000
"""Of characters, items or properties that a schema may demand or allow."""
MAX_PATTERN_CHARACTERS = 2048
MAX_MULTIPLE = 10_000
"""A divisor, its decimal point left out: the compiler keeps a state for every remainder."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Those that are enforced."""

# The compiler's own has a 29th of February in every year.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_LEAP_YEAR}-02-29|{_YEAR}-(?:02-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])))"
)
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][^a-z]*"  # no leap seconds, no small letters: many readers know neither
_STRICTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "discriminator")
)
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_AS_THEY_ARE = frozenset(("type", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_ONE = frozenset(("items", "additionalItems", "additionalProperties"))
_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
# Escapes of letters would give a name two spellings, and so let an object have it twice (see SPELLING).
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f]")

SPELLING: Mapping[str, Any] = {
    # Every text has one spelling: otherwise "\u0061" would be another name than "a", and slip past its schema.
    "json_allowed_escapes": '"\\bfnrt',
    # At most a space, or a line break and its indentation: models that sample white space for ever never end.
    "whitespace_pattern": r"[ ]?|\n[ ]{0,40}",
    "lenient": False,
    "coerce_one_of": False,
}
"""How the compiler is to write JSON."""


def invalid(where: str, rule: str) -> ApiError:
    """Return the 400 for a schema, pattern or grammar that cannot be obeyed."""
    return refuse(where, rule, code=INVALID)


def too_complex(where: str, rule: str) -> ApiError:
    """Return the 400 for one that would cost too much to obey."""
    return refuse(where, rule, code=TOO_COMPLEX)


def read_schema(given: Any, where: str) -> dict[str, Any]:
    """Return a schema without its annotations, ready for the compiler; raise a 400 naming field and keyword.

    Keys keep their order: it is the order in which the answer has them.
    """
    if not isinstance(given, dict):
        raise invalid(where, "must be a JSON schema")
    if is_deeper(given, MAX_DEPTH):
        raise too_complex(where, f"must be nested at most {MAX_DEPTH} levels deep")
    if len(json.dumps(given)) > MAX_BYTES:
        raise too_complex(where, f"must be at most {MAX_BYTES >> 10} KiB of JSON")
    return {**_Reader().root(given, where), "x-guidance": dict(SPELLING)}


def read_pattern(given: Any, where: str) -> str:
    """Return a regular expression that the whole answer must match; raise a 400."""
    if not isinstance(given, str) or not 0 < len(given) <= MAX_PATTERN_CHARACTERS:
        raise invalid(where, f"must be a regular expression of 1 to {MAX_PATTERN_CHARACTERS} characters")
    return given


def read_grammar(given: Any, where: str) -> str:
    """Return a Lark or GBNF grammar; raise a 400. Control tokens and settings of the compiler cannot be named in it."""
    if not isinstance(given, str) or not given.strip():
        raise invalid(where, "must be a grammar in Lark or GBNF")
    if len(given.encode()) > MAX_BYTES:
        raise too_complex(where, f"must be at most {MAX_BYTES >> 10} KiB")
    outside = _LITERALS.sub(" ", given)
    for word, why in _NOT_IN_GRAMMARS:
        if found := word.search(outside):
            raise invalid(where, f"{found.group().strip()!r} {why}")
    return given


_LITERALS = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|#[^\n]*|/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*|\[(?:\\.|[^\]\\\n])*\]'
)
_NOT_IN_GRAMMARS = (
    (re.compile(r"<[^<>\n]*>?"), "cannot be used: grammars are of text, without control tokens"),
    (re.compile(r"%(?:json|llguidance|lark)\b"), "cannot be used in a grammar"),
    (re.compile(r"@\w*"), "cannot be used: a grammar stands for itself"),
)


@dataclass(slots=True)
class _Reader:
    """Walks one schema and counts what is in it."""

    num_properties: int = 0
    num_schemas: int = 0
    num_values: int = 0
    _readers: dict[str, Callable[[Any, str], Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._readers = {
            "pattern": _pattern,
            "format": _format,
            "multipleOf": _multiple,
            "$ref": _reference,
            "enum": self._enum,
            "const": _written,
            **dict.fromkeys(_AS_THEY_ARE, lambda value, _where: value),
            **dict.fromkeys(_COUNTS, _count),
            **dict.fromkeys(_ONE, self._one),
            **dict.fromkeys(_LISTS, self._several),
            **dict.fromkeys(_NAMED, self._named),
        }

    def root(self, given: dict[str, Any], where: str) -> dict[str, Any]:
        inner = {key: value for key, value in given.items() if key not in {"$schema", "$id"}}
        draft = given.get("$schema")
        read: dict[str, Any] = self._schema(inner, where)
        if draft is None:
            return read
        if not isinstance(draft, str) or not _DRAFT.fullmatch(draft):
            raise invalid(f"{where}.$schema", "must be a draft of json-schema.org: 4, 6, 7, 2019-09 or 2020-12")
        return {"$schema": draft, **read}

    def _schema(self, given: Any, where: str) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise invalid(where, "must be a JSON schema: an object, true or false")
        self.num_schemas += 1
        if self.num_schemas > MAX_SCHEMAS:
            raise too_complex(where, f"must hold at most {MAX_SCHEMAS} schemas in all")
        read = {}
        for keyword, value in given.items():
            place = f"{where}.{keyword}"
            if keyword in self._readers:
                read[keyword] = self._readers[keyword](value, place)
            elif not _says_nothing(keyword, value):
                raise invalid(place, f"the keyword {keyword[:64]!r} cannot be enforced")
        _check_properties(read, where)
        if stricter := _STRICTER.get(read.get("format", "")):
            read["allOf"] = [*read.get("allOf", ()), {"pattern": stricter}]
        return read

    def _one(self, given: Any, where: str) -> Any:
        return self._several(given, where) if isinstance(given, list) else self._schema(given, where)

    def _several(self, given: Any, where: str) -> list[Any]:
        if not isinstance(given, list):
            raise invalid(where, "must be a list of schemas")
        return [self._schema(one, f"{where}[{at}]") for at, one in enumerate(given)]

    def _named(self, given: Any, where: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise invalid(where, "must be an object of schemas")
        self.num_properties += len(given)
        if self.num_properties > MAX_PROPERTIES:
            raise too_complex(where, f"must have at most {MAX_PROPERTIES} properties and definitions in all")
        is_pattern = where.endswith(".patternProperties")
        for name in given:
            (_pattern if is_pattern else _written)(name, where)
        return {name: self._schema(one, f"{where}.{name}") for name, one in given.items()}

    def _enum(self, given: Any, where: str) -> list[Any]:
        if not isinstance(given, list):
            raise invalid(where, "must be a list of values")
        self.num_values += len(given)
        if self.num_values > MAX_VALUES:
            raise too_complex(where, f"must hold at most {MAX_VALUES} values in all")
        return [_written(value, where) for value in given]


def _says_nothing(keyword: str, value: Any) -> bool:
    if keyword == "uniqueItems":
        return value is False
    return keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance")


def _check_properties(read: Mapping[str, Any], where: str) -> None:
    """Free names may come twice, and then count once: only one of them can be demanded."""
    required = read.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if read.get("minProperties", 0) > num_required + 1:
        raise invalid(f"{where}.minProperties", f"cannot be enforced above {num_required + 1}, one more than required")


def _written(value: Any, where: str) -> Any:
    """Return a value that can be spelled in the answer."""
    if isinstance(value, str):
        if _UNWRITABLE.search(value):
            raise invalid(where, "must be without control characters")
    elif isinstance(value, list):
        for inner in value:
            _written(inner, where)
    elif isinstance(value, dict):
        for name, inner in value.items():
            _written(name, where)
            _written(inner, where)
    return value


def _pattern(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARACTERS:
        raise invalid(where, f"must be a regular expression of at most {MAX_PATTERN_CHARACTERS} characters")
    return value


def _format(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        raise invalid(where, f"cannot be enforced; these formats are: {', '.join(FORMATS)}")
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise invalid(where, f"must be an integer from 0 to {MAX_COUNT}")
    return value


def _multiple(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise invalid(where, "must be a number greater than 0")
    digits = Decimal(str(value)).normalize()
    exponent = digits.as_tuple().exponent
    assert isinstance(exponent, int), "JSON numbers are finite"
    scaled = digits.scaleb(-exponent) if exponent < 0 else digits
    if scaled > MAX_MULTIPLE or exponent < -9:
        raise too_complex(where, f"must have a value of at most {MAX_MULTIPLE}, its decimal point left out")
    return value


def _reference(value: Any, where: str) -> str:
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
        raise invalid(where, 'must point into the schema itself: "#" or "#/$defs/..."')
    return value

"""Is a JSON body of a size and shape that anything may look at?

Asked before and after the parser looked at it, and before any field is read.
"""

import json
from itertools import chain
from typing import Any

from services.recipe.refusals import refuse

MAX_DEPTH = 128
"""Levels of objects and lists; JSON schemas take two for each of their own."""
MAX_CONTAINERS = 50_000
"""Objects and lists in a body: the longest agent histories have a few thousand messages of a few parts each."""
MAX_BRACKETS = 500_000
"""Opening ones, in text too. Parsing millions of empty lists takes seconds; no text that is read has so many."""
_SHOWN_CHARACTERS = 100


def check_unparsed(body: bytes) -> None:
    """Raise a 400 for a body whose mere parsing would hold up everybody."""
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise refuse("", f"the body has more than {MAX_BRACKETS} brackets", code="invalid_json")


def check_json(body: bytes, parsed: dict[str, Any]) -> None:
    """Raise a 400 for a body that nests too deeply, has too many objects and lists, or one field twice.

    parsed: what the parser made of `body`. It keeps the last of two fields with one name, and who checks the first one
    and who obeys the last one need not be the same: so there must not be two.
    """
    # Each level needs a bracket, so most bodies need no walk; nor a second parse, if all fields are at the top.
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_walk(parsed)
    if body.count(b":") > len(parsed):
        _check_fields(body)


def _check_walk(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    depth = num_containers = 0
    while level:
        depth, num_containers = depth + 1, num_containers + len(level)
        if depth > MAX_DEPTH:
            raise refuse("", f"the body nests more than {MAX_DEPTH} levels", code="invalid_json")
        inner: list[Any] = []
        for value in chain.from_iterable(outer.values() if type(outer) is dict else outer for outer in level):
            if type(value) in {dict, list}:
                inner.append(value)
                if num_containers + len(inner) > MAX_CONTAINERS:
                    raise _too_many()
        level = inner


def _check_fields(body: bytes) -> None:
    num_objects = 0

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal num_objects
        num_objects += 1
        if num_objects > MAX_CONTAINERS:  # the walk did not see those under a field's first mention
            raise _too_many()
        if len({name for name, _value in pairs}) < len(pairs):
            raise refuse("", f"the body has {_first_twice(pairs)!r} twice in one object", code="invalid_json")

    json.loads(body, object_pairs_hook=look)


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _value in pairs:
        if name in seen:
            return name[:_SHOWN_CHARACTERS]
        seen.add(name)
    raise AssertionError("no name is there twice")


def _too_many() -> Exception:
    return refuse("", f"the body has more than {MAX_CONTAINERS} objects and lists", code="invalid_json")

"""What must an answer look like, and which tools must it call? Said by every API in its own words; kept here in one.

`framing.sketch_of` makes a grammar of it, or a 400: a constraint is kept or refused, never hoped for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "json_object", "json_schema", "regex", "grammar"]


@dataclass(frozen=True, slots=True)
class Format:
    """The form of the answer's text. body: a JSON schema, a pattern, or a grammar; None for the first two kinds.

    field: where the request says so, for errors.
    """

    kind: Kind = "text"
    body: Mapping[str, Any] | str | None = None
    field: str = ""


TEXT = Format()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the declared tools may be used.

    must_call: whether an answer without a call is wrong.  names: the tools that may be called, () for all of them.
    is_parallel: whether there may be several calls.  strict_names: tools whose arguments must obey their schema.
    field, strict_field: where the request says so, for errors.
    """

    must_call: bool = False
    names: tuple[str, ...] = ()
    is_parallel: bool = True
    strict_names: tuple[str, ...] = ()
    field: str = ""
    strict_field: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """All that an answer must obey."""

    format: Format = TEXT
    tools: ToolUse = ToolUse()


FREE = Constraint()

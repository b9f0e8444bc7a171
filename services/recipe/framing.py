"""How is what an answer must be said in the words of a model family? The seam between constraints and grammars."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.recipe.constraint import Constraint, Format, ToolUse
from services.recipe.conversation import Conversation, Tool
from services.recipe.grammar_limits import invalid
from services.recipe.grammars import Part, Sketch, json_object, json_schema, lark, regex

MAX_CALLS = 32
"""Of one answer that is bound to its tools."""

_SAYS_NOTHING = frozenset(("title", "description", "$comment", "examples", "default", "$schema", "$id", "strict"))
_SIMPLE = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))


class Framing(Protocol):
    """Knows where a family's answers have their text and their calls."""

    def sketch(self, conversation: Conversation, content: Part | None, use: ToolUse) -> Sketch:
        """Return what the answer may be, reasoning included.

        content: what its text must be, None for any.  Raises a 400 for tools that the format cannot be bound to.
        """


class PlainFraming:
    """The framing of models whose answers are text and nothing else."""

    def sketch(self, conversation: Conversation, content: Part | None, use: ToolUse) -> Sketch:  # noqa: ARG002 - no tools
        assert content is not None, "tools were refused before"
        return Sketch((content,))


PLAIN = PlainFraming()


def sketch_of(constraint: Constraint, conversation: Conversation, framing: Framing) -> Sketch | None:
    """Return what the answer may be, None for anything; raise a 400 for what cannot be enforced."""
    content, use = content_of(constraint.format), constraint.tools
    if content is None and not use.must_call and not use.strict_names:
        return None
    return framing.sketch(conversation, content, use)


def content_of(asked: Format) -> Part | None:
    """Return what an answer's text must be, None for anything; raise a 400 for what cannot be enforced."""
    match asked.kind:
        case "text":
            return None
        case "json_object":
            return json_object(asked.field)
        case "json_schema":
            return json_schema(asked.body, asked.field)
        case "regex":
            return regex(asked.body, asked.field)
        case "grammar":
            return lark(asked.body, asked.field)


@dataclass(slots=True)
class Parts:
    """The parts of a frame under construction; equal ones are one."""

    found: list[Part] = field(default_factory=list)

    def name(self, part: Part) -> str:
        """Return how the frame calls the part."""
        for at, known in enumerate(self.found):
            if known.job == part.job:
                return f"@part{at}"
        self.found.append(part)
        return f"@part{len(self.found) - 1}"


def callable_tools(conversation: Conversation, use: ToolUse) -> dict[str, Tool]:
    """Return the tools that may be called, by where the request declares them."""
    chosen = {f"tools[{at}].parameters": tool for at, tool in enumerate(conversation.tools)}
    return {where: tool for where, tool in chosen.items() if not use.names or tool.name in use.names}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool. schema: with the definitions that it may refer to."""

    name: str
    schema: Mapping[str, Any] | bool
    is_required: bool
    where: str


def parameters_of(tool: Tool, where: str) -> list[Parameter]:
    """Return a tool's parameters in order; raise a 400 when its schema says more than which ones there are."""
    schema = tool.parameters
    beyond = [key for key in schema if key not in _SIMPLE and key not in _SAYS_NOTHING and not key.startswith("x-")]
    if beyond or schema.get("type", "object") != "object":
        raise invalid(f"{where}.{(*beyond, 'type')[0]}", "cannot be enforced for the parameters of a tool")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict):
        raise invalid(f"{where}.properties", "must be an object of schemas")
    if not isinstance(required, list) or any(name not in properties for name in required):
        raise invalid(f"{where}.required", "must be names of properties")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        Parameter(
            name,
            one | shared if isinstance(one, dict) else one,
            is_required=name in required,
            where=f"{where}.properties.{name}",
        )
        for name, one in properties.items()
    ]


def texts_of(schema: Mapping[str, Any] | bool) -> tuple[str, ...] | None:  # noqa: FBT001 - JSON schemas are so
    """Return the texts that an argument may be, () for any; None when it is no text, or one with other conditions."""
    if isinstance(schema, bool) or schema.get("type") != "string":
        return None
    conditions = {key: schema[key] for key in schema if key not in {*_SAYS_NOTHING, "type", "$defs", "definitions"}}
    values = conditions.pop("enum", [])
    is_simple = not conditions and isinstance(values, list) and all(isinstance(value, str) for value in values)
    return tuple(values) if is_simple and (values or "enum" not in schema) else None

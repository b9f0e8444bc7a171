"""Which tools may a request declare, and which calls may a conversation hold?"""

import re
from collections.abc import Sequence
from typing import Any

from services.recipe.constraint import ToolUse
from services.recipe.conversation import Tool, ToolCall, Turn
from services.recipe.fields import Fields
from services.recipe.nesting import is_deeper
from services.recipe.refusals import refuse

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_SCHEMA_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = "must be 1 to 64 letters, digits, underscores and dashes"


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolUse]:
    """Return the tools that the model is to know of (none with tool_choice "none"), and how it may use them.

    Raises a 400 naming the field.
    """
    given, choice = fields.take("tools"), fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must be a list of at most {MAX_TOOLS} tools")
    strict: list[str] = []
    tools = tuple(_tool(tool, f"tools[{at}]", strict) for at, tool in enumerate(given))
    check_names(tools, fields)
    if choice == "none":
        return (), ToolUse()
    names: tuple[str, ...] = ()
    if isinstance(choice, dict):
        names = (_named(choice, fields.name("tool_choice"), tools),)
    elif choice == "required" and not tools:
        raise fields.wrong("tool_choice", '"required" needs tools')
    elif choice not in (None, "auto", "required"):
        raise fields.wrong("tool_choice", 'must be "auto", "none", "required", or a function to be called')
    must_call = bool(names) or choice == "required"
    at = next((at for at, tool in enumerate(tools) if tool.name in strict), 0)
    use = ToolUse(
        must_call,
        names,
        is_parallel,
        tuple(strict),
        field=fields.name("tool_choice"),
        strict_field=fields.name(f"tools[{at}].function.strict"),
    )
    return tools, use


def check_names(tools: Sequence[Tool], fields: Fields) -> None:
    """Raise a 400 when two tools share a name."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", "must have names of their own")


def check_name(name: str | None, fields: Fields) -> str:
    """Return the name of a tool; raise a 400 for what is none."""
    if name is None or not _NAME.fullmatch(name):
        raise fields.wrong("name", _NAME_RULE)
    return name


def read_schema(fields: Fields, field: str) -> dict[str, Any]:
    """Return a tool's JSON schema, {} when there is none."""
    schema = fields.take(field)
    if schema is not None and not isinstance(schema, dict):
        raise fields.wrong(field, "must be a JSON schema")
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise fields.wrong(field, f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep")
    return schema or {}


def _named(choice: dict[str, Any], where: str, tools: Sequence[Tool]) -> str:
    fields = Fields(choice, where)
    if fields.take("type") != "function":
        raise fields.wrong("type", 'must be "function"')
    function = _object(fields.take("function"), fields.name("function"), "must be an object with name")
    fields.finish()
    name = function.text("name")
    function.finish()
    return declared(name, tools, function.name("name"))


def declared(name: str | None, tools: Sequence[Tool], where: str) -> str:
    """Return the name of a declared tool; raise a 400 for any other."""
    if name is None or name not in {tool.name for tool in tools}:
        raise refuse(where, "must be the name of one of the tools")
    return name


def _tool(given: Any, where: str, strict: list[str]) -> Tool:
    fields = _object(given, where, "must be an object with type and function")
    if fields.take("type") != "function":
        raise fields.wrong("type", 'must be "function"')
    function = _object(fields.take("function"), fields.name("function"), "must be an object with name and parameters")
    fields.finish()
    name, description = check_name(function.text("name"), function), function.text("description")
    parameters = read_schema(function, "parameters")
    if function.flag("strict"):
        strict.append(name)
    function.finish()
    return Tool(name, description or "", parameters)


def read_calls(given: Any, where: str) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message."""
    if not isinstance(given, list) or len(given) > MAX_CALLS:
        raise refuse(where, f"must be a list of at most {MAX_CALLS} calls")
    calls = tuple(_call(call, f"{where}[{at}]") for at, call in enumerate(given))
    if len({call.id for call in calls}) < len(calls):
        raise refuse(where, "must have ids of their own")
    return calls


def _call(given: Any, where: str) -> ToolCall:
    fields = _object(given, where, "must be an object with id, type and function")
    fields.accept(("index",))  # left over where deltas were put together
    call_id = fields.text("id")
    if not call_id:
        raise fields.wrong("id", "must be the call's id")
    if fields.take("type") not in (None, "function"):
        raise fields.wrong("type", 'must be "function"')
    function = _object(fields.take("function"), fields.name("function"), "must be an object with name and arguments")
    fields.finish()
    name, arguments = check_name(function.text("name"), function), function.text("arguments")
    function.finish()
    return ToolCall(call_id, name, arguments or "{}")


def check_results(turns: Sequence[Turn], items: str = "") -> None:
    """Raise a 400 unless every call is answered, right after it and once, and every result answers a call.

    items: the field to blame where turns are not what the caller wrote; "" blames single messages.
    """
    open_calls: set[str] = set()
    for at, turn in enumerate(turns):
        if turn.role == "tool":
            if turn.call_id not in open_calls:
                raise refuse(
                    items or f"messages[{at}].tool_call_id", "must have the id of a call just before, not answered yet"
                )
            open_calls.remove(turn.call_id)
        elif open_calls:
            raise refuse(items or f"messages[{at}]", "goes on before the results of all tool calls are there")
        open_calls.update(call.id for call in turn.calls)
    if open_calls:
        raise refuse(items or "messages", "must end with the results of all tool calls")


def _object(given: Any, where: str, rule: str) -> Fields:
    if not isinstance(given, dict):
        raise refuse(where, rule)
    return Fields(given, where)

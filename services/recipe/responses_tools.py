"""Which tools may a Responses request declare, how may they be used, and how does the response repeat that?"""

from collections.abc import Sequence
from typing import Any

from services.recipe.constraint import ToolUse
from services.recipe.conversation import Tool
from services.recipe.fields import Fields
from services.recipe.refusals import refuse
from services.recipe.schema import ModelRules
from services.recipe.tools import MAX_TOOLS, check_name, check_names, declared, read_schema

_NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}


def read_tools(fields: Fields, model: ModelRules) -> tuple[tuple[Tool, ...], ToolUse, dict[str, Any]]:
    """Return the tools that the model is to know of, how it may use them, and what the response says about both."""
    given = fields.take("tools") or []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must be a list of at most {MAX_TOOLS} tools")
    strict: dict[str, str] = {}
    read = [_tool(tool, f"tools[{at}]", strict) for at, tool in enumerate(given)]
    if given and not model.takes_tools:
        raise fields.wrong("tools", "this model takes no tools here")
    check_names(read, fields)
    choice = fields.take("tool_choice")
    if choice is None:
        choice = "auto"
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    must_call, names, shown = _choose(choice, read)
    use = ToolUse(
        must_call, names, is_parallel, tuple(strict), field="tool_choice", strict_field=next(iter(strict.values()), "")
    )
    told = {
        "tools": [_told(tool, is_strict=tool.name in strict) for tool in read],
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
    }
    return tuple(shown), use if shown else ToolUse(), told


def _choose(choice: Any, tools: Sequence[Tool]) -> tuple[bool, tuple[str, ...], Sequence[Tool]]:
    """Return whether there must be a call, of which tools, and which the model is shown."""
    if choice == "none":
        return False, (), ()
    if choice == "required" and not tools:
        raise refuse("tool_choice", '"required" needs tools')
    if choice in ("auto", "required"):
        return choice == "required", (), tools
    if not isinstance(choice, dict):
        raise refuse("tool_choice", 'must be "auto", "none", "required" or an object')
    fields = Fields(choice, "tool_choice")
    kind = fields.take("type")
    if kind == "function":
        name = declared(fields.text("name"), tools, "tool_choice.name")
        fields.finish()
        return True, (name,), tools
    if kind != "allowed_tools":
        raise fields.wrong("type", 'must be "function" or "allowed_tools"')
    mode, allowed = fields.take("mode"), fields.take("tools")
    fields.finish()
    if mode not in ("auto", "required"):
        raise refuse("tool_choice.mode", 'must be "auto" or "required"')
    if not isinstance(allowed, list) or not allowed:
        raise refuse("tool_choice.tools", "must be a list of functions")
    names = tuple(_allowed(tool, f"tool_choice.tools[{at}]", tools) for at, tool in enumerate(allowed))
    return mode == "required", names, [tool for tool in tools if tool.name in names]


def _allowed(given: Any, where: str, tools: Sequence[Tool]) -> str:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise refuse(where, 'must be an object with type "function" and name')
    name = given.get("name")
    return declared(name if isinstance(name, str) else None, tools, f"{where}.name")


def _tool(given: Any, where: str, strict: dict[str, str]) -> Tool:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with type and name")
    fields = Fields(given, where)
    if fields.take("type") != "function":
        raise fields.wrong("type", 'must be "function": built-in tools are not served here')
    name, description = check_name(fields.text("name"), fields), fields.text("description")
    schema = read_schema(fields, "parameters")
    if fields.flag("strict"):
        strict[name] = fields.name("strict")
    fields.refuse_all_but(_NEUTRAL_TOOL, "is not served here")
    fields.finish()
    return Tool(name, description or "", schema)


def _told(tool: Tool, *, is_strict: bool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": is_strict,
    }

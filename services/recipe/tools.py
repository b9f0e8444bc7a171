"""Which tools may a request declare, and which calls may a conversation hold?"""

import re
from collections.abc import Sequence
from typing import Any

from services.recipe.conversation import Tool, ToolCall, Turn
from services.recipe.fields import Fields
from services.recipe.nesting import is_deeper
from services.recipe.refusals import refuse

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_SCHEMA_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = "must be 1 to 64 letters, digits, underscores and dashes"
_LATER = "needs structured outputs, which are not served by this version"


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """Return the tools that the model is to know of: none with tool_choice "none". Raises a 400 naming the field."""
    given, choice = fields.take("tools"), fields.take("tool_choice")
    if not fields.flag("parallel_tool_calls", default=True):
        raise fields.wrong("parallel_tool_calls", f"false {_LATER}")
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must be a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(given))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", "must have names of their own")
    if choice == "required" or isinstance(choice, dict):
        raise fields.wrong("tool_choice", f'{_LATER}; "auto" and "none" are')
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", 'must be "auto" or "none"')
    return () if choice == "none" else tools


def _tool(given: Any, where: str) -> Tool:
    fields = _object(given, where, "must be an object with type and function")
    if fields.take("type") != "function":
        raise fields.wrong("type", 'must be "function"')
    function = _object(fields.take("function"), fields.name("function"), "must be an object with name and parameters")
    fields.finish()
    name, description = function.text("name"), function.text("description")
    if name is None or not _NAME.fullmatch(name):
        raise function.wrong("name", _NAME_RULE)
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise function.wrong("parameters", "must be a JSON schema")
    if is_deeper(parameters, MAX_SCHEMA_DEPTH):
        raise function.wrong("parameters", f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep")
    if function.flag("strict"):
        raise function.wrong("strict", f"true {_LATER}")
    function.finish()
    return Tool(name, description or "", parameters or {})


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
    name, arguments = function.text("name"), function.text("arguments")
    if name is None or not _NAME.fullmatch(name):
        raise function.wrong("name", _NAME_RULE)
    function.finish()
    return ToolCall(call_id, name, arguments or "{}")


def check_results(turns: Sequence[Turn]) -> None:
    """Raise a 400 unless every call is answered, right after it and once, and every result answers a call."""
    open_calls: set[str] = set()
    for at, turn in enumerate(turns):
        if turn.role == "tool":
            if turn.call_id not in open_calls:
                raise refuse(f"messages[{at}].tool_call_id", "must be the id of a call just before, not answered yet")
            open_calls.remove(turn.call_id)
        elif open_calls:
            raise refuse(f"messages[{at}]", "comes before the results of all tool calls")
        open_calls.update(call.id for call in turn.calls)
    if open_calls:
        raise refuse("messages", "must end with the results of all tool calls")


def _object(given: Any, where: str, rule: str) -> Fields:
    if not isinstance(given, dict):
        raise refuse(where, rule)
    return Fields(given, where)

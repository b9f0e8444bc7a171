"""How are tools spoken of in ChatML? In the words of Hermes, which Qwen and many others have learned.

A model whose template knows `tools` is told of them by it. For every other one they are written into the system
message, calls into what the assistant said, and results into what the user says.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.recipe.conversation import Conversation, Tool, ToolCall, Turn
from services.recipe.nesting import is_deeper

MAX_DEPTH = 64
"""Arguments nested deeper are shown to the model as one text."""

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{CALL_BEGIN}{CALL_END} XML tags:\n{CALL_BEGIN}\n"
    f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
)


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as templates know them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def called(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return earlier calls as templates know them."""
    return [
        {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in calls
    ]


def written(conversation: Conversation) -> tuple[Turn, ...]:
    """Return the conversation's turns with tools, calls and results as plain text."""
    turns = [_spelled(turn) for turn in _with_results(conversation.turns)]
    if not conversation.tools:
        return tuple(turns)
    told = _BEFORE + "\n".join(map(_json, described(conversation.tools))) + _AFTER
    if turns and turns[0].role in {"system", "developer"}:
        return (Turn("system", (f"{turns[0].text}\n\n{told}",), turns[0].name), *turns[1:])
    return (Turn("system", (told,)), *turns)


def _with_results(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with runs of results as one message of the user."""
    told: list[Turn] = []
    follows_result = False
    for turn in turns:
        if turn.role != "tool":
            told.append(turn)
        else:
            text = f"<tool_response>\n{turn.text}\n</tool_response>"
            before = [f"{told.pop().text}\n"] if follows_result else []
            told.append(Turn("user", (*before, text)))
        follows_result = turn.role == "tool"
    return told


def _spelled(turn: Turn) -> Turn:
    if not turn.calls:
        return turn
    calls = [f"{CALL_BEGIN}\n{_json(_plain(call))}\n{CALL_END}" for call in turn.calls]
    return Turn(turn.role, ("\n".join([*([turn.text] if turn.text else []), *calls]),), turn.name)


def _plain(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": _arguments(call.arguments)}


def _arguments(given: str) -> Mapping[str, Any]:
    """Return arguments by name; those that are no JSON object become one argument of that text."""
    try:
        read = orjson.loads(given)
    except orjson.JSONDecodeError:
        read = None
    return read if isinstance(read, dict) and not is_deeper(read, MAX_DEPTH) else {"arguments": given}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

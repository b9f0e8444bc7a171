"""How are answers in ChatML bound to a form, and to their tools?"""

import json

from services.recipe.constraint import ToolUse
from services.recipe.conversation import Conversation, Tool
from services.recipe.framing import MAX_CALLS, Parts, callable_tools
from services.recipe.grammar_limits import invalid
from services.recipe.grammars import Part, Sketch, json_schema
from services.recipe.hermes import CALL_BEGIN, CALL_END
from services.recipe.tokenizer import PromptTokenizer


class HermesFraming:
    """Frames for calls as JSON between tags, which are tokens where the model has them."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        begin, end = tokenizer.control_id(CALL_BEGIN), tokenizer.control_id(CALL_END)
        self._is_token = begin is not None
        self._begin = _literal(CALL_BEGIN) if begin is None else f"<[{begin}]>"
        self._end = _literal(CALL_END) if end is None else f"<[{end}]>"

    def sketch(self, conversation: Conversation, content: Part | None, use: ToolUse) -> Sketch:
        if not conversation.tools:
            assert content is not None, "nothing else can be asked for without tools"
            return Sketch((content,))
        parts = Parts()
        ways = [] if content is None or use.must_call else [parts.name(content)]
        if content is None and not use.must_call:
            ways += ["TEXT", f"TEXT? {self._begin} first" if self._is_token else "opening first"]
        else:
            ways.append(f"{self._begin} first")
        most = MAX_CALLS if use.is_parallel else 1
        more = f'("\\n" {self._begin} call){{0,{most - 1}}}' if most > 1 else ""
        tools = callable_tools(conversation, use)
        names = [f"tool{at}" for at in range(len(tools))]
        rules = [
            f"start: {' | '.join(ways)}",
            f"first: call {more}",
            f'call: "\\n" ({" | ".join(names)}) "\\n" {self._end}',
            *(f"{name}: {_tool(tool, at, parts)}" for name, (at, tool) in zip(names, tools.items(), strict=True)),
            *self._lexemes(),
        ]
        return Sketch(tuple(parts.found), "\n".join(rules) + "\n", where=use.field)

    def _lexemes(self) -> list[str]:
        """Return free text: where tags are letters too, it ends at the first that opens a call."""
        if self._is_token:
            return ["TEXT: /(?s:.+)/"]
        anything, tag = "/(?s:.*)/", CALL_BEGIN
        return [f"TEXT: {anything} & ~/(?s:.*){tag}(?s:.*)/", f"opening[lazy]: /(?s:.*){tag}/"]


def _tool(tool: Tool, where: str, parts: Parts) -> str:
    schema = tool.parameters
    if schema.get("type", "object") != "object":
        raise invalid(f"{where}.type", 'must be "object" for the parameters of a tool')
    part = json_schema({"type": "object"} | dict(schema), where)
    before = f'{{"name": {json.dumps(tool.name)}, "arguments": '
    return f'{_literal(before)} {parts.name(part)} "}}"'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

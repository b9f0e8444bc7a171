"""How are answers of DeepSeek V4.1 bound to a form, and to their tools?

Reasoning stays free: it ends by its token. Calls have the markup that `deepseek_parser.py` reads; a parameter of free
text is written as text, every other one as JSON that obeys its schema.
"""

import json
import re

from services.recipe.constraint import ToolUse
from services.recipe.conversation import Conversation, Tool
from services.recipe.deepseek_words import Mark, Vocabulary
from services.recipe.framing import MAX_CALLS, Parameter, Parts, callable_tools, parameters_of, texts_of
from services.recipe.grammar_limits import invalid
from services.recipe.grammars import Part, Sketch, json_schema

# Free text may end in what opens a tag, so the opening is a part of the lexeme. Control tokens are never text.
_LEXEMES = r"""
THOUGHT: /(?s:.*)/
TEXT: /(?s:.*)/
OPENING: /(?s:.*)</
VALUE: /(?s:.*)<\//
"""
_NAME = re.compile(r'[^"<>\x00-\x1f]{1,256}')


class DeepseekFraming:
    """Frames for V4.1's format."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._dsml = f"<[{vocabulary.ids[Mark.DSML]}]>"
        self._thought = f"<[{vocabulary.ids[Mark.THOUGHT]}]>"

    def sketch(self, conversation: Conversation, content: Part | None, use: ToolUse) -> Sketch:
        parts = Parts()
        rules = [f"start: {f'THOUGHT {self._thought} ' if conversation.effort != 'none' else ''}body"]
        ways = [] if content is None or use.must_call else [parts.name(content)]
        if conversation.tools and content is None and not use.must_call:
            ways += ["TEXT", "OPENING calls"]
        elif conversation.tools:
            ways.append(f"{_literal(chr(10) * 2 + '<')} calls")
        rules.append(f"body: {' | '.join(ways)}")
        if conversation.tools:
            rules += self._calls(conversation, use, parts)
        return Sketch(tuple(parts.found), "\n".join(rules) + _LEXEMES, where=use.field)

    def _calls(self, conversation: Conversation, use: ToolUse, parts: Parts) -> list[str]:
        tools = callable_tools(conversation, use)
        names = [f"tool{at}" for at in range(len(tools))]
        most = MAX_CALLS if use.is_parallel else 1
        return [
            f"calls: {self._dsml} {_literal(' calls>' + chr(10))} call{{1,{most}}} {self._closing(' calls>')}",
            f"call: {self._opening(' invoke name=' + chr(34))} ({' | '.join(names)})",
            f"end: {self._dsml} {_literal(' parameter>' + chr(10))}",
            *(
                f"{name}: {self._tool(tool, where, parts)}"
                for name, (where, tool) in zip(names, tools.items(), strict=True)
            ),
        ]

    def _tool(self, tool: Tool, where: str, parts: Parts) -> str:
        given = [self._parameter(parameter, parts) for parameter in parameters_of(tool, where)]
        return " ".join([_literal(f'{tool.name}">\n'), *(given or [_literal("\n")]), self._closing(" invoke>\n")])

    def _parameter(self, parameter: Parameter, parts: Parts) -> str:
        schema, name = parameter.schema, parameter.name
        if not _NAME.fullmatch(name):
            raise invalid(parameter.where, "has a name that this model's calls cannot hold")
        texts = texts_of(schema)
        if texts is None:
            kind, value = "false", f"{parts.name(json_schema(schema, parameter.where))} {_literal('</')}"
        else:
            kind, value = "true", f"({' | '.join(_literal(text + '</') for text in texts)})" if texts else "VALUE"
        opening = self._opening(f' parameter name="{name}" string="{kind}">')
        return f"({opening} {value} end){'' if parameter.is_required else '?'}"

    def _opening(self, rest: str) -> str:
        return f"{_literal('<')} {self._dsml} {_literal(rest)}"

    def _closing(self, rest: str) -> str:
        return f"{_literal('</')} {self._dsml} {_literal(rest)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

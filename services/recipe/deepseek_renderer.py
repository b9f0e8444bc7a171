"""How does a conversation become a DeepSeek V4.1 prompt?

A prompt is built as a list of control tokens and stretches of text, never as one string: what a caller wrote is always
text, so no spelling in it can be taken for a control token. Stretches are encoded one by one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

from services.recipe.conversation import Conversation, Tool, ToolCall, Turn
from services.recipe.deepseek_words import (
    GROUNDING,
    RESULT_BEGIN,
    RESULT_END,
    TOOLS_BEGIN,
    TOOLS_END,
    Mark,
    Vocabulary,
    effort_line,
)
from services.recipe.dialect import IMAGE_PLACE
from services.recipe.nesting import is_deeper
from services.recipe.token_floor import refuse_hopeless

MAX_DEPTH = 127
"""Arguments nested deeper are shown to the model as one text, as the library does: nobody's stack is spent on them."""

_BETWEEN = "\n\n"
_GROUNDING = re.compile("|".join(map(re.escape, GROUNDING)))
_MARKS = re.compile("|".join(map(re.escape, Mark)))


@dataclass(frozen=True, slots=True)
class Token:
    """A control token, by spelling."""

    spelling: str


PICTURE = Token("")
"""Where a picture belongs."""

Part = str | Token


class DeepseekRenderer:
    """Writes V4.1 prompts from our own knowledge of the format."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def render(self, conversation: Conversation, *, context_tokens: int | None = None) -> list[int]:
        return encode_parts(compose(conversation), self._vocabulary, context_tokens)


def encode_parts(parts: Iterable[Part], vocabulary: Vocabulary, context_tokens: int | None) -> list[int]:
    """Return the ids of a prompt; neighbouring texts are encoded as one. Raises a 400 for what cannot fit."""
    stretches = _stretches(parts, vocabulary.ids)
    refuse_hopeless(
        vocabulary.tokenizer.floor, "messages", [s for s in stretches if isinstance(s, str)], context_tokens
    )
    ids: list[int] = []
    for stretch in stretches:
        if isinstance(stretch, str):
            ids += vocabulary.tokenizer.plain_ids(stretch)
        else:
            ids.append(stretch)
    return ids


def _stretches(parts: Iterable[Part], ids: Mapping[str, int]) -> list[str | int]:
    """Return ids, and between them whole texts. A grounding token that the model does not have is text."""
    known = [part if isinstance(part, str) else _id(part, ids) for part in parts]
    stretches: list[str | int] = []
    for is_text, run in groupby(known, lambda part: isinstance(part, str)):
        same = list(run)
        stretches += ["".join(map(str, same))] if is_text else same
    return stretches


def _id(token: Token, ids: Mapping[str, int]) -> str | int:
    return IMAGE_PLACE if token is PICTURE else ids.get(token.spelling, token.spelling)


def compose(conversation: Conversation) -> Iterator[Part]:
    """Yield the prompt, from its beginning to where the answer begins."""
    turns, tools = conversation.turns, conversation.tools
    thinks = conversation.effort != "none"
    yield Token(Mark.BEGIN)
    opens = bool(turns) and _kind(turns[0]) == "system"
    if opens or thinks or tools:
        yield Token(Mark.SYSTEM)
        yield effort_line(conversation.effort) if thinks else ""
        yield turns[0].text if opens else ""
        yield from _declared(tools)
    calls: Sequence[ToolCall] = ()
    for kind, run in groupby(turns[1:] if opens else turns, _kind):
        if kind == "user":
            yield Token(Mark.USER)
            yield from _told(list(run), calls)
            continue
        for turn in run:
            if kind == "system":
                yield Token(Mark.SYSTEM)
                yield turn.text
            else:
                # Without tools a model is not shown what it thought earlier; with them its plans would be lost.
                yield from _said(turn, shows_reasoning=thinks and bool(tools))
                calls = turn.calls
    yield Token(Mark.ASSISTANT)
    yield Token(Mark.THINK if thinks else Mark.THOUGHT)


def _kind(turn: Turn) -> str:
    """Return whose mark a turn stands under: results of tools are told by the user."""
    return {"developer": "system", "tool": "user"}.get(turn.role, turn.role)


def _declared(tools: Sequence[Tool]) -> Iterator[Part]:
    if not tools:
        return
    yield from _marked(TOOLS_BEGIN, _MARKS)
    yield "\n".join(
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False
        )
        for tool in tools
    )
    yield TOOLS_END


def _told(turns: Sequence[Turn], calls: Sequence[ToolCall]) -> Iterator[Part]:
    """Yield what users and tools said in one go; results in the order of the calls they answer."""
    order = {call.id: at for at, call in enumerate(calls)}
    results = sorted((t for t in turns if t.role == "tool"), key=lambda turn: order.get(turn.call_id, 0))
    for at, turn in enumerate((*results, *(t for t in turns if t.role != "tool"))):
        if at:
            yield _BETWEEN
        if turn.role == "tool":
            yield RESULT_BEGIN + turn.text + RESULT_END
        else:
            yield from content(turn)


def content(turn: Turn) -> Iterator[Part]:
    """Yield a user's texts as they stand next to each other, and pictures set apart from what surrounds them."""
    for at, part in enumerate(turn.parts):
        if at and not (isinstance(part, str) and isinstance(turn.parts[at - 1], str)):
            yield _BETWEEN
        yield part if isinstance(part, str) else PICTURE


def _said(turn: Turn, *, shows_reasoning: bool) -> Iterator[Part]:
    yield Token(Mark.ASSISTANT)
    if shows_reasoning:
        yield Token(Mark.THINK)
        yield from _marked(turn.reasoning or "", _GROUNDING)
    yield Token(Mark.THOUGHT)
    yield from _marked(turn.text, _GROUNDING)
    if turn.calls:
        yield _BETWEEN
        yield from _tag("<", " calls>\n")
        for call in turn.calls:
            yield from _call(call)
        yield from _tag("</", " calls>")
    yield Token(Mark.END)


def _call(call: ToolCall) -> Iterator[Part]:
    yield from _tag("<", f' invoke name="{call.name}">\n')
    for at, (name, value) in enumerate(_arguments(call.arguments).items()):
        is_text = isinstance(value, str)
        yield "\n" if at else ""
        yield from _tag("<", f' parameter name="{name}" string="{str(is_text).lower()}">')
        yield value if is_text else json.dumps(value, ensure_ascii=False)
        yield from _tag("</", " parameter>")
    yield "\n"
    yield from _tag("</", " invoke>\n")


def _arguments(given: str) -> dict[str, Any]:
    """Return arguments by name; those that are no JSON object become one argument of that text, as in the library."""
    try:
        read = orjson.loads(given)
    except orjson.JSONDecodeError:
        read = None
    return read if isinstance(read, dict) and not is_deeper(read, MAX_DEPTH) else {"arguments": given}


def _tag(opening: str, rest: str) -> Iterator[Part]:
    yield opening
    yield Token(Mark.DSML)
    yield rest


def _marked(text: str, marks: re.Pattern[str]) -> Iterator[Part]:
    """Yield text in which the spellings that `marks` finds are tokens."""
    at = 0
    for found in marks.finditer(text):
        yield text[at : found.start()]
        yield Token(found.group())
        at = found.end()
    yield text[at:]

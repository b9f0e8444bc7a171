"""How is a model with a chat template spoken to? The template writes the prompt; answers are plain text.

Models of the ChatML kind may be given tools, too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from services.recipe.conversation import Conversation, Turn
from services.recipe.dialect import Dialect, Parser, PlainParser
from services.recipe.disguise import Disguise
from services.recipe.hermes import called, described, written
from services.recipe.hermes_frame import HermesFraming
from services.recipe.hermes_parser import HermesParser
from services.recipe.template import ChatTemplate
from services.recipe.token_floor import refuse_hopeless
from services.recipe.tokenizer import PromptTokenizer

_CHATML = "<|im_start|>"


class TemplateRenderer:
    """Renders with the folder's own jinja template. Effort and pictures were refused before."""

    def __init__(self, tokenizer: PromptTokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._disguise = Disguise(tokenizer.spellings, template.literals)

    def render(self, conversation: Conversation, *, context_tokens: int | None = None) -> list[int]:
        knows_tools = self._template.takes_tools
        messages = _messages(conversation.turns if knows_tools else written(conversation))
        tools = described(conversation.tools) if knows_tools else []
        # Names and values of tools and calls are the caller's as well, so they are covered with the messages.
        texts: list[str] = []
        for nested in (tools, *(message.get("tool_calls") for message in messages)):
            _collect(nested, texts)
        disguised = self._disguise.cover([*messages, {str(at): text for at, text in enumerate(texts)}])
        *covered, spelled = disguised.messages
        safe = iter(map(str, spelled.values()))
        tools = _replaced(tools, safe)
        covered = [
            message | {"tool_calls": _replaced(message["tool_calls"], safe)} if "tool_calls" in message else message
            for message in covered
        ]
        # Not the messages but what the template makes of them: it may trim them, or leave some out.
        rendered = self._template.render(covered, tools)
        refuse_hopeless(self._tokenizer.floor, "messages", [rendered], context_tokens, disguised.originals)
        return self._tokenizer.marked_ids(rendered, disguised.originals)


def templated(tokenizer: PromptTokenizer, template: ChatTemplate | None) -> Dialect:
    """Return the dialect of a model with this template; without one it takes no conversations."""
    if template is None:
        return Dialect(
            None, lambda _conversation: PlainParser(tokenizer.pieces), no_chat="this model has no chat template"
        )
    renderer = TemplateRenderer(tokenizer, template)
    if tokenizer.control_id(_CHATML) is None:
        return Dialect(renderer, lambda _conversation: PlainParser(tokenizer.pieces))
    return Dialect(
        renderer,
        lambda conversation: _chatml_parser(tokenizer.pieces, conversation),
        takes_tools=True,
        framing=HermesFraming(tokenizer),
    )


def _chatml_parser(pieces: Sequence[bytes], conversation: Conversation) -> Parser:
    if not conversation.tools:
        return PlainParser(pieces)
    return HermesParser(pieces, {tool.name for tool in conversation.tools})


def _collect(value: Any, texts: list[str]) -> None:
    """Add all texts in a JSON value, names included, in order."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            texts.append(name)
            _collect(inner, texts)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, texts)


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    """Return the value with other texts, in the same order."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {next(texts): _replaced(inner, texts) for inner in value.values()}
    return [_replaced(inner, texts) for inner in value] if isinstance(value, list) else value


def _messages(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Return the dicts that templates know.

    `developer` is OpenAI's newer word for `system`. A leading run with one in it becomes a single system message, since
    many templates take only one.
    """
    leading = 0
    while leading < len(turns) and turns[leading].role in {"system", "developer"}:
        leading += 1
    head, tail = [_message(turn) for turn in turns[:leading]], [_message(turn) for turn in turns[leading:]]
    if leading > 1 and any(turn.role == "developer" for turn in turns[:leading]):
        head = [head[0] | {"content": "\n\n".join(str(message["content"]) for message in head)}]
    return head + tail


def _message(turn: Turn) -> dict[str, object]:
    message: dict[str, object] = {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = called(turn.calls)
    return message

"""How is a model with a chat template spoken to? The template writes the prompt; answers are plain text."""

from collections.abc import Sequence

from services.recipe.conversation import Conversation, Turn
from services.recipe.dialect import Dialect, PlainParser
from services.recipe.disguise import Disguise
from services.recipe.template import ChatTemplate
from services.recipe.token_floor import refuse_hopeless
from services.recipe.tokenizer import PromptTokenizer


class TemplateRenderer:
    """Renders with the folder's own jinja template. Tools, effort and pictures were refused before."""

    def __init__(self, tokenizer: PromptTokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._disguise = Disguise(tokenizer.spellings, template.literals)

    def render(self, conversation: Conversation, *, context_tokens: int | None = None) -> list[int]:
        disguised = self._disguise.cover(_messages(conversation.turns))
        # Not the messages but what the template makes of them: it may trim them, or leave some out.
        rendered = self._template.render(disguised.messages)
        refuse_hopeless(self._tokenizer.floor, "messages", [rendered], context_tokens, disguised.originals)
        return self._tokenizer.marked_ids(rendered, disguised.originals)


def templated(tokenizer: PromptTokenizer, template: ChatTemplate | None) -> Dialect:
    """Return the dialect of a model with this template; without one it takes no conversations."""
    return Dialect(
        renderer=TemplateRenderer(tokenizer, template) if template else None,
        parser=lambda _conversation: PlainParser(tokenizer.pieces),
        no_chat="this model has no chat template",
    )


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
    return message

"""Which conversations does the Messages API hold? Anthropic's content blocks, made into turns.

`cache_control` is accepted wherever the API has it and changes nothing: prompts are always cached.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from services.recipe.conversation import Picture, ToolCall, Turn
from services.recipe.fields import Fields
from services.recipe.messages import MAX_MESSAGES
from services.recipe.nesting import is_deeper
from services.recipe.pictures import MEDIA_TYPES, check_size, read_url
from services.recipe.refusals import ApiError, refuse
from services.recipe.schema import ModelRules
from services.recipe.tools import MAX_CALLS, MAX_SCHEMA_DEPTH, check_name, check_results

NO_TOOLS = "this model takes no tools here"
_FAILED = "Error: "


def read_turns(fields: Fields, model: ModelRules) -> tuple[Turn, ...]:
    """Return `system` and `messages` as turns; raise a 400 naming the block at fault."""
    turns = _system(fields.take("system"))
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        raise fields.wrong("messages", "must be a list of at least one message")
    if len(given) > MAX_MESSAGES:
        raise fields.wrong("messages", f"must be at most {MAX_MESSAGES} messages")
    for at, message in enumerate(given):
        turns += _Message(message, f"messages[{at}]", model).turns()
    if turns[-1].role == "assistant" and not turns[-1].calls:
        rule = "must not end with an assistant's message: this model cannot go on from a given beginning"
        raise fields.wrong("messages", rule)
    check_results(turns)
    check_size([part for turn in turns for part in turn.parts if isinstance(part, Picture)])
    return tuple(turns)


def _system(given: Any) -> list[Turn]:
    if not given and isinstance(given, str | list | None):
        return []
    return [Turn("system", _texts(given, "system"))]


class _Message:
    """One message while it is read. A user's may hold results of tools, which are turns of their own."""

    def __init__(self, given: Any, where: str, model: ModelRules) -> None:
        if not isinstance(given, dict):
            raise refuse(where, "must be an object with role and content")
        self._fields = Fields(given, where)
        self._model = model
        self._parts: list[str | Picture] = []
        self._shown: list[Picture] = []  # by tools
        self._results: list[Turn] = []
        self._calls: list[ToolCall] = []
        self._reasoning: list[str] = []

    def turns(self) -> list[Turn]:
        """Return what the message says."""
        fields = self._fields
        role, content = fields.take("role"), fields.take("content")
        if role == "system":
            fields.finish()
            return [Turn("system", _texts(content, fields.name("content")))]
        readers = _READERS.get(role) if isinstance(role, str) else None
        if readers is None:
            raise fields.wrong("role", 'must be "user", "assistant" or "system"')
        fields.finish()
        if isinstance(content, str):
            self._parts.append(content)
        elif isinstance(content, list) and content:
            for at, block in enumerate(content):
                self._block(block, fields.name(f"content[{at}]"), readers)
        else:
            raise fields.wrong("content", "must be a string or a list of content blocks")
        return self._assistant() if role == "assistant" else self._user()

    def _assistant(self) -> list[Turn]:
        if len({call.id for call in self._calls}) < len(self._calls) or len(self._calls) > MAX_CALLS:
            raise self._fields.wrong("content", f"must hold at most {MAX_CALLS} tool_use blocks with ids of their own")
        reasoning = "".join(self._reasoning) if self._reasoning else None
        return [Turn("assistant", tuple(self._parts), reasoning=reasoning, calls=tuple(self._calls))]

    def _user(self) -> list[Turn]:
        parts = (*self._shown, *self._parts)
        return self._results + ([Turn("user", parts)] if parts or not self._results else [])

    def _block(self, given: Any, where: str, readers: "_Readers") -> None:
        if not isinstance(given, dict):
            raise refuse(where, "must be an object with a type")
        fields = Fields(given, where)
        kind = fields.take("type")
        reader = readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise fields.wrong("type", f"must be one of {', '.join(readers)}; other blocks are not served here")
        fields.accept(("cache_control",))
        reader(self, fields)
        fields.finish()

    def text(self, fields: Fields) -> None:
        """Take a text block."""
        fields.refuse_all_but({"citations": ([],)}, "is not served by this version")
        self._parts.append(_required(fields, "text"))

    def image(self, fields: Fields) -> None:
        """Take a picture."""
        self._parts.append(self._picture(fields))

    def thinking(self, fields: Fields) -> None:
        """Take what the model thought; its signature is not looked at."""
        fields.accept(("signature",))
        self._reasoning.append(_required(fields, "thinking"))

    def redacted(self, fields: Fields) -> None:
        """Leave out what another vendor hid."""
        fields.accept(("data",))  # another vendor's secret: nothing that this model thought

    def tool_use(self, fields: Fields) -> None:
        """Take a call."""
        self._need_tools(fields)
        call_id = _required(fields, "id")
        name = check_name(fields.text("name"), fields)
        given = fields.take("input")
        fields.accept(("caller",))
        if not isinstance(given, dict) or is_deeper(given, MAX_SCHEMA_DEPTH):
            raise fields.wrong("input", f"must be an object, nested at most {MAX_SCHEMA_DEPTH} levels deep")
        self._calls.append(ToolCall(call_id, name, orjson.dumps(given).decode()))

    def tool_result(self, fields: Fields) -> None:
        """Take a tool's result; a failure is told in the text, which is all that models see."""
        self._need_tools(fields)
        if self._parts:
            raise refuse(fields.name("type"), "tool_result blocks must come first in a message")
        call_id = _required(fields, "tool_use_id")
        content, is_error = fields.take("content"), fields.flag("is_error")
        text = "".join(self._result_part(part, at, fields) for at, part in enumerate(_as_blocks(content, fields)))
        self._results.append(Turn("tool", ((_FAILED if is_error else "") + text,), call_id=call_id))

    def _result_part(self, given: Any, at: int, outer: Fields) -> str:
        where = outer.name(f"content[{at}]")
        if not isinstance(given, dict) or given.get("type") not in ("text", "image"):
            raise refuse(where, 'must be a block of type "text" or "image"')
        fields = Fields(given, where)
        fields.accept(("cache_control",))
        is_text = fields.take("type") == "text"
        text = _required(fields, "text") if is_text else ""
        if not is_text:
            self._shown.append(self._picture(fields))
        fields.finish()
        return text

    def _picture(self, fields: Fields) -> Picture:
        if not self._model.takes_images:
            raise refuse(fields.name("type"), "this model takes no images here")
        given = fields.take("source")
        if not isinstance(given, dict):
            raise fields.wrong("source", "must be an object with type")
        source = Fields(given, fields.name("source"))
        kind = source.take("type")
        if kind == "url":
            picture = read_url(_required(source, "url"), source.name("url"))
        elif kind == "base64":
            media_type, where = source.text("media_type"), source.name("data")
            if media_type not in MEDIA_TYPES:
                raise source.wrong("media_type", f"must be one of {', '.join(MEDIA_TYPES)}")
            picture = Picture(where, _required(source, "data"))
        else:
            raise source.wrong("type", 'must be "base64" or "url"')
        source.finish()
        return picture

    def _need_tools(self, fields: Fields) -> None:
        if not self._model.takes_tools:
            raise refuse(fields.name("type"), NO_TOOLS)


_Readers = Mapping[str, Callable[[_Message, Fields], None]]
_READERS: Final[Mapping[str, _Readers]] = {
    "user": {"text": _Message.text, "image": _Message.image, "tool_result": _Message.tool_result},
    "assistant": {
        "text": _Message.text,
        "thinking": _Message.thinking,
        "redacted_thinking": _Message.redacted,
        "tool_use": _Message.tool_use,
    },
}


def _texts(given: Any, where: str) -> tuple[str, ...]:
    """Return a text, or text blocks, as parts that stand next to each other."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise refuse(where, "must be a string or a list of text blocks")
    return tuple(_text_block(block, f"{where}[{at}]") for at, block in enumerate(given))


def _text_block(given: Any, where: str) -> str:
    if not isinstance(given, dict):
        raise refuse(where, 'must be a block of type "text"')
    fields = Fields(given, where)
    if fields.take("type") != "text":
        raise fields.wrong("type", 'must be "text"')
    text = _required(fields, "text")
    fields.accept(("cache_control",))
    fields.refuse_all_but({"citations": ([],)}, "is not served by this version")
    fields.finish()
    return text


def _as_blocks(content: Any, fields: Fields) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise fields.wrong("content", "must be a string or a list of content blocks")
    return content


def _required(fields: Fields, field: str) -> str:
    text = fields.text(field)
    if text is None:
        raise _missing(fields, field)
    return text


def _missing(fields: Fields, field: str) -> ApiError:
    return fields.wrong(field, "must be a string")

"""Which items may the Responses API's input hold, and which conversation do they make?

Items are kept as they were given, each with an id, and read again whenever a later request builds upon them.
"""

import base64
import binascii
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from services.recipe.conversation import Picture, ToolCall, Turn
from services.recipe.fields import Fields
from services.recipe.pictures import check_size, read_url
from services.recipe.refusals import ApiError, refuse
from services.recipe.schema import ModelRules
from services.recipe.tools import check_name, check_results

MAX_ITEMS = 4096
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_SEALED = "fathom-1:"
_STATUSES = (None, "in_progress", "completed", "incomplete")


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`: encoded, so that a client can carry it; it is no secret here."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str, where: str) -> str:
    """Return what `seal` made a text of; raise a 400 for anything else."""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=sealed.startswith(_SEALED)).decode()
    except (binascii.Error, ValueError):
        raise refuse(where, "was not made by this server") from None


def name_items(given: Any, field: str) -> list[dict[str, Any]]:
    """Return the items of an input, each with a type and an id; a string is a user's message.

    What is in them is checked by `read_turns`. Raises a 400 when they are no list of objects.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or len(given) > MAX_ITEMS:
        raise refuse(field, f"must be a string or a list of at most {MAX_ITEMS} items")
    return [_named(item, f"{field}[{at}]") for at, item in enumerate(given)]


def _named(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object")
    kind = given.get("type") or "message"
    prefix = _PREFIXES.get(kind) if isinstance(kind, str) else None
    if prefix is None:
        known = ", ".join(_PREFIXES)
        raise refuse(f"{where}.type", f"must be one of {known}; other items are not served here")
    item = {**given, "type": kind, "id": given.get("id") or f"{prefix}_{uuid.uuid4().hex}"}
    if kind == "message":
        content = given.get("content")
        if isinstance(content, str):
            part = {"type": "output_text" if given.get("role") == "assistant" else "input_text", "text": content}
            item["content"] = [part | ({"annotations": []} if part["type"] == "output_text" else {})]
    if kind != "reasoning":
        item.setdefault("status", "completed")
    return item


def read_turns(items: Sequence[Mapping[str, Any]], field: str, num_earlier: int, model: ModelRules) -> list[Turn]:
    """Return items as turns; raise a 400 naming the item at fault.

    num_earlier: how many of them, the first ones, come from earlier responses and not from `field`.
    """
    reader = _Reader(model)
    for at, item in enumerate(items):
        reader.take(item, f"{field}[{at - num_earlier}]" if at >= num_earlier else "previous_response_id")
    turns = reader.done()
    check_results(turns, field)
    check_size([part for turn in turns for part in turn.parts if isinstance(part, Picture)])
    return turns


def check_items(items: Sequence[Mapping[str, Any]], field: str, model: ModelRules) -> None:
    """Raise a 400 for items that are none, whatever may come before or after them."""
    reader = _Reader(model)
    for at, item in enumerate(items):
        reader.take(item, f"{field}[{at}]")
    check_size([part for turn in reader.done() for part in turn.parts if isinstance(part, Picture)])


class _Reader:
    """Makes turns of items: neighbouring items of the assistant's are one turn, as they were one answer."""

    def __init__(self, model: ModelRules) -> None:
        self._model = model
        self._turns: list[Turn] = []
        self._said: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._shown: list[Picture] = []  # by tools, told after their results

    def take(self, item: Mapping[str, Any], where: str) -> None:
        """Read one item."""
        fields = Fields(item, where)
        kind = fields.take("type")
        fields.accept(("id",))
        if fields.take("status") not in _STATUSES:
            raise fields.wrong("status", 'must be "in_progress", "completed" or "incomplete"')
        if kind != "function_call_output":
            self._show()
        _READERS[kind](self, fields)
        fields.finish()

    def done(self) -> list[Turn]:
        """Return all turns."""
        self._flush()
        self._show()
        return self._turns

    def message(self, fields: Fields) -> None:
        """Take a message."""
        role = fields.take("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise fields.wrong("role", 'must be "user", "assistant", "system" or "developer"')
        fields.accept(("phase",))
        parts = self._parts(fields, "content", takes_images=role == "user")
        if role != "assistant":
            self._flush()
            self._turns.append(Turn(role, tuple(parts)))
            return
        if self._said or self._calls:
            self._flush()
        self._said += [part for part in parts if isinstance(part, str)]

    def reasoning(self, fields: Fields) -> None:
        """Take what the model thought; of its forms the first that says something."""
        if self._said or self._calls:
            self._flush()
        sealed = fields.text("encrypted_content")
        content, summary = fields.take("content"), fields.take("summary")
        text = _join(content, "reasoning_text", fields.name("content"))
        summarized = _join(summary, "summary_text", fields.name("summary"))
        opened = unseal(sealed, fields.name("encrypted_content")) if sealed else ""
        self._reasoning.append(text or opened or summarized)

    def function_call(self, fields: Fields) -> None:
        """Take a call."""
        self._need_tools(fields)
        call_id, name = _required(fields, "call_id"), check_name(fields.text("name"), fields)
        arguments = fields.text("arguments")
        fields.refuse_all_but({"namespace": ("",), "async": (False,), "caller": ()}, "is not served here")
        if any(call.id == call_id for call in self._calls):
            raise fields.wrong("call_id", "must be a call's own")
        self._calls.append(ToolCall(call_id, name, arguments or "{}"))

    def function_call_output(self, fields: Fields) -> None:
        """Take a tool's result."""
        self._need_tools(fields)
        self._flush()
        call_id = _required(fields, "call_id")
        fields.refuse_all_but({"namespace": ("",), "name": ("",), "caller": ()}, "is not served here")
        parts = self._parts(fields, "output", takes_images=True)
        self._shown += [part for part in parts if isinstance(part, Picture)]
        text = "".join(part for part in parts if isinstance(part, str))
        self._turns.append(Turn("tool", (text,), call_id=call_id))

    def _parts(self, fields: Fields, field: str, *, takes_images: bool) -> list[str | Picture]:
        given = fields.take(field)
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list) or not given:
            raise fields.wrong(field, "must be a string or a list of parts")
        return [
            self._part(part, fields.name(f"{field}[{at}]"), takes_images=takes_images) for at, part in enumerate(given)
        ]

    def _part(self, given: Any, where: str, *, takes_images: bool) -> str | Picture:
        if not isinstance(given, dict):
            raise refuse(where, "must be an object with type")
        part = Fields(given, where)
        kind = part.take("type")
        if kind == "input_image" and takes_images:
            read: str | Picture = self._picture(part)
        elif kind in ("input_text", "output_text", "text"):
            part.accept(("annotations", "logprobs"))  # output that comes back as it was given
            read = _required(part, "text")
        elif kind == "refusal":
            read = _required(part, "refusal")
        else:
            rule = 'must be "input_text", "output_text" or "input_image", the latter for users and tools'
            raise part.wrong("type", f"{rule}; files are not served here")
        part.finish()
        return read

    def _picture(self, part: Fields) -> Picture:
        if not self._model.takes_images:
            raise part.wrong("type", "this model takes no images here")
        part.refuse_all_but({"file_id": ("",), "prompt_cache_breakpoint": ()}, "is not served here")
        if part.take("detail") not in (None, "auto", "high", "original"):
            raise part.wrong("detail", 'must be "auto" or "high"; images are always seen in full')
        return read_url(_required(part, "image_url"), part.name("image_url"))

    def _flush(self) -> None:
        if self._said or self._calls or self._reasoning:
            reasoning = "".join(self._reasoning) if self._reasoning else None
            turn = Turn("assistant", tuple(self._said), reasoning=reasoning, calls=tuple(self._calls))
            self._turns.append(turn)
        self._said, self._reasoning, self._calls = [], [], []

    def _show(self) -> None:
        if self._shown:
            self._turns.append(Turn("user", tuple(self._shown)))
            self._shown = []

    def _need_tools(self, fields: Fields) -> None:
        if not self._model.takes_tools:
            raise fields.wrong("type", "this model takes no tools here")


_READERS: Final[Mapping[str, Callable[[_Reader, Fields], None]]] = {
    "message": _Reader.message,
    "reasoning": _Reader.reasoning,
    "function_call": _Reader.function_call,
    "function_call_output": _Reader.function_call_output,
}


def _join(given: Any, kind: str, where: str) -> str:
    """Return the texts of a list of parts, all of one kind."""
    if given is None:
        return ""
    if not isinstance(given, list):
        raise refuse(where, "must be a list")
    texts = []
    for at, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
            raise refuse(f"{where}[{at}]", f"must be a part of type {kind!r} with text")
        texts.append(part["text"])
    return "".join(texts)


def _required(fields: Fields, field: str) -> str:
    text = fields.text(field)
    if text is None:
        raise _missing(fields, field)
    return text


def _missing(fields: Fields, field: str) -> ApiError:
    return fields.wrong(field, "must be a string")

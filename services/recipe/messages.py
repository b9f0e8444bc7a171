"""Which conversations do we take, and what does the template see of them?"""

from collections.abc import Sequence
from typing import Any

from services.recipe.fields import Fields
from services.recipe.refusals import ApiError, refuse

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
_IMAGES = frozenset({"image_url", "image", "input_image"})


def read_messages(given: Any) -> tuple[dict[str, object], ...]:
    """Return messages of role, content and, where given, name and reasoning_content; raise a 400 naming the message.

    `developer` is OpenAI's newer word for `system`. A leading run with one in it becomes a single system message, since
    many templates take only one.
    """
    if not isinstance(given, list) or not given:
        raise refuse("messages", "must be a list of at least one message")
    if len(given) > MAX_MESSAGES:
        raise refuse("messages", f"must be at most {MAX_MESSAGES} messages")
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(given)]
    return tuple(_merge_developer(read))


def _message(given: Any, where: str) -> dict[str, object]:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with role and content")
    fields = Fields(given, where)
    role = fields.take("role")
    if role not in ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(ROLES)}")
    if role == "tool" or fields.take("tool_calls"):
        raise _no_tools(where)
    message: dict[str, object] = {"role": role, "content": _content(fields.take("content"), fields)}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if role == "assistant":
        if (reasoning := fields.text("reasoning_content")) is not None:
            message["reasoning_content"] = reasoning
        fields.refuse_all_but({"refusal": ("",), "audio": (), "function_call": ()}, "is not served by this version")
    fields.finish()
    return message


def _no_tools(where: str) -> ApiError:
    return refuse(where, "tool calls and their results are not served by this version")


def _content(given: Any, fields: Fields) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise fields.wrong("content", "must be a string or a list of text parts")
    return "".join(_part(part, fields.name(f"content[{i}]")) for i, part in enumerate(given))


def _part(given: Any, where: str) -> str:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with type and text")
    kind = given.get("type")
    if kind in _IMAGES:
        raise refuse(where, "this model takes no images")
    if kind != "text":
        raise refuse(f"{where}.type", 'must be "text"')
    part = Fields(given, where)
    part.accept(("type",))
    text = part.text("text")
    if text is None:
        raise part.wrong("text", "must be a string")
    part.finish()
    return text


def _merge_developer(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] in {"system", "developer"}:
        leading += 1
    head, tail = list(messages[:leading]), list(messages[leading:])
    if len(head) > 1 and any(message["role"] == "developer" for message in head):
        head = [head[0] | {"content": "\n\n".join(str(message["content"]) for message in head)}]
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in head + tail]

"""Which conversations do we take?"""

from typing import Any, cast, get_args

from services.recipe.conversation import Picture, Role, ToolCall, Turn
from services.recipe.fields import Fields
from services.recipe.pictures import check_size, read_url
from services.recipe.refusals import ApiError, refuse
from services.recipe.tools import check_results, read_calls

MAX_MESSAGES = 4096
ROLES = get_args(Role)
_IMAGES = ("image_url", "image", "input_image")
_DETAILS = (None, "auto", "high")


def read_messages(given: Any, *, takes_tools: bool = False, takes_images: bool = False) -> tuple[Turn, ...]:
    """Return the turns of a conversation; raise a 400 naming the message at fault.

    takes_tools, takes_images: whether the model can be shown tool calls and images; otherwise they are refused.
    """
    if not isinstance(given, list) or not given:
        raise refuse("messages", "must be a list of at least one message")
    if len(given) > MAX_MESSAGES:
        raise refuse("messages", f"must be at most {MAX_MESSAGES} messages")
    turns = tuple(
        _message(message, f"messages[{i}]", takes_tools=takes_tools, takes_images=takes_images)
        for i, message in enumerate(given)
    )
    check_results(turns)
    check_size([part for turn in turns for part in turn.parts if isinstance(part, Picture)])
    return turns


def _message(given: Any, where: str, *, takes_tools: bool, takes_images: bool) -> Turn:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with role and content")
    fields = Fields(given, where)
    role = fields.take("role")
    if role not in ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(ROLES)}")
    role = cast("Role", role)
    called = fields.take("tool_calls")
    if (role == "tool" or called) and not takes_tools:
        raise _no_tools(where)
    if called and role != "assistant":
        raise fields.wrong("tool_calls", "are for assistant messages")
    calls = read_calls(called, fields.name("tool_calls")) if called else ()
    parts = _content(fields, takes_images=takes_images and role == "user", calls=calls)
    name, reasoning, call_id = fields.text("name"), None, ""
    if role == "tool":
        call_id = fields.text("tool_call_id") or ""
    if role == "assistant":
        reasoning = fields.text("reasoning_content")
        neutral: dict[str, tuple[Any, ...]] = {"refusal": ("",), "audio": (), "function_call": (), "annotations": ([],)}
        fields.refuse_all_but(neutral, "is not served by this version")
    fields.finish()
    return Turn(role, parts, name, reasoning, calls, call_id)


def _no_tools(where: str) -> ApiError:
    return refuse(where, "tool calls and their results are not served by this version")


def _content(fields: Fields, *, takes_images: bool, calls: tuple[ToolCall, ...]) -> tuple[str | Picture, ...]:
    given = fields.take("content")
    if isinstance(given, str):
        return (given,)
    if given is None and calls:
        return ()
    if not isinstance(given, list) or not given:
        raise fields.wrong("content", "must be a string or a list of text parts")
    return tuple(_part(part, fields.name(f"content[{i}]"), takes_images=takes_images) for i, part in enumerate(given))


def _part(given: Any, where: str, *, takes_images: bool) -> str | Picture:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with type and text")
    kind = given.get("type")
    if kind in _IMAGES and not takes_images:
        raise refuse(where, "this model takes no images here")
    if kind not in ("text", "image_url"):
        raise refuse(f"{where}.type", 'must be "text" or "image_url"' if takes_images else 'must be "text"')
    part = Fields(given, where)
    part.accept(("type",))
    read = _picture(part) if kind == "image_url" else part.text("text")
    if read is None:
        raise part.wrong("text", "must be a string")
    part.finish()
    return read


def _picture(part: Fields) -> Picture:
    given = part.take("image_url")
    if not isinstance(given, dict):
        raise part.wrong("image_url", "must be an object with url")
    image = Fields(given, part.name("image_url"))
    url = image.text("url")
    if url is None:
        raise image.wrong("url", "must be a data: URL")
    if image.take("detail") not in _DETAILS:
        raise image.wrong("detail", 'must be "auto" or "high"; images are always seen in full')
    image.finish()
    return read_url(url, image.name("url"))

"""What do the larger fields of requests hold? Messages, items, blocks, tools and formats, as JSON schemas.

A field may also be null, which asks for nothing; the schemas do not repeat that.
"""

from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
OBJECT: Final[Schema] = {"type": "object"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": (1 << 31) - 1}
NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def numbers(low: float, high: float) -> Schema:
    """Return the schema of a number of low..high."""
    return {"type": "number", "minimum": low, "maximum": high}


def one_of(*values: str) -> Schema:
    """Return the schema of some strings."""
    return {"type": "string", "enum": list(values)}


def listed(items: Schema, most: int, least: int = 0) -> Schema:
    """Return the schema of a list of at most `most`."""
    return {"type": "array", "items": items, "maxItems": most} | ({"minItems": least} if least else {})


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object without other fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def typed(kind: str, properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object that says its type."""
    return closed({"type": one_of(kind), **properties}, "type", *required)


def said(text: str, schema: Schema) -> Schema:
    """Return the schema with words for people."""
    return schema | {"description": text}


URL: Final = said(
    "data:<image/png, image/jpeg or image/webp>;base64,... or, where the server fetches, https://...", TEXT
)
_TEXT_PART: Final = typed("text", {"text": TEXT}, "text")
_IMAGE_PART: Final = typed(
    "image_url", {"image_url": closed({"url": URL, "detail": one_of("auto", "high")}, "url")}, "image_url"
)
_CONTENT: Final[Schema] = {"anyOf": [TEXT, listed({"anyOf": [_TEXT_PART, _IMAGE_PART]}, 50_000, 1)]}
_CALL: Final = closed(
    {"id": TEXT, "type": one_of("function"), "function": closed({"name": NAME, "arguments": TEXT}, "name")},
    "id",
    "function",
)
_CHAT_MESSAGE: Final = closed(
    {
        "role": one_of("system", "developer", "user", "assistant", "tool"),
        "content": _CONTENT,
        "name": TEXT,
        "tool_calls": listed(_CALL, 128),
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "refusal": one_of(""),
        "annotations": listed({}, 0),
    },
    "role",
)
CHAT_MESSAGES: Final = listed(_CHAT_MESSAGE, 4096, 1)

_NAMED_SCHEMA: Final[dict[str, Schema]] = {"name": NAME, "description": TEXT, "schema": OBJECT, "strict": FLAG}
_OUR_FORMATS: Final = (
    typed("text", {}),
    typed("json_object", {}),
    said("ours: the answer is matched by this pattern", typed("regex", {"pattern": TEXT}, "pattern")),
    said("ours: a Lark or GBNF grammar", typed("grammar", {"grammar": TEXT}, "grammar")),
)
RESPONSE_FORMAT: Final[Schema] = {
    "anyOf": [
        *_OUR_FORMATS,
        typed("json_schema", {"json_schema": closed(_NAMED_SCHEMA, "name", "schema")}, "json_schema"),
    ]
}
TEXT_FORMAT: Final[Schema] = {"anyOf": [*_OUR_FORMATS, typed("json_schema", _NAMED_SCHEMA, "name", "schema")]}

_FUNCTION: Final[dict[str, Schema]] = {"name": NAME, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
CHAT_TOOLS: Final = listed(typed("function", {"function": closed(_FUNCTION, "name")}, "function"), 128)
CHAT_CHOICE: Final[Schema] = {
    "anyOf": [
        one_of("auto", "none", "required"),
        typed("function", {"function": closed({"name": NAME}, "name")}, "function"),
    ]
}
RESPONSE_TOOLS: Final = listed(typed("function", _FUNCTION, "name"), 128)
RESPONSE_CHOICE: Final[Schema] = {
    "anyOf": [
        one_of("auto", "none", "required"),
        typed("function", {"name": NAME}, "name"),
        typed(
            "allowed_tools",
            {"mode": one_of("auto", "required"), "tools": listed(typed("function", {"name": NAME}, "name"), 128, 1)},
            "mode",
            "tools",
        ),
    ]
}
ANTHROPIC_TOOLS: Final = listed(
    closed(
        {
            "type": one_of("custom"),
            "name": NAME,
            "description": TEXT,
            "input_schema": OBJECT,
            "strict": FLAG,
            "cache_control": OBJECT,
            "eager_input_streaming": FLAG,
        },
        "name",
        "input_schema",
    ),
    128,
)
_ONE_CALL: Final[dict[str, Schema]] = {"disable_parallel_tool_use": FLAG}
ANTHROPIC_CHOICE: Final[Schema] = {
    "anyOf": [
        typed("auto", _ONE_CALL),
        typed("any", _ONE_CALL),
        typed("tool", {"name": NAME, **_ONE_CALL}, "name"),
        typed("none", {}),
    ]
}

_ITEM: Final[dict[str, Schema]] = {"id": TEXT, "status": one_of("in_progress", "completed", "incomplete")}
_INPUT_IMAGE: Final = typed(
    "input_image", {"image_url": URL, "detail": one_of("auto", "high", "original")}, "image_url"
)
_SAID_PART: Final[dict[str, Schema]] = {"text": TEXT, "annotations": listed({}, 50_000), "logprobs": listed({}, 50_000)}
_PARTS: Final[Schema] = {
    "anyOf": [
        TEXT,
        listed(
            {
                "anyOf": [
                    typed("input_text", {"text": TEXT}, "text"),
                    typed("output_text", _SAID_PART, "text"),
                    typed("refusal", {"refusal": TEXT}, "refusal"),
                    _INPUT_IMAGE,
                ]
            },
            50_000,
            1,
        ),
    ]
}
_MESSAGE_ITEM: Final = closed(
    {
        "type": one_of("message"),
        "role": one_of("user", "assistant", "system", "developer"),
        "content": _PARTS,
        "phase": TEXT,
        **_ITEM,
    },
    "role",
    "content",
)


def _texts(kind: str) -> Schema:
    return listed(typed(kind, {"text": TEXT}, "text"), 50_000)


ITEM: Final[Schema] = {
    "anyOf": [
        _MESSAGE_ITEM,
        typed(
            "reasoning",
            {
                "content": _texts("reasoning_text"),
                "summary": _texts("summary_text"),
                "encrypted_content": TEXT,
                **_ITEM,
            },
        ),
        typed("function_call", {"call_id": TEXT, "name": NAME, "arguments": TEXT, **_ITEM}, "call_id", "name"),
        typed("function_call_output", {"call_id": TEXT, "output": _PARTS, **_ITEM}, "call_id", "output"),
    ]
}

_CACHED: Final[dict[str, Schema]] = {"cache_control": OBJECT}
TEXT_BLOCK: Final = typed("text", {"text": TEXT, "citations": listed({}, 0), **_CACHED}, "text")
_SOURCE: Final[Schema] = {
    "anyOf": [
        typed(
            "base64",
            {"media_type": one_of("image/png", "image/jpeg", "image/webp"), "data": TEXT},
            "media_type",
            "data",
        ),
        typed("url", {"url": URL}, "url"),
    ]
}
_IMAGE_BLOCK: Final = typed("image", {"source": _SOURCE, **_CACHED}, "source")
_BLOCKS: Final[Schema] = {
    "anyOf": [
        TEXT_BLOCK,
        _IMAGE_BLOCK,
        typed(
            "tool_use", {"id": TEXT, "name": NAME, "input": OBJECT, "caller": OBJECT, **_CACHED}, "id", "name", "input"
        ),
        typed(
            "tool_result",
            {
                "tool_use_id": TEXT,
                "content": {"anyOf": [TEXT, listed({"anyOf": [TEXT_BLOCK, _IMAGE_BLOCK]}, 50_000)]},
                "is_error": FLAG,
                **_CACHED,
            },
            "tool_use_id",
        ),
        typed("thinking", {"thinking": TEXT, "signature": TEXT, **_CACHED}, "thinking"),
        typed("redacted_thinking", {"data": TEXT, **_CACHED}),
    ]
}
ANTHROPIC_MESSAGES: Final = listed(
    closed(
        {
            "role": one_of("user", "assistant", "system"),
            "content": {"anyOf": [TEXT, listed(_BLOCKS, 50_000, 1)]},
        },
        "role",
        "content",
    ),
    4096,
    1,
)

"""What do the public API's answers hold? As JSON schemas, for its OpenAPI page; the tests hold answers against them.

Answers may get further fields; clients are to skip those that they do not know.
"""

from typing import Final

from services.recipe.openapi_parts import FLAG, IDS, OBJECT, TEXT, Schema, one_of

NUMBER: Final[Schema] = {"type": "number"}
TOTAL: Final[Schema] = {"type": "integer", "minimum": 0}
_NOTHING: Final[Schema] = {"type": "null"}


def maybe(schema: Schema) -> Schema:
    """Return the schema of something or null."""
    return {"anyOf": [schema, _NOTHING]}


def listing(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def told(properties: dict[str, Schema], *optional: str) -> Schema:
    """Return the schema of an object that has all of these but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def const(value: str) -> Schema:
    """Return the schema of one string."""
    return one_of(value)


OPENAI_ERROR: Final = told({"error": told({"message": TEXT, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)})})
ANTHROPIC_ERROR: Final = told(
    {"type": const("error"), "error": told({"type": TEXT, "message": TEXT}), "request_id": TEXT}
)
_USAGE: Final = told(
    {
        "prompt_tokens": TOTAL,
        "completion_tokens": TOTAL,
        "total_tokens": TOTAL,
        "prompt_tokens_details": told({"cached_tokens": TOTAL}),
        "completion_tokens_details": told({"reasoning_tokens": TOTAL}),
    },
    "completion_tokens_details",
)
_SCORED: Final[dict[str, Schema]] = {"token": TEXT, "logprob": NUMBER, "bytes": listing(TOTAL)}
_SCORES: Final = listing(told({**_SCORED, "top_logprobs": listing(told(_SCORED))}))
_CALL: Final = told(
    {"id": TEXT, "type": const("function"), "function": told({"name": TEXT, "arguments": TEXT})},
)
_OURS: Final[dict[str, Schema]] = {"prompt_token_ids": IDS, "token_ids": IDS}
_CHAT_SCORES: Final = maybe(told({"content": maybe(_SCORES), "refusal": _NOTHING}))
CHAT: Final = told(
    {
        "id": TEXT,
        "object": const("chat.completion"),
        "created": TOTAL,
        "model": TEXT,
        "choices": listing(
            told(
                {
                    "index": TOTAL,
                    "finish_reason": one_of("stop", "length", "tool_calls"),
                    "logprobs": _CHAT_SCORES,
                    "message": told(
                        {
                            "role": const("assistant"),
                            "content": maybe(TEXT),
                            "refusal": _NOTHING,
                            "reasoning_content": TEXT,
                            "tool_calls": listing(_CALL),
                        },
                        "reasoning_content",
                        "tool_calls",
                    ),
                    **_OURS,
                },
                *_OURS,
            )
        ),
        "usage": _USAGE,
        "service_tier": TEXT,
    }
)
_TEXT_SCORES: Final = told(
    {
        "tokens": listing(TEXT),
        "token_logprobs": listing(maybe(NUMBER)),
        "top_logprobs": listing(maybe({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": listing(TOTAL),
    }
)
COMPLETION: Final = told(
    {
        "id": TEXT,
        "object": const("text_completion"),
        "created": TOTAL,
        "model": TEXT,
        "choices": listing(
            told(
                {
                    "index": TOTAL,
                    "text": TEXT,
                    "finish_reason": one_of("stop", "length"),
                    "logprobs": maybe(_TEXT_SCORES),
                    **_OURS,
                },
                *_OURS,
            )
        ),
        "usage": _USAGE,
    }
)
_RESPONSE_USAGE: Final = told(
    {
        "input_tokens": TOTAL,
        "input_tokens_details": told({"cached_tokens": TOTAL, "cache_write_tokens": TOTAL}),
        "output_tokens": TOTAL,
        "output_tokens_details": told({"reasoning_tokens": TOTAL}),
        "total_tokens": TOTAL,
    }
)
RESPONSE: Final = told(
    {
        "id": TEXT,
        "object": const("response"),
        "created_at": NUMBER,
        "completed_at": maybe(NUMBER),
        "status": one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        "error": maybe(told({"code": TEXT, "message": TEXT})),
        "incomplete_details": maybe(told({"reason": TEXT})),
        "model": TEXT,
        "output": listing(told({"type": one_of("message", "reasoning", "function_call"), "id": TEXT})),
        "usage": maybe(_RESPONSE_USAGE),
        "instructions": maybe(TEXT),
        "max_output_tokens": maybe(TOTAL),
        "max_tool_calls": maybe(TOTAL),
        "previous_response_id": maybe(TEXT),
        "conversation": maybe(told({"id": TEXT})),
        "background": FLAG,
        "store": FLAG,
        "parallel_tool_calls": FLAG,
        "tool_choice": {"anyOf": [TEXT, OBJECT]},
        "tools": listing(OBJECT),
        "reasoning": OBJECT,
        "text": OBJECT,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER,
        "top_logprobs": TOTAL,
        "truncation": one_of("auto", "disabled"),
        "metadata": OBJECT,
        "service_tier": TEXT,
    }
)
INPUT_TOKENS: Final = told({"object": const("response.input_tokens"), "input_tokens": TOTAL})
MESSAGE: Final = told(
    {
        "id": TEXT,
        "type": const("message"),
        "role": const("assistant"),
        "model": TEXT,
        "content": listing(told({"type": one_of("text", "thinking", "tool_use")})),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": maybe(TEXT),
        "usage": told(
            {
                "input_tokens": TOTAL,
                "cache_creation_input_tokens": TOTAL,
                "cache_read_input_tokens": TOTAL,
                "output_tokens": TOTAL,
            }
        ),
    }
)
COUNTED: Final = told({"input_tokens": TOTAL})
TOKENIZED: Final = told({"tokens": IDS, "count": TOTAL, "max_model_len": TOTAL})
DETOKENIZED: Final = told({"prompt": TEXT})
CONVERSATION: Final = told({"id": TEXT, "object": const("conversation"), "created_at": TOTAL, "metadata": OBJECT})
DELETED: Final = told({"id": TEXT, "object": TEXT, "deleted": {"type": "boolean", "enum": [True]}})
ITEM: Final = told({"id": TEXT, "type": TEXT})
PAGE: Final = told(
    {
        "object": const("list"),
        "data": listing(ITEM),
        "first_id": maybe(TEXT),
        "last_id": maybe(TEXT),
        "has_more": FLAG,
    }
)
_OPENAI_MODEL: Final = told(
    {"id": TEXT, "object": const("model"), "created": TOTAL, "owned_by": TEXT, "max_model_len": TOTAL}
)
_ANTHROPIC_MODEL: Final = told(
    {"id": TEXT, "type": const("model"), "display_name": TEXT, "created_at": TEXT, "lifecycle": TEXT}
)
MODEL: Final[Schema] = {"anyOf": [_OPENAI_MODEL, _ANTHROPIC_MODEL]}
MODELS: Final[Schema] = {
    "anyOf": [
        told({"object": const("list"), "data": listing(_OPENAI_MODEL)}),
        told({"data": listing(_ANTHROPIC_MODEL), "first_id": maybe(TEXT), "last_id": maybe(TEXT), "has_more": FLAG}),
    ]
}
HEALTH: Final = told({"status": TEXT, "model": TEXT, "reason": TEXT}, "model", "reason")

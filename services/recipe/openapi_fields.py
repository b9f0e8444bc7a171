"""Which fields do the public API's requests have? As JSON schemas, for its OpenAPI page; the tests try every one.

A field may also be null, which asks for nothing; the schemas do not repeat that.
"""

from typing import Any, Final

from services.recipe.conversation import EFFORTS
from services.recipe.schema import MAX_CHOICES, MAX_STOPS

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


def listed(items: Schema, most: int) -> Schema:
    """Return the schema of a list of at most `most`."""
    return {"type": "array", "items": items, "maxItems": most}


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object without other fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


METADATA: Final[Schema] = {
    "type": "object",
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "maxLength": 512},
}
IDENTITY: Final = {
    "metadata": METADATA,
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "service_tier": one_of("auto", "default"),
    "store": FLAG,
}
SAMPLING: Final = {
    "temperature": numbers(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": numbers(0, 1),
    "presence_penalty": numbers(-2, 2),
    "frequency_penalty": numbers(-2, 2),
    "repetition_penalty": numbers(0.001, 2),
    "logit_bias": {"type": "object", "additionalProperties": numbers(-100, 100), "maxProperties": 1024},
    "seed": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
}
ANSWER: Final = {
    "max_tokens": COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    "stop": {"anyOf": [TEXT, listed(TEXT, MAX_STOPS)]},
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "return_token_ids": FLAG,
    "stream": FLAG,
    "stream_options": closed({"include_usage": FLAG}),
    "response_format": OBJECT,
}
MESSAGES: Final = {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": 4096}
FUNCTION: Final = closed({"name": NAME, "description": TEXT, "parameters": OBJECT, "strict": FLAG}, "name")
CHAT_TOOLS: Final = listed(closed({"type": one_of("function"), "function": FUNCTION}, "type", "function"), 128)
CHOICE: Final[Schema] = {"anyOf": [one_of("auto", "none", "required"), OBJECT]}
TOOLS: Final = {"tools": CHAT_TOOLS, "tool_choice": CHOICE, "parallel_tool_calls": FLAG}

CHAT: Final = closed(
    {
        "model": TEXT,
        "messages": MESSAGES,
        "max_completion_tokens": COUNT,
        "logprobs": FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "reasoning_effort": one_of(*EFFORTS),
        **TOOLS,
        **SAMPLING,
        **ANSWER,
        **IDENTITY,
    },
    "model",
    "messages",
)
COMPLETION: Final = closed(
    {
        "model": TEXT,
        "prompt": {"anyOf": [TEXT, IDS, {"type": "array", "items": {"anyOf": [TEXT, IDS]}}]},
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
        "echo": FLAG,
        **SAMPLING,
        **ANSWER,
        **IDENTITY,
    },
    "model",
    "prompt",
)
_RESPONSE_FIELDS: Final[dict[str, Schema]] = {
    "model": TEXT,
    "input": {"anyOf": [TEXT, listed(OBJECT, 4096)]},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "conversation": {"anyOf": [TEXT, closed({"id": TEXT}, "id")]},
    "background": FLAG,
    "include": listed(TEXT, 3),
    "max_output_tokens": COUNT,
    "max_tool_calls": COUNT,
    "parallel_tool_calls": FLAG,
    "reasoning": closed({"effort": one_of(*EFFORTS), "summary": one_of("auto")}),
    "text": closed({"format": OBJECT, "verbosity": one_of("medium")}),
    "tools": listed(
        closed(
            {"type": one_of("function"), "name": NAME, "description": TEXT, "parameters": OBJECT, "strict": FLAG},
            "type",
            "name",
        ),
        128,
    ),
    "tool_choice": CHOICE,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "truncation": one_of("auto", "disabled"),
    "stream": FLAG,
    "stream_options": OBJECT,
    **SAMPLING,
    **IDENTITY,
}
RESPONSE: Final = closed(_RESPONSE_FIELDS, "model")
INPUT_TOKENS: Final = closed(_RESPONSE_FIELDS)
_MESSAGES_FIELDS: Final[dict[str, Schema]] = {
    "model": TEXT,
    "messages": MESSAGES,
    "max_tokens": COUNT,
    "system": {"anyOf": [TEXT, {"type": "array", "items": OBJECT}]},
    "stop_sequences": listed(TEXT, 16),
    "stream": FLAG,
    "temperature": numbers(0, 2),
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "thinking": OBJECT,
    "output_config": closed({"effort": one_of(*EFFORTS[2:]), "format": OBJECT}),
    "tools": listed(OBJECT, 128),
    "tool_choice": OBJECT,
    "metadata": closed({"user_id": TEXT}),
    "service_tier": one_of("auto", "standard_only"),
    "cache_control": OBJECT,
}
ANTHROPIC: Final = closed(_MESSAGES_FIELDS, "model", "messages", "max_tokens")
ANTHROPIC_COUNT: Final = closed(_MESSAGES_FIELDS, "model", "messages")
TOKENIZE: Final = closed(
    {"model": TEXT, "prompt": TEXT, "messages": MESSAGES, **TOOLS, "reasoning_effort": one_of(*EFFORTS)}
)
DETOKENIZE: Final = closed({"model": TEXT, "tokens": IDS}, "tokens")
CONVERSATION: Final = closed({"metadata": METADATA, "items": listed(OBJECT, 20)})
METADATA_ALONE: Final = closed({"metadata": METADATA})
ITEMS: Final = closed({"items": listed(OBJECT, 20)}, "items")

"""Which fields do the public API's requests have? As JSON schemas, for its OpenAPI page; the tests try every one.

A field may also be null, which asks for nothing; the schemas do not repeat that.
"""

from typing import Final

from services.recipe.conversation import EFFORTS
from services.recipe.openapi_parts import (
    ANTHROPIC_CHOICE,
    ANTHROPIC_MESSAGES,
    ANTHROPIC_TOOLS,
    CHAT_CHOICE,
    CHAT_MESSAGES,
    CHAT_TOOLS,
    COUNT,
    FLAG,
    IDS,
    ITEM,
    OBJECT,
    RESPONSE_CHOICE,
    RESPONSE_FORMAT,
    RESPONSE_TOOLS,
    TEXT,
    TEXT_BLOCK,
    TEXT_FORMAT,
    Schema,
    closed,
    listed,
    numbers,
    one_of,
    said,
    typed,
)
from services.recipe.schema import MAX_CHOICES, MAX_STOPS

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
    "response_format": RESPONSE_FORMAT,
}
TOOLS: Final = {"tools": CHAT_TOOLS, "tool_choice": CHAT_CHOICE, "parallel_tool_calls": FLAG}

CHAT: Final = closed(
    {
        "model": TEXT,
        "messages": CHAT_MESSAGES,
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
        "echo": said("the prompt stands before the answer; with logprobs it has its own", FLAG),
        "suffix": said("what follows the answer, for models that fill in", TEXT),
        **SAMPLING,
        **ANSWER,
        "max_tokens": said("0 with echo: the prompt alone", COUNT | {"minimum": 0}),
        **IDENTITY,
    },
    "model",
    "prompt",
)
_RESPONSE_FIELDS: Final[dict[str, Schema]] = {
    "model": TEXT,
    "input": {"anyOf": [TEXT, listed(ITEM, 4096)]},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "conversation": {"anyOf": [TEXT, closed({"id": TEXT}, "id")]},
    "background": FLAG,
    "include": listed(
        one_of("reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url"),
        3,
    ),
    "max_output_tokens": COUNT,
    "max_tool_calls": COUNT,
    "parallel_tool_calls": FLAG,
    "reasoning": closed({"effort": one_of(*EFFORTS), "summary": one_of("auto")}),
    "text": closed({"format": TEXT_FORMAT, "verbosity": one_of("medium")}),
    "tools": RESPONSE_TOOLS,
    "tool_choice": RESPONSE_CHOICE,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "truncation": one_of("auto", "disabled"),
    "stream": FLAG,
    "stream_options": closed({"include_obfuscation": said("false is the only value", FLAG)}),
    **SAMPLING,
    **IDENTITY,
}
RESPONSE: Final = closed(_RESPONSE_FIELDS, "model")
INPUT_TOKENS: Final = closed(_RESPONSE_FIELDS)
_MESSAGES_FIELDS: Final[dict[str, Schema]] = {
    "model": TEXT,
    "messages": ANTHROPIC_MESSAGES,
    "max_tokens": COUNT,
    "system": {"anyOf": [TEXT, listed(TEXT_BLOCK, 50_000)]},
    "stop_sequences": listed(TEXT, 16),
    "stream": FLAG,
    "temperature": numbers(0, 2),
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "thinking": {
        "anyOf": [
            typed("disabled", {}),
            typed("adaptive", {"display": one_of("summarized", "omitted")}),
            typed(
                "enabled",
                {"budget_tokens": COUNT | {"minimum": 1024}, "display": one_of("summarized", "omitted")},
                "budget_tokens",
            ),
        ]
    },
    "output_config": closed(
        {"effort": one_of(*EFFORTS[2:]), "format": typed("json_schema", {"schema": OBJECT}, "schema")}
    ),
    "tools": ANTHROPIC_TOOLS,
    "tool_choice": ANTHROPIC_CHOICE,
    "metadata": closed({"user_id": TEXT}),
    "service_tier": one_of("auto", "standard_only"),
    "cache_control": OBJECT,
}
ANTHROPIC: Final = closed(_MESSAGES_FIELDS, "model", "messages", "max_tokens")
ANTHROPIC_COUNT: Final = closed(_MESSAGES_FIELDS, "model", "messages")
TOKENIZE: Final = closed(
    {"model": TEXT, "prompt": TEXT, "messages": CHAT_MESSAGES, **TOOLS, "reasoning_effort": one_of(*EFFORTS)}
)
DETOKENIZE: Final = closed({"model": TEXT, "tokens": IDS}, "tokens")
CONVERSATION: Final = closed({"metadata": METADATA, "items": listed(ITEM, 20)})
METADATA_ALONE: Final = closed({"metadata": METADATA})
ITEMS: Final = closed({"items": listed(ITEM, 20)}, "items")

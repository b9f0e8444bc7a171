"""What may a request to the Responses API say? Every field, its range and its default.

As elsewhere nothing is ignored silently. Without any effect but their echo are `user`, `safety_identifier`,
`prompt_cache_key`, `metadata` and `max_tool_calls`, which counts calls of built-in tools, of which there are none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.recipe.constraint import Constraint, Format
from services.recipe.conversation import Conversation, Turn
from services.recipe.fields import Fields
from services.recipe.formats import read_named_schema
from services.recipe.identity import read_identity
from services.recipe.refusals import refuse
from services.recipe.responses_items import name_items, read_turns
from services.recipe.responses_tools import read_tools
from services.recipe.schema import (
    AnswerRules,
    ModelRules,
    Sampling,
    read_effort,
    read_model,
    read_sampling,
)

_UINT31 = (1 << 31) - 1
_NOT_HERE = "is not served here"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
}
_NEUTRAL_REASONING: dict[str, tuple[Any, ...]] = {
    "summary": ("auto",),  # leaves it to us whether there is one
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "context": ("auto",),
}
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_INCLUDES = (_ENCRYPTED, _LOGPROBS, "message.input_image.image_url")


@dataclass(frozen=True, slots=True)
class References:
    """What of earlier requests a request builds upon, read before all else. "" and None: nothing was said."""

    previous_response_id: str
    conversation_id: str
    stores: bool | None
    is_background: bool


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A validated body of /v1/responses.

    input_items: what this request adds to the context, each with an id.  seals: whether reasoning comes encoded too.
    drops_oldest: whether what does not fit the context may be left out.  echo: the fields that the response repeats.
    """

    conversation: Conversation
    input_items: Sequence[Mapping[str, Any]]
    sampling: Sampling
    rules: AnswerRules
    constraint: Constraint
    seals: bool
    drops_oldest: bool
    echo: Mapping[str, Any]


def read_references(body: Mapping[str, Any]) -> References:
    """Return what the request builds upon; raise a 400 for what contradicts itself."""
    fields = Fields(body)
    previous, conversation = fields.text("previous_response_id"), fields.take("conversation")
    if isinstance(conversation, dict):
        inner = Fields(conversation, "conversation")
        conversation = inner.text("id")
        inner.finish()
    if conversation is not None and not isinstance(conversation, str):
        raise fields.wrong("conversation", "must be the id of a conversation, or an object with it")
    if previous and conversation:
        raise fields.wrong("conversation", "cannot be combined with previous_response_id")
    stores = None if body.get("store") is None else fields.flag("store")
    return References(previous or "", conversation or "", stores, fields.flag("background"))


def read_request(
    body: dict[str, Any], model: ModelRules, earlier: Sequence[Mapping[str, Any]] = (), *, counts_only: bool = False
) -> ResponsesRequest:
    """Return the request in `body`; raise a 400 that names field and rule.

    earlier: the items of the context that the request builds upon.  counts_only: a request of
    /v1/responses/input_tokens, which may have no input of its own.
    """
    fields = Fields(body)
    fields.accept(("model", "previous_response_id", "conversation", "store", "background"))
    read_model(body)
    given = fields.take("input")
    items = [] if given is None and (counts_only or earlier) else name_items(given, "input")
    if not items and not earlier:
        raise fields.wrong("input", "must not be empty")
    instructions = fields.text("instructions")
    turns = [Turn("system", (instructions,))] if instructions else []
    turns += read_turns([*earlier, *items], "input", len(earlier), model)
    tools, use, told_tools = read_tools(fields, model)
    effort, told_effort = _reasoning(fields, model)
    format_, told_text = _text(fields)
    seals, num_logprobs = _includes(fields)
    max_tokens = fields.integer("max_output_tokens", 1, _UINT31)
    truncation = fields.take("truncation") or "disabled"
    if truncation not in ("auto", "disabled"):
        raise fields.wrong("truncation", 'must be "auto" or "disabled"')
    echo = read_identity(fields) | told_tools | {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1, _UINT31),
        "reasoning": told_effort,
        "text": told_text,
        "top_logprobs": num_logprobs or 0,
        "truncation": truncation,
    }  # fmt: skip
    fields.refuse_all_but(_NEUTRAL, _NOT_HERE)
    sampling = read_sampling(fields, num_logprobs, model.vocab_tokens)
    echo |= {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    rules = _rules(fields, max_tokens)
    fields.finish()
    conversation = Conversation(tuple(turns), tools, effort)
    constraint = Constraint(format_, use)
    return ResponsesRequest(conversation, items, sampling, rules, constraint, seals, truncation == "auto", echo)


def _rules(fields: Fields, max_tokens: int | None) -> AnswerRules:
    is_stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise fields.wrong("stream_options", "must be an object")
        inner = Fields(options, "stream_options")
        inner.refuse_all_but({"include_obfuscation": (False,)}, "true is not served here")
        inner.finish()
    return AnswerRules(
        max_tokens=max_tokens,
        stops=(),
        stop_token_ids=(),
        ignore_eos=False,
        num_choices=1,
        is_stream=is_stream,
        includes_usage=True,
        returns_token_ids=False,
    )


def _reasoning(fields: Fields, model: ModelRules) -> tuple[str, dict[str, Any]]:
    given = fields.take("reasoning")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise fields.wrong("reasoning", "must be an object with effort")
    inner = Fields(given, "reasoning")
    effort = read_effort(inner, "effort", model)
    inner.refuse_all_but(_NEUTRAL_REASONING, "is not served here: reasoning is told in full")
    inner.finish()
    return effort, {"effort": effort if model.default_effort != "none" else None, "summary": None}


def _text(fields: Fields) -> tuple[Format, dict[str, Any]]:
    given = fields.take("text")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise fields.wrong("text", "must be an object with format")
    text = Fields(given, "text")
    wanted = text.take("format")
    text.refuse_all_but({"verbosity": ("medium",)}, "is not served here")
    text.finish()
    if wanted is None:
        return Format(), {"format": {"type": "text"}}
    return _format(wanted), {"format": wanted}


def _format(given: Any) -> Format:
    """Return the form of the answer; OpenAI's here have no object around a schema's name."""
    if not isinstance(given, dict):
        raise refuse("text.format", "must be an object with type")
    fields = Fields(given, "text.format")
    kind = fields.take("type")
    if kind == "json_schema":
        return read_named_schema({name: value for name, value in given.items() if name != "type"}, "text.format")
    if kind not in ("text", "json_object", "regex", "grammar"):
        raise fields.wrong("type", 'must be "text", "json_object", "json_schema", "regex" or "grammar"')
    body = {"regex": "pattern", "grammar": "grammar"}.get(kind, "type")
    read = Format() if kind == "text" else Format(kind, fields.text(body), fields.name(body))
    fields.finish()
    return read


def _includes(fields: Fields) -> tuple[bool, int | None]:
    """Return whether reasoning is to come encoded too, and how many alternatives each token is to have, if any."""
    include = fields.take("include") or []
    if not isinstance(include, list) or not all(word in _INCLUDES for word in include):
        raise fields.wrong("include", f"must be a list of {', '.join(_INCLUDES)}")
    num_top = fields.integer("top_logprobs", 0, 20)
    if num_top and _LOGPROBS not in include:
        raise fields.wrong("top_logprobs", f"needs {_LOGPROBS} in include")
    return _ENCRYPTED in include, (num_top or 0) if _LOGPROBS in include else None


def drop_oldest(conversation: Conversation, num_turns: int) -> Conversation:
    """Return the conversation without its oldest turns: what leads it, and its last `num_turns`, stay."""
    turns = conversation.turns
    head = 0
    while head < len(turns) and turns[head].role in {"system", "developer"}:
        head += 1
    return replace(conversation, turns=turns[:head] + turns[max(head, len(turns) - num_turns) :])

"""What may a request to the Messages API say? Every field, its range and its default.

As elsewhere nothing is ignored silently. Without any effect are `metadata`, `service_tier` and `cache_control`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.recipe.anthropic_turns import NO_TOOLS, read_turns
from services.recipe.constraint import Constraint, Format, ToolUse
from services.recipe.conversation import EFFORTS, Conversation, Tool
from services.recipe.fields import Fields
from services.recipe.refusals import refuse
from services.recipe.schema import AnswerRules, ModelRules, Sampling, read_model, read_sampling
from services.recipe.tools import MAX_TOOLS, check_name, check_names, declared, read_schema

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
_UINT31 = (1 << 31) - 1
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_NOT_HERE = "is not served here"
_BUDGETS = ((2048, "low"), (8192, "medium"), (32768, "high"))
"""A budget below this many tokens asks for this effort; more asks for "max"."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A validated body of /v1/messages. shows_thinking: whether thinking blocks hold their text."""

    model: str
    conversation: Conversation
    sampling: Sampling
    rules: AnswerRules
    constraint: Constraint
    shows_thinking: bool


def read_messages_request(body: dict[str, Any], model: ModelRules, *, counts_only: bool = False) -> MessagesRequest:
    """Return the request in `body`; raise a 400 that names field and rule.

    counts_only: a request of /v1/messages/count_tokens, which generates nothing.
    """
    name, fields = read_model(body), Fields(body)
    fields.accept(("model", "cache_control"))
    max_tokens = fields.integer("max_tokens", 1, _UINT31)
    if max_tokens is None and not counts_only:
        raise fields.wrong("max_tokens", "is required: an integer of at least 1")
    turns = read_turns(fields, model)
    tools, use = _tools(fields, model)
    effort, shows_thinking, format_ = _thinking_and_format(fields, model, max_tokens)
    _accept_identity(fields)
    fields.refuse_all_but(_NEUTRAL, _NOT_HERE)
    rules = _rules(fields, max_tokens)
    # Anthropic's four, by their names; no others have a place in this API.
    own = {field: fields.take(field) for field in ("temperature", "top_p", "top_k")}
    sampling = read_sampling(Fields(own), None, model.vocab_tokens)
    fields.finish()
    conversation, constraint = Conversation(turns, tools, effort), Constraint(format_, use)
    return MessagesRequest(name, conversation, sampling, rules, constraint, shows_thinking)


def _rules(fields: Fields, max_tokens: int | None) -> AnswerRules:
    stops = fields.take("stop_sequences") or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.wrong("stop_sequences", f"must be a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise fields.wrong("stop_sequences", f"must hold strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return AnswerRules(
        max_tokens=max_tokens,
        stops=tuple(stops),
        stop_token_ids=(),
        ignore_eos=False,
        num_choices=1,
        is_stream=fields.flag("stream"),
        includes_usage=True,
        returns_token_ids=False,
    )


def _accept_identity(fields: Fields) -> None:
    """Take what says who asks and at which price, which changes no answer."""
    metadata = fields.take("metadata")
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise fields.wrong("metadata", "must be an object")
        inner = Fields(metadata, "metadata")
        inner.text("user_id")
        inner.finish()
    if fields.take("service_tier") not in (None, "auto", "standard_only"):
        raise fields.wrong("service_tier", 'must be "auto" or "standard_only"')


def _thinking_and_format(fields: Fields, model: ModelRules, max_tokens: int | None) -> tuple[str, bool, Format]:
    """Return how hard to think, whether to show it, and the form of the answer."""
    given = fields.take("output_config")
    if given is not None and not isinstance(given, dict):
        raise fields.wrong("output_config", "must be an object")
    config = Fields(given or {}, "output_config")
    asked = config.text("effort")
    if asked is not None and asked not in EFFORTS[2:]:
        raise config.wrong("effort", f"must be one of {', '.join(EFFORTS[2:])}")
    format_ = _format(config)
    config.finish()
    if asked is not None and model.default_effort == "none":
        raise config.wrong("effort", "is not for this model: it does not reason before it answers")
    effort, shows = _thinking(fields, model, max_tokens)
    return (effort if effort == "none" else asked or effort), shows, format_


def _thinking(fields: Fields, model: ModelRules, max_tokens: int | None) -> tuple[str, bool]:
    """Return what `thinking` asks for; the model's own effort when it is absent or "adaptive"."""
    given = fields.take("thinking")
    if given is None:
        return model.default_effort, True
    if not isinstance(given, dict):
        raise fields.wrong("thinking", "must be an object with type")
    thinking = Fields(given, "thinking")
    kind = thinking.take("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise thinking.wrong("type", 'must be "enabled", "disabled" or "adaptive"')
    effort, shows = "none" if kind == "disabled" else model.default_effort, True
    if kind != "disabled":
        display = thinking.take("display")
        if display not in (None, "summarized", "omitted"):
            raise thinking.wrong("display", 'must be "summarized" or "omitted"')
        shows = display != "omitted"
    if kind == "enabled":
        budget = thinking.integer("budget_tokens", 1024, _UINT31)
        if budget is None or (max_tokens is not None and budget >= max_tokens):
            raise thinking.wrong("budget_tokens", "must be at least 1024 and less than max_tokens")
        if model.default_effort == "none":
            raise thinking.wrong("type", '"enabled" is not for this model: it does not reason before it answers')
        effort = next((effort for limit, effort in _BUDGETS if budget < limit), "max")
    thinking.finish()
    return effort, shows


def _format(config: Fields) -> Format:
    given = config.take("format")
    if given is None:
        return Format()
    where = config.name("format")
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with type and schema")
    fields = Fields(given, where)
    if fields.take("type") != "json_schema":
        raise fields.wrong("type", 'must be "json_schema"')
    schema = read_schema(fields, "schema")
    fields.finish()
    return Format("json_schema", schema, where)


def _tools(fields: Fields, model: ModelRules) -> tuple[tuple[Tool, ...], ToolUse]:
    given = fields.take("tools") or []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise fields.wrong("tools", f"must be a list of at most {MAX_TOOLS} tools")
    if given and not model.takes_tools:
        raise fields.wrong("tools", NO_TOOLS)
    strict: dict[str, str] = {}
    tools = tuple(_tool(tool, f"tools[{at}]", strict) for at, tool in enumerate(given))
    check_names(tools, fields)
    choice = fields.take("tool_choice")
    if choice is None:
        return tools, ToolUse(strict_names=tuple(strict), strict_field=next(iter(strict.values()), ""))
    return _choose(choice, tools, strict)


def _choose(given: Any, tools: Sequence[Tool], strict: dict[str, str]) -> tuple[tuple[Tool, ...], ToolUse]:
    if not isinstance(given, dict):
        raise refuse("tool_choice", "must be an object with type")
    choice = Fields(given, "tool_choice")
    kind = choice.take("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise choice.wrong("type", 'must be "auto", "any", "tool" or "none"')
    if kind != "none" and not tools:
        raise refuse("tool_choice", "needs tools")
    names = (declared(choice.text("name"), tools, choice.name("name")),) if kind == "tool" else ()
    is_parallel = kind == "none" or not choice.flag("disable_parallel_tool_use")
    choice.finish()
    if kind == "none":
        return (), ToolUse()
    return tuple(tools), ToolUse(
        kind != "auto", names, is_parallel, tuple(strict), "tool_choice.type", next(iter(strict.values()), "")
    )


def _tool(given: Any, where: str, strict: dict[str, str]) -> Tool:
    if not isinstance(given, dict):
        raise refuse(where, "must be an object with name and input_schema")
    fields = Fields(given, where)
    if fields.take("type") not in (None, "custom"):
        raise fields.wrong("type", 'must be "custom": tools that run on a server are not served here')
    name, description = check_name(fields.text("name"), fields), fields.text("description")
    if "input_schema" not in given:
        raise fields.wrong("input_schema", "must be a JSON schema")
    schema = read_schema(fields, "input_schema")
    if fields.flag("strict"):
        strict[name] = fields.name("strict")
    fields.accept(("cache_control", "eager_input_streaming"))  # arguments always come as they are made
    fields.refuse_all_but(_NEUTRAL_TOOL, _NOT_HERE)
    fields.finish()
    return Tool(name, description or "", schema)

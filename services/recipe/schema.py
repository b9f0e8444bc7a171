"""What may a request say? Every field, its range and its default.

Nothing is ignored silently: a field we do not know, or know and cannot honour, is a 400 that names it. Accepted without
any effect are only `store` and what `identity.py` reads.
"""

from dataclasses import dataclass
from typing import Any

from services.recipe.constraint import FREE, TEXT, Constraint, Format, ToolUse
from services.recipe.conversation import EFFORTS, Conversation
from services.recipe.fields import Fields, is_id, is_number
from services.recipe.formats import read_format
from services.recipe.identity import read_identity
from services.recipe.messages import read_messages
from services.recipe.refusals import refuse
from services.recipe.tools import read_tools

MAX_CHOICES = 16
MAX_ALL_CHOICES = 64
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
_INT64 = 1 << 63
_UINT31 = (1 << 31) - 1
# fp32 logits divided by less than this reach infinity or drown the noise: it is greedy in all but name.
_SMALLEST_TEMPERATURE = 1e-5
_SMALLEST_PENALTY = 1e-3

_NOT_YET = "is not served by this version"
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
}
_NEUTRAL_TOOLS: dict[str, tuple[Any, ...]] = {"tools": ([],), "tool_choice": ("none",)}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {"best_of": (1,)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; proto SamplingParams has the units. seed None: nobody asked for one."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """When the answer ends and how it is told.

    max_tokens: None is as many as fit into the context, 0 shows the prompt alone.
    """

    max_tokens: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    num_choices: int
    is_stream: bool
    includes_usage: bool
    returns_token_ids: bool


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What of a model decides which requests make sense. default_effort: "none" for models that do not reason."""

    vocab_tokens: int
    takes_tools: bool = False
    takes_images: bool = False
    default_effort: str = "none"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated body of /v1/chat/completions."""

    model: str
    conversation: Conversation
    sampling: Sampling
    rules: AnswerRules
    constraint: Constraint = FREE


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated body of /v1/completions.

    prompts: texts, or ids to be used exactly as they are.  suffix: what is to follow the answer, "" for anything.
    """

    model: str
    prompts: tuple[str | list[int], ...]
    suffix: str
    echo: bool
    sampling: Sampling
    rules: AnswerRules
    format: Format = TEXT

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to every token of the prompt are to be told; None: nothing of them."""
        return self.sampling.num_logprobs if self.echo else None


def read_model(body: dict[str, Any]) -> str:
    """Return the model's name; looked at first, because an unknown model makes all else meaningless."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise refuse("model", "must be the name of a model; GET /v1/models lists them")
    return model


def read_chat(body: dict[str, Any], model_rules: ModelRules) -> ChatRequest:
    """Return the chat request in `body`; raise a 400 that names field and rule."""
    model, fields = read_model(body), Fields(body)
    fields.accept(("model",))
    conversation, tool_use = read_conversation(fields, model_rules)
    wants_logprobs = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, 20)
    if num_top and not wants_logprobs:
        raise fields.wrong("top_logprobs", "needs logprobs: true")
    # The newer name; both may be there if they agree.
    newer, older = fields.integer("max_completion_tokens", 1, _UINT31), fields.integer("max_tokens", 1, _UINT31)
    if newer is not None and older is not None and newer != older:
        raise fields.wrong("max_completion_tokens", "differs from max_tokens; give one of them")
    format_ = read_format(fields, "response_format")
    fields.refuse_all_but(_NEUTRAL_CHAT, _NOT_YET)
    sampling = read_sampling(fields, (num_top or 0) if wants_logprobs else None, model_rules.vocab_tokens)
    rules = read_rules(fields, newer or older, model_rules.vocab_tokens)
    fields.finish()
    return ChatRequest(model, conversation, sampling, rules, Constraint(format_, tool_use))


def read_conversation(fields: Fields, model: ModelRules) -> tuple[Conversation, ToolUse]:
    """Return messages, tools and effort, and how the tools may be used."""
    given = fields.take("messages")
    turns = read_messages(given, takes_tools=model.takes_tools, takes_images=model.takes_images)
    if model.takes_tools:
        tools, tool_use = read_tools(fields)
    else:
        tools, tool_use = (), ToolUse()
        fields.refuse_all_but(_NEUTRAL_TOOLS, _NOT_YET)
    return Conversation(turns, tools, read_effort(fields, "reasoning_effort", model)), tool_use


def read_effort(fields: Fields, field: str, model: ModelRules) -> str:
    """Return how hard to think: one of EFFORTS, the model's own when the field is absent."""
    effort = fields.text(field)
    if effort is None:
        return model.default_effort
    if model.default_effort == "none" and effort != "none":
        raise fields.wrong(field, "is not for this model: it does not reason before it answers")
    if effort not in EFFORTS:
        raise fields.wrong(field, f"must be one of {', '.join(EFFORTS)}")
    return effort


def read_completion(body: dict[str, Any], *, vocab_tokens: int) -> CompletionRequest:
    """Return the completion request in `body`; raise a 400 that names field and rule."""
    model, fields = read_model(body), Fields(body)
    fields.accept(("model",))
    prompts = _prompts(fields.take("prompt"), vocab_tokens)
    num_logprobs = fields.integer("logprobs", 0, 5)
    echo, suffix = fields.flag("echo"), fields.text("suffix") or ""
    if echo and suffix:
        raise fields.wrong("echo", "cannot be combined with suffix")
    format_ = read_format(fields, "response_format")
    fields.refuse_all_but(_NEUTRAL_COMPLETION, _NOT_YET)
    sampling = read_sampling(fields, num_logprobs, vocab_tokens)
    rules = read_rules(fields, fields.integer("max_tokens", 0 if echo else 1, _UINT31), vocab_tokens)
    fields.finish()
    if len(prompts) * rules.num_choices > MAX_ALL_CHOICES:
        raise refuse("prompt", f"prompts times n must be at most {MAX_ALL_CHOICES}")
    return CompletionRequest(model, prompts, suffix, echo, sampling, rules, format_)


def read_sampling(fields: Fields, num_logprobs: int | None, vocab_tokens: int) -> Sampling:
    """Return how tokens are to be drawn; num_logprobs: as the caller's API spells it, already read."""
    # OpenAI's default, not the model folder's: the same request means the same whichever model answers.
    temperature = fields.number("temperature", 1.0, 0, 2)
    top_k = fields.integer("top_k", -1, _UINT31)
    repetition = fields.number("repetition_penalty", 1.0, 0, 2, above=True)
    if repetition < _SMALLEST_PENALTY:
        raise fields.wrong("repetition_penalty", f"must be at least {_SMALLEST_PENALTY:g}: smaller ones overflow")
    return Sampling(
        temperature=temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0,
        top_p=max(fields.number("top_p", 1.0, 0, 1, above=True), 1e-30),  # stays above 0 as fp32
        top_k=max(top_k or 0, 0),  # -1 is how other servers spell "off"
        min_p=fields.number("min_p", 0.0, 0, 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(fields, vocab_tokens),
        seed=fields.integer("seed", -_INT64, _INT64 - 1),
        num_logprobs=num_logprobs,
    )


def read_rules(fields: Fields, max_tokens: int | None, vocab_tokens: int) -> AnswerRules:
    """Return when the answer ends and how it is told; max_tokens: already read."""
    read_identity(fields)
    fields.flag("store")  # true keeps nothing: only responses are kept, in the API of that name
    is_stream = fields.flag("stream")
    return AnswerRules(
        max_tokens=max_tokens,
        stops=_stops(fields),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_IDS, vocab_tokens - 1),
        ignore_eos=fields.flag("ignore_eos"),
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        is_stream=is_stream,
        includes_usage=_includes_usage(fields, is_stream=is_stream),
        returns_token_ids=fields.flag("return_token_ids"),
    )


def _includes_usage(fields: Fields, *, is_stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise fields.wrong("stream_options", "must be an object")
    if not is_stream:
        raise fields.wrong("stream_options", "needs stream: true")
    inner = Fields(options, "stream_options")
    includes_usage = inner.flag("include_usage")
    inner.finish()
    return includes_usage


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise fields.wrong("stop", f"must hold strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_tokens: int) -> tuple[tuple[int, float], ...]:
    given = fields.take("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict) or len(given) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"must be an object of at most {MAX_BIASES} token ids and biases")
    biases = {}
    for key, bias in given.items():
        # One spelling per id, or "5" and "05" could say different things about the same token.
        is_plain = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
        if not is_plain or int(key) >= vocab_tokens:
            raise fields.wrong("logit_bias", f"must have token ids from 0 to {vocab_tokens - 1} as keys")
        if not is_number(bias) or not -100 <= bias <= 100:
            raise fields.wrong("logit_bias", "must have biases from -100 to 100")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _prompts(given: Any, vocab_tokens: int) -> tuple[str | list[int], ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise refuse("prompt", "must be a string, a list of token ids, or a list of such")
    if isinstance(given[0], int) and not isinstance(given[0], bool):
        return (_ids(given, "prompt", vocab_tokens),)
    if len(given) > MAX_ALL_CHOICES:
        raise refuse("prompt", f"must be at most {MAX_ALL_CHOICES} prompts")
    return tuple(
        prompt if isinstance(prompt, str) else _ids(prompt, f"prompt[{i}]", vocab_tokens)
        for i, prompt in enumerate(given)
    )


def _ids(given: Any, where: str, vocab_tokens: int) -> list[int]:
    if not isinstance(given, list) or not given or not all(is_id(item, vocab_tokens - 1) for item in given):
        raise refuse(where, f"must be a string or a list of token ids from 0 to {vocab_tokens - 1}")
    return list(given)

"""Which engine requests does one API request become? One per choice."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from proto.common_pb2 import Grammar, LogitBias, Request, SamplingParams, StopRules
from services.recipe.model_folder import ServedModel
from services.recipe.pictures import Prompt
from services.recipe.refusals import refuse, too_long
from services.recipe.schema import AnswerRules, Sampling
from services.recipe.seeds import choice_seed

ANSWER_SECONDS = 1800.0
"""Nobody waits longer for an answer: SDKs give up after ten silent minutes, streams may run on."""


@dataclass(frozen=True, slots=True)
class Job:
    """One choice: its place in the answer, the prompt it continues, and the message for the entrypoint."""

    choice: int
    prompt: int
    prompt_ids: Sequence[int]
    request: Request


def plan_jobs(
    request_id: str,
    model: ServedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    rules: AnswerRules,
    *,
    grammar: Grammar | None,
    num_prompt_logprobs: int | None,
    context_tokens: int,
    prompt_field: str,
    traceparent: str,
) -> tuple[Job, ...]:
    """Return a job per choice, prompt by prompt; raise a 400 when a prompt and its answer do not fit the context.

    Choice k of every prompt samples with the same seed, so a prompt's choices do not depend on its neighbours.
    """
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    deadline = time.time() + ANSWER_SECONDS
    is_single = len(prompts) * rules.num_choices == 1
    jobs = []
    for at, prompt in enumerate(prompts):
        max_tokens = _answer_tokens(len(prompt.ids), rules.max_tokens, context_tokens, prompt_field)
        for k in range(rules.num_choices):
            choice = at * rules.num_choices + k
            request = Request(
                request_id=request_id if is_single else f"{request_id}-{choice}",
                model=model.name,
                prompt_token_ids=prompt.ids,
                sampling=_sampling_params(sampling, choice_seed(seed, k)),
                stop=_stop_rules(rules, max_tokens, model),
                deadline_unix_seconds=deadline,
                traceparent=traceparent,
                grammar=grammar,
                num_prompt_logprobs=num_prompt_logprobs,
                images=prompt.images,
            )
            jobs.append(Job(choice, at, prompt.ids, request))
    return tuple(jobs)


def _answer_tokens(prompt_tokens: int, max_tokens: int | None, context_tokens: int, prompt_field: str) -> int:
    """Return the answer's limit, at least 1, which is what engines compute; without one it may fill the context."""
    if prompt_tokens == 0:
        raise refuse(prompt_field, "must have at least one token")
    room = context_tokens - prompt_tokens
    if room < (max_tokens or 1):
        wanted = f"up to {max_tokens}" if max_tokens else "at least 1"
        raise too_long(prompt_field if room < 1 else "max_tokens", context_tokens, str(prompt_tokens), wanted)
    return room if max_tokens is None else max(max_tokens, 1)


def _sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        seed=seed,
        num_logprobs=sampling.num_logprobs,
    )


def _stop_rules(rules: AnswerRules, max_tokens: int, model: ServedModel) -> StopRules:
    own = () if rules.ignore_eos else model.eos_token_ids
    return StopRules(
        max_tokens=max_tokens,
        stop_token_ids=sorted({*own, *rules.stop_token_ids}),
        ignore_eos=rules.ignore_eos,
    )

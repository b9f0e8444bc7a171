"""What does one process answer, without any service: the yardstick of every path?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from e2e.client import BOTH, Sampling
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator

_WHOLE_PROMPT_TOKENS = 8192
_NUM_BLOCKS = 64
"""Of 128 tokens: room for a batch of the longest prompts."""

T = TypeVar("T")
Answers = dict[str, dict[str, tuple[int, ...]]]
"""Sampling name -> prompt name -> ids."""


def with_model(
    model_dir: Path,
    work: Callable[[Executor], T],
    *,
    dtype: Literal["bf16", "fp32", "int8"],
    num_blocks: int = _NUM_BLOCKS,
) -> T:
    """Do some work with a model of this process, which nobody keeps.

    One thread: a second one takes a third more of both cores, and whole suites run beside this.
    """
    found = work(Executor.load(model_dir, dtype=dtype, num_blocks=num_blocks, threads=1))
    gc.collect()  # half a gigabyte of weights must not stay while the services load theirs
    return found


def alone(
    executor: Executor, prompts: Mapping[str, Sequence[int]], *, max_tokens: int, samplings: Sequence[Sampling] = BOTH
) -> Answers:
    """Answer one prompt at a time, whole. What samplings have in common is computed once: logits know of none."""
    params = {one.name: _params(one) for one in samplings}
    answers = {name: _alone(executor, ids, params, max_tokens) for name, ids in prompts.items()}
    return {sampling: {name: answers[name][sampling] for name in prompts} for sampling in params}


def together(
    executor: Executor,
    prompts: Mapping[str, Sequence[int]],
    *,
    max_tokens: int,
    samplings: Sequence[Sampling] = BOTH,
    chunk_tokens: int | None = None,
    at_once: int,
) -> Answers:
    """Answer `at_once` prompts at a time, in chunks of `chunk_tokens` (None: whole)."""
    generator = Generator(executor, chunk_tokens=chunk_tokens or _WHOLE_PROMPT_TOKENS, max_batch=at_once)
    found = {}
    for one in samplings:
        results = generator.generate([GenerateRequest(ids, _params(one), max_tokens) for ids in prompts.values()])
        found[one.name] = {prompt: result.token_ids for prompt, result in zip(prompts, results, strict=True)}
    return found


def _params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(**dict(sampling.fields))  # type: ignore[arg-type]  # the API's names are the engine's


def _alone(
    executor: Executor, prompt: Sequence[int], samplings: Mapping[str, SamplingParams], max_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Each sampling's answer to one prompt."""
    table = range(1, 1 - (-(len(prompt) + max_tokens) // executor.layout.block_tokens))
    slot = int(executor.window is not None)
    if slot:
        executor.reset_window(slot)
    return _answers(executor, Row(0, prompt, 0, table, window=slot), tuple(prompt), samplings, max_tokens)


def _answers(
    executor: Executor, newest: Row, tokens: tuple[int, ...], samplings: Mapping[str, SamplingParams], num_tokens: int
) -> dict[str, tuple[int, ...]]:
    """How `tokens` go on, of which `newest` are still to be computed. Samplings part where they draw different tokens."""
    step = executor.launch(Batch((replace(newest, sampling=next(iter(samplings.values()))),)))

    def draw(sampling: SamplingParams) -> int:
        # A GPU has drawn for one sampling already: each is drawn for anew, from the same logits.
        again = replace(step, batch=Batch((replace(newest, sampling=sampling),)), draws=None)
        return executor.collect(again)[0].token_id

    drawn = {name: draw(sampling) for name, sampling in samplings.items()}
    if num_tokens == 1:
        return {name: (token,) for name, token in drawn.items()}
    window = executor.read_window(newest.window) if newest.window else b""
    answers: dict[str, tuple[int, ...]] = {}
    for token in set(drawn.values()):
        if window:
            executor.write_window(newest.window, window)
        # What another token's sampling left at this position and after it is written over, in order.
        preceding = tokens[max(len(tokens) - executor.preceding_tokens, 0) :]
        following = replace(newest, token_ids=(token,), position=len(tokens), preceding=preceding)
        those = {name: sampling for name, sampling in samplings.items() if drawn[name] == token}
        rest = _answers(executor, following, (*tokens, token), those, num_tokens - 1)
        answers |= {name: (token, *rest[name]) for name in those}
    return answers

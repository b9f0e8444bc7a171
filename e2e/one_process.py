"""What does one process answer, without any service: the yardstick of every path?"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from e2e.client import Sampling
from kernels.batch import Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator

_WHOLE_PROMPT_TOKENS = 8192
_NUM_BLOCKS = 64
"""Of 128 tokens: room for a batch of the longest prompts."""


def one_process(
    model_dir: Path,
    prompts: Mapping[str, Sequence[int]],
    *,
    samplings: Sequence[Sampling],
    max_tokens: int,
    dtype: Literal["bf16", "fp32", "int8"],
    chunk_tokens: int | None = None,
    at_once: int = 1,
    num_blocks: int = _NUM_BLOCKS,
    threads: int = 2,
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Answer `at_once` prompts at a time, in chunks of `chunk_tokens` (None: whole).

    Returns sampling -> prompt -> token ids.
    """
    executor = Executor.load(model_dir, dtype=dtype, num_blocks=num_blocks, threads=threads)
    params = {one.name: SamplingParams(**dict(one.fields)) for one in samplings}  # type: ignore[arg-type]  # the API's names are the engine's
    if at_once == 1 and chunk_tokens is None and executor.window is None:
        answers = {name: _alone(executor, ids, params, max_tokens) for name, ids in prompts.items()}
        found = {sampling: {name: answers[name][sampling] for name in prompts} for sampling in params}
    else:
        found = {}
        generator = Generator(executor, chunk_tokens=chunk_tokens or _WHOLE_PROMPT_TOKENS, max_batch=at_once)
        for name, sampling in params.items():
            results = generator.generate([GenerateRequest(ids, sampling, max_tokens) for ids in prompts.values()])
            found[name] = {prompt: result.token_ids for prompt, result in zip(prompts, results, strict=True)}
        del generator
    # Half a gigabyte of weights must not stay while the services load theirs.
    del executor
    gc.collect()
    return found


def _alone(
    executor: Executor, prompt: Sequence[int], samplings: Mapping[str, SamplingParams], max_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Each sampling's answer to one prompt, which is computed whole, and once: its logits know of no sampling."""
    table = range(1, 1 - (-(len(prompt) + max_tokens) // executor.layout.block_tokens))
    whole = Row(0, prompt, 0, table, sampling=next(iter(samplings.values())))
    step = executor.launch(Batch((whole,)))
    drawn = {
        name: executor.collect(replace(step, batch=Batch((replace(whole, sampling=sampling),))))[0].token_id
        for name, sampling in samplings.items()
    }
    answers = {}
    for name, sampling in samplings.items():
        answer = [drawn[name]]
        while len(answer) < max_tokens:
            newest = Row(0, answer[-1:], len(prompt) + len(answer) - 1, table, sampling=sampling)
            answer.append(executor.collect(executor.launch(Batch((newest,))))[0].token_id)
        answers[name] = tuple(answer)
    return answers

"""What does one process answer, without any service: the yardstick of every path?"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from e2e.client import Sampling
from kernels.batch import SamplingParams
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
    generator = Generator(executor, chunk_tokens=chunk_tokens or _WHOLE_PROMPT_TOKENS, max_batch=at_once)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for sampling in samplings:
        params = SamplingParams(**dict(sampling.fields))  # type: ignore[arg-type]  # the API's names are the engine's
        requests = [GenerateRequest(token_ids=ids, sampling=params, max_tokens=max_tokens) for ids in prompts.values()]
        results = generator.generate(requests)
        found[sampling.name] = {name: result.token_ids for name, result in zip(prompts, results, strict=True)}
    # Half a gigabyte of weights must not stay while the services load theirs.
    del generator, executor
    gc.collect()
    return found

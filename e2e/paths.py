"""Which tokens does each path give? The one-process yardstick, and a running suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from e2e.client import GREEDY, SEEDED, Sampling, complete_all
from e2e.one_process import one_process
from e2e.prompts import Prompt
from e2e.suite import Suite

MAX_TOKENS = 6
BOTH = (GREEDY, SEEDED)

Expected = dict[str, dict[str, tuple[int, ...]]]
"""Sampling name -> prompt name -> ids."""


def expected_tokens(
    model_dir: Path,
    wanted: Sequence[Prompt],
    *,
    dtype: Literal["bf16", "fp32"],
    chunk_tokens: int | None = None,
    at_once: int = 1,
    max_tokens: int = MAX_TOKENS,
    num_blocks: int = 64,
    threads: int = 2,
) -> Expected:
    """Tokens of the one-process path.  num_blocks: of its pool.  threads: a tiny model is fastest with one."""
    return one_process(
        model_dir,
        {p.name: p.token_ids for p in wanted},
        samplings=BOTH,
        max_tokens=max_tokens,
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        at_once=at_once,
        num_blocks=num_blocks,
        threads=threads,
    )


async def tokens_of(
    suite: Suite,
    wanted: Sequence[Prompt],
    *,
    at_once: int,
    max_tokens: int = MAX_TOKENS,
    samplings: Sequence[Sampling] = BOTH,
) -> Expected:
    """Tokens of the suite, `at_once` prompts at a time."""
    found: Expected = {}
    for sampling in samplings:
        answers = await complete_all(
            suite.base_url, [p.token_ids for p in wanted], at_once=at_once, max_tokens=max_tokens, sampling=sampling
        )
        found[sampling.name] = {p.name: a.token_ids for p, a in zip(wanted, answers, strict=True)}
    return found

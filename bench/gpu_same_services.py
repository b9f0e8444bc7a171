"""Do services on a GPU answer what one process answers there, greedy and seeded, however many replicas there are?"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from e2e.client import BOTH, Answer, complete_all
from e2e.one_process import Answers, alone, with_model
from e2e.paths import in_turn
from e2e.suite import Suite
from kernels.executor import Executor

MAX_TOKENS = 12
_AT_ONCE = 8
_CHUNK_TOKENS = "128"
_NUM_BLOCKS = 64
_SECONDS = 240.0
"""Of one suite's start and of all of its answers, each."""
Prompts = dict[str, tuple[int, ...]]


def through_services(
    model_dir: Path, counts: Sequence[int], *, dtype: Literal["bf16", "fp32"], say: Callable[..., None]
) -> None:
    """counts: of prefill and of decode replicas, one suite after the other; one that fails does not hide the others."""
    wanted, expected = yardstick(model_dir, dtype)
    for count in counts:
        try:
            asyncio.run(_compare(model_dir, count, dtype, wanted, expected, say))
        except Exception as error:  # noqa: BLE001 - said, and the next is tried
            say(way=_named(count), same=False, failed=f"{type(error).__name__}: {str(error)[-400:]}")


def yardstick(model_dir: Path, dtype: Literal["bf16", "fp32"]) -> tuple[Prompts, Answers]:
    """What one process answers to every prompt alone. Its memory is given back."""
    from bench.gpu_same_tokens import prompts_of

    def compute(executor: Executor) -> tuple[Prompts, Answers]:
        ids = prompts_of(model_dir, has_windows=executor.window is not None)
        wanted = {f"{number}, {len(each)} tokens": each for number, each in enumerate(ids)}
        return wanted, alone(executor, wanted, max_tokens=MAX_TOKENS, samplings=BOTH)

    found = with_model(model_dir, compute, dtype=dtype, num_blocks=_NUM_BLOCKS)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the services' processes plan with what is free
    return found


async def _compare(
    model_dir: Path, count: int, dtype: str, wanted: Prompts, expected: Answers, say: Callable[..., None]
) -> None:
    """Half of the prompts greedy and half seeded, then the other way round: the second time blocks are found."""
    env = {"FATHOM_PREFILL_CHUNK_TOKENS": _CHUNK_TOKENS}
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as scratch:
        async with Suite.running(
            Path(scratch), model=model_dir, dtype=dtype, prefill=count, decode=count, env=env
        ) as suite:
            for first, when in ((0, "cold"), (1, "over what is there")):
                each = in_turn(len(wanted), first=first)
                async with asyncio.timeout(_SECONDS):
                    answers = await complete_all(
                        suite.base_url, list(wanted.values()), at_once=_AT_ONCE, max_tokens=MAX_TOKENS, samplings=each
                    )
                for sampling in BOTH:
                    mine = [
                        (name, answer) for name, one, answer in zip(wanted, each, answers, strict=True)
                        if one is sampling
                    ]  # fmt: skip
                    _say_differing(f"{_named(count)}, {when}, {sampling.name}", mine, expected[sampling.name], say)
            loads = await suite.decode_loads()
            say(way=f"{_named(count)}: decode replicas that answer", replicas=len(loads), same=len(loads) == count)


def _say_differing(
    way: str, mine: list[tuple[str, Answer]], expected: dict[str, tuple[int, ...]], say: Callable[..., None]
) -> None:
    differ = [name for name, answer in mine if answer.token_ids != expected[name]]
    cached = sum(answer.cached_tokens for _, answer in mine)
    say(way=way, answers=len(mine), cached_tokens=cached, differ=len(differ), first=differ[:3], same=not differ)


def _named(count: int) -> str:
    return f"{count} prefill and {count} decode replicas"

"""Which tokens does each path give? The one-process yardstick, and a running suite."""

from __future__ import annotations

from collections.abc import Sequence

from e2e.client import BOTH, Answer, Sampling, complete_all
from e2e.one_process import Answers
from e2e.prompts import Prompt
from e2e.suite import Suite

MAX_TOKENS = 4
"""The first is drawn by prefill; prompts of 127 and 255 tokens end a block with their second."""


def ids_of(wanted: Sequence[Prompt]) -> dict[str, tuple[int, ...]]:
    """Token ids by name, as the one-process yardstick takes them."""
    return {p.name: p.token_ids for p in wanted}


def in_turn(number: int, *, first: int = 0) -> list[Sampling]:
    """Greedy and seeded in turn: half of the prompts take the one, half the other.  first: 1 begins with seeded."""
    return [BOTH[(index + first) % len(BOTH)] for index in range(number)]


def of_each(expected: Answers, wanted: Sequence[Prompt], samplings: Sequence[Sampling]) -> dict[str, tuple[int, ...]]:
    """What the yardstick says of prompts that take one sampling each, by the prompts' names."""
    return {p.name: expected[one.name][p.name] for p, one in zip(wanted, samplings, strict=True)}


async def answers_of(
    suite: Suite,
    wanted: Sequence[Prompt],
    samplings: Sequence[Sampling],
    *,
    at_once: int,
    max_tokens: int = MAX_TOKENS,
) -> list[Answer]:
    """Answers of the suite to prompts that take one sampling each, `at_once` at a time."""
    return await complete_all(
        suite.base_url, [p.token_ids for p in wanted], at_once=at_once, max_tokens=max_tokens, samplings=samplings
    )


async def mixed_tokens_of(
    suite: Suite, wanted: Sequence[Prompt], samplings: Sequence[Sampling], *, at_once: int
) -> dict[str, tuple[int, ...]]:
    """The answers' tokens, by the prompts' names."""
    found = await answers_of(suite, wanted, samplings, at_once=at_once)
    return {p.name: a.token_ids for p, a in zip(wanted, found, strict=True)}


async def tokens_of(
    suite: Suite,
    wanted: Sequence[Prompt],
    *,
    at_once: int,
    max_tokens: int = MAX_TOKENS,
    samplings: Sequence[Sampling] = BOTH,
) -> Answers:
    """Tokens of the suite, `at_once` prompts at a time, for one sampling after the other."""
    found: Answers = {}
    for one in samplings:
        each = [one] * len(wanted)
        answers = await answers_of(suite, wanted, each, at_once=at_once, max_tokens=max_tokens)
        found[one.name] = {p.name: a.token_ids for p, a in zip(wanted, answers, strict=True)}
    return found

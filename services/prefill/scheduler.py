"""Which prompts get how many tokens in the next step?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptView:
    """What the scheduler may know of one prompt."""

    sequence: int
    priority: int
    """Higher is served first."""

    arrival: int
    """Counts submits; the smaller came first."""

    remaining_tokens: int
    """Prompt tokens whose KV is not in the pool yet."""

    needed_blocks: int
    """Blocks it must be given before its first chunk; 0 once it holds them."""

    is_loading: bool = False
    """Waits for blocks from the KV store; computes nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prompt's share of a step."""

    sequence: int
    num_tokens: int


def in_order(prompts: Sequence[PromptView]) -> list[PromptView]:
    """Order by priority, then first come first served."""
    return sorted(prompts, key=lambda p: (-p.priority, p.arrival))


def to_admit(prompts: Sequence[PromptView], *, free_blocks: int) -> list[int]:
    """Name the waiting prompts that get their blocks now, in order.

    The first that does not fit stops the line: a long prompt is never overtaken for ever by short ones.
    """
    admitted = []
    for prompt in in_order([p for p in prompts if p.needed_blocks]):
        if prompt.needed_blocks > free_blocks:
            break
        free_blocks -= prompt.needed_blocks
        admitted.append(prompt.sequence)
    return admitted


STEP_SECONDS = 1.0
"""Longest wanted step: cancels are obeyed, and new prompts let in, between two steps."""
LEAST_CHUNK_TOKENS = 128
"""Below it a step costs nearly as much as this many tokens do."""


def step_budget(*, chunk_tokens: int, tokens_per_second: float) -> int:
    """Return how many tokens the next step may have: `chunk_tokens`, or fewer on a machine too slow for that many.

    tokens_per_second: recent speed; 0 when unknown.
    """
    if tokens_per_second <= 0:
        return chunk_tokens
    return min(chunk_tokens, max(LEAST_CHUNK_TOKENS, int(tokens_per_second * STEP_SECONDS)))


def next_chunks(prompts: Sequence[PromptView], *, chunk_tokens: int) -> list[Chunk]:
    """Share one step's token budget among the prompts that hold their blocks.

    The first in line takes all it can use; what it leaves goes to the next, so several short prompts share a step.
    """
    chunks = []
    for prompt in in_order([p for p in prompts if not p.needed_blocks and not p.is_loading]):
        if chunk_tokens == 0:
            break
        if prompt.remaining_tokens == 0:
            continue
        share = min(prompt.remaining_tokens, chunk_tokens)
        chunk_tokens -= share
        chunks.append(Chunk(sequence=prompt.sequence, num_tokens=share))
    return chunks

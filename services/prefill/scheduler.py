"""Which prompts get how many tokens in the next step?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) that an image fills."""

    start: int
    end: int


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
    """Waits for what was found of it; computes nothing meanwhile."""

    held_back_tokens: int = 0
    """The last of the remaining ones, which wait for the embeddings of an image, or for the step in flight."""

    position: int = 0
    """Where its next chunk starts."""

    stops: tuple[int, ...] = ()
    """Positions at which a chunk ends, ascending: its window state is saved there."""

    images: tuple[Span, ...] = ()
    """In order, without overlap."""

    is_scored: bool = False
    """The logits of all its tokens are wanted, not of the last one alone."""

    @property
    def ready_tokens(self) -> int:
        return self.remaining_tokens - self.held_back_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prompt's share of a step."""

    sequence: int
    num_tokens: int


def in_order(prompts: Sequence[PromptView]) -> list[PromptView]:
    """Order by priority, then first come first served."""
    return sorted(prompts, key=lambda p: (-p.priority, p.arrival))


def to_admit(prompts: Sequence[PromptView], *, free_blocks: int, free_windows: int) -> list[int]:
    """Name the waiting prompts that get their blocks and their window now, in order.

    The first that does not fit stops the line: a long prompt is never overtaken for ever by short ones.
    """
    admitted: list[int] = []
    for prompt in in_order([p for p in prompts if p.needed_blocks]):
        if prompt.needed_blocks > free_blocks or len(admitted) == free_windows:
            break
        free_blocks -= prompt.needed_blocks
        admitted.append(prompt.sequence)
    return admitted


STEP_SECONDS = 1.0
"""Longest wanted step: cancels are obeyed, and new prompts let in, between two steps."""
LEAST_CHUNK_TOKENS = 128
"""Below it a step costs nearly as much as this many tokens do."""
SCORED_TOKENS = 256
"""Most tokens of a step whose logits are all wanted: 130 MB of them for a vocabulary of 129,000."""


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
    chunks: list[Chunk] = []
    scored_tokens = SCORED_TOKENS
    for prompt in in_order([p for p in prompts if not p.needed_blocks and not p.is_loading]):
        if chunk_tokens <= 0:
            break
        budget = min(chunk_tokens, scored_tokens) if prompt.is_scored else chunk_tokens
        share = _share(prompt, budget, is_first=not chunks)
        if share == 0:
            continue
        chunk_tokens -= share
        scored_tokens -= share if prompt.is_scored else 0
        chunks.append(Chunk(sequence=prompt.sequence, num_tokens=share))
    return chunks


def _share(prompt: PromptView, budget: int, *, is_first: bool) -> int:
    """Cut a chunk at the next stop and never inside an image: it ends before the image.

    An image that a chunk begins with is taken whole, whatever the budget, by the first in line; others wait for room.
    """
    start = prompt.position
    end = start + min(prompt.ready_tokens, budget)
    end = min([end, *(stop for stop in prompt.stops if stop > start)])
    for image in prompt.images:
        if image.start < end < image.end:
            end = image.start
    if end <= start and prompt.ready_tokens and is_first:
        end = next((image.end for image in prompt.images if image.start <= start < image.end), start)
    return max(end - start, 0)


def outside_images(positions: Iterable[int], images: Sequence[Span], *, block_tokens: int) -> tuple[int, ...]:
    """Move block boundaries that lie inside an image down to the last boundary before it; none is moved to 0."""
    moved = set()
    for position in positions:
        for image in reversed(images):  # moved out of one image, a boundary may lie in the one before
            if image.start < position < image.end:
                position = image.start // block_tokens * block_tokens  # noqa: PLW2901 - the same boundary, moved
        moved.add(position)
    return tuple(sorted(position for position in moved if position > 0))

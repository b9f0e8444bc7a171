"""Which sequences run in the next step, and who gives up its blocks when there are none left?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the scheduler may know of one sequence."""

    sequence: int
    priority: int
    """Higher is served first."""

    arrival: int
    """Counts starts; the smaller came first. A preempted sequence keeps its place."""

    num_tokens: int
    """Prompt and answer so far, a token that is being drawn included."""

    computed_tokens: int
    """Leading tokens whose KV is in its blocks once all launched steps are done; 0 after a preemption."""

    held_blocks: int
    """Blocks it holds; 0 after a preemption."""

    held_back_tokens: int = 0
    """The last of those not computed, which wait: for what was found, an image's embeddings, or the step in flight."""

    @property
    def pending_tokens(self) -> int:
        """Tokens that can be computed now: 1 in steady state."""
        return self.num_tokens - self.computed_tokens - self.held_back_tokens


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step."""

    sequence: int
    num_tokens: int
    new_blocks: int
    """Blocks to give it before the step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do before the step, and the step."""

    preempted: tuple[int, ...] = ()
    """Sequences whose blocks are released first, in this order."""

    resumed: tuple[int, ...] = ()
    """Sequences that get blocks for all their tokens; they compute from the next plan on."""

    shares: tuple[Share, ...] = ()


def in_order(sequences: Sequence[SequenceView]) -> list[SequenceView]:
    """Order by priority, then first come first served."""
    return sorted(sequences, key=lambda s: (-s.priority, s.arrival))


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold that many tokens' KV."""
    return -(-num_tokens // block_tokens)


@dataclass(slots=True)
class _Room:
    """Blocks left while a plan is made."""

    free_blocks: int
    preempted: list[int] = field(default_factory=list)

    def make(self, wanted: int, for_: SequenceView, holders: list[SequenceView]) -> bool:
        """Preempt from the end of `holders` until `wanted` blocks are free; False if `for_` itself had to go."""
        while wanted > self.free_blocks:
            victim = holders.pop()
            self.free_blocks += victim.held_blocks
            self.preempted.append(victim.sequence)
            if victim is for_:
                return False
        self.free_blocks -= wanted
        return True


def plan_step(
    sequences: Sequence[SequenceView], *, free_blocks: int, block_tokens: int, max_batch: int, recompute_tokens: int
) -> Plan:
    """Choose the rows of the next step.

    Sequences that hold blocks run first, oldest of the highest priority first, at most `max_batch` of them. When one
    needs a block and none is free, the youngest of the lowest priority loses all of its own. Recompute after a
    preemption is chunked: all of it in one step is at most `recompute_tokens`, so others keep their pace.
    A plan that preempts resumes nobody, or two sequences could trade places for ever.
    """
    holders = in_order([s for s in sequences if s.held_blocks])
    room = _Room(free_blocks)
    shares: list[Share] = []
    budget = recompute_tokens
    for current in holders[:max_batch]:
        if current.sequence in room.preempted:
            break  # victims come from the end: everyone after it is gone too
        take = current.pending_tokens
        if take > 1:
            take = min(take, budget)
            budget -= take
        if take == 0:
            continue
        wanted = max(0, blocks_for(current.computed_tokens + take, block_tokens) - current.held_blocks)
        if not room.make(wanted, current, holders):
            break
        shares.append(Share(current.sequence, take, wanted))
    if room.preempted:
        return Plan(preempted=tuple(room.preempted), shares=tuple(shares))
    resumed = _to_resume(sequences, room.free_blocks, len(holders), block_tokens, max_batch)
    return Plan(resumed=resumed, shares=tuple(shares))


def _to_resume(
    sequences: Sequence[SequenceView], free_blocks: int, num_holders: int, block_tokens: int, max_batch: int
) -> tuple[int, ...]:
    """Name the sequences without blocks that get all theirs back, in order; the first that does not fit stops."""
    resumed: list[int] = []
    for waiting in in_order([s for s in sequences if not s.held_blocks]):
        needed = blocks_for(waiting.num_tokens, block_tokens)
        if num_holders >= max_batch or not has_room(needed, free_blocks=free_blocks, num_holders=num_holders):
            break
        free_blocks -= needed
        num_holders += 1
        resumed.append(waiting.sequence)
    return tuple(resumed)


def has_room(needed_blocks: int, *, free_blocks: int, num_holders: int) -> bool:
    """Say whether a newcomer may take blocks: everyone who runs must still be able to grow by one.

    Without that margin a newcomer's first step would preempt it again.
    """
    return needed_blocks + num_holders <= free_blocks

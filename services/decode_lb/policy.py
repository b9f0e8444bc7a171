"""Which decode replica continues this sequence?

A decode step costs by two things: how many sequences it carries and how much KV they read. Each is taken as a share of
what the replica can carry, the shares are added, and the smallest sum wins; ties go to the first name.

A replica takes KV in only while everyone who runs there can still grow by a block, and not while sequences there wait
for blocks. Others are not picked: KV sent there would hang in its reservation, and nobody could send it elsewhere. Of
those that take it, replicas with free blocks for an estimated answer as well are preferred; without one, a sequence may
be preempted later, which costs time but no token. When none takes it, the caller hears Overloaded and may wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.chassis.errors import NoReplica, Overloaded, PromptTooLong

RETRY_SECONDS = 1.0
"""When to try again: a load report is 0.2 s, a registry refresh 1.5 s."""

TYPICAL_ANSWER_TOKENS = 512
"""Room counted for an answer that may be longer. The default of max_tokens is all that fits the context; counting
that would leave most of a pool empty, since nearly every answer ends far earlier."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decode replica as the balancer sees it at this moment. Loads hold reported and booked work, each once."""

    replica: str
    boot_id: str
    address: str
    ready: bool
    """False while it drains."""
    fingerprint: bytes
    block_tokens: int
    total_blocks: int
    """Blocks of its KV pool; 0 when it did not say: then room is not checked."""
    free_blocks: int
    """Blocks left when every sequence there has received its KV."""
    free_after_answers: int
    """Blocks left when their answers have grown as estimated; below 0 when the pool is overcommitted."""
    sequences: int
    """Running, waiting and booked."""
    queued: int
    """Waiting for blocks there, as last reported: preempted, or handed over and not let in."""
    kv_tokens: int
    """KV of those sequences."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """What the choice depends on."""

    fingerprint: bytes
    kv_tokens: int
    """KV that will be handed over."""
    max_tokens: int
    """Most tokens the answer may add."""
    exclude: frozenset[str] = frozenset()
    """Replicas that just failed this request."""

    @property
    def expected_tokens(self) -> int:
        """KV to make room for: what is handed over plus an estimate of the answer."""
        return self.kv_tokens + min(self.max_tokens, TYPICAL_ANSWER_TOKENS)


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens. At least one."""
    return max(-(-num_tokens // max(block_tokens, 1)), 1)


def pick(candidates: Iterable[Candidate], sequence: Sequence, *, full_batch: int) -> Candidate:
    """Return the replica whose next steps suffer least from one more sequence.

    full_batch: sequences that count as a full load, the same scale as a full KV pool.
    Raises PromptTooLong when no replica of the model could ever take the KV in, NoReplica when none is ready or all
    were excluded, Overloaded when none has room now.
    """
    ready = [c for c in candidates if c.ready and c.fingerprint == sequence.fingerprint]
    usable = [c for c in ready if c.replica not in sequence.exclude]
    intake_tokens = sequence.kv_tokens + 1  # the first token's own KV
    if ready and not any(_fits(c, intake_tokens, c.total_blocks) for c in ready):
        most = max(c.total_blocks * c.block_tokens for c in ready)
        raise PromptTooLong(
            f"{sequence.kv_tokens} tokens of KV fit no decode replica; the largest holds {most}", field="prompt"
        )
    if not usable:
        raise NoReplica("no decode replica of this model is ready", retry_after=RETRY_SECONDS)
    open_ones = [c for c in usable if not c.queued and _fits(c, intake_tokens, c.free_blocks - c.sequences)]
    if not open_ones:
        raise Overloaded("all decode replicas are full", retry_after=RETRY_SECONDS)
    roomy = [c for c in open_ones if _fits(c, sequence.expected_tokens, c.free_after_answers)]
    return min(roomy or open_ones, key=lambda c: (_load(c, sequence, full_batch), c.replica))


def _fits(candidate: Candidate, num_tokens: int, free_blocks: int) -> bool:
    return not candidate.total_blocks or blocks_for(num_tokens, candidate.block_tokens) <= free_blocks


def _load(candidate: Candidate, sequence: Sequence, full_batch: int) -> float:
    """Load after taking the sequence, in shares of capacity: 2.0 is a full batch over a full pool."""
    batch_share = (candidate.sequences + 1) / full_batch
    pool_tokens = candidate.total_blocks * candidate.block_tokens
    if not pool_tokens:
        return batch_share
    return batch_share + (candidate.kv_tokens + sequence.kv_tokens) / pool_tokens

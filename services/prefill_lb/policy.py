"""Which prefill replica takes this prompt?

Filter, then score: ready replicas of the right model, not excluded, whose pool can hold the prompt; of these the
prompt's length tier; of these the one that would finish it first. Cost is counted in tokens: what is queued there plus
what this prompt adds. Ties go to the first name, so the same input always gives the same pick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.chassis.errors import NoReplica, Overloaded, PromptTooLong

TIER_STARTS = (0, 16 * 1024, 64 * 1024, 256 * 1024)
"""Shortest prompt of each tier. Unit: tokens."""

RETRY_SECONDS = 1.0
"""When to try again if no replica is ready: one registry refresh is 1.5 s, a load report 0.2 s."""

_LONGEST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prefill replica as the balancer sees it at this moment."""

    replica: str
    boot_id: str
    address: str
    ready: bool
    """False while it drains."""
    fingerprint: bytes
    block_tokens: int
    total_blocks: int
    """Blocks of its KV pool; 0 when it did not say, which excludes nothing."""
    tiers: frozenset[int]
    """Length tiers that it serves; empty means all."""
    queued_tokens: int
    """Prompt tokens reported as not yet computed plus those booked since that report."""
    tokens_per_second: float
    """Recent speed; 0 when unknown."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the choice depends on."""

    fingerprint: bytes
    prompt_tokens: int
    hit_tokens: int = 0
    """Leading part that the KV store holds and nobody computes again."""
    exclude: frozenset[str] = frozenset()
    """Replicas that just failed this request."""

    @property
    def uncached_tokens(self) -> int:
        # The last prompt token is always computed, even on a full hit: sampling needs its logits.
        return max(self.prompt_tokens - self.hit_tokens, 1)


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica, and the tier whose replicas were compared."""

    candidate: Candidate
    tier: int


def tier_of(prompt_tokens: int) -> int:
    """Return the length tier of a prompt: 0 below 16K, 1 below 64K, 2 below 256K, 3 from there."""
    return sum(prompt_tokens >= start for start in TIER_STARTS[1:])


def pick(candidates: Iterable[Candidate], prompt: Prompt, *, max_queued_tokens: int) -> Choice:
    """Return the replica that would finish the prompt first.

    Raises PromptTooLong when no replica of the model could ever hold it, NoReplica when none is ready or all were
    excluded, Overloaded when the tier's replicas all have too long a queue. An idle replica is never overloaded.
    """
    ready = [c for c in candidates if c.ready and c.fingerprint == prompt.fingerprint]
    usable = [c for c in _roomy(ready, prompt) if c.replica not in prompt.exclude]
    if not usable:
        raise NoReplica("no prefill replica of this model is ready", retry_after=RETRY_SECONDS)
    tier, serving = _tier(usable, tier_of(prompt.prompt_tokens))
    taking = [c for c in serving if _takes(c, prompt, max_queued_tokens)]
    if not taking:
        raise Overloaded("every prefill replica has a full queue", retry_after=_drain_seconds(serving, prompt))
    return Choice(min(taking, key=lambda c: (c.queued_tokens + prompt.uncached_tokens, c.replica)), tier)


def _roomy(ready: Sequence[Candidate], prompt: Prompt) -> list[Candidate]:
    roomy = [c for c in ready if not c.total_blocks or prompt.prompt_tokens <= c.total_blocks * c.block_tokens]
    if ready and not roomy:
        most = max(c.total_blocks * c.block_tokens for c in ready)
        raise PromptTooLong(
            f"prompt has {prompt.prompt_tokens} tokens; the largest prefill replica holds {most}", field="prompt"
        )
    return roomy


def _tier(usable: Sequence[Candidate], wanted: int) -> tuple[int, list[Candidate]]:
    """Find the tier to use: the prompt's own, else the next longer that has replicas, else the next shorter.

    Longer first: a replica meant for long prompts has room for a short one, the other way round is the emergency.
    """
    longer_then_shorter = (*range(wanted, len(TIER_STARTS)), *range(wanted - 1, -1, -1))
    for tier in longer_then_shorter:
        serving = [c for c in usable if not c.tiers or tier in c.tiers]
        if serving:
            return tier, serving
    # Only tiers that this version does not know: better served by those than by nobody.
    return wanted, list(usable)


def _takes(candidate: Candidate, prompt: Prompt, max_queued_tokens: int) -> bool:
    after = candidate.queued_tokens + prompt.uncached_tokens
    return candidate.queued_tokens == 0 or after <= max_queued_tokens


def _drain_seconds(serving: Sequence[Candidate], prompt: Prompt) -> float:
    """Estimate when the fastest queue has computed as much as this prompt needs. Unit: seconds."""
    fastest = max(c.tokens_per_second for c in serving)
    if fastest <= 0:
        return RETRY_SECONDS
    return min(max(prompt.uncached_tokens / fastest, RETRY_SECONDS), _LONGEST_RETRY_SECONDS)

"""What does the engine know of one sequence?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kernels.batch import Sampled, SamplingParams


class Ending(Enum):
    """Why a sequence has no next token."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Grown:
    """One sequence's new token."""

    sampled: Sampled
    num_answer_tokens: int
    """This one, and the first that prefill sampled, included."""
    ending: Ending | None


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One sequence in the engine. The upper fields are given; the engine thread alone touches the lower ones."""

    token_ids: list[int]
    """Prompt, then the answer so far."""
    num_prompt_tokens: int
    last_tokens: int
    """The sequence ends when it has this many tokens."""
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    priority: int
    keys: list[bytes]
    """Of the full blocks of token_ids."""
    next_key: Callable[[int], bytes | None]
    """Extends the key chain by one token; returns the key of the block it filled, if it filled one."""
    listener: Callable[[Grown], None]
    """Called on the event loop."""

    sequence: int = 0
    block_table: list[int] = field(default_factory=list)
    """Empty before the start and after a preemption."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks."""
    written_blocks: int = 0
    """Leading blocks that are in the KV store or were offered to it; survives a preemption."""

    def append(self, sampled: Sampled) -> Grown:
        """Take a sampled token in; say whether it was the last."""
        if sampled.problem is not None:
            return Grown(sampled, len(self.token_ids) - self.num_prompt_tokens, Ending.FAILED)
        self.token_ids.append(sampled.token_id)
        key = self.next_key(sampled.token_id)
        if key is not None:
            self.keys.append(key)
        ending = None
        if sampled.token_id in self.stop_token_ids:
            ending = Ending.STOP
        elif len(self.token_ids) >= self.last_tokens:
            ending = Ending.LENGTH
        return Grown(sampled, len(self.token_ids) - self.num_prompt_tokens, ending)

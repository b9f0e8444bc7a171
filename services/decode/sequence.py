"""What does the engine know of one sequence?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kernels.batch import NO_REPLAY, Replay, Sampled, SamplingParams
from kernels.kv.window import NULL_WINDOW
from proto.common_pb2 import ImageRef
from services.chassis.embeddings import ImageFeed
from services.chassis.kvstore_writer import Origin
from services.decode.grammar import Guide


class Ending(Enum):
    """Why a sequence has no next token."""

    STOP = "stop"
    LENGTH = "length"
    WHOLE = "whole"
    """The grammar allows nothing but the end."""
    UNGUIDED = "unguided"
    """Which tokens the grammar allows could not be found out."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Grown:
    """One sequence's new token."""

    sampled: Sampled
    num_answer_tokens: int
    """This one, and the first that prefill sampled, included."""
    ending: Ending | None


@dataclass(frozen=True, slots=True)
class StartWanted:
    """A preempted sequence got blocks again, and these are still here; it waits for `begin`."""

    attempt: int
    found: tuple[bytes, ...]
    """Keys of the leading blocks that were found."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingsWanted:
    """An image's embeddings are needed to compute again, and no longer those of the one before; None: of none."""

    image: ImageRef | None


@dataclass(frozen=True, slots=True)
class SavedState:
    """The window state after a whole block of the answer."""

    position: int
    payload: bytes


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
    ask: Callable[[StartWanted | EmbeddingsWanted], None]
    """Called on the event loop: what a preempted sequence needs to be computed again."""
    guide: Guide | None = None
    """None: any token may follow."""
    images: ImageFeed = field(default_factory=ImageFeed)
    origin: Origin = field(default_factory=Origin)
    """Of its blocks, when they go to the KV store."""

    sequence: int = 0
    block_table: list[int] = field(default_factory=list)
    """Empty before the start and after a preemption."""
    window: int = NULL_WINDOW
    computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks and the window once all launched steps are done."""
    replay: Replay = NO_REPLAY
    attempt: int = 0
    """Counts how often it lost its blocks: an answer to an earlier question is of no use."""
    reuses_blocks: bool = True
    """False after what was found turned out to be no hit: then all is computed into blocks of its own."""
    found_blocks: int = 0
    """Leading blocks that were found when it got blocks again."""
    is_preparing: bool = False
    """Has asked with `StartWanted`."""
    saved_state: SavedState | None = None
    """The newest one; the window store gets it when the answer ends."""
    written_blocks: int = 0
    """Leading blocks that are in the KV store or were offered to it; survives a preemption."""

    def append(self, sampled: Sampled) -> Grown:
        """Take a sampled token in; say whether it was the last."""
        if sampled.problem is not None:
            is_unguided = self.guide is not None and self.guide.is_lost
            problem = Ending.UNGUIDED if is_unguided else Ending.FAILED
            return Grown(sampled, len(self.token_ids) - self.num_prompt_tokens, problem)
        self.token_ids.append(sampled.token_id)
        key = self.next_key(sampled.token_id)
        if key is not None:
            self.keys.append(key)
        ending = None
        is_whole = self.guide is not None and self.guide.accept(sampled.token_id)
        if sampled.token_id in self.stop_token_ids:
            ending = Ending.STOP
        elif is_whole:
            ending = Ending.WHOLE
        elif len(self.token_ids) >= self.last_tokens:
            ending = Ending.LENGTH
        elif self.guide is not None:
            self.guide.begin()
        return Grown(sampled, len(self.token_ids) - self.num_prompt_tokens, ending)

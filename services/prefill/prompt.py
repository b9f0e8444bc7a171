"""What does the engine know of one prompt, and what does it tell about it?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernels.batch import NO_REPLAY, Replay, Sampled, SamplingParams, Scored
from kernels.kv.window import NULL_WINDOW
from proto.common_pb2 import ImageRef
from services.chassis.embeddings import ImageFeed
from services.chassis.kvstore_writer import Origin
from services.prefill.scheduler import Span


@dataclass(frozen=True, slots=True)
class HitFound:
    """Leading blocks are here, or may be in the KV store; the prompt waits for `begin`."""

    num_found: int
    """In the pool. Unit: blocks."""
    wanted: tuple[bytes, ...]
    """Keys of the blocks behind them that the KV store may hold."""


@dataclass(frozen=True, slots=True)
class EmbeddingsWanted:
    """An image's embeddings are needed next, and no longer those of the one before; None: of no more images."""

    image: ImageRef | None


@dataclass(frozen=True, slots=True)
class LastChunkStarted:
    """The rest of the prompt is in the step that starts now."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """One step's work on this prompt; times in seconds since the Unix epoch."""

    num_tokens: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """The prompt is computed; its blocks and its window stay until `release`."""

    sampled: Sampled
    cached_tokens: int
    computed_tokens: int
    queue_seconds: float
    compute_seconds: float
    scores: Sequence[Scored] = ()
    """Of the prompt's tokens from the second on, where they were asked for."""


Happening = HitFound | EmbeddingsWanted | LastChunkStarted | ChunkDone | FirstTokenSampled


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt in the engine. The upper fields are given; the engine thread alone touches the lower ones."""

    token_ids: Sequence[int]
    keys: Sequence[bytes]
    """Of its full blocks."""
    sampling: SamplingParams
    priority: int
    stored_blocks: int
    """Leading blocks that the KV store said it holds; a hint."""
    listener: Callable[[Happening], None]
    """Called on the event loop."""
    allowed_mask: bytes | None = None
    """Which first tokens the grammar allows; None allows all."""
    images: ImageFeed = field(default_factory=ImageFeed)
    spans: tuple[Span, ...] = ()
    """Of the images."""
    origin: Origin = field(default_factory=Origin)
    """Of its blocks, when they go to the KV store."""
    num_scores: int | None = None
    """Asks for the logprob of every token and this many alternatives: the prompt is then computed whole."""
    submitted: float = field(default_factory=time.monotonic)

    sequence: int = 0
    block_table: list[int] = field(default_factory=list)
    window: int = NULL_WINDOW
    reusable_blocks: int = 0
    """Leading blocks that may be used as they are found."""
    matched_blocks: int = 0
    """Leading blocks of the table that were found or loaded: shared, never computed into."""
    known_blocks: int = 0
    """Leading blocks that were found or loaded at any time: not offered to the KV store again."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks and the window once all launched steps are done."""
    cached_tokens: int = 0
    """Those of them that were found, not computed."""
    replay: Replay = NO_REPLAY
    stops: tuple[int, ...] = ()
    """Where the window state is saved, and chunks end."""
    is_loading: bool = False
    first_chunk: float = 0.0
    scores: list[Scored] = field(default_factory=list)
    """Of the computed tokens' followers."""

    @property
    def remaining_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

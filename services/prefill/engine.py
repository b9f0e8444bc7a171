"""How do prompts become KV and a first token? One thread owns the executor and the block pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.batch import Batch, Row, Sampled, SamplingParams
from services.chassis.errors import BlocksLost
from services.prefill.sampling import has_penalties
from services.prefill.scheduler import Chunk, PromptView, next_chunks, step_budget, to_admit

if TYPE_CHECKING:
    from kernels.executor import Executor
    from kernels.kv.pool import BlockPool
    from services.prefill.writeback import Writeback

_SPEED_MEMORY = 0.9
"""Weight of the past in the measured speed: about the last ten steps count."""
_MEASURED_TOKENS = 64
"""Shorter steps say little about the speed: most of their time is fixed cost."""


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """The KV store may hold these blocks; the prompt waits until `loading_ended`."""

    keys: tuple[bytes, ...]


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
    """The prompt is computed; its blocks stay until `release`."""

    sampled: Sampled
    cached_tokens: int
    computed_tokens: int
    queue_seconds: float
    compute_seconds: float


Happening = LoadWanted | LastChunkStarted | ChunkDone | FirstTokenSampled


@dataclass(slots=True)
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
    submitted: float = field(default_factory=time.monotonic)

    sequence: int = 0
    block_table: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks."""
    cached_tokens: int = 0
    """Those of them that were found, not computed."""
    is_loading: bool = False
    first_chunk: float = 0.0

    @property
    def remaining_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """What the replica is busy with, as of the last step boundary."""

    total_blocks: int
    used_blocks: int = 0
    cached_blocks: int = 0
    queued_sequences: int = 0
    running_sequences: int = 0
    queued_tokens: int = 0
    tokens_per_second: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    """Computed since boot."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


class PrefillEngine:
    """Everything here but `load` runs in the engine thread: as `turn`, or as a job between two turns."""

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        *,
        chunk_tokens: int,
        tell: Callable[..., None],
        writeback: Writeback,
        on_step: Callable[[float], None],
    ) -> None:
        """tell: runs a callable with arguments on the event loop.  on_step: is told each step's seconds."""
        self._executor = executor
        self._pool = pool
        self._block_tokens = pool.block_tokens
        self._chunk_tokens = chunk_tokens
        self._tell = tell
        self._writeback = writeback
        self._on_step = on_step
        self._prompts: dict[int, Prompt] = {}
        self._num_submits = 0
        self.load = Load(total_blocks=pool.total)

    # The four beats.

    def turn(self) -> bool:
        """Compute one step; False when there is nothing to compute."""
        chunks = self._plan()
        if not chunks:
            self._take_stock()
            return False
        started = time.time()
        sampled = self._executor.collect(self._executor.launch(self._batch(chunks)))
        self._publish(chunks, sampled, started, time.time())
        return True

    def _plan(self) -> list[Chunk]:
        views = [self._view(prompt) for prompt in self._prompts.values()]
        for sequence in to_admit(views, free_blocks=self._pool.free_blocks):
            self._admit(self._prompts[sequence])
        views = [self._view(prompt) for prompt in self._prompts.values()]
        speed = self.load.tokens_per_second
        return next_chunks(views, chunk_tokens=step_budget(chunk_tokens=self._chunk_tokens, tokens_per_second=speed))

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        rows = []
        for chunk in chunks:
            prompt = self._prompts[chunk.sequence]
            if not prompt.first_chunk:
                prompt.first_chunk = time.monotonic()
            is_last = chunk.num_tokens == prompt.remaining_tokens
            if is_last:
                self._tell(prompt.listener, LastChunkStarted())
            start = prompt.computed_tokens
            rows.append(
                Row(
                    sequence=prompt.sequence,
                    token_ids=prompt.token_ids[start : start + chunk.num_tokens],
                    position=start,
                    block_table=prompt.block_table,
                    sampling=prompt.sampling if is_last else None,
                    history=prompt.token_ids if is_last and has_penalties(prompt.sampling) else (),
                    num_prompt_tokens=len(prompt.token_ids),
                )
            )
        return Batch(rows=tuple(rows))

    def _publish(self, chunks: Sequence[Chunk], sampled: Sequence[Sampled], started: float, ended: float) -> None:
        tokens = {row.sequence: row for row in sampled}
        full: list[tuple[Prompt, range]] = []
        for chunk in chunks:
            prompt = self._prompts[chunk.sequence]
            full.append((prompt, self._advance(prompt, chunk.num_tokens)))
            self._tell(prompt.listener, ChunkDone(chunk.num_tokens, started, ended))
            if (token := tokens.get(chunk.sequence)) is not None:
                self._tell(prompt.listener, self._first_token(prompt, token))
        # Copies come last: nobody waits for them.
        for prompt, blocks in full:
            for block in blocks:
                self._writeback.offer(prompt.keys[block], prompt.block_table[block])
        self._take_stock(sum(chunk.num_tokens for chunk in chunks), ended - started)

    # Jobs, run between two turns.

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt whose blocks fit the pool."""
        self._num_submits += 1
        prompt.sequence = self._num_submits
        self._prompts[prompt.sequence] = prompt

    def loaded(self, prompt: Prompt, payloads: Sequence[bytes]) -> None:
        """Put verified blocks that follow what is there into the pool; ignored once the prompt was released."""
        if prompt.sequence not in self._prompts:
            return
        for payload in payloads:
            block = prompt.computed_tokens // self._block_tokens
            self._executor.write_block(prompt.block_table[block], payload)
            self._advance(prompt, self._block_tokens)
            prompt.cached_tokens += self._block_tokens

    def loading_ended(self, prompt: Prompt) -> None:
        """Compute what was not loaded."""
        prompt.is_loading = False

    def read_blocks(self, prompt: Prompt, blocks: range) -> list[bytes]:
        """Copy blocks of the prompt's table off the device. Raises BlocksLost once the prompt was released."""
        if prompt.sequence not in self._prompts:
            raise BlocksLost("the prompt's blocks were released")
        return [self._executor.read_block(prompt.block_table[block]) for block in blocks]

    def release(self, prompt: Prompt) -> None:
        """Forget a prompt, in whatever state it is; its full blocks stay findable. Harmless when repeated."""
        if self._prompts.pop(prompt.sequence, None) is not None:
            self._pool.release(prompt.block_table)

    # Parts of the beats.

    def _view(self, prompt: Prompt) -> PromptView:
        needed = 0 if prompt.block_table else -(-len(prompt.token_ids) // self._block_tokens)
        return PromptView(
            sequence=prompt.sequence,
            priority=prompt.priority,
            arrival=prompt.sequence,
            remaining_tokens=prompt.remaining_tokens,
            needed_blocks=needed,
            is_loading=prompt.is_loading,
        )

    def _admit(self, prompt: Prompt) -> None:
        """Give the prompt its blocks: those found in the pool, and new ones for the rest."""
        # The last prompt token is always computed, even on a full hit: sampling needs its logits.
        reusable = (len(prompt.token_ids) - 1) // self._block_tokens
        found = self._pool.acquire(prompt.keys[:reusable])
        needed = -(-len(prompt.token_ids) // self._block_tokens)
        prompt.block_table = found + self._pool.allocate(needed - len(found))
        prompt.computed_tokens = prompt.cached_tokens = len(found) * self._block_tokens
        wanted = tuple(prompt.keys[len(found) : min(prompt.stored_blocks, reusable)])
        if wanted:
            prompt.is_loading = True
            self._tell(prompt.listener, LoadWanted(wanted))

    def _advance(self, prompt: Prompt, num_tokens: int) -> range:
        """Count computed tokens and name the blocks they filled; return those blocks' places in the table."""
        before = prompt.computed_tokens // self._block_tokens
        prompt.computed_tokens += num_tokens
        full = range(before, prompt.computed_tokens // self._block_tokens)
        for block in full:
            self._pool.publish(prompt.block_table[block], prompt.keys[block])
        return full

    def _first_token(self, prompt: Prompt, sampled: Sampled) -> FirstTokenSampled:
        now = time.monotonic()
        return FirstTokenSampled(
            sampled=sampled,
            cached_tokens=prompt.cached_tokens,
            computed_tokens=len(prompt.token_ids) - prompt.cached_tokens,
            queue_seconds=prompt.first_chunk - prompt.submitted,
            compute_seconds=now - prompt.first_chunk,
        )

    def _take_stock(self, num_tokens: int = 0, step_seconds: float = 0.0) -> None:
        """Show the loop a fresh picture. A whole value is swapped in, so no lock is needed."""
        last = self.load
        speed = last.tokens_per_second
        if step_seconds > 0:
            self._on_step(step_seconds)
        if num_tokens >= min(_MEASURED_TOKENS, self._chunk_tokens):
            now = num_tokens / step_seconds
            speed = _SPEED_MEMORY * speed + (1 - _SPEED_MEMORY) * now if speed else now
        queued = [p for p in self._prompts.values() if not p.first_chunk]
        self.load = Load(
            total_blocks=self._pool.total,
            used_blocks=self._pool.used_blocks,
            cached_blocks=self._pool.cached_blocks,
            queued_sequences=len(queued),
            running_sequences=len(self._prompts) - len(queued),
            queued_tokens=sum(p.remaining_tokens for p in self._prompts.values()),
            tokens_per_second=speed,
            num_steps=last.num_steps + (step_seconds > 0),
            num_tokens=last.num_tokens + num_tokens,
        )

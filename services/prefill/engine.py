"""How do prompts become KV and a first token? One thread owns the executor, the block pool and the windows.

Where the executor runs ahead, a step is planned and launched while the device computes the one before. What is asked of
a device happens in the order in which it was asked, so copies of blocks between two turns see all steps launched
before, and blocks that pass on are written by their new owner after the old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.batch import Batch, Image, Row, Sampled
from kernels.kv.window import NULL_WINDOW, WindowPool
from services.chassis.errors import BlocksLost
from services.prefill.flight import Flight, Part
from services.prefill.prompt import ChunkDone, EmbeddingsWanted, FirstTokenSampled, HitFound, LastChunkStarted, Prompt
from services.prefill.sampling import has_penalties
from services.prefill.scheduler import Chunk, PromptView, next_chunks, step_budget, to_admit

if TYPE_CHECKING:
    from kernels.executor import Executor
    from kernels.kv.pool import BlockPool
    from kernels.kv.replay import Hit
    from proto.common_pb2 import ImageRef
    from services.chassis.kvstore_writer import Writeback
    from services.prefill.states import States

_SPEED_MEMORY = 0.9
"""Weight of the past in the measured speed: about the last ten steps count."""
_MEASURED_TOKENS = 64
"""Shorter steps say little about the speed: most of their time is fixed cost."""


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
    """All but `load`, and copies where `copies_beside`, runs in its thread: as `turn`, or a job between turns."""

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        *,
        chunk_tokens: int,
        tell: Callable[..., None],
        writeback: Writeback,
        states: States,
        on_step: Callable[[float], None],
    ) -> None:
        """tell: runs a callable with arguments on the event loop.  on_step: is told each step's seconds."""
        self._executor = executor
        self._pool = pool
        self._windows = WindowPool(executor.num_windows)
        self._block_tokens = pool.block_tokens
        self._chunk_tokens = chunk_tokens
        self._tell = tell
        self._writeback = writeback
        self._states = states
        self._on_step = on_step
        self._prompts: dict[int, Prompt] = {}
        self._num_submits = 0
        self._flight: Flight | None = None
        self._collected = 0.0  # when, in seconds since the Unix epoch
        self.load = Load(total_blocks=pool.total)
        self.copies_beside = executor.is_on_host

    # The four beats.

    def turn(self) -> bool:
        """Plan and launch a step, collect and publish one; False when there is nothing to do.

        They are the same step, or if the executor runs ahead, the one collected is that of the turn before.
        """
        if self._flight is not None and self._flight.is_scored:
            self._land(None)
        chunks = self._plan()
        has_landed = self._land(self._launch(chunks) if chunks else None)
        if not self._executor.runs_ahead:
            has_landed = self._land(None)
        if not has_landed:
            self._take_stock()
        is_busy = has_landed or self._flight is not None
        self._writeback.settle(wait=not is_busy)
        return is_busy

    def _plan(self) -> list[Chunk]:
        views = [self._view(prompt) for prompt in self._prompts.values()]
        free_windows = self._executor.num_windows - 1 - self._windows.used_windows
        if not self._executor.num_windows:  # nobody needs one
            free_windows = len(views)
        for sequence in to_admit(views, free_blocks=self._pool.free_blocks, free_windows=free_windows):
            self._admit(self._prompts[sequence])
        views = [self._view(prompt) for prompt in self._prompts.values()]
        speed = self.load.tokens_per_second
        return next_chunks(views, chunk_tokens=step_budget(chunk_tokens=self._chunk_tokens, tokens_per_second=speed))

    def _launch(self, chunks: Sequence[Chunk]) -> Flight:
        rows, parts = [], {}
        for chunk in chunks:
            prompt = self._prompts[chunk.sequence]
            if not prompt.first_chunk:
                prompt.first_chunk = time.monotonic()
            is_last = chunk.num_tokens == prompt.remaining_tokens
            if is_last:
                self._tell(prompt.listener, LastChunkStarted())
            rows.append(self._row(prompt, chunk.num_tokens, is_last=is_last))
            start = prompt.computed_tokens
            parts[chunk.sequence] = Part(prompt, start, start + chunk.num_tokens)
        started = time.time()
        step = self._executor.launch(Batch(rows=tuple(rows)))
        for part in parts.values():
            part.prompt.computed_tokens = part.end
            self._ask_for_embeddings(part.prompt)
        return Flight(step, parts, started)

    def _land(self, launched: Flight | None) -> bool:
        """Collect and publish the step in flight, if there is one; `launched` takes its place."""
        landed, self._flight = self._flight, launched
        if landed is None:
            return False
        sampled = self._executor.collect(landed.step)
        for sequence, scores in self._executor.score(landed.step).items():
            if sequence in self._prompts:
                self._prompts[sequence].scores += scores
        self._publish(landed, sampled)
        return True

    def _publish(self, landed: Flight, sampled: Sequence[Sampled]) -> None:
        started, ended = max(landed.started, self._collected), time.time()
        self._collected = ended
        for prompt in landed.leaving:
            self._let_go(prompt)
        tokens = {row.sequence: row for row in sampled}
        parts = [part for sequence, part in landed.parts.items() if sequence in self._prompts]
        for part in parts:
            self._name_full_blocks(part)
            self._tell(part.prompt.listener, ChunkDone(part.num_tokens, started, ended))
            if (token := tokens.get(part.prompt.sequence)) is not None:
                self._tell(part.prompt.listener, self._first_token(part.prompt, token))
        # Copies come last: nobody waits for them.
        for part in parts:
            self._keep(part)
        self._take_stock(landed.num_tokens, ended - started)

    # Jobs, run between two turns.

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt whose blocks fit the pool."""
        self._num_submits += 1
        prompt.sequence = self._num_submits
        # Found blocks have no logits: a prompt whose tokens are scored is computed whole.
        most = self._states.most_blocks(len(prompt.token_ids)) if prompt.num_scores is None else 0
        prompt.reusable_blocks = most
        self._prompts[prompt.sequence] = prompt

    def loaded(self, prompt: Prompt, payloads: Sequence[bytes | memoryview]) -> None:
        """Put verified blocks that follow what was found into the pool; ignored once the prompt was released."""
        if prompt.sequence not in self._prompts:
            return
        for payload in payloads:
            block = prompt.block_table[prompt.matched_blocks]
            self._executor.write_block(block, payload)
            self._pool.publish(block, prompt.keys[prompt.matched_blocks])
            prompt.matched_blocks += 1

    def begin(self, prompt: Prompt, hit: Hit, state: bytes | None) -> None:
        """Compute what the hit leaves.  state: of the window, as the hit names it.

        Found blocks that the hit does not use are shared and must not be computed into: then the prompt waits again,
        for blocks of its own.  Ignored once the prompt was released.
        """
        if prompt.sequence not in self._prompts:
            return
        prompt.is_loading = False
        prompt.known_blocks = max(prompt.known_blocks, prompt.matched_blocks)
        prompt.reusable_blocks = hit.block_tokens // self._block_tokens
        if prompt.reusable_blocks < prompt.matched_blocks:
            self._let_go(prompt)
            return
        if state is None:
            self._executor.reset_window(prompt.window)
        else:
            self._executor.write_window(prompt.window, state)
        prompt.computed_tokens = prompt.cached_tokens = hit.compute_from
        prompt.replay = hit.replay
        prompt.stops = self._states.stops(len(prompt.token_ids), prompt.spans, hit)
        self._ask_for_embeddings(prompt)

    def embedded(self, prompt: Prompt, image: ImageRef, embeddings: bytes | memoryview) -> None:
        """Take in what `EmbeddingsWanted` asked for."""
        prompt.images.put(image, embeddings)

    def copy_blocks(self, prompt: Prompt, blocks: range, places: Sequence[memoryview]) -> None:
        """Copy blocks off the device, one to each place. Raises BlocksLost once the prompt was released."""
        table = prompt.block_table  # it gets another one when it is released
        _check_held(prompt, self._prompts)
        for block, place in zip(blocks, places, strict=True):
            self._executor.copy_block(table[block], place)
        _check_held(prompt, self._prompts)

    def copy_window(self, prompt: Prompt, place: memoryview) -> None:
        """Copy the prompt's window state off the device. Raises BlocksLost like `copy_blocks`."""
        window = prompt.window
        _check_held(prompt, self._prompts)
        place[:] = self._executor.read_window(window)
        _check_held(prompt, self._prompts)

    def release(self, prompt: Prompt) -> None:
        """Forget a prompt, in whatever state it is; its full blocks stay findable. Harmless when repeated."""
        if self._prompts.pop(prompt.sequence, None) is None:
            return
        if self._flight is not None and prompt.sequence in self._flight.parts:
            self._flight.leaving.append(prompt)
        else:
            self._let_go(prompt)

    # Parts of the beats.

    def _view(self, prompt: Prompt) -> PromptView:
        needed = 0 if prompt.block_table else -(-len(prompt.token_ids) // self._block_tokens)
        num_tokens, computed = len(prompt.token_ids), prompt.computed_tokens
        part = self._flight.parts.get(prompt.sequence) if self._flight is not None else None
        must_wait = part is not None and part.ends_at_stop
        return PromptView(
            sequence=prompt.sequence,
            priority=prompt.priority,
            arrival=prompt.sequence,
            remaining_tokens=prompt.remaining_tokens,
            needed_blocks=needed,
            is_loading=prompt.is_loading,
            held_back_tokens=prompt.remaining_tokens if must_wait else prompt.images.held_back(computed, num_tokens),
            position=computed,
            stops=prompt.stops,
            images=prompt.spans,
            is_scored=prompt.num_scores is not None,
        )

    def _row(self, prompt: Prompt, num_tokens: int, *, is_last: bool) -> Row:
        start = prompt.computed_tokens
        end = start + num_tokens
        return Row(
            sequence=prompt.sequence,
            token_ids=prompt.token_ids[start:end],
            position=start,
            block_table=prompt.block_table,
            sampling=prompt.sampling if is_last else None,
            history=prompt.token_ids if is_last and has_penalties(prompt.sampling) else (),
            num_prompt_tokens=len(prompt.token_ids),
            allowed_mask=prompt.allowed_mask if is_last else None,
            window=prompt.window,
            preceding=prompt.token_ids[max(start - self._executor.preceding_tokens, 0) : start],
            images=tuple(Image(i.position, i.num_tokens, i.embeddings) for i in prompt.images.within(start, end)),
            replay=prompt.replay,
            targets=prompt.token_ids[start + 1 : end + 1] if prompt.num_scores is not None else (),
            num_target_logprobs=prompt.num_scores or 0,
        )

    def _admit(self, prompt: Prompt) -> None:
        """Give the prompt a window and its blocks: those found in the pool, and new ones for the rest."""
        num_tokens = len(prompt.token_ids)
        num_found = self._pool.match(prompt.keys[: prompt.reusable_blocks])
        wanted = tuple(prompt.keys[num_found : min(prompt.stored_blocks, prompt.reusable_blocks)])
        hit = None
        if not wanted and not (num_found and self._states.worker is not None):
            hit = self._states.plan(num_tokens, num_found)
            prompt.known_blocks = max(prompt.known_blocks, num_found)
            num_found = hit.block_tokens // self._block_tokens
        found = self._pool.acquire(prompt.keys[:num_found])
        needed = -(-num_tokens // self._block_tokens)
        prompt.block_table = found + self._pool.allocate(needed - len(found))
        prompt.window = self._windows.allocate()
        prompt.matched_blocks = num_found
        if hit is not None:
            self.begin(prompt, hit, None)
        else:
            prompt.is_loading = True
            self._tell(prompt.listener, HitFound(num_found, wanted))

    def _let_go(self, prompt: Prompt) -> None:
        self._pool.release(prompt.block_table)
        self._windows.release(prompt.window)
        prompt.block_table, prompt.window = [], NULL_WINDOW

    def _name_full_blocks(self, part: Part) -> None:
        """Tokens below the hit were computed for their windows' sake: their blocks are there already."""
        prompt, size = part.prompt, self._block_tokens
        for block in range(max(part.start // size, prompt.reusable_blocks), part.end // size):
            self._pool.publish(prompt.block_table[block], prompt.keys[block])

    def _keep(self, part: Part) -> None:
        """Offer full blocks that were not known before to the KV store, and save the window state at a stop."""
        prompt, size = part.prompt, self._block_tokens
        for block in range(max(part.start // size, prompt.known_blocks), part.end // size):
            self._writeback.offer(prompt.origin, prompt.keys, block, prompt.block_table[block])
        if part.ends_at_stop:
            self._states.keep(prompt.keys[part.end // size - 1], part.end, prompt.window)

    def _ask_for_embeddings(self, prompt: Prompt) -> None:
        if prompt.images.move_to(prompt.computed_tokens):
            self._tell(prompt.listener, EmbeddingsWanted(prompt.images.current))

    def _first_token(self, prompt: Prompt, sampled: Sampled) -> FirstTokenSampled:
        now = time.monotonic()
        return FirstTokenSampled(
            sampled=sampled,
            cached_tokens=prompt.cached_tokens,
            computed_tokens=len(prompt.token_ids) - prompt.cached_tokens,
            queue_seconds=prompt.first_chunk - prompt.submitted,
            compute_seconds=now - prompt.first_chunk,
            scores=prompt.scores,
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


def _check_held(prompt: Prompt, prompts: Mapping[int, Prompt]) -> None:
    """A prompt is released once: one that is here after a copy was here all the time, whichever thread looks."""
    if prompt.sequence not in prompts:
        raise BlocksLost("the prompt's blocks were released")

"""How do sequences grow token by token? One thread owns the executor, the block pool and the windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.batch import Batch, Image, Row, Sampled
from kernels.kv.window import NULL_WINDOW, WindowPool
from services.decode.rooms import Rooms
from services.decode.sampling import has_penalties
from services.decode.scheduler import Plan, SequenceView, Share, blocks_for, plan_step
from services.decode.sequence import DecodeSequence, EmbeddingsWanted, Grown, SavedState, StartWanted

if TYPE_CHECKING:
    from kernels.executor import Executor
    from kernels.kv.pool import BlockPool
    from kernels.kv.replay import Hit
    from proto.common_pb2 import ImageRef
    from services.chassis.kvstore_writer import Writeback
    from services.decode.states import States

RECOMPUTE_TOKENS = 128
"""Of preempted sequences, in one step beside the others' single tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the replica is busy with, as of the last step boundary."""

    total_blocks: int
    used_blocks: int = 0
    cached_blocks: int = 0
    running_sequences: int = 0
    queued_sequences: int = 0
    """Without blocks: preempted, or waiting for room."""
    kv_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    """Sampled since boot."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks


class DecodeEngine:
    """Everything here but `load` runs in the engine thread: as `turn`, or as a job between two turns."""

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        *,
        max_batch: int,
        tell: Callable[..., None],
        writeback: Writeback,
        states: States,
        on_step: Callable[[float], None],
        recompute_tokens: int = RECOMPUTE_TOKENS,
    ) -> None:
        """tell: runs a callable with arguments on the event loop.  on_step: is told each step's seconds."""
        self._windows = WindowPool(executor.num_windows)
        self.rooms = Rooms(executor, pool, self._windows)
        self._executor = executor
        self._pool = pool
        self._block_tokens = pool.block_tokens
        self._max_batch = max_batch
        self._recompute_tokens = recompute_tokens
        self._tell = tell
        self._writeback = writeback
        self._states = states
        self._on_step = on_step
        self._sequences: dict[int, DecodeSequence] = {}
        self._num_starts = 0
        self._num_preemptions = 0
        self.load = Load(total_blocks=pool.total)

    # The four beats.

    def turn(self) -> bool:
        """Compute one step; False when there is nothing to compute."""
        plan = self._plan()
        if not plan.shares:
            self._take_stock()
            return bool(plan.resumed or plan.preempted)
        started = time.monotonic()
        launched = self._executor.launch(self._batch(plan.shares))
        sampled = self._executor.collect(launched.with_masks(self._masks(launched.batch)))
        self._publish(plan.shares, sampled)
        step_seconds = time.monotonic() - started
        self._on_step(step_seconds)
        self._take_stock(len(sampled), step_seconds)
        return True

    def _plan(self) -> Plan:
        holders = sum(1 for s in self._sequences.values() if s.block_table)
        if holders == len(self._sequences):  # preempted sequences come before newcomers
            self.rooms.grant(num_holders=holders)
        plan = plan_step(
            [_view(s) for s in self._sequences.values()],
            free_blocks=self._pool.free_blocks,
            block_tokens=self._block_tokens,
            max_batch=self._max_batch,
            recompute_tokens=self._recompute_tokens,
        )
        for sequence in plan.preempted:
            self._preempt(self._sequences[sequence])
        resumed = tuple(sequence for sequence in plan.resumed if self._resume(self._sequences[sequence]))
        for share in plan.shares:
            if share.new_blocks:
                self._sequences[share.sequence].block_table += self._pool.allocate(share.new_blocks)
        return replace(plan, resumed=resumed)

    def _batch(self, shares: Sequence[Share]) -> Batch:
        rows = []
        for share in shares:
            sequence = self._sequences[share.sequence]
            start = sequence.computed_tokens
            end = start + share.num_tokens
            is_last = end == len(sequence.token_ids)
            rows.append(
                Row(
                    sequence=share.sequence,
                    token_ids=sequence.token_ids[start:end],
                    position=start,
                    block_table=sequence.block_table,
                    sampling=sequence.sampling if is_last else None,
                    history=sequence.token_ids if is_last and has_penalties(sequence.sampling) else (),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    window=sequence.window,
                    preceding=sequence.token_ids[max(start - self._executor.preceding_tokens, 0) : start],
                    images=_images(sequence, start, end),
                    replay=sequence.replay,
                )
            )
        return Batch(rows=tuple(rows))

    def _masks(self, batch: Batch) -> dict[int, bytes]:
        """Masks that were filled since the last step, while the device computed this one."""
        guides = {row.sequence: self._sequences[row.sequence].guide for row in batch.rows if row.sampling is not None}
        return {sequence: guide.mask() for sequence, guide in guides.items() if guide is not None}

    def _publish(self, shares: Sequence[Share], sampled: Sequence[Sampled]) -> None:
        for share in shares:
            sequence = self._sequences[share.sequence]
            sequence.computed_tokens += share.num_tokens
            self._ask_for_embeddings(sequence)
        grown = [(self._sequences[row.sequence], row) for row in sampled]
        events = [(sequence.listener, sequence.append(row)) for sequence, row in grown]
        # One callback for the whole step, so that its tokens leave in one frame.
        self._tell(_deliver, events)
        # Copies come last: nobody waits for them.
        for share in shares:
            self._keep_full_blocks(self._sequences[share.sequence], share.num_tokens)
            self._keep_state(self._sequences[share.sequence])
        for (sequence, _), (_, event) in zip(grown, events, strict=True):
            if event.ending is not None:
                self.release(sequence)

    # Jobs, run between two turns.

    def start(self, sequence: DecodeSequence, epoch: int) -> None:
        """Run a sequence in the blocks and the window that its ticket holds. Raises BlocksLost when that is gone."""
        sequence.block_table, sequence.window = self.rooms.take(epoch, sequence.keys)
        self._num_starts += 1
        sequence.sequence = self._num_starts
        sequence.computed_tokens = sequence.num_prompt_tokens
        sequence.written_blocks = sequence.num_prompt_tokens // self._block_tokens  # prefill writes the prompt's
        self._sequences[sequence.sequence] = sequence
        if sequence.guide is not None:
            sequence.guide.begin()

    def begin(self, sequence: DecodeSequence, attempt: int, hit: Hit, state: bytes | None) -> None:
        """Compute again what the hit leaves.  state: of the window, as the hit names it.

        Found blocks that the hit does not use are shared and must not be computed into: then the sequence waits again,
        for blocks of its own.  Ignored when it was released, or lost its blocks once more.
        """
        if sequence.sequence not in self._sequences or sequence.attempt != attempt:
            return
        sequence.is_preparing = False
        if hit.block_tokens < sequence.found_blocks * self._block_tokens:
            self._let_go(sequence)
            sequence.reuses_blocks = False
            return
        if state is None:
            self._executor.reset_window(sequence.window)
        else:
            self._executor.write_window(sequence.window, state)
        sequence.computed_tokens = hit.compute_from
        sequence.replay = hit.replay
        self._ask_for_embeddings(sequence)

    def embedded(self, sequence: DecodeSequence, image: ImageRef, embeddings: bytes | memoryview) -> None:
        """Take in what `EmbeddingsWanted` asked for."""
        sequence.images.put(image, embeddings)

    def release(self, sequence: DecodeSequence) -> None:
        """Forget a sequence, in whatever state it is; its full blocks stay findable. Harmless when repeated."""
        if self._sequences.pop(sequence.sequence, None) is None:
            return
        self._let_go(sequence)
        saved = sequence.saved_state
        if saved is not None:
            self._states.keep(sequence.keys[saved.position // self._block_tokens - 1], saved.position, saved.payload)

    # Parts of the beats.

    def _preempt(self, sequence: DecodeSequence) -> None:
        self._num_preemptions += 1
        self._let_go(sequence)
        sequence.reuses_blocks = True

    def _let_go(self, sequence: DecodeSequence) -> None:
        self._pool.release(sequence.block_table)
        self._windows.release(sequence.window)
        sequence.block_table, sequence.window = [], NULL_WINDOW
        sequence.computed_tokens = 0
        sequence.is_preparing = False
        sequence.attempt += 1
        if sequence.images.move_to(len(sequence.token_ids)):
            self._tell(sequence.ask, EmbeddingsWanted(None))

    def _resume(self, sequence: DecodeSequence) -> bool:
        """Give a window, and blocks for all tokens: those still found in the pool, new ones for what is computed again.

        False without a free window.
        """
        if not self._windows.has_free:
            return False
        num_tokens = len(sequence.token_ids)
        reusable = self._states.most_blocks(num_tokens) if sequence.reuses_blocks else 0
        num_found = self._pool.match(sequence.keys[:reusable])
        hit = None
        if not (num_found and self._states.worker is not None):
            hit = self._states.plan(num_tokens, num_found)
            num_found = hit.block_tokens // self._block_tokens
        found = self._pool.acquire(sequence.keys[:num_found])
        needed = blocks_for(num_tokens, self._block_tokens)
        sequence.block_table = found + self._pool.allocate(needed - len(found))
        sequence.window = self._windows.allocate()
        sequence.found_blocks = num_found
        if hit is not None:
            self.begin(sequence, sequence.attempt, hit, None)
        else:
            sequence.is_preparing = True
            self._tell(sequence.ask, StartWanted(sequence.attempt, tuple(sequence.keys[:num_found]), num_tokens))
        return True

    def _ask_for_embeddings(self, sequence: DecodeSequence) -> None:
        if sequence.images.move_to(sequence.computed_tokens):
            self._tell(sequence.ask, EmbeddingsWanted(sequence.images.current))

    def _keep_state(self, sequence: DecodeSequence) -> None:
        """Copy the window state after each whole block of the answer: the last one is where the next turn starts."""
        position = sequence.computed_tokens
        is_exact = position >= sequence.replay.write_from  # below the hit, windows may be part empty
        if self._states.worker is None or position % self._block_tokens or not is_exact:
            return
        if position > sequence.num_prompt_tokens:  # prefill saves the prompt's
            sequence.saved_state = SavedState(position, self._states.read(sequence.window))

    def _keep_full_blocks(self, sequence: DecodeSequence, num_tokens: int) -> None:
        """Name the blocks that the step's tokens filled, and offer the answer's to the KV store, once."""
        last = sequence.computed_tokens // self._block_tokens
        first = (sequence.computed_tokens - num_tokens) // self._block_tokens
        # Below the hit, tokens were computed for their windows' sake: their blocks are there already.
        for block in range(max(first, sequence.replay.write_from // self._block_tokens), last):
            self._pool.publish(sequence.block_table[block], sequence.keys[block])
            if block >= sequence.written_blocks:
                self._writeback.offer(sequence.origin, sequence.keys, block, sequence.block_table[block])
                sequence.written_blocks = block + 1

    def _take_stock(self, num_tokens: int = 0, step_seconds: float = 0.0) -> None:
        """Show the loop a fresh picture. A whole value is swapped in, so no lock is needed."""
        last = self.load
        holders = [s for s in self._sequences.values() if s.block_table]
        self.load = Load(
            total_blocks=self._pool.total,
            used_blocks=self._pool.used_blocks,
            cached_blocks=self._pool.cached_blocks,
            running_sequences=len(holders),
            queued_sequences=len(self._sequences) - len(holders) + self.rooms.num_waiting,
            kv_tokens=sum(s.computed_tokens for s in holders),
            num_preemptions=self._num_preemptions,
            num_steps=last.num_steps + (step_seconds > 0),
            num_tokens=last.num_tokens + num_tokens,
        )


def _view(sequence: DecodeSequence) -> SequenceView:
    num_tokens, computed = len(sequence.token_ids), sequence.computed_tokens
    held_back = num_tokens if sequence.is_preparing else sequence.images.held_back(computed, num_tokens)
    return SequenceView(
        sequence=sequence.sequence,
        priority=sequence.priority,
        arrival=sequence.sequence,
        num_tokens=num_tokens,
        computed_tokens=computed,
        held_blocks=len(sequence.block_table),
        held_back_tokens=held_back,
    )


def _images(sequence: DecodeSequence, start: int, end: int) -> tuple[Image, ...]:
    return tuple(Image(i.position, i.num_tokens, i.embeddings) for i in sequence.images.within(start, end))


def _deliver(events: Sequence[tuple[Callable[[Grown], None], Grown]]) -> None:
    for listener, event in events:
        listener(event)

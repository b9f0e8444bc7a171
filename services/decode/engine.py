"""How do sequences grow token by token? One thread owns the executor, the block pool and the windows.

Where the executor runs ahead, a step is planned and launched while the device computes the one before, whose tokens are
not known yet: the plan assumes one more token for each of its rows. A sequence that turns out to have ended has a row
too many, which is dropped. What is asked of a device happens in the order in which it was asked, so copies of blocks
between two turns see all steps launched before, and blocks that pass on are written by their new owner after the old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.batch import Sampled
from kernels.kv.window import NULL_WINDOW, WindowPool
from services.decode.flight import Flight, Part, batch_of
from services.decode.rooms import Rooms
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
        self._flight: Flight | None = None
        self._collected = 0.0  # when, by the monotonic clock
        self.load = Load(total_blocks=pool.total)

    # The four beats.

    def turn(self) -> bool:
        """Plan and launch a step, collect and publish one; False when there is nothing to do.

        They are the same step, or if the executor runs ahead, the one collected is that of the turn before.
        """
        if self._flight is not None:
            self._draw(self._flight)
        plan = self._plan()
        has_landed = self._land(self._launch(plan.shares) if plan.shares else None)
        if not self._executor.runs_ahead:
            has_landed = self._land(None)
        if not has_landed:
            self._take_stock()
        is_busy = bool(has_landed or self._flight or plan.resumed or plan.preempted)
        self._writeback.settle(wait=not is_busy)
        return is_busy

    def _plan(self) -> Plan:
        holders = sum(1 for s in self._sequences.values() if s.block_table)
        if holders == len(self._sequences):  # preempted sequences come before newcomers
            self.rooms.grant(num_holders=holders)
        plan = plan_step(
            [self._view(s) for s in self._sequences.values()],
            free_blocks=self._pool.free_blocks,
            block_tokens=self._block_tokens,
            max_batch=self._max_batch,
            recompute_tokens=self._recompute_tokens,
        )
        if plan.preempted and self._flight is not None:
            return Plan()  # the device still writes into those blocks, and maybe some are free once it is done
        for sequence in plan.preempted:
            self._preempt(self._sequences[sequence])
        resumed = tuple(sequence for sequence in plan.resumed if self._resume(self._sequences[sequence]))
        for share in plan.shares:
            if share.new_blocks:
                self._sequences[share.sequence].block_table += self._pool.allocate(share.new_blocks)
        return replace(plan, resumed=resumed)

    def _launch(self, shares: Sequence[Share]) -> Flight:
        parts = [self._part(share) for share in shares]
        masks_follow = any(part.is_sampled and part.sequence.guide is not None for part in parts)
        batch = batch_of(parts, preceding_tokens=self._executor.preceding_tokens)
        step = self._executor.launch(batch, masks_follow=masks_follow)
        for part in parts:
            part.sequence.computed_tokens = part.end
            self._ask_for_embeddings(part.sequence)
        return Flight(step, {p.sequence.sequence: p for p in parts}, time.monotonic(), is_drawn=not masks_follow)

    def _draw(self, flight: Flight) -> None:
        """Bring the masks that a step still waits for: they were filled while the device computed it."""
        if flight.is_drawn:
            return
        masks = {s.sequence: s.guide.mask() for s in flight.guided() if s.guide and s.sequence in self._sequences}
        flight.step = self._executor.draw(flight.step, masks)
        flight.is_drawn = True

    def _land(self, launched: Flight | None) -> bool:
        """Collect and publish the step in flight, if there is one; `launched` takes its place."""
        landed, self._flight = self._flight, launched
        if landed is None:
            return False
        self._draw(landed)
        self._publish(landed, self._executor.collect(landed.step))
        return True

    def _publish(self, landed: Flight, sampled: Sequence[Sampled]) -> None:
        step_seconds = time.monotonic() - max(landed.started, self._collected)
        self._collected = time.monotonic()
        for sequence in landed.leaving:
            self._let_go(sequence)
        grown = [(self._sequences[row.sequence], row) for row in sampled if row.sequence in self._sequences]
        events = [(sequence.listener, sequence.append(row)) for sequence, row in grown]
        # One callback for the whole step, so that its tokens leave in one frame.
        self._tell(_deliver, events)
        # Copies come last: nobody waits for them.
        for part in landed.parts.values():
            if part.sequence.sequence in self._sequences:
                self._keep_full_blocks(part)
                self._keep_state(part)
        for (sequence, _), (_, event) in zip(grown, events, strict=True):
            if event.ending is not None:
                self.release(sequence)
        self._on_step(step_seconds)
        self._take_stock(len(grown), step_seconds)

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
        if self._flight is not None and sequence.sequence in self._flight.parts:
            self._flight.leaving.append(sequence)
        else:
            self._let_go(sequence)
        saved = sequence.saved_state
        if saved is not None:
            self._states.keep(sequence.keys[saved.position // self._block_tokens - 1], saved.position, saved.payload)

    # Parts of the beats.

    def _view(self, sequence: DecodeSequence) -> SequenceView:
        """Count a token that is being drawn; hold the sequence back where its next row must wait for this one."""
        computed, num_tokens = sequence.computed_tokens, len(sequence.token_ids)
        held_back = 0
        if self._flight is not None and (part := self._flight.parts.get(sequence.sequence)) is not None:
            num_tokens += part.is_sampled
            if num_tokens >= sequence.last_tokens or self._has_state_to_keep(part):
                held_back = num_tokens - computed
        if sequence.is_preparing:
            held_back = num_tokens
        return SequenceView(
            sequence=sequence.sequence,
            priority=sequence.priority,
            arrival=sequence.sequence,
            num_tokens=num_tokens,
            computed_tokens=computed,
            held_blocks=len(sequence.block_table),
            held_back_tokens=held_back or sequence.images.held_back(computed, num_tokens),
        )

    def _part(self, share: Share) -> Part:
        sequence = self._sequences[share.sequence]
        start = sequence.computed_tokens
        end = start + share.num_tokens
        is_drawing = self._flight is not None and self._flight.draws(share.sequence)
        return Part(sequence, start, end, is_sampled=end == len(sequence.token_ids) + is_drawing)

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

    def _has_state_to_keep(self, part: Part) -> bool:
        """After each whole block of the answer there is a state: the last one is where the next turn starts."""
        position, sequence = part.end, part.sequence
        is_exact = position >= sequence.replay.write_from  # below the hit, windows may be part empty
        if self._states.worker is None or position % self._block_tokens or not is_exact:
            return False
        return position > sequence.num_prompt_tokens  # prefill saves the prompt's

    def _keep_state(self, part: Part) -> None:
        """Copy the window state. A sequence with one to keep has no row in the step launched behind: it would go on."""
        if self._has_state_to_keep(part):
            part.sequence.saved_state = SavedState(part.end, self._states.read(part.sequence.window))

    def _keep_full_blocks(self, part: Part) -> None:
        """Name the blocks that the step's tokens filled, and offer the answer's to the KV store, once."""
        sequence = part.sequence
        last = part.end // self._block_tokens
        first = part.start // self._block_tokens
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


def _deliver(events: Sequence[tuple[Callable[[Grown], None], Grown]]) -> None:
    for listener, event in events:
        listener(event)

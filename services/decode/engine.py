"""How do sequences grow token by token? One thread owns the executor and the block pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.batch import Batch, Row, Sampled
from services.decode.rooms import Rooms
from services.decode.sampling import has_penalties
from services.decode.scheduler import Plan, SequenceView, Share, blocks_for, plan_step
from services.decode.sequence import DecodeSequence, Grown

if TYPE_CHECKING:
    from kernels.executor import Executor
    from kernels.kv.pool import BlockPool
    from services.decode.writeback import Writeback

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
        on_step: Callable[[float], None],
        recompute_tokens: int = RECOMPUTE_TOKENS,
    ) -> None:
        """tell: runs a callable with arguments on the event loop.  on_step: is told each step's seconds."""
        self.rooms = Rooms(executor, pool)
        self._executor = executor
        self._pool = pool
        self._block_tokens = pool.block_tokens
        self._max_batch = max_batch
        self._recompute_tokens = recompute_tokens
        self._tell = tell
        self._writeback = writeback
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
        sampled = self._executor.collect(self._executor.launch(self._batch(plan.shares)))
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
        for sequence in plan.resumed:
            self._resume(self._sequences[sequence])
        for share in plan.shares:
            if share.new_blocks:
                self._sequences[share.sequence].block_table += self._pool.allocate(share.new_blocks)
        return plan

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
                )
            )
        return Batch(rows=tuple(rows))

    def _publish(self, shares: Sequence[Share], sampled: Sequence[Sampled]) -> None:
        for share in shares:
            self._sequences[share.sequence].computed_tokens += share.num_tokens
        grown = [(self._sequences[row.sequence], row) for row in sampled]
        events = [(sequence.listener, sequence.append(row)) for sequence, row in grown]
        # One callback for the whole step, so that its tokens leave in one frame.
        self._tell(_deliver, events)
        # Copies come last: nobody waits for them.
        for share in shares:
            self._keep_full_blocks(self._sequences[share.sequence], share.num_tokens)
        for (sequence, _), (_, event) in zip(grown, events, strict=True):
            if event.ending is not None:
                self.release(sequence)

    # Jobs, run between two turns.

    def start(self, sequence: DecodeSequence, epoch: int) -> None:
        """Run a sequence in the blocks that its ticket holds. Raises BlocksLost when the ticket is gone."""
        reserved = self.rooms.take(epoch, sequence.keys)
        self._num_starts += 1
        sequence.sequence = self._num_starts
        sequence.block_table = reserved
        sequence.computed_tokens = sequence.num_prompt_tokens
        sequence.written_blocks = sequence.num_prompt_tokens // self._block_tokens  # prefill writes the prompt's
        self._sequences[sequence.sequence] = sequence

    def release(self, sequence: DecodeSequence) -> None:
        """Forget a sequence, in whatever state it is; its full blocks stay findable. Harmless when repeated."""
        if self._sequences.pop(sequence.sequence, None) is not None:
            self._pool.release(sequence.block_table)

    # Parts of the beats.

    def _preempt(self, sequence: DecodeSequence) -> None:
        self._num_preemptions += 1
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed_tokens = 0

    def _resume(self, sequence: DecodeSequence) -> None:
        """Give blocks for all tokens: those still found in the pool, new ones for what must be computed again."""
        reusable = (len(sequence.token_ids) - 1) // self._block_tokens
        found = self._pool.acquire(sequence.keys[:reusable])
        needed = blocks_for(len(sequence.token_ids), self._block_tokens)
        sequence.block_table = found + self._pool.allocate(needed - len(found))
        sequence.computed_tokens = len(found) * self._block_tokens

    def _keep_full_blocks(self, sequence: DecodeSequence, num_tokens: int) -> None:
        """Name the blocks that the step's tokens filled, and offer the answer's to the KV store, once."""
        last = sequence.computed_tokens // self._block_tokens
        for block in range((sequence.computed_tokens - num_tokens) // self._block_tokens, last):
            self._pool.publish(sequence.block_table[block], sequence.keys[block])
            if block >= sequence.written_blocks:
                self._writeback.offer(sequence.keys[block], sequence.block_table[block])
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
    return SequenceView(
        sequence=sequence.sequence,
        priority=sequence.priority,
        arrival=sequence.sequence,
        num_tokens=len(sequence.token_ids),
        computed_tokens=sequence.computed_tokens,
        held_blocks=len(sequence.block_table),
    )


def _deliver(events: Sequence[tuple[Callable[[Grown], None], Grown]]) -> None:
    for listener, event in events:
        listener(event)

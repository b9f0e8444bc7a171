"""What would one process answer? Continuous batching over one executor, without services.

The yardstick of the whole-suite tests and of the benchmarks: own block pool, chunked prefill, preemption by recompute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kernels.batch import Batch, Row, Sampled, SamplingParams
from kernels.executor import Executor
from kernels.kv.pool import BlockPool
from kernels.kv.window import NULL_WINDOW, WindowPool

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt and when to stop. Stop tokens are reported and end the answer."""

    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 16
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """An answer. logprobs: one per token where asked for. problem: why it ended early ("error")."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish: Finish
    problem: str | None = None


@dataclass(slots=True)
class _Sequence:
    index: int
    request: GenerateRequest
    tokens: list[int]
    """Prompt and answer so far."""
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    window: int | None = None
    """Its window slot while it runs."""
    logprobs: list[float | None] = field(default_factory=list)
    result: GenerateResult | None = None

    @property
    def waiting_tokens(self) -> int:
        return len(self.tokens) - self.computed


class Generator:
    """Answers lists of requests with one executor, all of whose blocks it owns."""

    def __init__(self, executor: Executor, *, chunk_tokens: int = 512, max_batch: int = 32) -> None:
        """chunk_tokens: prompt tokens computed per step, over all sequences.  max_batch: sequences per step."""
        self._executor = executor
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._pool = BlockPool(executor.num_blocks, executor.layout.block_tokens)
        self._windows = WindowPool(executor.num_windows)
        self.num_preemptions = 0
        """Sequences that lost their blocks and were recomputed, since the start."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order.  ValueError for one that cannot fit the model or the pool alone."""
        for request in requests:
            self._check(request)
        waiting = deque(_Sequence(index, request, list(request.token_ids)) for index, request in enumerate(requests))
        running: list[_Sequence] = []
        done: dict[int, GenerateResult] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._max_batch and self._windows.has_free:
                    running.append(waiting.popleft())
                    running[-1].window = self._windows.allocate()
                    self._executor.reset_window(running[-1].window)
                batch = self._next_batch(running, waiting)
                sampled = self._executor.collect(self._executor.launch(batch))
                self._record(batch, sampled, running)
                for sequence in [each for each in running if each.result]:
                    assert sequence.result is not None
                    done[sequence.index] = sequence.result
                    self._release(sequence)
                    running.remove(sequence)
        finally:
            for sequence in running:
                self._release(sequence)
        return [done[index] for index in range(len(requests))]

    def _check(self, request: GenerateRequest) -> None:
        total = len(request.token_ids) + request.max_tokens
        limit = min(self._executor.config.max_position_tokens, self._pool.total * self._pool.block_tokens)
        if not request.token_ids or request.max_tokens < 1:
            raise ValueError("a request has at least one prompt token and asks for at least one")
        if total > limit:
            raise ValueError(f"prompt and answer have {total} tokens; this executor takes at most {limit}")

    def _next_batch(self, running: list[_Sequence], waiting: deque[_Sequence]) -> Batch:
        """Decode tokens of all, then prompt chunks within the budget; the youngest give way when blocks run out."""
        rows: list[Row] = []
        budget = self._chunk_tokens
        for sequence in list(running):
            if sequence not in running:
                continue  # it gave way
            count = sequence.waiting_tokens
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count and self._make_room(sequence, sequence.computed + count, running, waiting):
                rows.append(self._row(sequence, count))
        return Batch(tuple(row for row in rows if any(row.sequence == each.index for each in running)))

    def _release(self, sequence: _Sequence) -> None:
        self._pool.release(sequence.blocks)
        self._windows.release(sequence.window or NULL_WINDOW)
        sequence.blocks, sequence.window = [], None

    def _row(self, sequence: _Sequence, count: int) -> Row:
        start = sequence.computed
        last = start + count == len(sequence.tokens)
        return Row(
            sequence=sequence.index,
            token_ids=sequence.tokens[start : start + count],
            position=start,
            block_table=sequence.blocks,
            sampling=sequence.request.sampling if last else None,
            history=sequence.tokens,
            num_prompt_tokens=len(sequence.request.token_ids),
            window=sequence.window or NULL_WINDOW,
            preceding=sequence.tokens[max(start - self._executor.preceding_tokens, 0) : start],
        )

    def _make_room(self, sequence: _Sequence, tokens: int, running: list[_Sequence], waiting: deque[_Sequence]) -> bool:
        """Give the sequence blocks for that many tokens; False when it gave way itself."""
        missing = -(-tokens // self._pool.block_tokens) - len(sequence.blocks)
        while missing > self._pool.free_blocks:
            youngest = max(running, key=lambda each: each.index)
            self._release(youngest)
            youngest.computed = 0
            running.remove(youngest)
            waiting.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return False
        sequence.blocks += self._pool.allocate(max(missing, 0))
        return True

    @staticmethod
    def _record(batch: Batch, sampled: Sequence[Sampled], running: list[_Sequence]) -> None:
        by_index = {sequence.index: sequence for sequence in running}
        for row in batch.rows:
            by_index[row.sequence].computed += len(row.token_ids)
        for each in sampled:
            sequence = by_index[each.sequence]
            if each.problem is None:
                sequence.tokens.append(each.token_id)
                sequence.logprobs.append(each.logprob)
            sequence.result = _finished(sequence, each)


def _finished(sequence: _Sequence, newest: Sampled) -> GenerateResult | None:
    request = sequence.request
    answer = tuple(sequence.tokens[len(request.token_ids) :])
    finish: Finish
    if newest.problem is not None:
        finish = "error"
    elif newest.token_id in request.stop_token_ids:
        finish = "stop"
    elif len(answer) == request.max_tokens:
        finish = "length"
    else:
        return None
    return GenerateResult(answer, tuple(sequence.logprobs), finish, newest.problem)

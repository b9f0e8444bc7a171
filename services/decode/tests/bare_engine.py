"""A decode engine without thread, server and clock: a script says who comes and goes, and between which two turns."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernels.batch import Batch, Row, Sampled, SamplingParams
from kernels.executor import Executor, Step
from kernels.grammar import GrammarFactory
from kernels.kv.pool import BlockPool
from services.chassis.block_keys import KeyChain
from services.chassis.kvstore_writer import Writeback
from services.decode.engine import DecodeEngine
from services.decode.grammar import Guide
from services.decode.sequence import DecodeSequence, Ending, Grown
from services.decode.states import States
from services.decode.tests.tiny_model import write_tiny_model

BLOCK = 16
ROOT = b"r" * 32
MOST_TURNS = 3000
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def load(folder: Path, num_blocks: int, *, run_ahead: bool) -> Executor:
    """Load the tiny model; one executor per pool size and way of running is shared by all tests."""
    if not folder.exists():
        write_tiny_model(folder)
    return Executor.load(
        folder, dtype="fp32", threads=1, num_blocks=num_blocks, block_tokens=BLOCK, run_ahead=run_ahead
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a script."""

    num_prompt_tokens: int
    max_tokens: int
    arrives: int = 0
    """Turns before it comes."""
    leaves: int | None = None
    """Turns from its arrival until it is cancelled."""
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    grammar: bytes = b""
    """Body; empty obeys none."""


@dataclass(slots=True, eq=False)
class Answer:
    """What became of a request. token_ids: the first is prefill's."""

    asked: Asked
    epoch: int
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    ending: Ending | None = None
    is_cancelled: bool = False
    sequence: DecodeSequence | None = None
    present_blocks: int | None = None
    """Granted, once it is a number."""

    def set(self, present_blocks: int) -> None:
        """Hear from the rooms, as the promise to an intake does."""
        self.present_blocks = present_blocks

    def grow(self, grown: Grown) -> None:
        """Listen to the engine."""
        assert self.ending is None, "nothing follows the end"
        assert not self.is_cancelled, "nobody asked any more"
        assert grown.sampled.problem is None, grown.sampled.problem
        self.token_ids.append(grown.sampled.token_id)
        self.logprobs.append(grown.sampled.logprob)
        self.ending = grown.ending


class WatchedExecutor:
    """An executor that minds what the engine may do while a step is in flight."""

    def __init__(self, executor: Executor, pool: BlockPool) -> None:
        self._executor = executor
        self._pool = pool
        self._launched: set[tuple[int, int, int]] = set()
        self._in_flight: list[tuple[Step, dict[int, list[int]]]] = []
        self.attempts: dict[int, int] = {}
        self.most_in_flight = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch, *, masks_follow: bool = False) -> Step:
        """No position twice, and no block that a step in flight writes for somebody else."""
        written = {row.sequence: _written(row) for row in batch.rows}
        for row in batch.rows:
            for position in range(row.position, row.position + len(row.token_ids)):
                once = (row.sequence, self.attempts[row.sequence], position)
                assert once not in self._launched, f"{once} was computed before"
                self._launched.add(once)
        for _, others in self._in_flight:
            for sequence, blocks in others.items():
                for row in batch.rows:
                    assert row.sequence == sequence or not set(blocks) & set(row.block_table), "blocks passed on early"
        step = self._executor.launch(batch, masks_follow=masks_follow)
        self._in_flight.append((step, written))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return step

    def collect(self, step: Step) -> tuple[Sampled, ...]:
        """Until now the blocks were held, and no other step is waited for before."""
        launched, written = self._in_flight.pop(0)
        assert launched.batch.rows[0].sequence == step.batch.rows[0].sequence, "steps are collected in order"
        assert all(self._pool.holders(block) for blocks in written.values() for block in blocks)
        return self._executor.collect(step)


class BareEngine:
    """Runs scripts. Tell callbacks run at once; prompts are computed by `source`."""

    def __init__(self, executor: Executor, source: Executor, grammars: GrammarFactory | None = None) -> None:
        self.pool = BlockPool(executor.num_blocks, BLOCK)
        self.executor = WatchedExecutor(executor, self.pool)
        self._source = source
        self._grammars = grammars
        watched: Any = self.executor
        self.engine = DecodeEngine(
            watched,
            self.pool,
            max_batch=8,
            tell=lambda deliver, *arguments: deliver(*arguments),
            writeback=Writeback(executor.fetch_block, executor.layout.block_bytes, None),
            states=States(executor, None),
            on_step=lambda _seconds: None,
            recompute_tokens=24,
        )

    def run(self, script: Sequence[Asked]) -> list[Answer]:
        """Play a script to its end; everything must be given back."""
        answers = [Answer(asked, epoch, _prompt(epoch, asked)) for epoch, asked in enumerate(script)]
        last = max((each.arrives + (each.leaves or 0) for each in script), default=0)
        for turn in range(MOST_TURNS):
            for answer in answers:
                self._follow(answer, turn)
            is_busy = self.engine.turn()
            if turn > last and not is_busy and all(each.ending or each.is_cancelled for each in answers):
                break
        else:
            raise AssertionError("the script did not end")
        assert 0 == self.pool.used_blocks
        assert 0 == self.engine.rooms.num_waiting
        self.pool.check_integrity()
        return answers

    def _follow(self, answer: Answer, turn: int) -> None:
        """Do what the outside does for a request between two turns."""
        asked = answer.asked
        if turn == asked.arrives:
            keys = KeyChain(ROOT, block_tokens=BLOCK)
            found: Any = answer
            self.engine.rooms.ask(
                found, answer.epoch, list(keys.extend(answer.prompt)), -(-len(answer.prompt) // BLOCK)
            )
        if asked.leaves is not None and turn == asked.arrives + asked.leaves and not answer.ending:
            answer.is_cancelled = True
            self.engine.rooms.release(answer.epoch)
        if answer.present_blocks is not None and answer.sequence is None and not answer.is_cancelled:
            self._start(answer, answer.present_blocks)
        sequence = answer.sequence
        if sequence is None:
            return
        if answer.is_cancelled or answer.ending:
            self.engine.release(sequence)
        self.executor.attempts[sequence.sequence] = sequence.attempt

    def _start(self, answer: Answer, present: int) -> None:
        asked, prompt = answer.asked, answer.prompt
        guide = (
            Guide(self._grammars, self._grammars.matcher(asked.grammar)) if asked.grammar and self._grammars else None
        )
        table = list(range(1, 1 + -(-len(prompt) // BLOCK)))
        row = Row(0, prompt, 0, table, asked.sampling, prompt, len(prompt), guide.matcher.mask() if guide else None)
        first = self._source.collect(self._source.launch(Batch((row,))))[0].token_id
        if guide is not None:
            guide.matcher.accept(first)
        chain = KeyChain(ROOT, block_tokens=BLOCK)
        answer.token_ids.append(first)
        answer.logprobs.append(None)
        answer.sequence = DecodeSequence(
            token_ids=[*prompt, first],
            num_prompt_tokens=len(prompt),
            last_tokens=len(prompt) + asked.max_tokens,
            stop_token_ids=asked.stop_token_ids,
            sampling=asked.sampling,
            priority=0,
            keys=list(chain.extend([*prompt, first])),
            next_key=chain.append,
            listener=answer.grow,
            ask=lambda _wanted: None,
            guide=guide,
        )
        self.engine.start(answer.sequence, answer.epoch)
        for there, here in zip(table[present:], answer.sequence.block_table[present:], strict=True):
            self.executor.write_block(here, self._source.read_block(there))


def sampled(seed: int, **changes: Any) -> SamplingParams:
    """Parameters with noise."""
    return replace(SamplingParams(temperature=0.9, seed=seed), **changes)


def _prompt(epoch: int, asked: Asked) -> list[int]:
    return [(7 * position + 11 * epoch) % 90 + 3 for position in range(asked.num_prompt_tokens)]


def _written(row: Row) -> list[int]:
    first, last = row.position // BLOCK, (row.position + len(row.token_ids) - 1) // BLOCK
    return list(row.block_table[first : last + 1])

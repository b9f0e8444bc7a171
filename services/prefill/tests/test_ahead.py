"""Does an engine that launches a chunk before the last one is done give the same KV, first tokens and scores?"""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.batch import SamplingParams
from kernels.executor import Executor
from kernels.kv.pool import BlockPool
from kernels.tests.shallow_v41 import shallow_v41
from services.chassis.block_keys import block_keys
from services.chassis.kvstore_writer import Writeback
from services.prefill.engine import PrefillEngine
from services.prefill.prompt import FirstTokenSampled, Prompt
from services.prefill.states import States
from services.prefill.tests.rig import prefill_replica, request
from services.prefill.tests.tiny_model import write_tiny_model

BLOCK = 16
ROOT = b"r" * 32
MOST_TURNS = 2000
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3, num_logprobs=2),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a script."""

    num_tokens: int
    arrives: int = 0
    """Turns before it comes."""
    leaves: int | None = None
    """Turns from its arrival until it is cancelled."""
    priority: int = 0
    sampling: SamplingParams = KINDS[0]
    num_scores: int | None = None


@dataclass(slots=True, eq=False)
class Came:
    """What came of a prompt."""

    prompt: Prompt
    is_gone: bool = False
    first: FirstTokenSampled | None = None
    blocks: list[bytes] = field(default_factory=list)

    def hear(self, happening: object) -> None:
        assert not self.is_gone, "nobody asked any more"
        if isinstance(happening, FirstTokenSampled):
            assert self.first is None, "there is one first token"
            self.first = happening


class Watched:
    """An executor that minds what the engine may do while a step is in flight."""

    def __init__(self, executor, pool):
        self._executor, self._pool = executor, pool
        self._launched = set()
        self._in_flight = []
        self._is_scored = False
        self.most_in_flight = 0

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def launch(self, batch):
        assert not self._is_scored, "a scored step's logits last until the next launch"
        self._is_scored = any(row.targets for row in batch.rows)
        for row in batch.rows:
            at = {(row.sequence, row.position + index) for index in range(len(row.token_ids))}
            assert not at & self._launched, "a token is computed once"
            self._launched |= at
            for others in self._in_flight:
                shared = {block for name, blocks in others if name != row.sequence for block in blocks}
                assert not shared & set(row.block_table), "blocks passed on early"
        self._in_flight.append([(row.sequence, _written(row)) for row in batch.rows])
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return self._executor.launch(batch)

    def collect(self, step):
        assert all(self._pool.holders(block) for _, blocks in self._in_flight.pop(0) for block in blocks)
        self._is_scored = self._is_scored and bool(self._in_flight)
        return self._executor.collect(step)


def _written(row):
    first, last = row.position // BLOCK, (row.position + len(row.token_ids) - 1) // BLOCK
    return list(row.block_table[first : last + 1])


@functools.cache
def load(folder, num_blocks, *, run_ahead):
    if not folder.exists():
        write_tiny_model(folder)
    return Executor.load(
        folder, dtype="fp32", threads=1, num_blocks=num_blocks, block_tokens=BLOCK, run_ahead=run_ahead
    )


def play(folder, script, num_blocks, *, run_ahead, chunk_tokens=20):
    """Play a script to its end; everything must be given back. Return what came, and the watched executor."""
    executor = load(folder, num_blocks, run_ahead=run_ahead)
    pool = BlockPool(num_blocks, BLOCK)
    watched = Watched(executor, pool)
    device: Any = watched
    engine = PrefillEngine(
        device,
        pool,
        chunk_tokens=chunk_tokens,
        tell=lambda deliver, *arguments: deliver(*arguments),
        writeback=Writeback(executor.fetch_block, executor.layout.block_bytes, None),
        states=States(executor, None),
        on_step=lambda _seconds: None,
    )
    came = [Came(_prompt(asked)) for asked in script]
    for each in came:
        each.prompt.listener = each.hear
    last = max(asked.arrives + (asked.leaves or 0) for asked in script)
    for turn in range(MOST_TURNS):
        for asked, each in zip(script, came, strict=True):
            if turn == asked.arrives:
                engine.submit(each.prompt)
            is_cancelled = asked.leaves is not None and turn == asked.arrives + asked.leaves
            if not each.is_gone and each.prompt.sequence and (each.first or is_cancelled):
                if each.first:  # between two turns, while others run: a handoff's copy
                    each.blocks = [executor.read_block(block) for block in each.prompt.block_table]
                engine.release(each.prompt)
                each.is_gone = True
        if not engine.turn() and turn > last and all(each.is_gone for each in came):
            break
    else:
        raise AssertionError("the script did not end")
    assert 0 == pool.used_blocks
    pool.check_integrity()
    return came, watched


def _prompt(asked):
    token_ids = tuple((7 * position + 11 * (asked.num_tokens % 3)) % 90 + 3 for position in range(asked.num_tokens))
    return Prompt(
        token_ids=token_ids,
        keys=block_keys(ROOT, token_ids, block_tokens=BLOCK),
        sampling=asked.sampling,
        priority=asked.priority,
        stored_blocks=0,
        listener=lambda _happening: None,
        num_scores=asked.num_scores,
    )


def check_same(folder, script, num_blocks):
    plain, _ = play(folder, script, num_blocks, run_ahead=False)
    ahead, watched = play(folder, script, num_blocks, run_ahead=True)
    for expected, got in zip(plain, ahead, strict=True):
        if expected.first and got.first:
            assert expected.first.sampled.token_id == got.first.sampled.token_id
            assert (expected.first.sampled.logprob, expected.first.scores) == (
                got.first.sampled.logprob,
                got.first.scores,
            )
            assert expected.blocks == got.blocks
    return watched, ahead


scripts = st.lists(
    st.builds(
        Asked,
        num_tokens=st.integers(1, 70),
        arrives=st.integers(0, 8),
        leaves=st.one_of(st.none(), st.none(), st.integers(1, 6)),
        priority=st.integers(0, 1),
        sampling=st.sampled_from(KINDS),
        num_scores=st.sampled_from([None, None, 1]),
    ),
    min_size=1,
    max_size=6,
)


@given(scripts, st.sampled_from([6, 12, 41]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_running_ahead_changes_nothing_that_is_handed_over(folder, script, num_blocks):
    """Arrivals, cancels, hits and scored prompts at any time; tokens, scores and all bytes are the same."""
    check_same(folder, script, num_blocks)


@pytest.mark.slow
@given(scripts, st.sampled_from([6, 12, 41]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_running_ahead_changes_nothing_in_many_scripts(folder, script, num_blocks):
    """The same, more often."""
    check_same(folder, script, num_blocks)


def test_the_chunks_of_one_prompt_follow_each_other_at_once(folder):
    """Its tokens are known, so nothing is waited for."""
    watched, _ = check_same(folder, [Asked(70, sampling=KINDS[1])], 41)

    assert 2 == watched.most_in_flight


def test_a_scored_step_is_collected_before_the_next_launch(folder):
    """Its logits last until then; the mate's chunks wait as well."""
    watched, (first, _) = check_same(folder, [Asked(40, num_scores=1), Asked(60, arrives=1)], 41)

    assert 39 == len(first.first.scores)
    assert watched.most_in_flight <= 2


@pytest.mark.slow
async def test_a_state_to_keep_is_read_before_the_windows_go_on(tmp_path):
    """A model with windows: the second time, the prompt starts from what was saved, and every bit is that of a cold run."""
    async with prefill_replica(shallow_v41(), states=tmp_path, run_ahead=True) as rig:
        wanted = request("warm", 70)
        cached = []
        for _time in range(2):
            events = await rig.serve(wanted)
            cached.append(next(e.first_token.cached_tokens for e in events if e.HasField("first_token")))
            blocks, _ = rig.source.prompt(wanted)
            (_, handed), window = rig.decode.committed[-1], rig.decode.windows[-1]
            assert (blocks[: 70 // BLOCK], rig.source.window()) == (handed[: 70 // BLOCK], window)
            await rig.idle()
            await rig.states.flush()

    assert [0, 3 * BLOCK] == cached

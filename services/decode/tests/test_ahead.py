"""Does an engine that plans a step before it knows the last one's tokens give the same answers?"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.grammar import GrammarFactory
from kernels.tests.shallow_v41 import shallow_v41
from services.chassis.window_store import folders
from services.decode.sequence import Ending
from services.decode.tests.bare_engine import BLOCK, Asked, BareEngine, load, sampled
from services.decode.tests.rig import decode_replica, keys_of, request
from services.decode.tests.tiny_model import EOS, VOCAB
from services.decode.tests.tiny_tokenizer import write_tokenizer

GRAMMAR = json.dumps({"grammars": [{"lark_grammar": "start: /[a-c][0-9a-f]{2,30}/"}]}).encode()
STOPS = frozenset(range(0, VOCAB, 13))
KINDS = [
    sampled(1),
    sampled(2, temperature=0.0),
    sampled(3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    sampled(4, num_logprobs=2, top_p=0.9),
    sampled(5, logit_bias=((5, 2.0),)),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    made = GrammarFactory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab_size=VOCAB, eos_token_ids=[EOS])
    yield made
    made.close()


def engine(folder, grammars, *, run_ahead, num_blocks=41):
    source = load(folder, 42, run_ahead=False)
    return BareEngine(load(folder, num_blocks, run_ahead=run_ahead), source, grammars)


def check_same(folder, grammars, script, num_blocks):
    """Play a script with and without; return the engine that ran ahead, and its answers."""
    plain = engine(folder, grammars, run_ahead=False, num_blocks=num_blocks).run(script)
    ahead = engine(folder, grammars, run_ahead=True, num_blocks=num_blocks)
    found = ahead.run(script)
    for expected, answer in zip(plain, found, strict=True):
        if answer.is_cancelled or expected.is_cancelled:  # one turn sooner or later
            length = min(len(expected.token_ids), len(answer.token_ids))
            assert expected.token_ids[:length] == answer.token_ids[:length]
        else:
            assert (expected.token_ids, expected.logprobs) == (answer.token_ids, answer.logprobs)
            assert expected.ending == answer.ending
    return ahead, found


asked = st.builds(
    Asked,
    num_prompt_tokens=st.integers(1, 40),
    max_tokens=st.integers(2, 24),
    arrives=st.integers(0, 12),
    leaves=st.one_of(st.none(), st.none(), st.integers(1, 14)),
    sampling=st.sampled_from(KINDS),
    stop_token_ids=st.sampled_from([frozenset(), STOPS]),
    grammar=st.sampled_from([b"", b"", GRAMMAR]),
)
scripts = st.lists(asked, min_size=1, max_size=6)


@given(scripts, st.sampled_from([6, 9, 41]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_running_ahead_changes_no_token(folder, grammars, script, num_blocks):
    """Arrivals, stops, cancels and preemptions at any time; what the engine must not do meanwhile is minded."""
    check_same(folder, grammars, script, num_blocks)


@pytest.mark.slow
@given(scripts, st.sampled_from([6, 9, 41]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_running_ahead_changes_no_token_in_many_scripts(folder, grammars, script, num_blocks):
    """The same, more often."""
    check_same(folder, grammars, script, num_blocks)


def test_every_kind_of_sampling_runs_ahead(folder, grammars):
    """Penalties count the token that is still drawn, masks come while the step runs, and nobody waits for anybody."""
    script = [Asked(9 + n, 20, sampling=kind) for n, kind in enumerate(KINDS)]
    script += [Asked(20, 20, sampling=sampled(9), grammar=GRAMMAR), Asked(30, 20, stop_token_ids=STOPS)]
    ahead, _ = check_same(folder, grammars, script, 41)

    assert 2 == ahead.executor.most_in_flight
    # All start together; after the first token of prefill there are 19 more, and one turn in which nobody is launched.
    assert ahead.engine.load.num_steps <= 21


def test_a_stop_costs_one_row_that_nobody_sees(folder, grammars):
    """The step in flight computes it, and holds its blocks until then."""
    (free,) = engine(folder, grammars, run_ahead=True).run([Asked(BLOCK, 12)])
    stop = free.token_ids[5]
    bare = engine(folder, grammars, run_ahead=True)
    (answer,) = bare.run([Asked(BLOCK, 12, stop_token_ids=frozenset({stop}))])
    length = free.token_ids.index(stop, 1) + 1

    assert (free.token_ids[:length], Ending.STOP) == (answer.token_ids, answer.ending)
    assert (length, length - 1) == (bare.engine.load.num_steps, bare.engine.load.num_tokens)


def test_a_known_length_costs_no_row(folder, grammars):
    """The last token is not computed, as without running ahead."""
    bare = engine(folder, grammars, run_ahead=True)
    bare.run([Asked(5, 12)])

    assert 11 == bare.engine.load.num_steps


def test_preemption_waits_for_the_step_in_flight(folder, grammars):
    """Its rows' tokens count, and nobody writes into blocks that changed hands."""
    script = [Asked(14 + n, 36, sampling=KINDS[n]) for n in range(3)]
    ahead, _ = check_same(folder, grammars, script, 7)

    assert ahead.engine.load.num_preemptions > 0


def test_an_engine_that_waits_has_one_step_at_a_time(folder, grammars):
    """The plain loop is what the other is held against."""
    bare = engine(folder, grammars, run_ahead=False)
    bare.run([Asked(5, 8), Asked(9, 8)])

    assert 1 == bare.executor.most_in_flight


@pytest.mark.slow
async def test_a_state_to_keep_is_read_before_the_windows_go_on(tmp_path):
    """A model with windows: the state that is saved is the one a cold run has there, though steps overlap."""
    async with decode_replica(shallow_v41(), states=tmp_path, run_ahead=True) as rig:
        wanted = request("saved", 40, max_tokens=12)
        expected = rig.source.answer(wanted)
        assert expected == await rig.answer(wanted)
        await rig.idle()
        await rig.states.flush()
        turn = request("turn", 1)
        turn.prompt_token_ids[:] = [*wanted.prompt_token_ids, *expected][: 3 * BLOCK]
        (saved,) = folders(tmp_path)[0].glob("*.whole")

        assert f"{keys_of(turn)[2].hex()}.{3 * BLOCK}.whole" == saved.name
        assert rig.source.prompt(turn).window == rig.states.store.load(keys_of(turn)[2], 3 * BLOCK)

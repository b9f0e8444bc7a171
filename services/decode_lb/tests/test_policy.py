"""Which decode replica continues this sequence?"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.errors import NoReplica, Overloaded, PromptTooLong
from services.decode_lb.policy import TYPICAL_ANSWER_TOKENS, Candidate, Sequence, blocks_for, pick

MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32


def candidate(replica="a", **changes):
    return replace(
        Candidate(
            replica=replica,
            boot_id=f"boot-{replica}",
            address=f"{replica}:1",
            ready=True,
            fingerprint=MODEL,
            block_tokens=128,
            total_blocks=100,
            free_blocks=100,
            free_after_answers=100,
            sequences=0,
            queued=0,
            kv_tokens=0,
        ),
        **changes,
    )


def sequence(kv_tokens=1000, max_tokens=100, **changes):
    return replace(Sequence(MODEL, kv_tokens, max_tokens), **changes)


def picked(fleet, wanted):
    return pick(fleet, wanted, full_batch=32).replica


def test_fewer_sequences_win_at_equal_kv():
    assert "b" == picked([candidate(sequences=3), candidate("b", sequences=2)], sequence())


def test_less_kv_wins_at_equal_counts():
    assert "b" == picked([candidate(kv_tokens=9000), candidate("b", kv_tokens=8000)], sequence())


def test_names_break_ties():
    assert "a" == picked([candidate("b"), candidate("a"), candidate("c")], sequence())


def test_kv_is_weighed_by_the_size_of_the_pool():
    """The same KV is half the load on a pool twice as large."""
    small = candidate("a", kv_tokens=6000)
    large = candidate("b", kv_tokens=7000, total_blocks=200, free_blocks=200, free_after_answers=200)

    assert "b" == picked([small, large], sequence())


def test_one_long_sequence_weighs_like_many_short_ones():
    """A step reads KV and carries sequences: half a pool is as much as half a batch."""
    long, many = candidate("a", kv_tokens=6401, sequences=1), candidate("b", kv_tokens=0, sequences=16)

    assert "b" == picked([long, many], sequence(10))
    assert "a" == picked([replace(long, kv_tokens=5900), many], sequence(10))


def test_room_for_a_typical_answer_is_preferred_to_a_smaller_load():
    tight = candidate("a", free_blocks=20, free_after_answers=8)
    roomy = candidate("b", sequences=10, free_blocks=20, free_after_answers=9)

    assert "b" == picked([tight, roomy], sequence(1000, 100))


def test_when_no_answer_fits_the_kv_alone_decides():
    """A sequence may be preempted later; that costs time but no token."""
    tight = candidate("a", free_blocks=8, free_after_answers=-3)

    assert "a" == picked([tight, candidate("b", free_blocks=7, free_after_answers=-1)], sequence(1000, 5000))


def test_everyone_who_runs_there_must_still_be_able_to_grow():
    """The replica's own rule for newcomers; without the margin the KV would wait in its reservation."""
    assert "a" == picked([candidate(free_blocks=12, free_after_answers=12, sequences=4)], sequence(1000))
    for room in (12, 100):  # also when short answers seem to leave enough
        with pytest.raises(Overloaded, match="all decode replicas are full"):
            picked([candidate(free_blocks=12, free_after_answers=room, sequences=5)], sequence(1000, 1))


def test_a_replica_where_sequences_wait_for_blocks_takes_no_more():
    """It lets nobody in before them: the caller's wait is better spent where it can still choose."""
    waiting = candidate("a", queued=1, sequences=1)

    assert "b" == picked([waiting, candidate("b", sequences=30, kv_tokens=9000)], sequence(1000))
    with pytest.raises(Overloaded):
        picked([waiting], sequence(1000))


def test_a_longer_answer_than_typical_asks_for_no_more_room():
    assert sequence(10, TYPICAL_ANSWER_TOKENS).expected_tokens == sequence(10, 1 << 20).expected_tokens


def test_full_replicas_refuse_for_now_and_small_ones_for_good():
    with pytest.raises(Overloaded) as full:
        picked([candidate(free_blocks=7, free_after_answers=0)], sequence(1000))
    assert full.value.retry_after > 0
    with pytest.raises(PromptTooLong, match="holds 1024"):
        picked([candidate(total_blocks=8, free_blocks=8)], sequence(1024))
    assert "a" == picked([candidate(total_blocks=8, free_blocks=8)], sequence(1023))


@pytest.mark.parametrize(
    "fleet",
    [[], [candidate(ready=False)], [candidate(fingerprint=OTHER_MODEL)], [candidate("gone")]],
    ids=["none", "draining", "other model", "excluded"],
)
def test_without_a_usable_replica_there_is_none(fleet):
    with pytest.raises(NoReplica) as refused:
        picked(fleet, sequence(exclude=frozenset({"gone"})))
    assert refused.value.retry_after > 0


def test_a_replica_that_does_not_know_its_pool_is_not_held_to_it():
    assert "a" == picked([candidate(total_blocks=0, free_blocks=0, free_after_answers=0)], sequence())


candidates = st.lists(
    st.builds(
        candidate,
        replica=st.sampled_from("abcdef"),
        ready=st.booleans(),
        fingerprint=st.sampled_from([MODEL, MODEL, OTHER_MODEL]),
        total_blocks=st.just(100),
        free_blocks=st.integers(0, 100),
        free_after_answers=st.integers(-20, 100),
        sequences=st.integers(0, 40),
        queued=st.sampled_from([0, 0, 0, 1]),
        kv_tokens=st.integers(0, 12_800),
    ),
    unique_by=lambda c: c.replica,
)
sequences = st.builds(
    sequence,
    kv_tokens=st.integers(1, 13_000),
    max_tokens=st.sampled_from([1, 100, 5000]),
    exclude=st.frozensets(st.sampled_from("abcdef"), max_size=3),
)


@given(candidates, sequences, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_pick_takes_the_kv_at_once_and_does_not_depend_on_order(fleet, wanted, random):
    usable = [c for c in fleet if c.ready and c.fingerprint == MODEL and c.replica not in wanted.exclude]
    needed = blocks_for(wanted.kv_tokens + 1, 128)
    try:
        chosen = pick(fleet, wanted, full_batch=32)
    except (NoReplica, Overloaded, PromptTooLong):
        assert not any(needed + c.sequences <= c.free_blocks and not c.queued for c in usable)
        return
    takers = [c for c in usable if needed + c.sequences <= c.free_blocks and not c.queued]
    roomy = [c for c in takers if c.free_after_answers >= blocks_for(wanted.expected_tokens, 128)]
    assert chosen in (roomy or takers)
    assert chosen == pick(random.sample(fleet, len(fleet)), wanted, full_batch=32)

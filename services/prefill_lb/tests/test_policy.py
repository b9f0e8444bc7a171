"""Which prefill replica takes this prompt?"""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.errors import NoReplica, Overloaded, PromptTooLong
from services.prefill_lb.policy import TIER_STARTS, Candidate, Prompt, pick, tier_of

MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
NO_BOUND = 1 << 40


def candidate(replica="a", **changes):
    return replace(
        Candidate(
            replica=replica,
            boot_id=f"boot-{replica}",
            address=f"{replica}:1",
            ready=True,
            fingerprint=MODEL,
            block_tokens=128,
            total_blocks=1 << 20,
            tiers=frozenset(),
            queued_tokens=0,
            tokens_per_second=0.0,
        ),
        **changes,
    )


def prompt(tokens=1000, **changes):
    return replace(Prompt(MODEL, tokens), **changes)


def picked(candidates, wanted, bound=NO_BOUND):
    return pick(candidates, wanted, max_queued_tokens=bound).candidate.replica


@pytest.mark.parametrize(
    ("tokens", "tier"),
    [(1, 0), (16_383, 0), (16_384, 1), (65_535, 1), (65_536, 2), (262_143, 2), (262_144, 3), (1 << 22, 3)],
)
def test_a_prompt_s_length_names_its_tier(tokens, tier):
    assert tier == tier_of(tokens)


ALL_SUBSETS = [frozenset(s) for n in range(1, 5) for s in combinations(range(4), n)]


@pytest.mark.parametrize("served", ALL_SUBSETS, ids=lambda s: "".join(map(str, sorted(s))))
@pytest.mark.parametrize("wanted", range(4))
def test_a_missing_tier_falls_to_the_next_longer_then_to_the_next_shorter(wanted, served):
    """Every subset of tiers serves every prompt, by the documented order."""
    fleet = [candidate(f"tier-{tier}", tiers=frozenset({tier})) for tier in served]

    choice = pick(fleet, prompt(TIER_STARTS[wanted] or 1), max_queued_tokens=NO_BOUND)

    longer, shorter = [t for t in served if t >= wanted], [t for t in served if t < wanted]
    expected = min(longer) if longer else max(shorter)
    assert (expected, f"tier-{expected}") == (choice.tier, choice.candidate.replica)


def test_a_replica_without_tiers_serves_all():
    fleet = [candidate("any", queued_tokens=5), candidate("long", tiers=frozenset({2, 3}))]

    assert ["any", "long"] == [picked(fleet, prompt(1000)), picked(fleet, prompt(100_000))]


def test_a_tier_whose_only_replica_is_excluded_falls_through():
    fleet = [candidate("short", tiers=frozenset({0})), candidate("long", tiers=frozenset({3}))]

    assert "long" == picked(fleet, prompt(exclude=frozenset({"short"})))


def test_the_shortest_queue_wins_and_names_break_ties():
    fleet = [candidate("c", queued_tokens=10), candidate("b", queued_tokens=3), candidate("a", queued_tokens=3)]

    assert "a" == picked(fleet, prompt())


def test_what_the_store_holds_is_no_work():
    """A hit of the whole prompt still computes its last token."""
    assert [600, 1] == [prompt(1000, hit_tokens=400).uncached_tokens, prompt(1000, hit_tokens=1000).uncached_tokens]


def test_a_prompt_that_fits_no_pool_is_too_long_and_names_the_limit():
    with pytest.raises(PromptTooLong, match="holds 1280") as refused:
        pick([candidate(total_blocks=10), candidate("b", total_blocks=9)], prompt(1281), max_queued_tokens=NO_BOUND)
    assert "prompt" == refused.value.field
    assert "a" == picked([candidate(total_blocks=10), candidate("b", total_blocks=9)], prompt(1280))


@pytest.mark.parametrize(
    "fleet",
    [[], [candidate(ready=False)], [candidate(fingerprint=OTHER_MODEL)], [candidate("gone")]],
    ids=["none", "draining", "other model", "excluded"],
)
def test_without_a_usable_replica_there_is_none(fleet):
    with pytest.raises(NoReplica) as refused:
        pick(fleet, prompt(exclude=frozenset({"gone"})), max_queued_tokens=NO_BOUND)
    assert refused.value.retry_after > 0


def test_full_queues_refuse_with_the_time_they_need():
    fleet = [candidate(queued_tokens=9000, tokens_per_second=500), candidate("b", queued_tokens=9500)]

    with pytest.raises(Overloaded) as refused:
        pick(fleet, prompt(2000), max_queued_tokens=10_000)
    assert 4.0 == refused.value.retry_after
    assert "a" == picked(fleet, prompt(1000), bound=10_000)


def test_an_idle_replica_takes_even_a_prompt_above_the_queue_bound():
    """Otherwise such a prompt could never be served."""
    assert "a" == picked([candidate()], prompt(50_000), bound=10_000)


candidates = st.lists(
    st.builds(
        candidate,
        replica=st.sampled_from("abcdef"),
        ready=st.booleans(),
        fingerprint=st.sampled_from([MODEL, MODEL, OTHER_MODEL]),
        total_blocks=st.sampled_from([0, 10, 1000, 1 << 20]),
        tiers=st.frozensets(st.integers(0, 5), max_size=3),
        queued_tokens=st.integers(0, 5000),
    ),
    unique_by=lambda c: c.replica,
)
prompts = st.builds(
    prompt,
    tokens=st.sampled_from([1, 1280, 1281, 20_000, 70_000, 300_000]),
    exclude=st.frozensets(st.sampled_from("abcdef"), max_size=3),
)


@given(candidates, prompts, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_pick_is_usable_cheapest_and_independent_of_order(fleet, wanted, random):
    try:
        choice = pick(fleet, wanted, max_queued_tokens=NO_BOUND)
    except (NoReplica, PromptTooLong):
        choice = None
    usable = [c for c in fleet if c.ready and c.fingerprint == MODEL and c.replica not in wanted.exclude]
    fitting = [c for c in usable if not c.total_blocks or wanted.prompt_tokens <= c.total_blocks * 128]
    assert bool(fitting) == bool(choice)
    if choice is None:
        return
    assert choice.candidate in fitting
    shuffled = random.sample(fleet, len(fleet))
    assert choice == pick(shuffled, wanted, max_queued_tokens=NO_BOUND)

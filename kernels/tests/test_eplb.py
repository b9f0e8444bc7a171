"""Expert placement: the golden placements, and what every placement promises."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.parallel.eplb import (
    BadPlacement,
    Counts,
    Placement,
    balance,
    dispatch_copy,
    initial,
    padded_extra,
    rank_loads,
    rearranged,
    replicated,
)
from kernels.tests.golden_files import golden, golden_json

CASES = range(5)


def golden_case(case: int) -> tuple[dict[str, Any], Counts]:
    return golden_json("sched/eplb")[case], golden(f"eplb.{case}.counts").numpy()


@pytest.mark.parametrize("case", CASES)
def test_placements_are_the_golden_ones(case: int) -> None:
    """Copies, slots and homes of every layer equal the reference's."""
    sizes, counts = golden_case(case)

    placement = rearranged(counts, extra=sizes["extra"], num_ranks=sizes["ranks"])

    assert np.array_equal(golden(f"eplb.{case}.logical_count").numpy(), placement.num_copies)
    assert np.array_equal(golden(f"eplb.{case}.physical_to_logical").numpy(), placement.physical_to_logical)
    assert np.array_equal(golden(f"eplb.{case}.logical_to_physical").numpy(), placement.logical_to_physical)


@pytest.mark.parametrize("case", CASES)
def test_loads_and_balance_are_the_golden_ones(case: int) -> None:
    """Loads per rank and the peak-over-mean metric equal the reference's."""
    sizes, counts = golden_case(case)
    placement = rearranged(counts, extra=sizes["extra"], num_ranks=sizes["ranks"])

    loads = rank_loads(counts, placement, sizes["ranks"])
    measured = balance(loads)

    np.testing.assert_allclose(loads, golden(f"eplb.{case}.rank_load").numpy(), atol=1e-9)
    assert sizes["moe_lb_max_sum"] == pytest.approx(measured.peak_tokens, abs=1e-9)
    assert sizes["moe_lb_mean_sum"] == pytest.approx(measured.mean_tokens, abs=1e-9)
    assert sizes["moe_lb"] == pytest.approx(measured.moe_lb, abs=1e-12)
    assert 1 / sizes["moe_lb"] == pytest.approx(measured.rank_balance)


@pytest.mark.parametrize("case", CASES)
def test_the_initial_placement_is_the_golden_one(case: int) -> None:
    """Before anything is counted every expert has a slot, and the first ones a second."""
    sizes, _ = golden_case(case)

    placement = initial(2, sizes["experts"], sizes["extra"])

    assert [sizes["initial"]] * 2 == placement.physical_to_logical.tolist()


def test_the_dispatch_rule_is_the_golden_one() -> None:
    """Every rank computes for itself which copy serves a token."""
    for example in golden_json("sched/eplb_dispatch")["examples"]:
        assert example["copy"] == dispatch_copy(example["ep_rank"], example["token"], example["copies"])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[10, 10, 1]], [0, 1, 2, 1]),  # equal now: the higher index is the busiest
        ([[100, 0], [0, 100]], [0, 1, 1]),  # in the load after a copy it would cancel out, and 0 get the copy
        ([[10, 20]], [0, 1, 1, 1]),  # equal after the first copy: it is still there
    ],
)
def test_the_tie_breaker_counts_in_present_loads_alone(counts: list[list[int]], expected: list[int]) -> None:
    """Of equal experts the higher index gets the copy, which an index added to every load would not give."""
    extra = len(expected) - len(counts[0])

    assert expected == replicated(np.array(counts), extra).tolist()


def test_real_extras_fill_the_ranks() -> None:
    """384 experts on 64 ranks with 64 more copies are 7 a rank; fewer extras are raised to a full slot everywhere."""
    assert 64 == padded_extra(384, 64, 64)
    assert 64 == padded_extra(384, 1, 64)
    assert 0 == padded_extra(384, 0, 64)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: rearranged(np.ones((1, 1, 4), np.int64), extra=1, num_ranks=2), "do not divide among 2 ranks"),
        (lambda: rearranged(np.ones((1, 4), np.int64), extra=0, num_ranks=2), r"not \[steps, layers, experts\]"),
        (lambda: rearranged(-np.ones((1, 1, 4), np.int64), extra=0, num_ranks=2), "of tokens"),
        (lambda: padded_extra(4, 1, 0), "make no placement"),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[[], object], reason: str) -> None:
    """What does not fit is an error that says so, not a placement with holes."""
    with pytest.raises(BadPlacement, match=reason):
        make()


def test_a_layer_that_counted_nothing_keeps_the_initial_placement() -> None:
    """An idle layer says nothing about its experts; the other layers are placed as if it were not there."""
    counts = np.zeros((3, 2, 6), np.int64)
    counts[:, 1] = np.arange(6)

    placement = rearranged(counts, extra=2, num_ranks=4)

    assert [0, 1, 2, 3, 4, 5, 0, 1] == placement.physical_to_logical[0].tolist()
    alone = rearranged(counts[:, 1:], extra=2, num_ranks=4)
    assert alone.physical_to_logical[0].tolist() == placement.physical_to_logical[1].tolist()


def test_idle_ranks_are_balanced() -> None:
    """No tokens at all is not a division by zero."""
    loads = rank_loads(np.zeros((1, 1, 4), np.int64), initial(1, 4, 0), 2)

    assert (1.0, 1.0) == (balance(loads).moe_lb, balance(loads).rank_balance)


@given(
    num_experts=st.integers(1, 12),
    extra=st.integers(0, 8),
    num_ranks=st.integers(1, 5),
    steps=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_every_placement_is_whole(num_experts: int, extra: int, num_ranks: int, steps: int, seed: int) -> None:
    """No slot is empty, no expert is lost, both maps agree, and loads add up to the tokens counted."""
    extra = padded_extra(num_experts, extra, num_ranks)
    counts = np.random.default_rng(seed).integers(0, 5, (steps, 2, num_experts))

    placement = rearranged(counts, extra=extra, num_ranks=num_ranks)

    assert_whole(placement, num_experts, extra)
    loads = rank_loads(counts, placement, num_ranks)
    np.testing.assert_allclose(counts.sum(axis=2), loads.sum(axis=0), atol=1e-9)
    assert balance(loads).moe_lb >= 1.0 - 1e-12


def assert_whole(placement: Placement, num_experts: int, extra: int) -> None:
    for layer, slots in enumerate(placement.physical_to_logical.tolist()):
        homes = placement.logical_to_physical[layer].tolist()
        used = [slot for home in homes for slot in home if slot >= 0]
        assert list(range(num_experts + extra)) == sorted(used)
        for expert, home in enumerate(homes):
            copies = placement.num_copies[layer, expert]
            assert 1 <= copies
            assert [expert] * copies == [slots[slot] for slot in home[:copies]]
            assert [-1] * (extra + 1 - copies) == home[copies:]
            assert home[5 % copies] == placement.slot(layer, expert, ep_rank=5, token_index=0)

"""Which drafts are verified: the golden decisions, and what every decision promises."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tests.golden_files import golden_json
from services.decode.drafts import (
    Curve,
    Drafted,
    Overheads,
    StepTiming,
    chosen_total,
    distribute,
    distribute_on_device,
    estimated_overheads,
    plan_drafts,
    sampler_time,
    scan,
    slope,
)

CURVE = Curve(((8, 10.0), (16, 11.0), (24, 15.0)))


def golden_case(case: int) -> tuple[dict[str, Any], list[Drafted], Curve, Overheads]:
    """Milliseconds throughout: the unit cancels."""
    data = golden_json("sched/scheduler")[case]
    requests = [
        Drafted(data["drafts"] if has else 0, earlier and tuple(earlier), latest and tuple(latest))
        for has, earlier, latest in zip(
            data["has_draft"], data["conf_step_minus_2"], data["conf_step_minus_1"], strict=True
        )
    ]
    curve = Curve(tuple((tokens, time) for tokens, time in data["curve"]))
    return data, requests, curve, Overheads(data["slope_ms"], data["sampler_ms"])


@pytest.mark.parametrize("case", range(10))
def test_decisions_are_the_golden_ones(case: int) -> None:
    """The total and its distribution equal the reference's, without a curve too."""
    data, requests, curve, overheads = golden_case(case)

    assert data["chosen_total"] == chosen_total(requests, curve, overheads)
    assert data["seqlens_q"] == list(plan_drafts(requests, curve, overheads))


@pytest.mark.parametrize("case", range(9))
def test_every_total_is_valued_as_in_the_golden_scan(case: int) -> None:
    """Expected tokens, time and rate equal the reference's in every bit.

    The reference goes on through places where a request has no draft, at a chance of 0; ours ends before them.
    """
    data, requests, curve, overheads = golden_case(case)

    scanned = scan(requests, curve, overheads)

    real = len(requests) + sum(request.num_drafts for request in requests)
    wanted = [each for each in data["scanned"] if real >= each["B"]]
    assert [each["B"] for each in wanted] == scanned.totals.tolist()
    assert [each["graph"] for each in wanted] == scanned.graph_tokens.tolist()
    assert [each["expected"] for each in wanted] == scanned.expected_tokens.tolist()
    assert [each["time_ms"] for each in wanted] == scanned.times.tolist()
    assert [each["rate"] for each in wanted] == scanned.rates.tolist()


@pytest.mark.parametrize("case", range(4))
def test_the_device_distributes_as_in_the_golden_cases(case: int) -> None:
    """For a fixed total the device finds the same rows, new requests last."""
    data = golden_json("sched/gpu_distribution")[case]
    previous = [None if index < 0 else index for index in data["remap"]]

    assert data["seqlens_q"] == list(distribute_on_device(data["total_q"], previous, data["prev_conf"]))


def test_a_valley_in_the_curve_is_crossed() -> None:
    """The scan does not stop where one more draft makes things worse: the best total can lie behind it."""
    curve = Curve(((1, 1.0), (2, 2.5), (6, 2.6)))
    sure = Drafted(5, earlier=(1.0,) * 5)

    assert 6 == chosen_total([sure], curve)


def test_of_equal_totals_the_smaller_is_chosen() -> None:
    """A hopeless draft is not verified just because it costs nothing."""
    assert 1 == chosen_total([Drafted(3, earlier=(0.0, 1.0, 1.0))], Curve(((8, 10.0),)))


def test_how_many_and_which_are_decided_from_different_steps() -> None:
    """Two steps ago one draft was worth it; which one, the last step says."""
    requests = [Drafted(1, earlier=(0.9,), latest=(0.1,)), Drafted(1, earlier=(0.0,), latest=(0.8,))]

    assert (1, 2) == plan_drafts(requests, Curve(((8, 10.0),)))


def test_a_batch_beyond_every_graph_verifies_nothing() -> None:
    """What was never measured is not made larger still."""
    assert (1,) * 30 == plan_drafts([Drafted(5)] * 30, CURVE)


def test_rates_that_are_no_probabilities_lose() -> None:
    """NaN and positions without a confidence count as hopeless: other drafts go first."""
    requests = [
        Drafted(2, earlier=(1.0, 0.0), latest=(float("nan"), 1.0)),
        Drafted(2, earlier=(1.0, 0.0), latest=(0.5,)),
        Drafted(2, earlier=(1.0, 0.0), latest=(0.6, 0.9)),
    ]

    assert (1, 2, 3) == plan_drafts(requests, Curve(((8, 10.0),)))


def test_a_rate_above_one_lifts_nothing() -> None:
    """A draft is never likelier than the one before it, or it would be taken without it."""
    requests = [Drafted(2, earlier=(1.0, 0.0), latest=(0.6, 7.0)), Drafted(1, earlier=(0.0,), latest=(0.65,))]

    assert (1, 2) == plan_drafts(requests, Curve(((8, 10.0),)))


def test_places_without_a_draft_get_no_row() -> None:
    """However large the total."""
    assert (2, 1) == distribute(np.array([[0.5, -1.0], [-1.0, -1.0]], np.float32), 9)


def test_nothing_to_do_is_no_error() -> None:
    """An empty batch, and one without a single draft."""
    assert () == plan_drafts([], CURVE)
    assert (1, 1) == plan_drafts([Drafted(0), Drafted(0)], CURVE)
    assert (1, 1) == plan_drafts([Drafted(0), Drafted(0)], Curve())
    assert (1,) == distribute_on_device(3, [None], [])


CONFIDENCES = st.none() | st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5).map(tuple)
REQUESTS = st.lists(st.builds(Drafted, st.integers(0, 5), CONFIDENCES, CONFIDENCES), max_size=7)
CURVES = st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 30)), max_size=5, unique_by=lambda point: point[0])


@given(requests=REQUESTS, points=CURVES, spent=st.builds(Overheads, st.floats(-1, 1), st.floats(0, 2)))
@settings(max_examples=60, deadline=None)
def test_every_plan_is_sound(requests: list[Drafted], points: list[tuple[int, float]], spent: Overheads) -> None:
    """Everyone has its own row, nobody more drafts than it has, the total is the chosen one, the best of all."""
    curve = Curve(tuple(points))
    rows = plan_drafts(requests, curve, spent)

    assert len(requests) == len(rows)
    assert all(1 <= row <= 1 + request.num_drafts for row, request in zip(rows, requests, strict=True))
    assert chosen_total(requests, curve, spent) == sum(rows)
    scanned = scan(requests, curve, spent)
    if scanned.totals.size:
        assert scanned.rates.max() == scanned.rates[sum(rows) - len(requests)]


@given(confidences=st.lists(st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_one_more_row_never_takes_one_away(confidences: list[list[float]]) -> None:
    """Growing the total only adds a draft to one request: drafts are always taken from the front, likeliest first."""
    count = len(confidences)
    plans = [distribute_on_device(total, range(count), confidences) for total in range(count, 6 * count + 1)]

    for fewer, more in pairwise(plans):
        assert [0] * (count - 1) + [1] == sorted(b - a for a, b in zip(fewer, more, strict=True))


def timings(
    graph_tokens: int, forwards: list[float], *, num_requests: int = 4, sampler: float = 1.0
) -> list[StepTiming]:
    return [StepTiming(graph_tokens, forward, num_requests, sampler) for forward in forwards]


def test_the_slope_is_a_median_of_medians() -> None:
    """One odd step, or one graph size that ran most often, does not set it; sizes seen too rarely do not count."""
    often = timings(8, [10.8] * 40)  # 0.1 a token
    odd = timings(16, [11.0 + 16 * 0.3] * 9 + [900.0])  # 0.3 a token
    rare = timings(24, [99.0] * 9)

    assert 0.2 == pytest.approx(slope(often + odd + rare, CURVE), abs=1e-6)
    assert 0.0 == slope(rare + timings(32, [1.0] * 20), CURVE)


def test_the_slope_forgets_old_steps() -> None:
    """Only the last 5,000 steps count."""
    assert 0.1 == pytest.approx(slope(timings(8, [99.0] * 9000) + timings(8, [10.8] * 5000), CURVE), abs=1e-6)


def test_the_sampler_time_follows_batches_of_the_same_size() -> None:
    """The last nine steps with as many requests; of any size where those are too few; nothing where all are."""
    few = timings(8, [10.0] * 4, num_requests=2, sampler=9.0)
    old = timings(8, [10.0] * 20, sampler=5.0)
    new = timings(8, [10.0] * 9, sampler=1.0)

    assert 1.0 == sampler_time(old + new + few, 4)
    assert 1.0 == sampler_time(old + new + few, 2)
    assert 0.0 == sampler_time(few, 2)
    assert Overheads(0.0, 1.0) == estimated_overheads(old + new, CURVE, 4)

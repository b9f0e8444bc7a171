"""Which drafts are worth verifying this step?

Verifying a draft costs a row; it pays when it is likely enough to be accepted. A draft counts only if all drafts before
it are accepted too, so its rate is the product of the confidences up to it: rates of one request never rise, and taking
drafts in order of rate always takes a leading part of each request's drafts (the prefix property).

Two sets of rates, as in DeepInfer: *how many* drafts to verify is decided from confidences of two steps ago, *which*
from those of the last step. The number thus depends on nothing the drafts in question depend on, which is what keeps
speculation lossless, and it is known while the device still computes the last step.
Times are in any one unit: only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float32]
"""[requests, depth]: chance that a draft and all before it are accepted; -1 where there is no draft."""

_NO_DRAFT = np.float32(-1.0)

SLOPE_STEPS = 5000
"""Steps the slope looks back on; what callers keep."""
_SLOPE_SAMPLES = 10
"""Steps of one graph size before its slope counts."""
_SAMPLER_STEPS = 9
"""Steps the sampler's time is the median of: few, so that it follows a change of what callers ask for."""
_SAMPLER_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Drafted:
    """One request of the next step."""

    num_drafts: int
    """Drafts it has; 0 verifies none."""
    earlier: tuple[float, ...] | None = None
    """Confidence of each draft position two steps ago; None counts as sure."""
    latest: tuple[float, ...] | None = None
    """Confidence of each of its drafts now; None (not there yet) counts as sure."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Time of the model's forward by graph size, as measured at start-up."""

    points: tuple[tuple[int, float], ...] = ()
    """(tokens, time), any order. None at all: nothing is known, and everything is verified."""
    _tokens: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _times: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the points once; they are looked up every step."""
        points = sorted(self.points)
        object.__setattr__(self, "_tokens", np.array([tokens for tokens, _ in points], np.int64))
        # fp32, as measured times are kept: a tie between two totals must fall the same way on every rank.
        object.__setattr__(self, "_times", np.array([time for _, time in points], np.float32).astype(np.float64))

    def graphs(self, totals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Size and time of the smallest graph that holds each total; only for totals that some graph holds."""
        index = np.searchsorted(self._tokens, totals)
        index = index[index < len(self._tokens)]
        return self._tokens[index], self._times[index]

    def measured(self) -> dict[int, float]:
        """Time by graph size."""
        return dict(zip(self._tokens.tolist(), self._times.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a step costs beyond the curve."""

    slope: float = 0.0
    """Extra time per token of the graph (contexts longer than those measured); below 0 counts as 0."""
    sampler: float = 0.0
    """Time of sampling."""


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """What each possible total of rows would bring; totals ascend by one from the number of requests."""

    totals: NDArray[np.int64]
    """Rows of the step: one per request, and drafts."""
    graph_tokens: NDArray[np.int64]
    expected_tokens: NDArray[np.float32]
    times: NDArray[np.float64]

    @property
    def rates(self) -> NDArray[np.float64]:
        """Tokens per unit of time."""
        rates: NDArray[np.float64] = self.expected_tokens.astype(np.float64) / self.times
        return rates


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One finished step, for the estimates."""

    graph_tokens: int
    forward: float
    """Measured time of the model's forward."""
    num_requests: int
    sampler: float
    """Measured time of sampling."""


def plan_drafts(requests: Sequence[Drafted], curve: Curve, overheads: Overheads = Overheads()) -> tuple[int, ...]:
    """Rows each request gets in the next step: 1 and the drafts to verify, a leading part of those it has."""
    latest = _rates(requests, [request.latest for request in requests])
    return distribute(latest, chosen_total(requests, curve, overheads))


def chosen_total(requests: Sequence[Drafted], curve: Curve, overheads: Overheads = Overheads()) -> int:
    """Rows of the next step that bring the most tokens per unit of time.

    Every total is looked at, because a curve measured on hardware has steps: the best can lie behind a worse one. A
    batch too large for every graph verifies no drafts.
    """
    if not curve.points:
        return len(requests) + sum(request.num_drafts for request in requests)
    scanned = scan(requests, curve, overheads)
    if not scanned.totals.size:
        return len(requests)
    return int(scanned.totals[scanned.rates.argmax()])  # the first of equals


def scan(requests: Sequence[Drafted], curve: Curve, overheads: Overheads = Overheads()) -> Scan:
    """Every total that some graph holds, from no drafts on, with its worth; drafts join likeliest first."""
    rates = _rates(requests, [request.earlier for request in requests]).ravel()
    rates = rates[np.argsort(-rates, kind="stable")]
    rates = rates[rates >= 0]
    # fp32 additions one after the other, as the reference adds: totals within rounding of each other must not swap.
    expected = np.cumsum(np.concatenate([np.array([len(requests)], np.float32), rates]), dtype=np.float32)
    totals = len(requests) + np.arange(len(expected))
    graphs, times = curve.graphs(totals)
    times = times + max(0.0, overheads.slope) * graphs + overheads.sampler
    return Scan(totals[: len(graphs)], graphs, expected[: len(graphs)], times)


def distribute(rates: Rates, total: int) -> tuple[int, ...]:
    """Rows of each request when `total` rows are shared out: 1 each, the rest to the likeliest drafts.

    Among equal rates the earlier request goes first, and in a request the earlier draft: rates never rise within a
    request, so its drafts are always taken from the front.
    """
    num_requests, depth = rates.shape
    spare = max(total - num_requests, 0)
    order = np.argsort(-rates.ravel(), kind="stable")[:spare]
    order = order[rates.ravel()[order] >= 0]
    wins = np.bincount(order // max(depth, 1), minlength=num_requests)
    return tuple((1 + wins).tolist())


def distribute_on_device(
    total: int, previous: Sequence[int | None], confidences: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """What the device does with a total that was fixed before the last step's confidences were known; twin of a kernel.

    previous: each request's index in the last batch, or None if it is new.  confidences: [last batch][depth].
    A new request has rows for drafts like the others (the device cannot know better), but they count as hopeless.
    """
    depth = len(confidences[0]) if confidences else 0
    hopeless = (0.0,) * depth
    carried = [hopeless if index is None else tuple(confidences[index]) for index in previous]
    return distribute(_rates([Drafted(depth)] * len(previous), carried), total)


def slope(timings: Sequence[StepTiming], curve: Curve) -> float:
    """Extra time per token over the curve: the median over graph sizes of each size's median; 0 if none has enough."""
    measured = curve.measured()
    excess: dict[int, list[float]] = {tokens: [] for tokens in measured}
    for timing in timings[-SLOPE_STEPS:]:
        tokens = timing.graph_tokens
        if tokens in measured:
            excess[tokens].append((timing.forward - measured[tokens]) / tokens)
    medians = [median(samples) for samples in excess.values() if len(samples) >= _SLOPE_SAMPLES]
    return median(medians) if medians else 0.0


def sampler_time(timings: Sequence[StepTiming], num_requests: int) -> float:
    """Median time of sampling in the latest steps with as many requests; else in the latest of any; else 0."""
    alike = [timing.sampler for timing in timings if timing.num_requests == num_requests]
    for samples in (alike, [timing.sampler for timing in timings]):
        if len(samples) >= _SAMPLER_SAMPLES:
            return median(samples[-_SAMPLER_STEPS:])
    return 0.0


def estimated_overheads(timings: Sequence[StepTiming], curve: Curve, num_requests: int) -> Overheads:
    """Both estimates from the steps so far, oldest first. Milliseconds of work: for once in a while, not every step."""
    return Overheads(slope(timings, curve), sampler_time(timings, num_requests))


def _rates(requests: Sequence[Drafted], confidences: Sequence[Sequence[float] | None]) -> Rates:
    """Products of the confidences, one fp32 rounding each, like those of the device.

    A position without a confidence is hopeless, and so is one whose confidence is no probability (NaN logits).
    """
    depth = max((request.num_drafts for request in requests), default=0)
    sure, hopeless = [1.0] * depth, [0.0] * depth
    padded = [sure if given is None else [*given, *hopeless][:depth] for given in confidences]
    chances = np.array(padded, np.float32).reshape(len(requests), depth)
    rates = np.cumprod(np.nan_to_num(chances, nan=0.0).clip(0.0, 1.0), axis=1, dtype=np.float32)
    num_drafts = np.array([request.num_drafts for request in requests], np.int64)
    rates[np.arange(depth) >= num_drafts[:, None]] = _NO_DRAFT
    return rates

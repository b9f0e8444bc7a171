"""Which experts get a second copy, which rank holds each copy, and which copy serves a token?

Counts in, a placement out: no clock, no device. Experts of one layer are copied where that lowers the busiest copy
most, summed over the steps of a window; then copies go to ranks, heaviest first, where they lift the peak rank least.
Summing peaks step by step (rather than averaging first) keeps experts that are busy at the same time apart.
The rules are DeepInfer's; every tie is broken by the lower index, so all ranks compute the same placement on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Loads = NDArray[np.float64]
Ids = NDArray[np.int64]

_DISPATCH_STRIDE = 23_333
"""Prime, far above any number of copies: consecutive tokens of a rank visit all copies of an expert."""
_TIE_BREAK = 1e-4
"""Tokens per expert index, added to present loads so that one expert is the busiest; never outweighs a token."""


class BadPlacement(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """The experts, copies and ranks asked for do not fit together."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where each copy of each expert lives. Physical slots are numbered rank by rank."""

    physical_to_logical: Ids
    """[layers, physical]: the expert in a slot; rank r holds slots r * per_rank up to (r + 1) * per_rank."""
    logical_to_physical: Ids
    """[layers, logical, extra + 1]: the slots of an expert by copy number, then -1."""
    num_copies: Ids
    """[layers, logical]."""

    def slot(self, layer: int, expert: int, *, ep_rank: int, token_index: int) -> int:
        """The slot that computes this token's share of the expert."""
        copy = dispatch_copy(ep_rank, token_index, int(self.num_copies[layer, expert]))
        return int(self.logical_to_physical[layer, expert, copy])


@dataclass(frozen=True, slots=True)
class Balance:
    """How even a placement is on given counts; sums over steps and layers, in tokens."""

    peak_tokens: float
    """Tokens of the busiest rank: what the step waits for."""
    mean_tokens: float
    """Tokens of a rank if all were equally busy."""

    @property
    def moe_lb(self) -> float:
        """Peak over mean: 1 is perfect, and without tokens all ranks are equally idle."""
        return self.peak_tokens / self.mean_tokens if self.mean_tokens else 1.0

    @property
    def rank_balance(self) -> float:
        """Mean over peak: the share of the ranks' time that is used."""
        return 1.0 / self.moe_lb


def padded_extra(num_experts: int, extra: int, num_ranks: int) -> int:
    """Copies beyond one each, raised until every rank has the same number of slots."""
    if num_experts < 1 or extra < 0 or num_ranks < 1:
        raise BadPlacement(f"{num_experts} experts, {extra} extra copies and {num_ranks} ranks make no placement")
    return -(-(num_experts + extra) // num_ranks) * num_ranks - num_experts


def initial(num_layers: int, num_experts: int, extra: int) -> Placement:
    """The placement before anything was counted: every expert once, then the first ones again."""
    slots = np.arange(num_experts + extra) % num_experts
    copies = np.bincount(slots, minlength=num_experts)
    return _stacked([slots] * num_layers, [_slots_of(slots, np.arange(len(slots)), copies)] * num_layers, extra)


def rearranged(counts: Counts, *, extra: int, num_ranks: int) -> Placement:
    """The placement for the loads of a window of steps.

    counts: [steps, layers, logical] tokens.  extra: copies beyond one each; (logical + extra) must divide among the
    ranks, see `padded_extra`.  A layer that counted nothing keeps the initial placement: no load speaks for another.
    """
    _, num_layers, num_experts = _checked(counts).shape
    if padded_extra(num_experts, extra, num_ranks) != extra:
        raise BadPlacement(f"{num_experts} experts and {extra} copies do not divide among {num_ranks} ranks")
    unmoved = initial(1, num_experts, extra)
    slots: list[Ids] = []
    homes: list[Ids] = []
    for layer in range(num_layers):
        window = counts[:, layer]
        if window.any():
            replicas = replicated(window, extra)
            placed, home = _placed(window, replicas, num_ranks)
        else:
            placed, home = unmoved.physical_to_logical[0], unmoved.logical_to_physical[0]
        slots.append(placed)
        homes.append(home)
    return _stacked(slots, homes, extra)


def replicated(counts: Counts, extra: int) -> Ids:
    """The expert of each copy: every expert once, then the extra copies in the order in which they were given.

    counts: [steps, logical] tokens of one layer.  Each copy goes to the expert for which the sum over steps of the
    busiest copy's load is least once it has one copy more.
    """
    num_experts = counts.shape[1]
    steps = np.arange(len(counts))
    tie_break = np.arange(num_experts) * _TIE_BREAK
    copies = np.ones(num_experts, np.int64)
    present: Loads = counts + tie_break
    relieved: Loads = counts / 2
    replicas = list(range(num_experts))
    for _ in range(extra):
        busiest = present.argmax(axis=1)
        peak = present[steps, busiest]
        without = present.copy()
        without[steps, busiest] = -np.inf
        # What remains the peak while expert j is left out: the peak itself, unless j is the peak.
        others = np.repeat(peak[:, None], num_experts, axis=1)
        others[steps, busiest] = without.max(axis=1)
        chosen = int(np.maximum(others, relieved).sum(axis=0).argmin())
        replicas.append(chosen)
        copies[chosen] += 1
        present[:, chosen] = counts[:, chosen] / copies[chosen] + tie_break[chosen]
        relieved[:, chosen] = counts[:, chosen] / (copies[chosen] + 1)
    return np.array(replicas, np.int64)


def dispatch_copy(ep_rank: int, token_index: int, num_copies: int) -> int:
    """Which copy of an expert serves the token with this index on this rank: spread evenly, without any message."""
    return (ep_rank + token_index * _DISPATCH_STRIDE) % num_copies


def rank_loads(counts: Counts, placement: Placement, num_ranks: int) -> Loads:
    """Tokens of each rank if every expert's tokens split evenly over its copies.

    counts: [steps, layers, logical].  Returns [ranks, steps, layers].
    """
    shares = _checked(counts) / placement.num_copies
    slots = np.broadcast_to(placement.physical_to_logical, (len(counts), *placement.physical_to_logical.shape))
    per_slot = np.take_along_axis(shares, slots, axis=2)
    by_rank = per_slot.reshape(*per_slot.shape[:2], num_ranks, -1).sum(axis=3)
    return np.moveaxis(by_rank, 2, 0)


def balance(loads: Loads) -> Balance:
    """loads: [ranks, steps, layers] tokens, of `rank_loads` or as the ranks counted them."""
    return Balance(float(loads.max(axis=0).sum()), float(loads.mean(axis=0).sum()))


def _placed(counts: Counts, replicas: Ids, num_ranks: int) -> tuple[Ids, Ids]:
    """Slots [physical] and homes [logical, extra + 1] of one layer's copies.

    Heaviest copy first, each to the rank with room where the sum over steps of the peak rank's load grows least.
    """
    num_steps, num_experts = counts.shape
    copies = np.bincount(replicas, minlength=num_experts)
    loads_of = (counts / copies).T
    per_rank = len(replicas) // num_ranks
    load = np.zeros((num_ranks, num_steps))
    peak = np.zeros(num_steps)
    held = np.zeros(num_ranks, np.int64)
    slots = np.full(len(replicas), -1, np.int64)
    taken = np.full(len(replicas), -1, np.int64)
    for replica in np.argsort(-loads_of[replicas].sum(axis=1), kind="stable").tolist():
        expert = replicas[replica]
        cost = np.maximum(peak, load + loads_of[expert]).sum(axis=1)
        cost[held >= per_rank] = np.inf
        rank = int(cost.argmin())
        taken[replica] = rank * per_rank + held[rank]
        slots[taken[replica]] = expert
        held[rank] += 1
        load[rank] += loads_of[expert]
        peak = np.maximum(peak, load[rank])
    return slots, _slots_of(replicas, taken, copies)


def _slots_of(replicas: Ids, taken: Ids, copies: Ids) -> Ids:
    """[logical, most copies an expert may have]: each expert's slots by copy number, then -1."""
    homes = np.full((len(copies), len(replicas) - len(copies) + 1), -1, np.int64)
    used = np.zeros(len(copies), np.int64)
    for expert, slot in zip(replicas.tolist(), taken.tolist(), strict=True):
        homes[expert, used[expert]] = slot
        used[expert] += 1
    return homes


def _stacked(slots: Sequence[Ids], homes: Sequence[Ids], extra: int) -> Placement:
    logical_to_physical = np.stack(homes) if homes else np.empty((0, 0, extra + 1), np.int64)
    physical_to_logical = np.stack(slots) if slots else np.empty((0, 0), np.int64)
    return Placement(physical_to_logical, logical_to_physical, (logical_to_physical >= 0).sum(axis=2))


def _checked(counts: Counts) -> Counts:
    if counts.ndim != 3 or (counts < 0).any():
        raise BadPlacement(f"counts are {list(counts.shape)}, not [steps, layers, experts] of tokens")
    return counts

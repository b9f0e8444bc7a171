"""Which row counts of a matrix kernel give every row the same bits?

A library picks its inner loop by the row count, and another loop sums in another order. So the counts a step may use
are measured at start-up: each candidate is run at two offsets, and counts whose shared rows agree in every bit form a
class. A step's rows are padded and cut into tiles of one class only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.ops.linear import Kernel, Linear
from kernels.ops.scratch import Scratch

_OFFSET = 1
"""Rows between the two windows: one is enough for rows on every seam between two inner loops to change sides."""
_LARGE_TILE = 64
"""Prefill needs a tile of at least this many rows; up to it a call costs about the reading of the weight."""


class NotInvariant(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """A kernel gives the same row other bits in another place; nothing built on it could keep its promise."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Row counts proven bit-equal to each other, ascending."""

    counts: tuple[int, ...]
    _plans: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, rows: int) -> tuple[int, ...]:
        """Tiles whose sum is at least `rows`: as many of the largest as fit, then the tightest cover of the rest."""
        known = self._plans.get(rows)
        if known is None:
            known = self._plans[rows] = self._cover(rows)
        return known

    def padded(self, rows: int) -> int:
        """Rows the tiles of `plan(rows)` have together."""
        return sum(self.plan(rows))

    def _cover(self, rows: int) -> tuple[int, ...]:
        largest = self.counts[-1]
        tiles = [largest] * (rows // largest)
        rest = rows % largest
        while rest:
            above = next(count for count in self.counts if count >= rest)
            below = max((count for count in self.counts if count <= rest), default=0)
            # A second tile reads the weight again; it pays when the padding it saves is a quarter of a large tile.
            if below == 0 or above <= _LARGE_TILE or (above - rest) * 4 <= above:
                tiles.append(above)
                break
            tiles.append(below)
            rest -= below
        return tuple(tiles)


class TiledLinear:
    """A packed weight and the row counts proven for it."""

    def __init__(self, linear: Linear, tiles: RowTiles, padding: Scratch | None = None) -> None:
        """padding: buffers that matrices of one model share; None = its own."""
        self.linear = linear
        self.tiles = tiles
        self._padding = padding

    def padded(self, rows: Tensor, tile: int) -> Tensor:
        """Rows and others behind them: [n, in] -> [tile, in], a scratch buffer, or the rows when they are as many.

        What stands behind is what an earlier product left there: no row's bits depend on its mates.
        """
        count, size = rows.shape
        if count == tile:
            return rows.contiguous()
        if self._padding is None:
            self._padding = Scratch(rows.device)
        whole = self._padding.take("rows", (tile, size), rows.dtype)
        whole[:count] = rows
        return whole

    def run(self, rows: Tensor, tiles: Sequence[int], scratch: Scratch) -> Tensor:
        """Rows [sum(tiles), in] -> [sum(tiles), out], a scratch buffer or new.

        `tiles` are counts that every weight of the step shares; fewer, larger ones of its own are used where they fit.
        """
        own = self.tiles.plan(len(rows))
        if sum(own) != len(rows) or len(own) > len(tiles):
            own = tuple(tiles)
        if len(own) == 1:
            return self.linear.apply(rows)
        parts = [self.linear.apply(part) for part in torch.split(rows, list(own))]
        out = scratch.take("tiles", (len(rows), self.linear.out_features), parts[0].dtype)
        return torch.cat(parts, out=out)


def prove(
    kernel: Kernel, linears: Sequence[Linear], *, limit: int, device: torch.device
) -> tuple[RowTiles, tuple[RowTiles, ...]]:
    """Measure the kernel's candidates up to `limit` rows on these packed weights and choose a class.

    Returns the counts all weights share, and each weight's own, of which those are part.  A class of one count is the
    fallback that always works: one fixed tile for everything.  Raises NotInvariant when a row's bits depend on its
    slot in every tile.
    """
    candidates = [count for count in kernel.candidates if count <= limit]
    measured = [_classes(each, _rows(each, max(candidates) + _OFFSET, kernel, device), candidates) for each in linears]
    shared = _choose(_joined(measured, candidates))
    if not shared:
        raise NotInvariant(f"kernel {kernel.name}: rows depend on their slot at every row count on {device}")
    own = (tuple(c for c, leader in each.items() if leader == each[shared[0]]) for each in measured)
    return RowTiles(shared), tuple(RowTiles(counts) for counts in own)


def probe(kernel: Kernel, weights: Sequence[TiledLinear], device: torch.device) -> bytes:
    """The bits these kernels give here on fixed inputs, for the recipe: where they differ, so must the fingerprint."""
    seen = hashlib.sha256()
    for weight in weights:
        out = weight.linear.apply(_rows(weight.linear, weight.tiles.counts[-1], kernel, device))
        seen.update(out.float().cpu().numpy().tobytes())
    return seen.digest()


def _rows(linear: Linear, count: int, kernel: Kernel, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20240229)
    return torch.randn(count, linear.in_features, generator=generator).to(kernel.activation).to(device)


def _classes(linear: Linear, rows: Tensor, candidates: Sequence[int]) -> dict[int, int]:
    """Count -> the smallest count it agrees with on every row both compute; without counts at odds with themselves."""
    results: dict[int, tuple[Tensor, Tensor]] = {}
    classes: dict[int, int] = {}
    for count in candidates:
        first = linear.apply(rows[:count].contiguous())
        second = linear.apply(rows[_OFFSET : _OFFSET + count].contiguous())
        if not torch.equal(first[_OFFSET:], second[: max(count - _OFFSET, 0)]):
            continue
        leader = next((name for name, seen in results.items() if _agree(seen, (first, second))), count)
        classes[count] = leader
        results[leader] = first, second  # the newest has the most rows to compare with
    return classes


def _agree(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x[: min(len(x), len(y))], y[: min(len(x), len(y))]) for x, y in zip(a, b, strict=True))


def _joined(classes: Sequence[dict[int, int]], candidates: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of counts that agree on every weight."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for count in candidates:
        if all(count in each for each in classes):
            groups.setdefault(tuple(each[count] for each in classes), []).append(count)
    return [tuple(group) for group in groups.values()]


def _choose(groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The class with the smallest tile among those that also have a large one."""
    if not groups:
        return ()
    wide = [group for group in groups if group[-1] >= _LARGE_TILE]
    if wide:
        return min(wide, key=lambda group: (group[0], -len(group)))
    return max(groups, key=lambda group: (group[-1], len(group)))

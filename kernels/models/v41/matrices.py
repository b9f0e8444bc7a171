"""How do a checkpoint's matrices become products whose rows have the same bits in every batch?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.models.v41.checkpoint import Checkpoint
from kernels.ops.linear import Kernel, Linear, plain
from kernels.ops.row_tiles import RowTiles, TiledLinear, probe, prove
from kernels.ops.scratch import Scratch

MOST_ROWS = 516
"""Row counts up to this one are proven; more rows take several tiles."""
MOST_HEAD_ROWS = 64
"""The same for the matrix of the vocabulary: few tokens of a step ask for logits, and proving it costs seconds."""
_SMALL_VALUES = 1 << 18
"""Below, a packed kernel's call costs more than its product saves (measured: 25 us against 4 us for 128 x 64)."""


def product(matrix: TiledLinear, rows: Tensor) -> Tensor:
    """Any number of rows, padded and cut into the matrix's proven tiles: [n, in] -> [n, out] fp32, new."""
    count = rows.shape[0]
    if not count:
        return rows.new_empty(0, matrix.linear.out_features)
    tiles = matrix.tiles.plan(count)
    if len(tiles) == 1:
        return matrix.linear.apply(matrix.padded(rows, tiles[0]))[:count]
    parts = torch.split(matrix.padded(rows, sum(tiles)), list(tiles))
    return torch.cat([matrix.linear.apply(part) for part in parts])[:count]


class Packer:
    """Packs weights for one kernel (small ones for the plain one), and proves row counts once for each shape."""

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self.kernel, self.device = kernel, device
        self._padding = Scratch(device)
        self._tiles: dict[tuple[int, ...], RowTiles] = {}
        """By shape and limit."""
        self._proven: list[TiledLinear] = []

    def pack(self, weight: Tensor, *, limit: int = MOST_ROWS) -> TiledLinear:
        """weight: [out, in] fp32; it may be freed.  limit: of the row counts to prove.  Raises NotInvariant."""
        kernel = self.kernel if weight.numel() >= _SMALL_VALUES else plain(self.kernel)
        linear = Linear(kernel, weight)
        shape = (*weight.shape, limit)
        if shape not in self._tiles:
            self._tiles[shape], _ = prove(kernel, [linear], limit=limit, device=self.device)
            self._proven.append(TiledLinear(linear, self._tiles[shape], self._padding))
        return TiledLinear(linear, self._tiles[shape], self._padding)

    def probe(self) -> bytes:
        """32 bytes of what this machine computes with the first weight of every shape."""
        return probe(self.kernel, self._proven, self.device)

    @property
    def names(self) -> str:
        """Of the kernels in use."""
        return "+".join(dict.fromkeys((self.kernel.name, plain(self.kernel).name)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Row counts proven for every shape."""
        shared = set.intersection(*(set(tiles.counts) for tiles in self._tiles.values()))
        return tuple(sorted(shared))


class Source:
    """Where one layer's weights come from."""

    def __init__(self, checkpoint: Checkpoint, packer: Packer, prefix: str) -> None:
        """prefix: of tensor names, with its dot; "" for the model's own."""
        self.checkpoint, self.packer, self.prefix = checkpoint, packer, prefix

    def matrix(self, name: str, *, limit: int = MOST_ROWS) -> TiledLinear:
        """The packed matrix `prefix + name + ".weight"`."""
        return self.packer.pack(self.tensor(f"{name}.weight"), limit=limit)

    def groups(self, name: str, count: int) -> tuple[TiledLinear, ...]:
        """A matrix cut into `count` equal parts of its rows."""
        return tuple(self.packer.pack(part.contiguous()) for part in self.tensor(f"{name}.weight").chunk(count))

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in fp32 on the device."""
        return self.checkpoint.dense(self.prefix + name).to(self.packer.device)

    def within(self, part: str) -> Source:
        """The weights of a part of this layer."""
        return Source(self.checkpoint, self.packer, f"{self.prefix}{part}.")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Columns of several products side by side."""
    return torch.cat(list(parts), dim=1)

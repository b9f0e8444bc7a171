"""What do the layers of one step share: where its tokens are, what they selected, and who is watching?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.v41.cache import EntryCache, V41Cache
from kernels.models.v41.plan import Half, Plan
from kernels.ops.numerics import Numerics
from kernels.ops.rope import RopeTable

Turn = tuple[Tensor, Tensor]
"""Cosine and sine of some positions, [n, rope dims / 2] each."""
Watch = Callable[[str, Tensor], Tensor]
"""Sees a named intermediate and returns what the step goes on with: tests compare, and force layers apart."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The compressed entries each token reads, and where they lie."""

    chosen: Tensor
    """[tokens, top-k] int64, ascending, then -1."""
    blocks: Tensor
    places: Tensor
    """[tokens, top-k] int64; the null block's first where there is none."""
    mask: Tensor
    """[tokens, window + top-k] fp32: 0 for keys that are seen, window first, else -inf."""

    @classmethod
    def of(cls, chosen: Tensor, half: Half, entries_per_block: int) -> Selection:
        is_chosen = chosen >= 0
        found = chosen.clamp_min(0)
        blocks = half.tables[half.span_of[:, None], found // entries_per_block]
        hidden = torch.where(is_chosen, 0.0, float("-inf"))
        return cls(
            chosen=chosen,
            blocks=torch.where(is_chosen, blocks, 0),
            places=torch.where(is_chosen, found % entries_per_block, 0),
            mask=torch.cat([half.window_mask, hidden], dim=1),
        )


@dataclass(frozen=True, slots=True)
class Ropes:
    """The two ways positions turn keys and queries."""

    plain: RopeTable
    """Of layers that read their window only."""
    compressed: RopeTable
    """Of layers that read compressed entries too."""

    def of(self, ratio: int) -> RopeTable:
        return self.compressed if ratio else self.plain


class Step:
    """One batch on its way through the layers."""

    def __init__(self, plan: Plan, cache: V41Cache, numerics: Numerics, ropes: Ropes, watch: Watch | None) -> None:
        self.plan, self.cache, self.numerics, self.ropes = plan, cache, numerics, ropes
        self.half = plan.encoder
        self.selection: Selection | None = None
        """What the newest index source selected."""
        self.candidates: list[Tensor] = []
        """Per batch of choosing tokens: the blocks of entries that later index sources may select from."""
        self.images = None if plan.images is None else plan.image_tokens
        """[tokens] bool: which of the half's tokens are parts of images; None = none."""
        self._watch = watch
        self._turns: dict[bool, Turn] = {}
        self._index_keys: dict[tuple[int, int], Tensor] = {}

    def enter_decoder(self) -> None:
        """Go on with the tokens of the decoder half."""
        self.half = self.plan.decoder
        self.selection = None
        self.candidates.clear()
        self._turns.clear()
        self._index_keys.clear()
        if self.images is not None and self.plan.kept is not None:
            self.images = self.images[self.plan.kept]

    def seen(self, name: str, value: Tensor) -> Tensor:
        """Show an intermediate to whoever watches."""
        return value if self._watch is None else self._watch(name, value)

    def turn(self, ratio: int) -> Turn:
        """Of the half's tokens, for a layer of that ratio."""
        key = ratio > 0
        if key not in self._turns:
            self._turns[key] = self.ropes.of(ratio).at(self.half.positions, self.half.last_position)
        return self._turns[key]

    def index_keys(self, source: int, span: int, units_of: int) -> Tensor:
        """A source's index keys for one span, padded with zeros to whole units: [units * units_of, index_dim] fp32."""
        key = (source, span)
        if key not in self._index_keys:
            entries: EntryCache = self.cache.entries[source]
            keys = entries.index_keys(self.half.spans[span].table)
            self._index_keys[key] = torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % units_of))
        return self._index_keys[key]

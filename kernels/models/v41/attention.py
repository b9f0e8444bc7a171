"""How do a layer's tokens attend: to their windows, and to the compressed entries chosen for them?

Every key is read as its cache record has it, those of the step's own tokens too: a token sees the same values whether
they were written a moment or an hour ago.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.v41.cache import EntryCache, Ring
from kernels.models.v41.config import V41Config
from kernels.models.v41.matrices import Source, joined, product
from kernels.models.v41.step import Selection, Step, Turn
from kernels.ops.elementwise import rms_norm
from kernels.ops.numerics import Numerics
from kernels.ops.rope import rotate_last
from kernels.ops.sparse import TOKENS, attend

_SLAB_BYTES = 16 << 20
"""Keys gathered at a time."""


def normed(x: Tensor, weight: Tensor, eps: float, numerics: Numerics) -> Tensor:
    """RMSNorm of fp32 rows, rounded once after the weight: a new tensor like x."""
    return numerics.bf16(rms_norm(x, weight, eps=eps, out=torch.empty_like(x)))


class WindowKeys:
    """One layer's window keys (which are its values too): projected, normalised, turned."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics) -> None:
        """source: of the layer's `attn.` weights."""
        self._eps, self._numerics = config.norm_eps, numerics
        self._project = source.matrix("wkv")
        self._norm = source.tensor("kv_norm.weight")

    def run(self, x: Tensor, turn: Turn) -> Tensor:
        """x: [tokens, hidden] fp32 as a matrix product sees it (fp8).  Returns [tokens, head_dim] fp32, new."""
        numerics = self._numerics
        keys = normed(numerics.bf16(product(self._project, x)), self._norm, self._eps, numerics)
        return numerics.bf16(rotate_last(keys, *turn))


class Queries:
    """One layer's queries, by way of a low-rank latent that the indexer uses too."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics) -> None:
        self._config, self._numerics = config, numerics
        self._down = source.matrix("wq_a")
        self._norm = source.tensor("q_norm.weight")
        self._up = source.matrix("wq_b")

    def latent(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] fp32 (fp8).  Returns [tokens, q_lora] fp32 as the next product sees it (fp8)."""
        numerics = self._numerics
        down = numerics.bf16(product(self._down, x))
        return numerics.fp8(normed(down, self._norm, self._config.norm_eps, numerics))

    def run(self, latent: Tensor, turn: Turn) -> Tensor:
        """[tokens, q_lora] -> [tokens, heads, head_dim] fp32, turned."""
        numerics = self._numerics
        queries = numerics.bf16(product(self._up, latent)).view(len(latent), -1, self._config.head_dim)
        return numerics.bf16(rotate_last(queries, *turn))


class Output:
    """What becomes of the attended values: turned back, and projected group by group."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics) -> None:
        self._groups = config.o_groups
        self._numerics = numerics
        self._down = source.groups("wo_a", config.o_groups)
        self._up = source.matrix("wo_b")

    def run(self, attended: Tensor, turn: Turn) -> Tensor:
        """[tokens, heads, head_dim] fp32, overwritten -> [tokens, hidden] fp32."""
        numerics = self._numerics
        turned = numerics.bf16(rotate_last(numerics.bf16(attended), *turn, inverse=True))
        groups = numerics.fp8(turned.reshape(len(turned), self._groups, -1))
        down = joined([product(matrix, group) for matrix, group in zip(self._down, groups.unbind(1), strict=True)])
        return numerics.bf16(product(self._up, numerics.fp8(down)))


class Attention:
    """One layer's attention, windows and chosen entries together."""

    def __init__(self, config: V41Config, source: Source, numerics: Numerics, *, layer: int) -> None:
        """source: of the layer's `attn.` weights."""
        self._ratio = config.compress_ratios[layer]
        self._source = config.kv_source_of(layer) if self._ratio else None
        self._layer = layer
        self._scale = config.head_dim**-0.5
        self.keys = WindowKeys(config, source, numerics)
        self.queries = Queries(config, source, numerics)
        self.output = Output(config, source, numerics)
        self.sinks = source.tensor("attn_sink")

    def run(self, step: Step, x: Tensor, latent: Tensor) -> Tensor:
        """x: [tokens, hidden] fp32 (fp8).  latent: of `queries`.  Returns [tokens, hidden]; keys go to the ring."""
        turn = step.turn(self._ratio)
        ring = step.cache.rings[self._layer]
        pool = read_window(step, ring, self.keys.run(x, turn))
        entries = None if self._source is None else step.cache.entries[self._source]
        queries = self.queries.run(latent, turn)
        attended = attend_all(step, queries, pool, entries, self.sinks, scale=self._scale)
        return self.output.run(attended, turn)


def read_window(step: Step, ring: Ring, keys: Tensor) -> Tensor:
    """Store a layer's new keys, and return all that its tokens may see, as `Half.window_keys` counts them.

    keys: [tokens, head_dim] fp32.  Returns [previous + tokens + 1, head_dim] fp32, the last row zeros.
    """
    half = step.half
    records = ring.encode(keys)
    parts = [records, records.new_zeros(1, records.shape[1])]  # bytes of zero are zeros in every format
    if half.previous_slots.shape[0]:
        parts.insert(0, ring.read(half.previous_slots, half.previous_places))
    ring.write(half.stored_slots, half.stored_places, records[half.stored_tokens])
    return ring.decode(torch.cat(parts))


def attend_all(
    step: Step, queries: Tensor, pool: Tensor, entries: EntryCache | None, sinks: Tensor, *, scale: float
) -> Tensor:
    """Gather each token's keys and attend, some tokens at a time.  queries: [tokens, heads, head_dim].  Like them."""
    half, selection = step.half, step.selection if entries else None
    mask = selection.mask if selection else half.window_mask
    slab = max(_SLAB_BYTES // (mask.shape[1] * pool.shape[1] * 4) // TOKENS, 1) * TOKENS
    parts = []
    for low in range(0, len(queries), slab):
        mine = slice(low, low + slab)
        keys = pool[half.window_keys[mine]]
        if selection and entries:
            keys = torch.cat([keys, _chosen(entries, selection, mine)], dim=1)
        parts.append(attend(queries[mine], keys, mask[mine], sinks, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chosen(entries: EntryCache, selection: Selection, mine: slice) -> Tensor:
    blocks, places = selection.blocks[mine], selection.places[mine]
    return entries.main(blocks.flatten(), places.flatten()).view(*blocks.shape, -1)

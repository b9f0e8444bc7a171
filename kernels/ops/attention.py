"""How much does each query take from each key's value? The same bits for a prefill chunk and for a decode token.

Keys are cut into units of 128 from position 0, whatever the block length of the cache. Every unit is one matrix product
of a fixed shape, each query's weights are one softmax, and products with the values are summed over units in ascending
order. A unit that a query cannot see adds exact zeros, so it does not matter to how many units a group is padded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.elementwise import row_sum
from kernels.ops.scratch import Scratch

UNIT_TOKENS = 128
"""Keys per matrix product: the numeric unit of attention."""
CHUNK_TOKENS = 64
"""Queries of one sequence per matrix product in a prefill chunk."""


class Attention:
    """Softmax attention bound to its buffers: built once per step, run once per layer."""

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, fused: bool, scratch: Scratch
    ) -> None:
        """The arguments are read at every run.

        queries: [groups, rows, size] fp32, scaled.  keys, values: [units, groups, 128, size] fp32, finite everywhere.
        mask: [outer, 1, tokens, 1, masked units, 128] fp32 0 or -inf for the last units; outer divides groups and
        tokens divides rows.  Every query sees at least one key.  fused: torch's softmax was proven here.
        """
        units, groups, _, size = keys.shape
        rows = queries.shape[1]
        outer, _, tokens, _, masked, _ = mask.shape
        self._fused = fused
        self._queries = queries
        self._keys = [unit.mT for unit in keys.unbind(0)]
        self._values = values.unbind(0)
        self._weights = scratch.take("attention.weights", (groups, rows, units * UNIT_TOKENS))
        self._slices = torch.split(self._weights, UNIT_TOKENS, dim=-1)
        self._units = self._weights.view(groups, rows, units, UNIT_TOKENS)
        self._out = scratch.take("attention.out", (groups, rows, size))
        by_token = (outer, groups // outer, tokens, rows // tokens)
        # Small products are fastest into contiguous memory; large ones are not worth a pass over it.
        self._scores: Sequence[Tensor] = ()
        if rows <= _FEW_ROWS:
            scores = scratch.take("attention.scores", (units, groups, rows, UNIT_TOKENS))
            self._scores = scores.unbind(0)
            in_order = scores.view(units, *by_token, UNIT_TOKENS).permute(1, 2, 3, 4, 0, 5)
            self._opened, self._hidden = in_order[..., : units - masked, :], in_order[..., units - masked :, :]
        self._visible = self._weights.view(*by_token, units, UNIT_TOKENS)[..., : units - masked, :]
        self._masked = self._weights.view(*by_token, units, UNIT_TOKENS)[..., units - masked :, :]
        self._mask = mask

    def run(self) -> Tensor:
        """[groups, rows, size] fp32, a scratch buffer."""
        for product, unit in zip(self._scores or self._slices, self._keys, strict=True):
            torch.bmm(self._queries, unit, out=product)
        if self._scores:
            self._visible.copy_(self._opened)
            torch.add(self._hidden, self._mask, out=self._masked)
        else:
            self._masked.add_(self._mask)
        if self._fused:
            torch.softmax(self._weights, dim=-1, out=self._weights)
        else:
            _softmax_by_unit(self._units)
        out = torch.bmm(self._slices[0], self._values[0], out=self._out)
        for weights, unit in zip(self._slices[1:], self._values[1:], strict=True):
            out.baddbmm_(weights, unit)
        return out


def _softmax_by_unit(scores: Tensor) -> None:
    """Softmax over the last two dimensions in place, summing each unit alone and the units in ascending order."""
    weights = scores.sub_(scores.amax(dim=(-2, -1), keepdim=True)).exp_()
    sums = row_sum(weights)
    total = sums[..., 0].clone()
    for unit in range(1, scores.shape[-2]):
        total.add_(sums[..., unit])
    weights.div_(total[..., None, None])


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Shapes of the matrix products that were proven bit-equal to each other."""

    decode_rows: int
    """Query rows one decode token is padded to, at least its heads per KV head."""
    fused: bool
    """torch's own softmax gives a row the same bits at every padded length."""
    bits: bytes
    """SHA-256 of what a fixed input gives on this machine, for the recipe."""


def prove_rows(*, group: int, kv_heads: int, head_dim: int, device: torch.device) -> AttentionRows:
    """Find the fewest rows a decode token can use and get the bits it would get inside a prefill chunk.

    group: query heads per KV head. Falls back to a chunk's shape for both when nothing smaller agrees.
    """
    trial = _Trial(group, kv_heads, head_dim, device)
    # A GPU's softmax shares a row among threads by its padded length: equal here need not mean equal elsewhere.
    for fused in (True, False) if device.type == "cpu" else (False,):
        expected = trial.chunk(fused=fused)
        bits = hashlib.sha256(expected.cpu().numpy().tobytes()).digest()
        for rows in _sizes(group):
            if all(trial.agrees(expected, rows=rows, batch=batch, fused=fused) for batch in (1, 2, 3, 7)):
                return AttentionRows(rows, fused, bits)
    return AttentionRows(CHUNK_TOKENS * group, fused=False, bits=bits)


class _Trial:
    """A fixed input: one chunk over three units, and its tokens as decode tokens over four."""

    def __init__(self, group: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(20240229)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self._group, self._kv_heads = group, kv_heads
        self._queries = draw(kv_heads, CHUNK_TOKENS * group, head_dim)
        self._keys, self._values = (draw(3, kv_heads, UNIT_TOKENS, head_dim) for _ in range(2))
        self._scratch = Scratch(device)

    def chunk(self, *, fused: bool) -> Tensor:
        """[kv_heads, chunk rows, head_dim]: every query sees the whole three units."""
        mask = self._queries.new_zeros(1, 1, 1, 1, 1, UNIT_TOKENS)
        return (
            Attention(self._queries, self._keys, self._values, mask, fused=fused, scratch=self._scratch).run().clone()
        )

    def agrees(self, expected: Tensor, *, rows: int, batch: int, fused: bool) -> bool:
        """Do `batch` decode tokens, padded to `rows` and given a hidden unit more, get the bits of the chunk?"""
        device, group, kv_heads = self._queries.device, self._group, self._kv_heads
        mine = slice(0, batch * group)
        padded = self._queries.new_zeros(batch, kv_heads, rows, self._queries.shape[2])
        padded[:, :, :group] = torch.unflatten(self._queries[:, mine], 1, (batch, group)).transpose(0, 1)
        keys, values = (
            torch.cat([each, each[:1]])[:, None].expand(-1, batch, -1, -1, -1).flatten(1, 2)
            for each in (self._keys, self._values)
        )
        mask = torch.full((1, 1, 1, 1, 1, UNIT_TOKENS), float("-inf"), device=device)
        got = Attention(padded.flatten(0, 1), keys, values, mask, fused=fused, scratch=self._scratch).run()
        got = got.view(batch, kv_heads, rows, -1)[:, :, :group].transpose(0, 1).flatten(1, 2)
        return torch.equal(got, expected[:, mine])


def _sizes(group: int) -> Sequence[int]:
    sizes = {group, *(size for size in (4, 8, 12, 16, 24, 32, 64) if size > group)}
    return [size for size in sorted(sizes) if size < group * CHUNK_TOKENS]


_FEW_ROWS = 32

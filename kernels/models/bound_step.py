"""How does a layer act on a step's tokens? Bound to its buffers once per step, then run layer after layer.

At batch 1 a step is a few thousand small operations, so every view that does not change between layers is made here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv.cache import KvCache
from kernels.models.config import ModelConfig
from kernels.models.layers import Layer
from kernels.models.step import Chunk, DecodeGroup, StepPlan
from kernels.ops.attention import CHUNK_TOKENS, UNIT_TOKENS, Attention, AttentionRows
from kernels.ops.elementwise import PADDING, rms_norm, rms_norm_padded, rotate, swiglu
from kernels.ops.linear import Kernel
from kernels.ops.scratch import Scratch


class BoundStep:
    """One step of one model. `hidden` is [rows, hidden_size] fp32; fill it, run the layers, read it."""

    def __init__(
        self,
        config: ModelConfig,
        kernel: Kernel,
        cache: KvCache,
        attention: AttentionRows,
        plan: StepPlan,
        rotary: tuple[Tensor, Tensor],
        scratch: Scratch,
    ) -> None:
        """rotary: cosine and sine of the plan's positions, [rows, 1, head_dim] fp32, each half repeated."""
        rows, tokens, dim = len(plan.token_ids), plan.num_tokens, config.head_dim
        turning = config.num_heads + config.num_kv_heads
        self._config, self._kernel, self._plan, self._scratch = config, kernel, plan, scratch
        self._cache, self._attention = cache, attention
        self._cos, self._sin = rotary
        self._padded = scratch.take("hidden", (rows, config.hidden_size + PADDING))
        self._padded[:, config.hidden_size] = (config.hidden_size * config.norm_eps) ** 0.5
        self._padded[:, config.hidden_size + 1 :] = 0.0
        self.hidden = self._padded[:, : config.hidden_size]
        self._turning = (rows, turning, dim)
        self._rotated = scratch.take("rotated", self._turning)
        stored = scratch.take("stored", (tokens, 2, config.num_kv_heads, dim), cache.dtype)
        self._stored = stored.view(2 * tokens, -1)
        self._stored_keys, self._stored_values = stored.unbind(1)
        self._rotated_keys = self._rotated[:tokens, config.num_heads :]
        self._token_rows = cache.token_rows_of_layers(plan.token_rows)
        queries = torch.unflatten(self._rotated[:, : config.num_heads], 1, (config.num_kv_heads, config.group))
        attended = scratch.take("attended", (rows, config.num_kv_heads, config.group, dim), kernel.activation)
        self._attended = attended.view(rows, -1)
        self._parts: list[_DecodePart | _ChunkPart] = [
            _DecodePart(self, group, queries, attended) for group in plan.decode_groups
        ]
        self._parts += [_ChunkPart(self, chunk, queries, attended) for chunk in plan.chunks]

    def apply(self, index: int, layer: Layer) -> None:
        """Add one layer to `hidden` and write its K and V."""
        self._project(index, layer)
        for part in self._parts:
            part.run(index)
        self._feed_forward(layer, self._padded, self._attended, self._plan.tiles)

    def finish(self, index: int, layer: Layer, norm: Tensor) -> Tensor:
        """Write the last layer's K and V, and add the layer to the rows whose logits are wanted: nobody needs others.

        Returns those rows normalised, in row order, padded for the head, in the kernel's dtype.
        """
        plan, scratch = self._plan, self._scratch
        self._project(index, layer)
        if not plan.num_wanted:
            return self.hidden[:0]
        for part in self._parts:
            part.run(index, plan.wanted_tokens)
        rows = len(plan.last)
        padded = torch.index_select(self._padded, 0, plan.last, out=scratch.take("last", (rows, self._padded.shape[1])))
        kept = scratch.take("last.attended", (rows, self._attended.shape[1]), self._attended.dtype)
        attended = torch.index_select(self._attended, 0, plan.last, out=kept)
        self._feed_forward(layer, padded, attended, plan.last_tiles)
        return self.normalised(torch.index_select(padded, 0, plan.head), norm)

    def _feed_forward(self, layer: Layer, padded: Tensor, attended: Tensor, tiles: Sequence[int]) -> None:
        """Add a layer's attention output and feed-forward to padded rows."""
        scratch = self._scratch
        hidden = padded[:, : self._config.hidden_size]
        hidden.add_(layer.output.run(attended, tiles, scratch))
        product = layer.gate_up.run(self.normalised(padded, layer.ffn_norm), tiles, scratch)
        if not self._kernel.pack_swiglu:
            product = self._activation(swiglu(self._fp32(product), scratch=scratch))
        hidden.add_(layer.down.run(product, tiles, scratch))

    def normalised(self, padded: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of padded fp32 rows, in the dtype the kernel takes."""
        out = self._scratch.take("norm", (len(padded), self._config.hidden_size))
        return self._activation(rms_norm_padded(padded, weight, out=out))

    def _activation(self, rows: Tensor) -> Tensor:
        dtype = self._kernel.activation
        return rows if dtype == rows.dtype else self._scratch.take("narrow", tuple(rows.shape), dtype).copy_(rows)

    def _fp32(self, rows: Tensor) -> Tensor:
        return rows if rows.dtype == torch.float32 else self._scratch.take("wide", tuple(rows.shape)).copy_(rows)

    def _project(self, index: int, layer: Layer) -> None:
        """Queries and keys, rotated, into `_rotated`; K and V into the cache."""
        _, turning, dim = self._turning
        rows = self.normalised(self._padded, layer.attention_norm)
        heads = self._fp32(layer.qkv.run(rows, self._plan.tiles, self._scratch)).view(len(rows), -1, dim)
        queries_keys = heads[:, :turning]
        if layer.qk_norm is not None:
            out = self._scratch.take("qk_norm", self._turning)
            queries_keys = rms_norm(queries_keys, layer.qk_norm, eps=self._config.norm_eps, out=out)
        rotate(queries_keys, self._cos, self._sin, scratch=self._scratch, out=self._rotated)
        self._stored_keys.copy_(self._rotated_keys)
        self._stored_values.copy_(heads[: self._plan.num_tokens, turning:])
        self._cache.write(self._token_rows[index], self._stored)

    def gathered(self, sections: Tensor, groups: int) -> _Gathered:
        """Buffers for the K and V of these sections."""
        return _Gathered(self._cache, sections, groups, self._scratch)

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Attention:
        return Attention(queries, keys, values, mask, fused=self._attention.fused, scratch=self._scratch)

    def query_buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._scratch.take(name, shape)

    @property
    def scale(self) -> float:
        return float(self._config.head_dim**-0.5)

    @property
    def decode_rows(self) -> int:
        return self._attention.decode_rows


class _Gathered:
    """One layer's K and V of some sequences in fp32: [units, groups * kv_heads, 128, head_dim]."""

    def __init__(self, cache: KvCache, sections: Tensor, groups: int, scratch: Scratch) -> None:
        """sections: [K and V, units, groups, blocks per unit], flat, of layer 0."""
        self._cache = cache
        self._sections = cache.sections_of_layers(sections)
        width = cache.kv_heads * cache.head_dim
        self._raw = scratch.take("gather.raw", (len(sections), cache.layout.block_tokens * width), cache.dtype)
        tokens = self._raw.view(2, -1, groups, UNIT_TOKENS, cache.kv_heads, cache.head_dim)
        self._tokens = tokens.transpose(3, 4)
        self._fp32 = scratch.take("gather.fp32", tuple(self._tokens.shape))
        both = self._fp32.view(2, tokens.shape[1], groups * cache.kv_heads, UNIT_TOKENS, cache.head_dim)
        self.keys, self.values = both.unbind(0)

    def run(self, index: int) -> None:
        self._cache.gather(self._sections[index], self._raw)
        self._fp32.copy_(self._tokens)


class _DecodePart:
    """A group of decode tokens: one product per sequence, KV head and unit."""

    def __init__(self, step: BoundStep, group: DecodeGroup, queries: Tensor, out: Tensor) -> None:
        mine = slice(group.start, group.start + group.count)
        self._tokens = range(group.start, group.start + group.count)
        _, kv_heads, size, dim = queries.shape
        self._scale = step.scale
        self._gathered = step.gathered(group.sections, group.count)
        padded = step.query_buffer("decode.queries", (group.count, kv_heads, step.decode_rows, dim))
        self._queries, self._padded = queries[mine], padded[:, :, :size]
        flat = padded.view(-1, step.decode_rows, dim)
        self._attention = step.attention(flat, self._gathered.keys, self._gathered.values, group.mask)
        self._out = out[mine]
        self._shape = (group.count, kv_heads, step.decode_rows, dim)

    def run(self, index: int, wanted: frozenset[int] | None = None) -> None:
        """Attend; with `wanted`, only if one of these tokens is here."""
        if wanted is not None and wanted.isdisjoint(self._tokens):
            return
        self._gathered.run(index)
        torch.mul(self._queries, self._scale, out=self._padded)
        self._out.copy_(self._attention.run().view(self._shape)[:, :, : self._out.shape[2]])


class _ChunkPart:
    """One sequence's chunk: one product per CHUNK_TOKENS tokens, KV head and unit."""

    def __init__(self, step: BoundStep, chunk: Chunk, queries: Tensor, out: Tensor) -> None:
        _, kv_heads, size, dim = queries.shape
        self._scale = step.scale
        self._gathered = step.gathered(chunk.sections, 1)
        keys, values = self._gathered.keys, self._gathered.values
        padded = step.query_buffer("chunk.queries", (kv_heads, CHUNK_TOKENS, size, dim))
        self._shape = tuple(padded.shape)
        flat = padded.view(kv_heads, -1, dim)
        self._tiles = []
        for tile in chunk.tiles:
            mine = slice(tile.start, tile.start + tile.count)
            attention = step.attention(flat, keys[: tile.units], values[: tile.units], tile.mask)
            source, target = queries[mine].transpose(0, 1), out[mine].transpose(0, 1)
            tokens = range(tile.start, tile.start + tile.count)
            self._tiles.append((tokens, source, padded[:, : tile.count], attention, target))

    def run(self, index: int, wanted: frozenset[int] | None = None) -> None:
        """Attend; with `wanted`, only in the tiles that hold one of these tokens."""
        tiles = [tile for tile in self._tiles if wanted is None or not wanted.isdisjoint(tile[0])]
        if tiles:
            self._gathered.run(index)
        for _, source, padded, attention, target in tiles:
            torch.mul(source, self._scale, out=padded)
            target.copy_(attention.run().view(self._shape)[:, : target.shape[1]])

"""How do a step's tokens become logits on a GPU? One function, run as it stands or captured in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.models.config import ModelConfig
from kernels.models.gpu.one_kernel import OneKernel
from kernels.models.gpu.weights import GpuWeights, heads_of
from kernels.ops.gpu_attention import PART_TOKENS, SINGLE, Shape, attend
from kernels.ops.gpu_layer_cut import MOST_ROWS
from kernels.ops.gpu_linear import MOST_GATED_ROWS, library_linear, linear, linear_parts, linear_swiglu, parts_for
from kernels.ops.gpu_norm import add_rms_norm
from kernels.ops.gpu_rope_cache import Paging, rope_and_store
from kernels.ops.gpu_swiglu import swiglu
from kernels.ops.ranges import grouped

_FUSED_ROWS = 64
"""Up to this many rows our own tiles are faster than the library: they start before the kernel before them ends."""
_SPLIT_ROWS = 16
"""Up to this many rows a product's depth is cut into parts."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A step, laid out on the device."""

    token_ids: Tensor
    """[tokens] int64."""
    rows: Tensor
    """[tokens] int32 table rows."""
    positions: Tensor
    """[tokens] int32."""
    tiles: Tensor
    """[tiles, 4] int32, as `attend` takes them."""
    splits: int = 1
    shape: Shape = SINGLE
    wanted: Tensor | None = None
    """[wanted] int64: tokens whose logits are wanted; None wants all."""
    wanted_tiles: Tensor | None = None
    """Tiles that cover at least the wanted tokens."""
    part: int = PART_TOKENS
    """Keys of attention's parts."""
    is_decode: bool = False
    """One token of each sequence, all of them wanted."""


class Stack:
    """A model's layers over its blocks."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, layers: list[Paging], *, invariant: bool) -> None:
        """invariant: a row's bits are the same in any batch; otherwise the library multiplies where it is faster."""
        self._weights = weights
        self._paging = layers
        self._heads = heads_of(config)
        self._eps = config.norm_eps
        self.invariant = invariant
        self._one_kernel = None if invariant else OneKernel.where_it_runs(config, weights, layers)

    def forward(self, at: Tokens) -> Tensor:
        """Logits of the wanted tokens, [wanted, vocab_size] fp32; K and V of all tokens go to their blocks."""
        weights = self._weights
        if self._one_kernel is not None and at.is_decode and len(at.token_ids) <= MOST_ROWS:
            x = self._one_kernel.layers(at.token_ids, at.rows, at.positions)
            return self._linear(x, weights.head, wide=True)
        residual = weights.embedding[at.token_ids]
        x = add_rms_norm(None, residual, weights.layers[0].attention_norm, eps=self._eps)
        norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        layers = zip(weights.layers, self._paging, norms, strict=True)
        for index, (layer, paging, norm) in enumerate(grouped(layers, "layers")):
            qkv = self._summed_later(x, layer.qkv)
            queries = rope_and_store(qkv, at.rows, at.positions, self._heads, layer.turning, paging)
            tiles, shape = at.tiles, at.shape
            is_last = index == len(norms) - 1
            if is_last and at.wanted_tiles is not None:
                tiles, shape = at.wanted_tiles, SINGLE
            attended = attend(queries, tiles, self._heads, paging, splits=at.splits, shape=shape, part=at.part)
            if is_last and at.wanted is not None:  # nobody looks at the others any more
                attended, residual = attended[at.wanted], residual[at.wanted]
            added = self._summed_later(attended, layer.output)
            x = add_rms_norm(added, residual, layer.ffn_norm, eps=self._eps, bias=layer.output_bias)
            added = self._summed_later(self._gated(x, layer.gate_up), layer.down)
            x = add_rms_norm(added, residual, norm, eps=self._eps)
        return self._linear(x, weights.head, wide=True)

    def _summed_later(self, x: Tensor, weight: Tensor) -> Tensor:
        """A product for a kernel that can add up parts."""
        if self.invariant or len(x) > _SPLIT_ROWS:
            return self._linear(x, weight)
        parts = parts_for(len(x), *weight.shape)
        return linear_parts(x, weight, parts=parts) if parts > 1 else linear(x, weight)

    def _linear(self, x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
        if self.invariant or (len(x) <= _FUSED_ROWS and not wide):
            return linear(x, weight, wide=wide)
        return library_linear(x, weight, wide=wide)

    def _gated(self, x: Tensor, weight: Tensor) -> Tensor:
        if len(x) <= (MOST_GATED_ROWS if self.invariant else _FUSED_ROWS):
            return linear_swiglu(x, weight)
        return swiglu(self._linear(x, weight))

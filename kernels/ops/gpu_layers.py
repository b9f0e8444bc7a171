"""How is a decode step of a few tokens handed to the one kernel that does all layers of a dense model?"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.ops import gpu_layer
from kernels.ops.gpu_launch import check
from kernels.ops.gpu_layer_cut import MOST_ROWS, Cut
from kernels.ops.gpu_layer_units import SHARED
from kernels.ops.gpu_rope_cache import Paging, Turning

_ATTENTION_SCALE = 1.4426950408889634
"""Weights are powers of two."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """All layers' matrices, one after the other, bf16."""

    qkv: Tensor
    """[layers * (query + key + value rows), hidden]."""
    output: Tensor
    """[layers * hidden, query rows]."""
    gate_up: Tensor
    """[layers * 2 * ffn, hidden], a layer's gate before its up."""
    down: Tensor
    """[layers * hidden, ffn]."""
    norms: Tensor
    """[2 * layers + 1, hidden]: before attention and before the feed-forward half of each layer, and the last."""
    embedding: Tensor
    """[vocabulary, hidden]."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What passes between programs; rows that a step has no token for stay zeros."""

    counters: Tensor
    residual: Tensor
    x: Tensor
    squares: Tensor
    qkv_sums: Tensor
    attended: Tensor
    hidden: Tensor
    partial: Tensor
    shared_out: Tensor
    shared_sums: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the kernel's order."""
        return tuple(getattr(self, each.name) for each in fields(self))

    @classmethod
    def of(cls, cut: Cut, device: torch.device) -> Scratch:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pairs, kind = cut.programs // cut.splits, torch.bfloat16
        return cls(
            counters=zeros(1 + cut.layers * (cut.programs // 2 + pairs), dtype=torch.int32),
            residual=zeros(cut.hidden, MOST_ROWS, dtype=kind),
            x=zeros(MOST_ROWS, cut.hidden, dtype=kind),
            squares=zeros(cut.hidden // 64, MOST_ROWS),
            qkv_sums=zeros(4, MOST_ROWS, cut.rows_qkv),
            attended=zeros(MOST_ROWS, cut.inner, dtype=kind),
            hidden=zeros(MOST_ROWS, cut.ffn, dtype=kind),
            partial=zeros(4, cut.hidden, MOST_ROWS),
            shared_out=zeros(pairs, cut.splits, MOST_ROWS, 128),
            shared_sums=zeros(pairs, cut.splits, 2, MOST_ROWS),
        )


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The one matrix that tensors of a shape are when they lie one after the other; None if they do not."""
    first = tensors[0]
    step = first.nbytes
    together = all(
        each.is_contiguous()
        and each.shape == first.shape
        and each.data_ptr() == first.data_ptr() + index * step
        and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for index, each in enumerate(tensors)
    )
    return first.as_strided((len(tensors) * first.shape[0], first.shape[1]), first.stride()) if together else None


def whole_cache(layers: Sequence[Paging]) -> Tensor:
    """[num_blocks, layers, 2, block tokens, KV heads * dims]: what the layers are views of."""
    first = layers[0].layer
    num_blocks, kinds, tokens, width = first.shape
    shape = (num_blocks, len(layers), kinds, tokens, width)
    inner = kinds * tokens * width
    check(first.stride() == (len(layers) * inner, tokens * width, width, 1), "blocks that hold all layers, in order")
    return first.as_strided(shape, (len(layers) * inner, inner, tokens * width, width, 1))


def boxes(tensor: Tensor, rows: int) -> TensorDescriptor:
    """A matrix as the tensor engine copies it: so many rows of 128 numbers at a time."""
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, 128], SHARED.value)


def run_layers(
    token_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    stacks: Stacks,
    turning: Turning,
    layers: Sequence[Paging],
    scratch: Scratch,
    cut: Cut,
    *,
    eps: float,
) -> Tensor:
    """Pass one new token of each of a few sequences through all layers; keys and values go to their blocks.

    token_ids: [tokens] int64.  rows, positions: [tokens] int32: table row (0 for padding, of position 0) and position.
    What blocks of seen tokens hold is finite, also beyond the newest token.
    Returns [tokens, hidden] bf16: normalised, what the head multiplies.
    """
    tokens = len(token_ids)
    check(0 < tokens * cut.kv_heads <= cut.programs // cut.splits, f"{tokens} tokens for a kernel of fewer")
    check(turning.bias is None and turning.qk_norm is None, "neither biases nor norms of heads")
    cache, out = whole_cache(layers), torch.empty(tokens, cut.hidden, dtype=torch.bfloat16, device=token_ids.device)
    scratch.counters.zero_()
    gpu_layer.layers_kernel[(cut.programs,)](
        boxes(stacks.qkv, 64),
        boxes(stacks.output, 64),
        boxes(stacks.gate_up, 64),
        boxes(stacks.down, 64),
        boxes(cache, 64),
        boxes(scratch.x, MOST_ROWS),
        boxes(scratch.attended, MOST_ROWS),
        boxes(scratch.hidden, MOST_ROWS),
        stacks.embedding,
        stacks.norms,
        turning.cos,
        turning.sin,
        cache,
        layers[0].tables,
        layers[0].tables.stride(0),
        token_ids,
        rows,
        positions,
        *scratch.tensors(),
        out,
        tokens,
        eps,
        128**-0.5 * _ATTENTION_SCALE,
        CUT=cut,
        num_warps=4,
        launch_cooperative_grid=True,  # all programs start together, or none
    )
    return out

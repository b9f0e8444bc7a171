"""What is a decoder layer made of: which tensors, packed how, and which rotary positions?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.models.config import ModelConfig, RopeConfig
from kernels.ops.linear import Kernel, Linear
from kernels.ops.row_tiles import RowTiles, TiledLinear

Fetch = Callable[[str], Tensor]
"""Hugging Face tensor name -> the tensor, on the model's device."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """One layer's packed matrices, in the order they are used."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    """Returns [rows, 2 * ffn], or [rows, ffn] where the kernel fuses the activation."""
    down: Linear

    def in_order(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms are fp32 and times sqrt(hidden_size), as rms_norm_padded takes them."""

    attention_norm: Tensor
    ffn_norm: Tensor
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim], or None."""
    qkv: TiledLinear
    output: TiledLinear
    gate_up: TiledLinear
    down: TiledLinear

    @property
    def weights(self) -> tuple[TiledLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def load_matrices(index: int, config: ModelConfig, fetch: Fetch, kernel: Kernel) -> Matrices:
    """Fuse q/k/v and gate/up, and pack them."""
    prefix = f"model.layers.{index}."

    def weight(name: str) -> Tensor:
        return fetch(f"{prefix}{name}.weight").float()

    def bias(names: Sequence[str], *, present: bool) -> Tensor | None:
        return torch.cat([fetch(f"{prefix}self_attn.{name}.bias").float() for name in names]) if present else None

    gate, up = weight("mlp.gate_proj"), weight("mlp.up_proj")
    return Matrices(
        qkv=Linear(
            kernel, torch.cat([weight(f"self_attn.{name}") for name in _QKV]), bias(_QKV, present=config.qkv_bias)
        ),
        output=Linear(kernel, weight("self_attn.o_proj"), bias(("o_proj",), present=config.output_bias)),
        gate_up=Linear.swiglu(kernel, gate, up) if kernel.pack_swiglu else Linear(kernel, torch.cat([gate, up])),
        down=Linear(kernel, weight("mlp.down_proj")),
    )


def load_layer(index: int, config: ModelConfig, fetch: Fetch, matrices: Matrices, tiles: Sequence[RowTiles]) -> Layer:
    """Join the matrices, with the row counts proven for each, and the norms."""
    prefix = f"model.layers.{index}."
    qkv, output, gate_up, down = map(TiledLinear, matrices.in_order(), tiles)
    qk_norm = None
    if config.qk_norm:
        queries = fetch(f"{prefix}self_attn.q_norm.weight").float().expand(config.num_heads, -1)
        keys = fetch(f"{prefix}self_attn.k_norm.weight").float().expand(config.num_kv_heads, -1)
        qk_norm = torch.cat([queries, keys]).contiguous()
    return Layer(
        attention_norm=padded_norm(fetch(f"{prefix}input_layernorm.weight")),
        ffn_norm=padded_norm(fetch(f"{prefix}post_attention_layernorm.weight")),
        qk_norm=qk_norm,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
    )


def padded_norm(weight: Tensor) -> Tensor:
    """A norm's weight as rms_norm_padded takes it."""
    return weight.float() * math.sqrt(len(weight))


def rope_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, [max_position_tokens, head_dim / 2] fp32.

    Angles are rounded to fp32 as the reference implementations do; their cosines are then taken in fp64, so that a
    position's bits do not depend on how a vectorised loop was cut.
    """
    frequencies = _frequencies(config.rope, config.head_dim).numpy()
    angles = np.arange(config.max_position_tokens, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = angles.astype(np.float64)
    return torch.from_numpy(np.cos(wide).astype(np.float32)), torch.from_numpy(np.sin(wide).astype(np.float32))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model reads, by its Hugging Face name."""
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if config.qkv_bias:
            layer |= {f"self_attn.{name}.bias": (queries if name == "q_proj" else keys,) for name in _QKV}
        if config.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


_QKV = ("q_proj", "k_proj", "v_proj")


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32, computed operation by operation as the reference implementations do."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.llama3 is None:
        return plain / rope.factor
    scaling = rope.llama3
    wavelengths = 2 * torch.pi / plain
    turns = scaling.original_max_position_tokens / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    return torch.where(blend < 0, plain / scaling.factor, torch.where(blend > 1, plain, blended))

"""Which tensors does a dense model keep on a GPU?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.models.config import ModelConfig, ModelNotSupported
from kernels.models.layers import rope_table
from kernels.models.model import Progress
from kernels.models.weights import Weights
from kernels.ops.gpu_rope_cache import Heads, Turning


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One decoder layer, bf16."""

    attention_norm: Tensor
    ffn_norm: Tensor
    qkv: Tensor
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    turning: Turning


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """A model's matrices, fused where they share their input."""

    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: Tensor


def heads_of(config: ModelConfig) -> Heads:
    """How projected rows are cut."""
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim)


def check_supported(config: ModelConfig) -> None:
    """Raise ModelNotSupported for shapes the kernels do not take."""
    dim = config.head_dim
    if dim < 16 or dim & (dim - 1) or dim > 256 or config.group > 64:
        raise ModelNotSupported(f"head_dim {dim}: the GPU's kernels take powers of two from 16 to 256")


def load_weights(config: ModelConfig, weights: Weights, device: torch.device, progress: Progress) -> GpuWeights:
    """Read every tensor, layer by layer; a kind's matrices of all layers lie one after the other."""

    def fetch(name: str) -> Tensor:
        return weights.tensor(name).to(device, torch.bfloat16).contiguous()

    def stack(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    steps, hidden, count = config.num_layers + 1, config.hidden_size, config.num_layers
    progress("load weights", 0, steps)
    cos, sin = (table.to(device) for table in rope_table(config))
    embedding = fetch("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else fetch("lm_head.weight")
    qkv, output = (
        stack(count, heads_of(config).row_size, hidden),
        stack(count, hidden, config.num_heads * config.head_dim),
    )
    gate_up, down = stack(count, 2 * config.ffn_size, hidden), stack(count, hidden, config.ffn_size)
    norms = stack(2 * count + 1, hidden)
    layers = []
    for index in range(count):
        progress("load weights", index + 1, steps)
        prefix = f"model.layers.{index}."

        def joined(names: tuple[str, ...], into: Tensor | None = None, prefix: str = prefix) -> Tensor:
            return torch.cat([fetch(prefix + name) for name in names], out=into)

        attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
        turning = Turning(
            cos,
            sin,
            joined(tuple(f"{name}.bias" for name in attention)) if config.qkv_bias else None,
            torch.stack([fetch(f"{prefix}self_attn.{name}_norm.weight") for name in "qk"]) if config.qk_norm else None,
            config.norm_eps,
        )
        layers.append(
            GpuLayer(
                attention_norm=joined(("input_layernorm.weight",), norms[2 * index]),
                ffn_norm=joined(("post_attention_layernorm.weight",), norms[2 * index + 1]),
                qkv=joined(tuple(f"{name}.weight" for name in attention), qkv[index]),
                output=joined(("self_attn.o_proj.weight",), output[index]),
                output_bias=fetch(prefix + "self_attn.o_proj.bias") if config.output_bias else None,
                gate_up=joined(("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_up[index]),
                down=joined(("mlp.down_proj.weight",), down[index]),
                turning=turning,
            )
        )
    progress("load weights", steps, steps)
    return GpuWeights(embedding, tuple(layers), norms[-1].copy_(fetch("model.norm.weight")), head)

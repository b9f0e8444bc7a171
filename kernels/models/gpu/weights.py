"""Which tensors does a dense model keep on a GPU, and how much memory do they and the KV blocks take?"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kernels.kv.layout import KvLayout
from kernels.models.config import ModelConfig, ModelNotSupported
from kernels.models.layers import expected_shapes, rope_table
from kernels.models.model import Progress
from kernels.models.weights import Weights
from kernels.ops.gpu_rope_cache import Heads, Turning

STEP_TOKENS = 16384
"""Tokens of one step that the workspace is planned for."""
_SPARE_BYTES = 2 << 30
"""For the library's own workspaces, the graphs, and the allocator's slack."""


class NoRoom(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """The device has less free memory than the model and its blocks need."""


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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device."""

    free: int
    weights: int
    workspace: int
    blocks: int
    num_blocks: int

    def describe(self) -> str:
        """One line for whoever starts the replica."""
        return (
            f"device memory: {_gib(self.free)} free = {_gib(self.weights)} weights + {_gib(self.workspace)} workspace"
            f" + {_gib(self.blocks)} for {self.num_blocks} KV blocks"
            f" + {_gib(self.free - self.weights - self.workspace - self.blocks)} left"
        )


def plan_memory(config: ModelConfig, layout: KvLayout, *, free: int, num_blocks: int | None) -> MemoryPlan:
    """How the free bytes are used.  num_blocks: None takes as many as fit.  Raises NoRoom."""
    weights = 2 * sum(map(prod, expected_shapes(config).values()))
    widest = 3 * config.ffn_size + 4 * config.hidden_size + 2 * heads_of(config).row_size
    workspace = 2 * STEP_TOKENS * widest + 4 * 512 * config.vocab_size + _SPARE_BYTES
    fitting = (free - weights - workspace) // layout.block_bytes
    count = fitting if num_blocks is None else num_blocks
    plan = MemoryPlan(free, weights, workspace, count * layout.block_bytes, count)
    if fitting < max(count, 2):
        raise NoRoom(f"{plan.describe()}: at most {max(fitting, 0)} blocks fit")
    return plan


def heads_of(config: ModelConfig) -> Heads:
    """How projected rows are cut."""
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim)


def check_supported(config: ModelConfig) -> None:
    """Raise ModelNotSupported for shapes the kernels do not take."""
    dim = config.head_dim
    if dim < 16 or dim & (dim - 1) or dim > 256 or config.group > 64:
        raise ModelNotSupported(f"head_dim {dim}: the GPU's kernels take powers of two from 16 to 256")


def load_weights(config: ModelConfig, weights: Weights, device: torch.device, progress: Progress) -> GpuWeights:
    """Read every tensor, layer by layer."""

    def fetch(name: str) -> Tensor:
        return weights.tensor(name).to(device, torch.bfloat16).contiguous()

    steps = config.num_layers + 1
    progress("load weights", 0, steps)
    cos, sin = (table.to(device) for table in rope_table(config))
    embedding = fetch("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else fetch("lm_head.weight")
    layers = []
    for index in range(config.num_layers):
        progress("load weights", index + 1, steps)
        prefix = f"model.layers.{index}."

        def joined(names: tuple[str, ...], prefix: str = prefix) -> Tensor:
            return torch.cat([fetch(prefix + name) for name in names])

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
                attention_norm=fetch(prefix + "input_layernorm.weight"),
                ffn_norm=fetch(prefix + "post_attention_layernorm.weight"),
                qkv=joined(tuple(f"{name}.weight" for name in attention)),
                output=fetch(prefix + "self_attn.o_proj.weight"),
                output_bias=fetch(prefix + "self_attn.o_proj.bias") if config.output_bias else None,
                gate_up=joined(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
                down=fetch(prefix + "mlp.down_proj.weight"),
                turning=turning,
            )
        )
    progress("load weights", steps, steps)
    return GpuWeights(embedding, tuple(layers), fetch("model.norm.weight"), head)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

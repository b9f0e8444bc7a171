"""What would the same weights do in a plain torch loop: one fused `linear` per matrix, SDPA, one contiguous cache?

Not batch-invariant. The peer that shows what invariance costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kernels.models.config import ModelConfig, read_config
from kernels.models.layers import rope_table
from kernels.models.weights import open_weights


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class PlainLoop:
    """A Llama without biases or q/k norms."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: str) -> None:
        self.config: ModelConfig = read_config(model_dir)
        if self.config.qkv_bias or self.config.qk_norm:
            raise ValueError("the plain loop computes the Llama and Mistral families only")
        self.dtype = dtype
        self.device = device
        weights = open_weights(model_dir)

        def fetch(*names: str) -> Tensor:
            return torch.cat([weights.tensor(f"{name}.weight") for name in names]).to(device, dtype)

        self.embedding = fetch("model.embed_tokens")
        self.head = self.embedding if self.config.tie_embeddings else fetch("lm_head")
        self.norm = fetch("model.norm")
        self.layers = []
        for index in range(self.config.num_layers):
            p = f"model.layers.{index}"
            self.layers.append(
                _Layer(
                    fetch(f"{p}.input_layernorm"),
                    fetch(f"{p}.self_attn.q_proj", f"{p}.self_attn.k_proj", f"{p}.self_attn.v_proj"),
                    fetch(f"{p}.self_attn.o_proj"),
                    fetch(f"{p}.post_attention_layernorm"),
                    fetch(f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj"),
                    fetch(f"{p}.mlp.down_proj"),
                )
            )
        cos, sin = rope_table(self.config)
        self.cos, self.sin = (torch.cat([part, part], -1).to(device, dtype) for part in (cos, sin))

    def new_cache(self, batch: int, tokens: int) -> Tensor:
        """Random K and V, [layers, K and V, batch, kv_heads, tokens, head_dim]."""
        config = self.config
        shape = (config.num_layers, 2, batch, config.num_kv_heads, tokens, config.head_dim)
        return torch.randn(shape).to(self.device, self.dtype)

    @torch.inference_mode()
    def step(self, token_ids: Tensor, position: int, cache: Tensor) -> Tensor:
        """Greedy next tokens [batch] after token_ids [batch, n] at `position`."""
        config, (batch, count) = self.config, token_ids.shape
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        end = position + count
        cos, sin = self.cos[position:end], self.sin[position:end]
        hidden = functional.embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            rows = functional.rms_norm(hidden, (config.hidden_size,), layer.attention_norm, config.norm_eps)
            mixed = functional.linear(rows, layer.qkv).view(batch, count, -1, dim).transpose(1, 2)
            q, k, v = torch.split(mixed, [heads, kv_heads, kv_heads], 1)
            cache[index, 0, :, :, position:end] = _turn(k, cos, sin)
            cache[index, 1, :, :, position:end] = v
            attended = functional.scaled_dot_product_attention(
                _turn(q, cos, sin),
                cache[index, 0, :, :, :end],
                cache[index, 1, :, :, :end],
                is_causal=count > 1,
                enable_gqa=True,
            )
            hidden = hidden + functional.linear(attended.transpose(1, 2).reshape(batch, count, -1), layer.output)
            rows = functional.rms_norm(hidden, (config.hidden_size,), layer.ffn_norm, config.norm_eps)
            gate, up = functional.linear(rows, layer.gate_up).chunk(2, -1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        last = functional.rms_norm(hidden[:, -1], (config.hidden_size,), self.norm, config.norm_eps)
        return functional.linear(last, self.head).argmax(-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

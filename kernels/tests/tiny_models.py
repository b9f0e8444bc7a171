"""Tiny random models of each supported family, and what a plain fp32 forward says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.engine_models import write_model

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "mistral": _COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    "qwen2": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
}


def write_tiny(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    return write_model(FAMILIES[family], folder, seed=3, dtype=dtype)


def plain_forward(folder: Path, token_ids: list[int]) -> Tensor:
    """Logits of every position, [tokens, vocab]: one matrix at a time, the whole prompt at once, straight from the paper."""
    raw = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    n = len(token_ids)
    cos, sin = _rope(raw, n, dim)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * weight

    def turn(x):
        half = dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def project(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    hidden = w["model.embed_tokens.weight"][token_ids]
    hidden_keys = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, w[f"{prefix}input_layernorm.weight"])
        q = project(x, f"{prefix}self_attn.q_proj").view(n, heads, dim).transpose(0, 1)
        k = project(x, f"{prefix}self_attn.k_proj").view(n, kv_heads, dim).transpose(0, 1)
        v = project(x, f"{prefix}self_attn.v_proj").view(n, kv_heads, dim).transpose(0, 1)
        if f"{prefix}self_attn.q_norm.weight" in w:
            q = norm(q, w[f"{prefix}self_attn.q_norm.weight"])
            k = norm(k, w[f"{prefix}self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = (q @ k.mT / dim**0.5).masked_fill(hidden_keys, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        hidden = hidden + project(attended, f"{prefix}self_attn.o_proj")
        x = norm(hidden, w[f"{prefix}post_attention_layernorm.weight"])
        gate = project(x, f"{prefix}mlp.gate_proj")
        hidden = hidden + project(gate * gate.sigmoid() * project(x, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    logits: Tensor = (norm(hidden, w["model.norm.weight"]) @ head.T).float()
    return logits


def _rope(raw: dict[str, Any], n: int, dim: int) -> tuple[Tensor, Tensor]:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw["rope_theta"]
    turns = []
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        if scaling.get("rope_type") == "llama3":
            ratio = scaling["original_max_position_embeddings"] * frequency / (2 * torch.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            blend = min(max((ratio - low) / (high - low), 0.0), 1.0)
            frequency = (1 - blend) * frequency / scaling["factor"] + blend * frequency
        turns.append(frequency)
    angles = torch.arange(n, dtype=torch.float64)[:, None] * torch.tensor(turns, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()

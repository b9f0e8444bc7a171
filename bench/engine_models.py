"""Random weights in the shape of a named model, for machines that cannot download one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.models.config import parse_config
from kernels.models.layers import expected_shapes

SHAPES: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
}


def write_random_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder of that shape with seeded bf16 weights. Returns the folder."""
    return write_model(SHAPES[name], folder, seed=seed, dtype=torch.bfloat16)


def write_model(raw: dict[str, object], folder: Path, *, seed: int, dtype: torch.dtype) -> Path:
    """A Hugging Face folder with this config.json and seeded weights whose activations stay of order one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor, shape in expected_shapes(parse_config(raw, {})).items():
        if tensor.endswith("norm.weight"):
            values = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator) * float(shape[-1]) ** -0.5
        tensors[tensor] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder

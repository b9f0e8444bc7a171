"""A real Llama of two small layers with random weights, as a Hugging Face folder."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 32, 4, 2, 64, 96, 2
CONTEXT = 512
EOS = 2


def write_tiny_model(folder: Path) -> Path:
    """Write config.json and model.safetensors; the same weights every time."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = np.random.default_rng(20260101)

    def weight(*shape: int) -> NDArray[np.float32]:
        return np.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), dtype=np.float32)

    kv_width = HIDDEN // HEADS * KV_HEADS
    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    tensors["lm_head.weight"] = weight(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": weight(HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(kv_width, HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(kv_width, HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(HIDDEN, FFN),
        }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder

"""Which shapes are measured on a GPU?"""

from __future__ import annotations

from bench.engine_models import SHAPES

GPU_SHAPES: dict[str, dict[str, object]] = {
    "smollm2-135m": SHAPES["smollm2-135m"],
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8448,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
}

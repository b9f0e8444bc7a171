"""How is a small random V4.1 checkpoint made, in exactly the layout of the published one?

For tests, benches and `fathom tiny-model`: every part of the architecture is there, in sizes a laptop computes at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.models.config import ModelNotSupported
from kernels.models.digest import Progress
from kernels.models.v41.config import parse_v41_config
from kernels.models.v41.spellings import token_spellings
from kernels.models.v41.tensors import E4M3, FP4, Spec, expected_tensors, is_engram_table
from kernels.ops.engram import compress_vocabulary, hash_tables
from kernels.ops.quant import quantise_fp4_weight, quantise_fp8_rows, quantise_fp8_weight

TEXT: Mapping[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 320, "hidden_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 4, "hidden_act": "silu", "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "use_cache": True, "tie_word_embeddings": False, "max_position_embeddings": 1024, "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 64},
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 6, 8, 10], "index_n_heads": 16,
    "index_head_dim": 64, "index_topk": 16, "candidate_source_layer_id": 6, "candidate_topk_blocks": 8,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4, "engram_vocab_size": 102, "engram_n_heads": 2, "engram_head_dim": 128,
    "engram_pad_token_id": 2, "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 300,
    "dspark_target_layer_ids": [9, 10, 11], "dspark_markov_rank": 32, "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip
"""Defaults of text_config. What the tokenizer decides (compressed vocabulary, table rows) is added when written."""

VISION: Mapping[str, Any] = {
    "model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 128, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3, "max_image_tokens": 64,
    "min_pixels": 7056, "max_wh_ratio": None,
}  # fmt: skip

_GAINS = {
    "markov_head.head.weight": 1.5,
    "head.weight": 2.5, "engram.wkv.weight": 0.55, "wo_b.weight": 0.33, "w2.weight": 0.33, "wo_a.weight": 1.7,
    "w1.weight": 1.7, "w3.weight": 1.7, "wgate.weight": 1.5, "gate.weight": 1.0, "hc_attn_fn": 1.0, "hc_ffn_fn": 1.0,
}  # fmt: skip
"""Deviation of a matrix's outputs for unit inputs, by the end of its name; others 1.15. Chosen so that every part of
the model moves the logits and none drowns the others."""
_ROWS_AT_ONCE = 65536


def write_tiny_model(
    folder: Path,
    *,
    seed: int,
    tokenizer: Mapping[str, str],
    image_token_id: int = 290,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = VISION,
    num_shards: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write config.json, the tokenizer's files and random weights into a folder, made if need be.

    The same arguments give the same bytes.  tokenizer: file name -> contents, tokenizer.json among them.
    text: what differs from TEXT.  vision: None leaves the tower out.  num_shards: files, with an index when several.
    progress: ("write weights", bytes, of all).  ModelNotSupported when the sizes do not fit each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in tokenizer.items():
        (folder / name).write_text(contents, encoding="utf-8")
    raw = _config(folder, dict(text or {}), vision, image_token_id)
    config = parse_v41_config(raw, {})
    _write_json(folder / "config.json", raw)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    specs = expected_tensors(config)
    total, done = sum(map(_num_bytes, specs.values())), 0
    file_of: dict[str, str] = {}
    for index, names in enumerate(_shards(specs, num_shards), start=1):
        file = "model.safetensors" if num_shards == 1 else f"model-{index:05}-of-{num_shards:05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= _random(name, specs, seed)
            done += _num_bytes(specs[name])
            if progress:
                progress("write weights", done, total)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library makes it private; services may run as another user
        file_of |= dict.fromkeys(names, file)
    if num_shards > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


def _config(
    folder: Path, text: Mapping[str, Any], vision: Mapping[str, Any] | None, image_token_id: int
) -> dict[str, Any]:
    """The whole of config.json."""
    unknown = sorted(set(text) - set(TEXT))
    if unknown:
        raise ModelNotSupported(f"text_config has no {', '.join(unknown)}")
    text = {**TEXT, **text}
    spellings = token_spellings(folder / "tokenizer.json")
    if len(spellings) > text["vocab_size"]:
        raise ModelNotSupported(f"the tokenizer has token {len(spellings) - 1}, vocab_size is {text['vocab_size']}")
    compressed_vocab = int(compress_vocabulary(spellings).max()) + 1
    tables = hash_tables(
        text["engram_layer_ids"],
        vocab_size=text["engram_vocab_size"],
        heads=text["engram_n_heads"],
        max_ngram=text["engram_max_ngram_size"],
        compressed_vocab_size=compressed_vocab,
    )
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": image_token_id,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "text_config": text | {
            "engram_num_embeddings": [tables[layer].num_rows for layer in text["engram_layer_ids"]],
            "engram_compressed_vocab_size": compressed_vocab,
        },
    }  # fmt: skip
    return raw if vision is None else raw | {"vision_config": dict(vision)}


def _shards(specs: Mapping[str, Spec], num_shards: int) -> Iterator[list[str]]:
    """Deal names to files of about the same size, in order; a matrix and its scales stay together."""
    share, filled, names = sum(map(_num_bytes, specs.values())) / num_shards, 0, list[str]()
    for name, spec in specs.items():
        if filled >= share and num_shards > 1 and not name.endswith(".scale"):
            yield names
            num_shards, filled, names = num_shards - 1, 0, []
        names.append(name)
        filled += _num_bytes(spec)
    yield names


def _num_bytes(spec: Spec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _random(name: str, specs: Mapping[str, Spec], seed: int) -> dict[str, Tensor]:
    """One tensor as it is stored, with its scales; nothing for scales, which come with their matrix."""
    spec, scale = specs[name], f"{name.removesuffix('weight')}scale"
    if name.endswith(".scale"):
        return {}
    # A stream of its own for each name: other sizes elsewhere, or another order, change nothing here.
    noise = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))  # it looks at 32 bits of a seed only
    if is_engram_table(name):
        rows = [quantise_fp8_rows(_normal((n, spec.shape[1]), noise) * 2) for n in _pieces(spec.shape[0])]
        return {name: torch.cat([data for data, _ in rows]), scale: torch.cat([scales for _, scales in rows])}
    if spec.dtype in {E4M3, FP4}:
        quantise, per_byte = (quantise_fp8_weight, 1) if spec.dtype == E4M3 else (quantise_fp4_weight, 2)
        size = spec.shape[1] * per_byte
        data, scales = quantise(_normal((spec.shape[0], size), noise) * (_gain(name) * size**-0.5))
        return {name: data, scale: scales}
    return {name: _small(name, spec.shape, noise).to(spec.dtype)}


def _small(name: str, shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    """What is kept in bf16 or fp32."""
    x = _normal(shape, noise)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".q_weight", ".k_weight")):
        return 1 + 0.25 * x
    if name.endswith("_scale"):
        return 0.25 + 0.15 * x.abs()
    if name.endswith("_base"):  # as DeepSeek starts it, less far from even: streams mostly keep to themselves
        x[8:].view(4, 4).diagonal().add_(2.5)
        return x
    if len(shape) == 1:  # biases, but sinks and the marks around images, which are as large as what they stand beside
        return (
            x if name.endswith("attn_sink") or name.startswith("image_") else 0.1 * x if "gate" not in name else 0.5 * x
        )
    return x if name.endswith("embed.weight") else x * (_gain(name) * shape[1] ** -0.5)


def _gain(name: str) -> float:
    if name.startswith(("vision.", "aligner.")):
        return 1.0
    return next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.15)


def _pieces(rows: int) -> Iterator[int]:
    return (min(_ROWS_AT_ONCE, rows - start) for start in range(0, rows, _ROWS_AT_ONCE))


def _normal(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=noise)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

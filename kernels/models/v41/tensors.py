"""Which tensors does a V4.1 checkpoint hold, in which shapes and formats?

Names, shapes and formats are those of the published Hugging Face layout: fp8 matrices with a scale per 32 x 32 block,
experts in fp4 with a scale per 32 values of a row, everything small in bf16 or fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.models.v41.config import MoeConfig, V41Config, VisionConfig
from kernels.models.v41.config_rules import SCALE_BLOCK

E4M3, E8M0, FP4 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8
"""Formats of fp8 weights, of scales, and of fp4 weights (two values in a byte)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How one tensor is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def accepts(self, dtype: torch.dtype) -> bool:
        """What is published in bf16 may be kept in fp32 as well."""
        return dtype == self.dtype or (self.dtype == torch.bfloat16 and dtype == torch.float32)


Specs = dict[str, Spec]


def expected_tensors(config: V41Config) -> Specs:
    """Every tensor of a checkpoint of this config, by its bare name (no `model.`)."""
    vocab, hidden, drafter = config.vocab_size, config.hidden_size, config.drafter
    specs = _bf16("embed.weight", vocab, hidden) | _bf16("head.weight", vocab, hidden) | _bf16("norm.weight", hidden)
    for layer in range(config.num_layers):
        specs |= _block(config, f"layers.{layer}.", config.moe) | _compressed(config, layer)
    for layer, rows in zip(config.engram.layers, config.engram.num_rows, strict=True):
        specs |= _engram(config, f"layers.{layer}.engram.", rows)
    for index in range(drafter.num_layers):
        specs |= _block(config, f"mtp.{index}.", drafter.moe)
    if drafter.num_layers:
        specs |= _fp8("mtp.0.main_proj", hidden, hidden * len(drafter.target_layers))
        specs |= _bf16("mtp.0.main_norm.weight", hidden)
        specs |= _draft_heads(config, f"mtp.{drafter.num_layers - 1}.")
    return specs | (_vision(config.vision, hidden) if config.vision else {})


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision service and not to the language model."""
    return name.startswith(("vision.", "aligner.", "image_"))


def is_engram_table(name: str) -> bool:
    """Whether a tensor is a part of an n-gram table, which is never read as a whole."""
    return ".engram.embed." in name


def _block(config: V41Config, prefix: str, moe: MoeConfig) -> Specs:
    """Attention and experts, the same in main and drafter layers."""
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    mixes = (2 + config.hc_mult) * config.hc_mult
    specs = _bf16(f"{prefix}attn_norm.weight", hidden) | _bf16(f"{prefix}ffn_norm.weight", hidden)
    for sublayer in ("attn", "ffn"):
        specs |= _fp32(f"{prefix}hc_{sublayer}_fn", mixes, config.hc_mult * hidden)
        specs |= _fp32(f"{prefix}hc_{sublayer}_base", mixes) | _fp32(f"{prefix}hc_{sublayer}_scale", 3)
    attn = f"{prefix}attn."
    specs |= _fp8(f"{attn}wq_a", config.q_lora, hidden) | _bf16(f"{attn}q_norm.weight", config.q_lora)
    specs |= _fp8(f"{attn}wq_b", heads * dim, config.q_lora)
    specs |= _fp8(f"{attn}wkv", dim, hidden) | _bf16(f"{attn}kv_norm.weight", dim)
    specs |= _fp8(f"{attn}wo_a", config.o_groups * config.o_lora, heads // config.o_groups * dim)
    specs |= _fp8(f"{attn}wo_b", hidden, config.o_groups * config.o_lora) | _fp32(f"{attn}attn_sink", heads)
    ffn = f"{prefix}ffn."
    specs |= _bf16(f"{ffn}gate.weight", moe.num_experts, hidden)
    specs |= _fp32(f"{ffn}gate.bias", moe.num_experts) | _fp32(f"{ffn}gate.bias_vl", moe.num_experts)
    for part, (out, size) in {"w1": (moe.width, hidden), "w2": (hidden, moe.width), "w3": (moe.width, hidden)}.items():
        specs |= _fp8(f"{ffn}shared_experts.{part}", out, size)
        for expert in range(moe.num_experts):
            name = f"{ffn}experts.{expert}.{part}"
            specs[f"{name}.weight"] = Spec((out, size // 2), FP4)
            specs[f"{name}.scale"] = Spec((out, size // SCALE_BLOCK), E8M0)
    return specs


def _compressed(config: V41Config, layer: int) -> Specs:
    """What writes and searches the compressed cache."""
    attn, hidden, dim = f"layers.{layer}.attn.", config.hidden_size, config.head_dim
    specs: Specs = {}
    if layer in config.kv_sources:
        specs |= _bf16(f"{attn}compressor.wkv.weight", dim, hidden) | _bf16(f"{attn}compressor.norm.weight", dim)
        specs |= _bf16(f"{attn}indexer.wk.weight", config.index_dim, dim)
        specs |= _bf16(f"{attn}indexer.k_norm.weight", config.index_dim)
        if config.compress_ratios[layer] > 1:
            specs |= _bf16(f"{attn}compressor.wgate.weight", dim, hidden)
    if layer in config.index_sources:
        specs |= _fp8(f"{attn}indexer.wq_b", config.index_heads * config.index_dim, config.q_lora)
        specs |= _bf16(f"{attn}indexer.weights_proj.weight", config.index_heads, hidden)
    return specs


def _engram(config: V41Config, prefix: str, rows: int) -> Specs:
    hidden, streams, dim = config.hidden_size, config.hc_mult, config.engram.head_dim
    specs = {
        f"{prefix}embed.weight": Spec((rows, dim), E4M3),
        f"{prefix}embed.scale": Spec((rows, dim // SCALE_BLOCK), E8M0),
    }
    specs |= _fp8(f"{prefix}wkv", (streams + 1) * hidden, config.engram.width)
    return specs | _bf16(f"{prefix}q_weight", streams, hidden) | _bf16(f"{prefix}k_weight", streams, hidden)


def _draft_heads(config: V41Config, prefix: str) -> Specs:
    """Of the drafter's last layer."""
    hidden, rank = config.hidden_size, config.drafter.markov_rank
    specs = _bf16(f"{prefix}norm.weight", hidden)
    specs |= _bf16(f"{prefix}markov_head.embed.weight", config.vocab_size, rank)
    specs |= _bf16(f"{prefix}markov_head.head.weight", config.vocab_size, rank)
    return specs | _bf16(f"{prefix}confidence_head.proj.weight", 1, hidden + rank)


def _vision(vision: VisionConfig, hidden: int) -> Specs:
    width = vision.hidden_size
    specs = _linear("vision.patch_embed.proj", width, 3 * vision.patch_size**2) | _bf16("vision.norm.weight", width)
    for block in (f"vision.blocks.{index}." for index in range(vision.num_layers)):
        specs |= _bf16(f"{block}norm1.weight", width) | _bf16(f"{block}norm2.weight", width)
        specs |= _linear(f"{block}attn.wqkv", 3 * width, width) | _linear(f"{block}attn.wo", width, width)
        specs |= _bf16(f"{block}mlp.w1.weight", 2 * vision.ffn_size, width)
        specs |= _bf16(f"{block}mlp.w2.weight", width, vision.ffn_size)
    specs |= _linear("aligner.w1", hidden, width * vision.downsample**2) | _linear("aligner.w2", hidden, hidden)
    for name in ("image_start", "image_newline", "image_end"):
        specs |= _bf16(name, hidden)
    return specs


def _bf16(name: str, *shape: int) -> Specs:
    return {name: Spec(shape, torch.bfloat16)}


def _fp32(name: str, *shape: int) -> Specs:
    return {name: Spec(shape, torch.float32)}


def _linear(name: str, out: int, size: int) -> Specs:
    return _bf16(f"{name}.weight", out, size) | _bf16(f"{name}.bias", out)


def _fp8(name: str, out: int, size: int) -> Specs:
    scale = (-(-out // SCALE_BLOCK), -(-size // SCALE_BLOCK))
    return {f"{name}.weight": Spec((out, size), E4M3), f"{name}.scale": Spec(scale, E8M0)}

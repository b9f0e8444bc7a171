"""DeepSeek-V4.1 at its published dimensions with random weights, made where they are used: no files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.gpu.v41.drafter import DrafterLoader, DrafterWeights
from kernels.models.gpu.v41.expert_weights import ExpertFormat, Placement
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.gpu.v41.weights import GpuV41Weights, Loader
from kernels.models.v41.config import V41Config, parse_v41_config
from kernels.models.v41.layout import v41_layout
from kernels.models.v41.tensors import E4M3, E8M0, FP4, Spec, expected_tensors
from kernels.ops.engram import hash_tables
from kernels.ops.numerics import QUANT
from kernels.ops.quant import GROUP, quantise_fp8_weight

TABLE_VOCAB = 40_000
"""Rows of each of an n-gram table's 24 parts, of the published 16,000,000: 240 MB a layer in the host's memory."""
EXPERTS_AT_ONCE = 16
"""Whose values are drawn together: 300 MB of a layer's 7,200."""
_EXPERT = re.compile(r"(?P<layer>.*\.experts\.)(?P<place>\d+)(?P<kind>\..*)")
_LAYERS, _ENCODER_LAYERS = 40, 20


def published_config(
    num_layers: int = _LAYERS, num_encoder_layers: int = _ENCODER_LAYERS, *, table_vocab: int = TABLE_VOCAB
) -> V41Config:
    """The published sizes, except for n-gram tables that fit anywhere; fewer layers keep their kinds and order."""
    pairs = range(2, num_encoder_layers, max((num_encoder_layers - 2) // 3, 1))
    has_decoder = num_encoder_layers < num_layers
    singles = [num_encoder_layers] if has_decoder else []
    layers = [1, max(num_encoder_layers * 14 // _ENCODER_LAYERS, 2)]
    tables = hash_tables(layers, vocab_size=table_vocab, heads=8, max_ngram=4, compressed_vocab_size=99_092)
    ratios = [0] * 2 + [2] * (num_encoder_layers - 2) + [1] * (num_layers - num_encoder_layers)
    text: dict[str, Any] = {
        "vocab_size": 129_280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": num_layers,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "swiglu_limit": 10.0, "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1_048_576, "rope_theta": 10_000, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "sliding_window": 128, "compress_ratios": ratios + [0] * 3,
        "compress_rope_theta": 160_000, "kv_source_layer_ids": [*list(pairs)[:3], *singles],
        "index_source_layer_ids": [*list(pairs)[:3], *singles, *range(num_encoder_layers + 4, num_layers, 4)],
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65_536},
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": num_encoder_layers, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": layers,
        "engram_num_embeddings": [tables[layer].num_rows for layer in layers], "engram_max_ngram_size": 4,
        "engram_vocab_size": table_vocab, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99_092, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
        "dspark_noise_token_id": 128_799, "dspark_target_layer_ids": [num_layers - 3, num_layers - 2, num_layers - 1],
        "dspark_markov_rank": 256, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    }  # fmt: skip
    raw = {
        "architectures": ["DeepseekV41ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "image_token_id": 129_264, "text_config": text,
        "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
    }  # fmt: skip
    config = parse_v41_config(raw, {})
    # Without a decoder nobody drafts.
    return config if has_decoder else replace(config, drafter=replace(config.drafter, num_layers=0, target_layers=()))


class RandomTensors:
    """A checkpoint of that config: the same name gives the same values."""

    def __init__(self, config: V41Config, device: torch.device) -> None:
        self._device = device
        self._specs = expected_tensors(config)
        self._experts: dict[str, tuple[str, tuple[Tensor, ...]]] = {}
        """By part and format: the newest neighbours' name, and what each of them has."""

    def dense(self, name: str) -> Tensor:
        shape = self._specs[name].shape
        if self._device.type == "meta":
            return torch.empty(shape, device=self._device)
        values = torch.randn(shape, generator=self._noise(name), device=self._device)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * values
        values.mul_(float(shape[-1]) ** -0.5 if len(shape) > 1 else 0.1)
        return in_fp8(values) if self._specs[name].dtype == E4M3 else values

    def stored(self, name: str) -> Tensor:
        """Experts are drawn with their neighbours: a layer of 384 is asked for 2,304 tensors."""
        spec: Spec = self._specs[name]
        if spec.dtype not in {E8M0, FP4}:
            raise ValueError(f"{name} is {spec.dtype}: read it dense")
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return self._drawn(name, spec, 1)[0]
        place, kind = int(expert["place"]), expert["kind"]
        first = place - place % EXPERTS_AT_ONCE
        drawn = f"{expert['layer']}{first}{kind}"
        if self._experts.get(kind, ("",))[0] != drawn:
            self._experts.pop(kind, None)  # before there are others
            self._experts[kind] = drawn, self._drawn(drawn, spec, EXPERTS_AT_ONCE).unbind()
        return self._experts[kind][1][place - first]

    def table(self, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        prefix = f"layers.{layer}.engram.embed."
        assert self._specs[f"{prefix}weight"].dtype == E4M3
        shapes = [self._specs[f"{prefix}{part}"].shape for part in ("weight", "scale")]
        if self._device.type == "meta":
            return np.zeros(shapes[0], np.uint8), np.zeros(shapes[1], np.uint8)
        data = self._bytes(f"{prefix}weight", shapes[0], 0, 0x78)
        scale = self._bytes(f"{prefix}scale", shapes[1], 110, 125)
        return data.cpu().numpy(), scale.cpu().numpy()

    def _drawn(self, name: str, spec: Spec, count: int) -> Tensor:
        """[count, ...] random values of this spec, in its format's bytes."""
        made = self._bytes(name, (count, *spec.shape), *((117, 120) if spec.dtype == E8M0 else (0, 256)))
        return made if spec.dtype == E8M0 else made.view(torch.int8)

    def _bytes(self, name: str, shape: tuple[int, ...], lowest: int, end: int) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=self._device)
        noise = self._noise(name)
        return torch.randint(lowest, end, shape, generator=noise, dtype=torch.uint8, device=self._device)

    def _noise(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(crc32(name.encode()))


def in_fp8(values: Tensor) -> Tensor:
    """[out, in] fp32, as it comes back from e4m3 with a scale for each 32 x 32: one call for all bands of rows."""
    data, scale = quantise_fp8_weight(values)
    blocks = data.float().view(len(scale), GROUP, -1, GROUP)
    return blocks.mul_(scale.float()[:, None, :, None]).view(values.shape)


def one_rank_of(config: V41Config, ranks: int) -> Placement:
    """One GPU's share of the experts, which gets as many rows as if every rank of the group had sent its own.

    Each expert is taken for one of those here, so that a step's tokens, times their choices, all stay.
    """
    here = -(-(config.moe.num_experts + ranks) // ranks)
    return Placement(tuple(range(here)), tuple(expert % here for expert in range(config.moe.num_experts)))


def random_weights(
    config: V41Config,
    device: torch.device,
    *,
    experts: ExpertFormat,
    placement: Placement | None,
    is_invariant: bool = True,
    unpacks: bool = False,
) -> GpuV41Weights:
    """placement: None = all experts.  unpacks: fp4 ones have room to become e4m3 in."""
    return Loader(
        config,
        RandomTensors(config, device),
        device,
        experts=experts,
        placement=placement,
        is_invariant=is_invariant,
        unpacks=unpacks,
    ).load()


def random_drafter(config: V41Config, device: torch.device, *, ranks: int, is_invariant: bool = True) -> DrafterWeights:
    """One GPU's share."""
    placement = one_rank_of(replace(config, moe=config.drafter.moe), ranks)
    tensors = RandomTensors(config, device)
    loader = DrafterLoader(config, tensors, device, experts="fp4", placement=placement, is_invariant=is_invariant)
    return loader.load_drafter()


def random_model(
    config: V41Config,
    weights: GpuV41Weights,
    device: torch.device,
    *,
    num_blocks: int,
    num_windows: int,
    is_invariant: bool,
    graph_sizes: tuple[int, ...],
    drafter: DrafterWeights | None = None,
) -> GpuV41:
    """With empty blocks and windows."""
    ids = torch.arange(config.vocab_size) % config.engram.compressed_vocab
    return GpuV41(
        config,
        weights,
        ids,
        v41_layout(config, QUANT),
        num_blocks=num_blocks,
        num_windows=num_windows,
        device=device,
        is_invariant=is_invariant,
        graph_sizes=graph_sizes,
        drafter=drafter,
    )


def give_past(model: GpuV41) -> None:
    """Fill blocks and windows with what nobody computed: finite values in every format."""
    model.cache.blocks[1:].random_(100, 120)
    state = bytearray([110]) * model.layout.window_bytes
    for stream in model.layout.window_streams:
        if stream.name == "compressor":
            state[stream.offset : stream.end] = bytes(stream.num_bytes)
    for slot in range(1, model.cache.num_windows):
        model.write_window(slot, state)

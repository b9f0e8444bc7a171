"""What does a DeepSeek-V4.1 folder's config.json ask for, and can this library compute it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.models.config import ModelNotSupported
from kernels.models.v41.config_fields import Fields, read_json
from kernels.models.v41.config_rules import SCALE_BLOCK, contradictions

ARCHITECTURE = "DeepseekV41ForCausalLM"


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Rotary positions of layers that read the compressed cache: YaRN over `theta`, attention factor 1."""

    theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_tokens: int


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """Hashed n-gram memory: for each layer (max_ngram - 1) tables x num_heads rows of head_dim per token."""

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    """Of each layer's table, in the order of `layers`."""
    max_ngram: int
    table_vocab: int
    """Tables are prime in size, the next primes from here on."""
    num_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab: int

    @property
    def rows_per_token(self) -> int:
        """Rows one token gathers in one layer."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def width(self) -> int:
        """Length of a token's gathered rows, concatenated."""
        return self.rows_per_token * self.head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts and one shared expert of the same width."""

    num_experts: int
    top_k: int
    width: int
    scaling: float
    swiglu_limit: float


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The DSpark drafter: its own blocks, the main model's embedding and head."""

    num_layers: int
    draft_tokens: int
    """Drafted per step (dspark_block_size)."""
    noise_token_id: int
    target_layers: tuple[int, ...]
    """Main layers whose attention inputs are its features."""
    markov_rank: int
    moe: MoeConfig


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower and what it accepts."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    patch_size: int
    rope_theta: float
    downsample: int
    """Patches merged per side into one image token."""
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True)
class V41Config:
    """A DeepSeek-V4.1 model. Layers below num_encoder_layers are the causal encoder, the others the decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dims: int
    """The last dims of each head, which positions turn."""
    q_lora: int
    o_lora: int
    o_groups: int
    norm_eps: float
    window_tokens: int
    max_position_tokens: int
    rope_theta: float
    """Plain, for layers of ratio 0 and the drafter."""
    compress_rope: YarnRope
    """For layers of ratio 1 and 2."""
    compress_ratios: tuple[int, ...]
    """Tokens per compressed entry of each main layer; 0 = the layer reads its window only."""
    kv_sources: tuple[int, ...]
    """Layers that write a compressed cache; later ones read the newest source's."""
    index_sources: tuple[int, ...]
    """Layers that select entries; later ones reuse the newest selection."""
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    hc_mult: int
    sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig
    moe: MoeConfig
    drafter: DrafterConfig
    vision: VisionConfig | None
    bos_token_id: int
    pad_token_id: int
    image_token_id: int
    """The text spelling of an image in rendered prompts; engines see `image_token_ids` instead."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_encoder_layers(self) -> int:
        """The first layer of ratio 1; every layer when there is none."""
        return self.compress_ratios.index(1) if 1 in self.compress_ratios else self.num_layers

    @property
    def backtrack_tokens(self) -> int:
        """Rejected drafts, and the token that followed them, may be computed again."""
        return self.drafter.draft_tokens + 1

    @property
    def ring_tokens(self) -> int:
        """Slots of a sliding window's ring."""
        return self.window_tokens + self.backtrack_tokens

    @property
    def block_tokens(self) -> int:
        """V4.1's blocks are as long as its window."""
        return self.window_tokens

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        """Ids that mark an image's place in a prompt: its first token's, then all others'. Empty without vision."""
        return (self.vocab_size + 2, self.vocab_size + 1) if self.vision else ()

    def kv_source_of(self, layer: int) -> int:
        """The layer whose compressed cache this one reads. ValueError for a layer of ratio 0."""
        if not self.compress_ratios[layer]:
            raise ValueError(f"layer {layer} reads no compressed cache")
        return max(source for source in self.kv_sources if source <= layer)

    def index_source_of(self, layer: int) -> int:
        """The layer whose selection this one reads. ValueError for a layer of ratio 0."""
        if not self.compress_ratios[layer]:
            raise ValueError(f"layer {layer} selects no entries")
        return max(source for source in self.index_sources if source <= layer)


def is_v41(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is of this architecture."""
    return ARCHITECTURE in (raw.get("architectures") or ())


def read_v41_config(model_dir: Path) -> V41Config:
    """Read config.json (and generation_config.json for the end tokens). ModelNotSupported lists every reason."""
    raw = read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    return parse_v41_config(raw, read_json(generation) if generation.is_file() else {})


def parse_v41_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> V41Config:
    """`read_v41_config` on parsed files."""
    if not is_v41(raw):
        raise ModelNotSupported(f"architectures {raw.get('architectures')!r} do not name {ARCHITECTURE}")
    problems: list[str] = []
    config = _config(raw, generation, problems)
    if not problems:
        problems += contradictions(config)
    if problems:
        raise ModelNotSupported("config.json cannot be served: " + "; ".join(problems))
    return config


def _config(raw: Mapping[str, Any], generation: Mapping[str, Any], problems: list[str]) -> V41Config:
    top = Fields(raw, "config", problems)
    text = Fields(raw.get("text_config"), "text_config", problems)
    _check_fixed(text, Fields(raw.get("quantization_config"), "quantization_config", problems))
    vision = raw.get("vision_config")
    num_layers = text.whole("num_hidden_layers")
    return V41Config(
        vocab_size=text.whole("vocab_size"),
        hidden_size=text.whole("hidden_size"),
        num_layers=num_layers,
        num_heads=text.whole("num_attention_heads"),
        head_dim=text.whole("head_dim"),
        rope_dims=text.whole("qk_rope_head_dim"),
        q_lora=text.whole("q_lora_rank"),
        o_lora=text.whole("o_lora_rank"),
        o_groups=text.whole("o_groups"),
        norm_eps=text.number("rms_norm_eps"),
        window_tokens=text.whole("sliding_window"),
        max_position_tokens=text.whole("max_position_embeddings"),
        rope_theta=text.number("rope_theta"),
        compress_rope=_rope(text),
        compress_ratios=_ratios(text, num_layers, problems),
        kv_sources=text.wholes("kv_source_layer_ids"),
        index_sources=text.wholes("index_source_layer_ids"),
        index_heads=text.whole("index_n_heads"),
        index_dim=text.whole("index_head_dim"),
        index_topk=text.whole("index_topk"),
        candidate_source=text.whole("candidate_source_layer_id", least=0),
        candidate_blocks=text.whole("candidate_topk_blocks"),
        candidate_block_size=text.whole("candidate_block_size"),
        hc_mult=text.whole("hc_mult"),
        sinkhorn_iters=text.whole("hc_sinkhorn_iters"),
        hc_eps=text.number("hc_eps"),
        engram=_engram(text),
        moe=_moe(text, "n_routed_experts", "num_experts_per_tok"),
        drafter=_drafter(text),
        vision=None if vision is None else _vision(Fields(vision, "vision_config", problems)),
        bos_token_id=top.whole("bos_token_id", least=0),
        pad_token_id=top.whole("pad_token_id", least=0),
        image_token_id=top.whole("image_token_id", least=0),
        eos_token_ids=_eos(top, generation, problems),
    )


def _eos(top: Fields, generation: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    """One id or a list of them, of generation_config.json if it names any; none where neither file does."""
    fields = top
    if generation.get("eos_token_id") is not None:
        fields = Fields(generation, "generation_config", problems)
    named = fields.get("eos_token_id")
    if named is None:
        return ()
    return fields.wholes("eos_token_id") if isinstance(named, list) else (fields.whole("eos_token_id", least=0),)


def _check_fixed(text: Fields, quantization: Fields) -> None:
    """What every published V4.1 agrees on, and this library does not compute otherwise."""
    text.must_be("num_key_value_heads", 1)
    text.must_be("hidden_act", "silu", default="silu")
    text.must_be("attention_bias", supported=False, default=False)
    text.must_be("tie_word_embeddings", supported=False, default=False)
    text.must_be("scoring_func", "sqrtsoftplus")
    text.must_be("topk_method", "noaux_tc")
    text.must_be("norm_topk_prob", supported=True)
    text.must_be("n_shared_experts", 1)
    text.must_be("hc_mult", 4)
    quantization.must_be("quant_method", "fp8")
    quantization.must_be("weight_block_size", [SCALE_BLOCK, SCALE_BLOCK])
    quantization.must_be("scale_fmt", "ue8m0")
    quantization.must_be("expert_dtype", "fp4")


def _ratios(text: Fields, num_layers: int, problems: list[str]) -> tuple[int, ...]:
    """Of the main layers; the file lists the drafter's behind them, which must be 0."""
    listed = text.wholes("compress_ratios")
    num_drafter = text.whole("num_nextn_predict_layers")
    if len(listed) != num_layers + num_drafter:
        problems.append(
            f"compress_ratios lists {len(listed)} layers, the model has {num_layers} and {num_drafter} of the drafter"
        )
    if any(listed[num_layers:]):
        problems.append("compress_ratios of the drafter's layers are not 0")
    return listed[:num_layers]


def _rope(text: Fields) -> YarnRope:
    scaling = text.section("rope_scaling")
    scaling.must_be("rope_type", "yarn")
    return YarnRope(
        theta=text.number("compress_rope_theta"),
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position_tokens=scaling.whole("original_max_position_embeddings"),
    )


def _engram(text: Fields) -> EngramConfig:
    return EngramConfig(
        layers=text.wholes("engram_layer_ids"),
        num_rows=text.wholes("engram_num_embeddings"),
        max_ngram=text.whole("engram_max_ngram_size", least=2),
        table_vocab=text.whole("engram_vocab_size"),
        num_heads=text.whole("engram_n_heads"),
        head_dim=text.whole("engram_head_dim"),
        pad_token_id=text.whole("engram_pad_token_id", least=0),
        compressed_vocab=text.whole("engram_compressed_vocab_size"),
    )


def _moe(text: Fields, num_experts: str, top_k: str) -> MoeConfig:
    return MoeConfig(
        num_experts=text.whole(num_experts),
        top_k=text.whole(top_k),
        width=text.whole("moe_intermediate_size"),
        scaling=text.number("routed_scaling_factor"),
        swiglu_limit=text.number("swiglu_limit"),
    )


def _drafter(text: Fields) -> DrafterConfig:
    return DrafterConfig(
        num_layers=text.whole("num_nextn_predict_layers"),
        draft_tokens=text.whole("dspark_block_size"),
        noise_token_id=text.whole("dspark_noise_token_id", least=0),
        target_layers=text.wholes("dspark_target_layer_ids"),
        markov_rank=text.whole("dspark_markov_rank"),
        moe=_moe(text, "dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    )


def _vision(vision: Fields) -> VisionConfig:
    return VisionConfig(
        num_layers=vision.whole("num_hidden_layers"),
        hidden_size=vision.whole("hidden_size"),
        num_heads=vision.whole("num_attention_heads"),
        ffn_size=vision.whole("intermediate_size"),
        patch_size=vision.whole("patch_size"),
        rope_theta=vision.number("rope_theta"),
        downsample=vision.whole("downsample_ratio"),
        max_image_tokens=vision.whole("max_image_tokens"),
        min_pixels=vision.whole("min_pixels"),
        max_wh_ratio=None if vision.get("max_wh_ratio") is None else vision.number("max_wh_ratio"),
    )

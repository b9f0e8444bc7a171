"""What of V4.1 is V4 as well, and how is one made to compute the other?

transformers knows V4 only. The two agree on layers that read their window and nothing else, but for three things: V4
mixes the streams into a sublayer with that sublayer's own weights (V4.1: with those of the one before), norms each
query head, and learns how the final streams are mixed. `OurV4` is the product's model with those three exchanged;
`their_v4` is transformers' with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.batch import Batch, Row
from kernels.models.deepseek_v41 import DeepseekV41, OpenedV41
from kernels.models.v41.attention import Queries
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import V41Config
from kernels.models.v41.layer import Layer
from kernels.models.v41.matrices import Source
from kernels.models.v41.step import Turn
from kernels.models.v41.tiny import write_tiny_model
from kernels.ops.elementwise import rms_norm
from kernels.ops.hyper import COEFFICIENTS, STREAMS, coefficients, mean_square
from kernels.ops.numerics import EXACT
from kernels.ops.rope import rotate_last
from kernels.tests.golden_files import tiny_v41

LAYERS = 3
"""That V4 has too. One more stands behind them in the folder, since blocks must hold something; it is never run."""
_TEXT = {
    "num_hidden_layers": LAYERS + 1, "compress_ratios": [0] * LAYERS + [1, 0], "kv_source_layer_ids": [LAYERS],
    "index_source_layer_ids": [LAYERS], "candidate_source_layer_id": LAYERS, "engram_layer_ids": [],
    "num_nextn_predict_layers": 1, "dspark_n_routed_experts": 4, "dspark_target_layer_ids": [0],
    "rms_norm_eps": 0.03, "hc_eps": 1e-3,
}  # fmt: skip
"""The epsilons are far larger than real ones: where they are added shows in the logits."""
_NAMES = {
    "self_attn.q_a_proj.weight": "attn.wq_a.weight", "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight", "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight", "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight", "self_attn.sinks": "attn.attn_sink",
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base", "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base", "ffn_hc.scale": "hc_ffn_scale",
    "mlp.gate.weight": "ffn.gate.weight", "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}  # fmt: skip
"""transformers' names in a layer, and ours. Routed experts are stacked there and are not listed."""


@dataclass(frozen=True, slots=True)
class HyperHead:
    """V4's learned mix of the final streams, which no V4.1 checkpoint has."""

    fn: Tensor
    """[4, 4 * hidden]."""
    base: Tensor
    """[4]."""
    scale: Tensor
    """[1]."""

    @classmethod
    def random(cls, hidden_size: int, *, seed: int) -> HyperHead:
        noise = torch.Generator().manual_seed(seed)
        width = STREAMS * hidden_size
        return cls(
            torch.randn(STREAMS, width, generator=noise) * width**-0.5,
            torch.randn(STREAMS, generator=noise),
            torch.rand(1, generator=noise) + 0.5,
        )

    def pre(self, streams: Tensor, config: V41Config) -> Tensor:
        """As a sublayer makes its `pre`; what it would make besides is made of zeros and dropped."""
        rest = COEFFICIENTS - STREAMS
        return coefficients(
            torch.nn.functional.pad(streams.flatten(1) @ self.fn.T, (0, rest)),
            mean_square(streams),
            scale=torch.cat([self.scale, torch.ones(2)]),
            base=torch.nn.functional.pad(self.base, (0, rest)),
            eps=config.norm_eps,
            hc_eps=config.hc_eps,
            iterations=config.sinkhorn_iters,
        ).pre


class NormedQueries(Queries):
    """V4's queries: each head is scaled to unit root-mean-square before it is turned."""

    def run(self, latent: Tensor, turn: Turn) -> Tensor:
        cos, sin = turn
        queries = super().run(latent, (torch.ones_like(cos), torch.zeros_like(sin)))  # by no angle: unchanged
        return rotate_last(self.normed(queries), cos, sin)

    def normed(self, queries: Tensor) -> Tensor:
        """[tokens, heads, head_dim] fp32, overwritten."""
        return rms_norm(queries, queries.new_ones(1), eps=self._config.norm_eps, out=queries)


@dataclass
class Unshifted:
    """Watches a step, and lets each sublayer be entered by its own weights instead of those of the one before."""

    layers: Sequence[Layer]
    config: V41Config
    head: HyperHead
    is_on: bool = True
    seen: dict[str, Tensor] = field(default_factory=dict)
    _pre: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, name: str, value: Tensor) -> Tensor:
        where = name.rpartition(".")[2]
        if where == "stream_in":
            self._pre = self._layer(name)._attention_mixing.coefficients(value).pre
        elif where == "stream_mid":
            self._pre = self._layer(name)._ffn_mixing.coefficients(value).pre
        elif where == "stream_final":
            self._pre = self.final(value)
        elif where == "pre_final" or (where in {"pre_in", "pre_mid"} and self.is_on):
            value = self._pre
        self.seen[where] = value
        return value

    def final(self, streams: Tensor) -> Tensor:
        """[tokens, 4, hidden] -> [tokens, 4]."""
        return self.head.pre(streams, self.config)

    def _layer(self, name: str) -> Layer:
        return self.layers[int(name.split(".")[1])]


class OurV4:
    """The product's model, its weights and caches, computing V4."""

    def __init__(self, folder: Path, head: HyperHead) -> None:
        opened = OpenedV41(
            folder, numerics=EXACT, block_tokens=None, device=torch.device("cpu"), progress=lambda *_: None
        )
        self.model: DeepseekV41 = opened.build(num_blocks=8, num_windows=2)
        self.config = config = self.model.info
        self.layers = self.model.weights.layers
        del self.layers[LAYERS:]
        self.watch = Unshifted(self.layers, config, head)
        checkpoint = Checkpoint(folder, config)
        for index, layer in enumerate(self.layers):
            source = Source(checkpoint, self.model.weights.packer, f"layers.{index}.attn.")
            layer._attention.queries = NormedQueries(config, source, EXACT)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], *, cuts: Sequence[int] = ()) -> Tensor:
        """Of every token of a prompt computed from nothing, in pieces that end at `cuts`: [tokens, vocab]."""
        self.model.reset_window(1)
        blocks = range(1, self.model.cache.num_blocks)
        parts = []
        for low, high in pairwise([0, *cuts, len(ids)]):
            row = Row(1, ids[low:high], low, blocks, window=1, preceding=ids[max(low - 3, 0) : low])
            last = self.model.forward(Batch((row,)), every_row=True, watch=self.watch)
            parts.append(self.model.head.run(self.watch.seen["stream_final"], self.watch.seen["pre_final"]))
            assert torch.equal(last, parts[-1][-1:]), "the head is invariant"
        return torch.cat(parts)


def their_v4(folder: Path, config: V41Config, head: HyperHead) -> Any:
    """transformers' DeepseekV4ForCausalLM, windows and routed experts in every layer, in fp32."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    reference = DeepseekV4ForCausalLM._from_config(
        DeepseekV4Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=LAYERS,
            layer_types=["sliding_attention"] * LAYERS,
            mlp_layer_types=["moe"] * LAYERS,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            partial_rotary_factor=config.rope_dims / config.head_dim,
            rope_theta=config.rope_theta,
            q_lora_rank=config.q_lora,
            o_lora_rank=config.o_lora,
            o_groups=config.o_groups,
            sliding_window=config.window_tokens,
            max_position_embeddings=config.max_position_tokens,
            rms_norm_eps=config.norm_eps,
            hc_mult=config.hc_mult,
            hc_sinkhorn_iters=config.sinkhorn_iters,
            hc_eps=config.hc_eps,
            n_routed_experts=config.moe.num_experts,
            num_experts_per_tok=config.moe.top_k,
            moe_intermediate_size=config.moe.width,
            routed_scaling_factor=config.moe.scaling,
            swiglu_limit=config.moe.swiglu_limit,
        ),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    ).eval()
    # Strict: what is zero or one by default there (sinks, biases, norms) would otherwise go unnoticed.
    reference.load_state_dict(_their_weights(Checkpoint(folder, config), head), strict=True)
    return reference


def _their_weights(checkpoint: Checkpoint, head: HyperHead) -> dict[str, Tensor]:
    """Every tensor under transformers' name."""
    dense, experts = checkpoint.dense, range(checkpoint.config.moe.num_experts)
    weights = {
        "model.embed_tokens.weight": dense("embed.weight"),
        "model.norm.weight": dense("norm.weight"),
        "lm_head.weight": dense("head.weight"),
        "model.hc_head.hc_fn": head.fn,
        "model.hc_head.hc_base": head.base,
        "model.hc_head.hc_scale": head.scale,
    }
    for layer in range(LAYERS):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        weights |= {f"{theirs}.{their}": dense(f"{ours}.{our}") for their, our in _NAMES.items()}
        gate_up = [
            torch.cat([checkpoint.expert(ours, each, "w1"), checkpoint.expert(ours, each, "w3")]) for each in experts
        ]
        weights[f"{theirs}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        weights[f"{theirs}.mlp.experts.down_proj"] = torch.stack([checkpoint.expert(ours, e, "w2") for e in experts])
    return weights


def write_bridge_folder(folder: Path, *, seed: int) -> None:
    """A tiny V4.1 checkpoint whose first LAYERS layers read their windows only."""
    tokenizer = {"tokenizer.json": (tiny_v41() / "tokenizer.json").read_text(encoding="utf-8")}
    write_tiny_model(folder, seed=seed, tokenizer=tokenizer, text=_TEXT, vision=None)

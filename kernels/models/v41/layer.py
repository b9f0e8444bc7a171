"""What does one layer do with a step? N-gram memory, attention, experts; and what it leaves for later layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.v41.attention import Attention
from kernels.models.v41.compressor import Compressor
from kernels.models.v41.config import MoeConfig, V41Config
from kernels.models.v41.engram import Engram
from kernels.models.v41.indexer import Indexer
from kernels.models.v41.matrices import Source
from kernels.models.v41.mixing import Mixing
from kernels.models.v41.moe import Expert, Moe
from kernels.models.v41.step import Step
from kernels.ops.engram import HashTables
from kernels.ops.hyper import STREAMS
from kernels.ops.numerics import Numerics
from kernels.ops.scratch import Scratch


class Layer:
    """One main layer."""

    def __init__(
        self, config: V41Config, source: Source, numerics: Numerics, *, layer: int, tables: HashTables | None
    ) -> None:
        """source: of the layer's weights.  tables: where it has n-gram memory."""
        attn = source.within("attn")
        self._numerics, self._layer = numerics, layer
        self._enters_decoder = layer == config.num_encoder_layers
        self._has_features = layer in config.drafter.target_layers
        self._engram = load_engram(config, source, numerics, layer=layer, tables=tables) if tables else None
        self._attention_mixing = Mixing(config, source, numerics, sublayer="attn")
        self._attention = Attention(config, attn, numerics, layer=layer)
        self._compressor = Compressor(config, attn, numerics, layer=layer) if layer in config.kv_sources else None
        self._indexer = (
            Indexer(config, attn.within("indexer"), numerics, layer=layer) if layer in config.index_sources else None
        )
        self._ffn_mixing = Mixing(config, source, numerics, sublayer="ffn")
        self._moe = load_moe(config.moe, source.within("ffn"), numerics)

    def run(
        self, step: Step, streams: Tensor, pre: Tensor, history: Tensor, features: list[Tensor], scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Streams [tokens, 4, hidden] and pre [tokens, 4] in and out; fewer tokens come out where the decoder begins.

        history: [tokens, max_ngram] compressed ids.  features: where a layer of the drafter's choice adds its own.
        """
        name, seen = f"layers.{self._layer}", step.seen
        images = step.images
        if self._engram:
            streams = self._engram(streams, history, images)
        streams, pre = seen(f"{name}.stream_in", streams), seen(f"{name}.pre_in", pre)
        x = self._attention_mixing.enter(streams, pre)
        if self._compressor:
            self._compressor.run(step, x)
        if self._enters_decoder:
            step.enter_decoder()
            images = step.images
            if (kept := step.plan.kept) is not None:
                streams, pre, x = streams[kept], pre[kept], x[kept]
        if self._has_features:
            features.append(self._numerics.bf16(_mean(streams)))
        made = self._attention_mixing.coefficients(streams)
        output = seen(f"{name}.attn_out", self._attend(step, seen(f"{name}.attn_in", x)))
        streams = seen(f"{name}.stream_mid", self._attention_mixing.leave(streams, output, made))
        pre = seen(f"{name}.pre_mid", made.pre)
        made = self._ffn_mixing.coefficients(streams)
        x = seen(f"{name}.ffn_in", self._ffn_mixing.enter(streams, pre))
        output = seen(f"{name}.ffn_out", self._moe(x, images, scratch))
        return self._ffn_mixing.leave(streams, output, made), made.pre

    def _attend(self, step: Step, x: Tensor) -> Tensor:
        rows = self._numerics.fp8(x)
        latent = self._attention.queries.latent(rows)
        if self._indexer:
            self._indexer.run(step, x, latent)
        return self._attention.run(step, rows, latent)


def load_moe(config: MoeConfig, source: Source, numerics: Numerics) -> Moe:
    """A layer's experts.  source: of its `ffn.` weights."""

    def expert(name: str) -> Expert:
        gate, up = source.tensor(f"{name}.w1.weight"), source.tensor(f"{name}.w3.weight")
        return Expert(source.packer.pack(torch.cat([gate, up])), source.matrix(f"{name}.w2"))

    return Moe(
        config,
        numerics,
        router=source.matrix("gate"),
        bias=source.tensor("gate.bias"),
        image_bias=source.tensor("gate.bias_vl"),
        experts=[expert(f"experts.{index}") for index in range(config.num_experts)],
        shared=expert("shared_experts"),
    )


def load_engram(config: V41Config, source: Source, numerics: Numerics, *, layer: int, tables: HashTables) -> Engram:
    """A layer's n-gram memory; the table stays in its file."""
    engram, device = source.within("engram"), source.packer.device

    def gather(rows: Tensor) -> Tensor:
        return source.checkpoint.engram_rows(layer, rows.cpu()).to(device)

    return Engram(
        numerics,
        tables=tables,
        gather=gather,
        wkv=engram.matrix("wkv"),
        query_weight=engram.tensor("q_weight"),
        key_weight=engram.tensor("k_weight"),
        eps=config.norm_eps,
    )


def _mean(streams: Tensor) -> Tensor:
    """[tokens, 4, hidden] -> [tokens, hidden], added in order."""
    total = streams[:, 0].clone()
    for stream in range(1, STREAMS):
        total.add_(streams[:, stream])
    return total.mul_(1.0 / STREAMS)

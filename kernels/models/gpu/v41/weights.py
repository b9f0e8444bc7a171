"""Which tensors does V4.1 keep on a GPU, in which formats, and how do they get there from a checkpoint?

fp8 matrices become bf16, which holds their values exactly and which the matrix units multiply as they are. Experts keep
their fp4 bytes, or become bf16 too where there is room: four times the bytes, nothing to unpack. N-gram tables stay in
the host's memory, pinned, where a kernel reads single rows. What is small is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.v41.config import V41Config
from kernels.models.v41.engram import tables_of
from kernels.ops.engram import HashTables
from kernels.ops.gpu_engram import HashNumbers
from kernels.ops.gpu_grouped import DEPTH, Weights, bf16_weights, fp4_weights
from kernels.ops.gpu_hyper import MixingWeights, split_weight
from kernels.ops.hyper import COEFFICIENTS, STREAMS
from kernels.ops.quant import GROUP

ExpertFormat = Literal["fp4", "bf16"]


class Tensors(Protocol):
    """A checkpoint, by bare names."""

    def dense(self, name: str) -> Tensor:
        """A tensor in fp32, dequantised."""

    def stored(self, name: str) -> Tensor:
        """A tensor in the format it is stored in."""

    def table(self, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """A layer's n-gram table: e4m3 bits [rows, head_dim], scale exponents [rows, head_dim / 32]."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which experts are in this GPU's memory."""

    here: tuple[int, ...]
    """Experts, in the order in which they lie."""
    rows: tuple[int, ...] | None = None
    """For every expert its place in `here`, -1 for those elsewhere; None = all experts are here, in order."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Matrices are bf16 [out, in]."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    wo_a: Weights
    """A matrix for each group of heads."""
    wo_b: Tensor
    sinks: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Of a KV source."""

    project: Tensor
    """Latents [dim, hidden]; for ratio 2 scores above them, [2 * dim, hidden]."""
    norm: Tensor
    index: Tensor
    index_norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Of an index source."""

    queries: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class MemoryWeights:
    """Of a layer with n-gram memory."""

    numbers: HashNumbers
    data: Tensor
    scale: Tensor
    """The table, in host memory."""
    wkv: Tensor
    gate: Tensor
    """[4, hidden] fp32: query weight times key weight."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router, experts of this GPU, and the shared expert."""

    router: Tensor
    bias: Tensor
    image_bias: Tensor
    rows: Tensor | None
    """[experts] int32: which of the experts here each one is, -1 for those elsewhere; None = all are here."""
    up: Weights
    down: Weights
    shared_up: Tensor
    shared_down: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one main layer."""

    attention_mixing: MixingWeights
    attention: AttentionWeights
    ffn_mixing: MixingWeights
    moe: MoeWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    memory: MemoryWeights | None


@dataclass(frozen=True, slots=True)
class DraftWindowWeights:
    """The drafter's part of the main forward."""

    project: Tensor
    norm: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    """wkv and its norm, of each drafter layer."""


@dataclass(frozen=True, slots=True)
class GpuV41Weights:
    """A model's."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    last: MixingWeights
    """The final norm, dressed as a sublayer's that makes nothing of the streams."""
    head: Tensor
    draft_windows: DraftWindowWeights | None
    experts: ExpertFormat


class Loader:
    """Reads one checkpoint."""

    def __init__(
        self,
        config: V41Config,
        tensors: Tensors,
        device: torch.device,
        *,
        experts: ExpertFormat,
        placement: Placement | None = None,
    ) -> None:
        self._config, self._tensors, self._device = config, tensors, device
        self._experts: ExpertFormat = experts
        self._placement = placement or Placement(tuple(range(config.moe.num_experts)))

    def load(self) -> GpuV41Weights:
        """Every tensor, layer by layer."""
        config, hidden = self._config, self._config.hidden_size
        tables = tables_of(config.engram)
        nothing = torch.zeros(COEFFICIENTS, STREAMS * hidden, device=self._device)
        return GpuV41Weights(
            embedding=self._bf16("embed.weight"),
            layers=tuple(self._layer(layer, tables.get(layer)) for layer in range(config.num_layers)),
            last=MixingWeights(
                split_weight(nothing),
                torch.zeros(3, device=self._device),
                torch.zeros(COEFFICIENTS, device=self._device),
                self._fp32("norm.weight"),
                config.norm_eps,
                config.hc_eps,
                config.sinkhorn_iters,
            ),
            head=self._bf16("head.weight"),
            draft_windows=self._draft_windows() if config.drafter.num_layers else None,
            experts=self._experts,
        )

    def _layer(self, layer: int, tables: HashTables | None) -> LayerWeights:
        config, prefix = self._config, f"layers.{layer}."
        attn = f"{prefix}attn."
        compressor = indexer = None
        if layer in config.kv_sources:
            names = ["wgate", "wkv"] if config.compress_ratios[layer] > 1 else ["wkv"]
            compressor = CompressorWeights(
                project=torch.cat([self._bf16(f"{attn}compressor.{name}.weight") for name in names]),
                norm=self._fp32(f"{attn}compressor.norm.weight"),
                index=self._bf16(f"{attn}indexer.wk.weight"),
                index_norm=self._fp32(f"{attn}indexer.k_norm.weight"),
            )
        if layer in config.index_sources:
            indexer = IndexerWeights(
                self._bf16(f"{attn}indexer.wq_b.weight"), self._bf16(f"{attn}indexer.weights_proj.weight")
            )
        return LayerWeights(
            attention_mixing=self._mixing(prefix, "attn"),
            attention=self._attention(attn),
            ffn_mixing=self._mixing(prefix, "ffn"),
            moe=self._moe(f"{prefix}ffn."),
            compressor=compressor,
            indexer=indexer,
            memory=self._memory(layer, tables) if tables else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        down = self._bf16(f"{prefix}wo_a.weight")
        groups = down.view(self._config.o_groups, -1, down.shape[1])
        return AttentionWeights(
            wq_a=self._bf16(f"{prefix}wq_a.weight"),
            q_norm=self._fp32(f"{prefix}q_norm.weight"),
            wq_b=self._bf16(f"{prefix}wq_b.weight"),
            wkv=self._bf16(f"{prefix}wkv.weight"),
            kv_norm=self._fp32(f"{prefix}kv_norm.weight"),
            wo_a=Weights("bf16", groups, groups.new_empty(0, dtype=torch.uint8), down.shape[1]),
            wo_b=self._bf16(f"{prefix}wo_b.weight"),
            sinks=self._fp32(f"{prefix}attn_sink"),
        )

    def _mixing(self, prefix: str, sublayer: str) -> MixingWeights:
        return MixingWeights(
            split_weight(self._fp32(f"{prefix}hc_{sublayer}_fn")),
            self._fp32(f"{prefix}hc_{sublayer}_scale"),
            self._fp32(f"{prefix}hc_{sublayer}_base"),
            self._fp32(f"{prefix}{sublayer}_norm.weight"),
            self._config.norm_eps,
            self._config.hc_eps,
            self._config.sinkhorn_iters,
        )

    def _moe(self, prefix: str) -> MoeWeights:
        shared = f"{prefix}shared_experts."
        rows = self._placement.rows
        return MoeWeights(
            router=self._bf16(f"{prefix}gate.weight"),
            bias=self._fp32(f"{prefix}gate.bias"),
            image_bias=self._fp32(f"{prefix}gate.bias_vl"),
            rows=None if rows is None else torch.tensor(rows, dtype=torch.int32, device=self._device),
            up=self._all(prefix, self._up),
            down=self._all(prefix, self._down),
            shared_up=torch.cat([self._bf16(f"{shared}{part}.weight") for part in ("w1", "w3")]),
            shared_down=self._bf16(f"{shared}w2.weight"),
        )

    def _up(self, prefix: str) -> Weights:
        """Gate on top of the projection; rows of zeros where the width is not a multiple of the kernel's depth."""
        padding = -self._config.moe.width % DEPTH
        parts = [self._fp4(f"{prefix}{part}", rows=padding) for part in ("w1", "w3")]
        return self._expert(*(torch.cat(both) for both in zip(*parts, strict=True)))

    def _down(self, prefix: str) -> Weights:
        """Columns of zeros meet the rows of zeros."""
        return self._expert(*self._fp4(f"{prefix}w2", columns=-self._config.moe.width % DEPTH))

    def _fp4(self, name: str, *, rows: int = 0, columns: int = 0) -> tuple[Tensor, Tensor]:
        """Pairs and scales, with so many rows and columns of zeros behind."""
        made = []
        for part, per_column in (("weight", 2), ("scale", GROUP)):
            tensor = self._tensors.stored(f"{name}.{part}").view(torch.uint8).to(self._device)
            made.append(torch.nn.functional.pad(tensor, (0, columns // per_column, 0, rows)))
        return made[0], made[1]

    def _expert(self, data: Tensor, scale: Tensor) -> Weights:
        made = fp4_weights(data.unsqueeze(0), scale.unsqueeze(0))
        return bf16_weights(made) if self._experts == "bf16" else made

    def _all(self, prefix: str, make: Callable[[str], Weights]) -> Weights:
        """One matrix of every expert here, end to end."""
        data: Tensor | None = None
        for place, expert in enumerate(self._placement.here):
            made = make(f"{prefix}experts.{expert}.")
            if data is None:
                data, scale = (
                    part.new_empty(len(self._placement.here), *part.shape[1:]) for part in (made.data, made.scale)
                )
            data[place] = made.data[0]
            if made.format == "fp4":
                scale[place] = made.scale[0]
        assert data is not None, "a GPU has one expert at least"
        return Weights(made.format, data, scale if made.format == "fp4" else made.scale, made.size)

    def _memory(self, layer: int, tables: HashTables) -> MemoryWeights:
        prefix = f"layers.{layer}.engram."
        data, scale = (self._pinned(part) for part in self._tensors.table(layer))
        return MemoryWeights(
            numbers=HashNumbers.of(tables, self._device),
            data=data,
            scale=scale,
            wkv=self._bf16(f"{prefix}wkv.weight"),
            gate=self._fp32(f"{prefix}q_weight") * self._fp32(f"{prefix}k_weight"),
        )

    def _pinned(self, array: NDArray[np.uint8]) -> Tensor:
        """Host memory that a GPU reads by itself."""
        held = torch.empty(array.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.copyto(held.numpy(), array)
        return held

    def _draft_windows(self) -> DraftWindowWeights:
        return DraftWindowWeights(
            project=self._bf16("mtp.0.main_proj.weight"),
            norm=self._fp32("mtp.0.main_norm.weight"),
            layers=tuple(
                (self._bf16(f"mtp.{index}.attn.wkv.weight"), self._fp32(f"mtp.{index}.attn.kv_norm.weight"))
                for index in range(self._config.drafter.num_layers)
            ),
        )

    def _bf16(self, name: str) -> Tensor:
        """Exact for bf16 tensors, and for fp8 ones under powers of two."""
        return self._tensors.dense(name).to(self._device, torch.bfloat16).contiguous()

    def _fp32(self, name: str) -> Tensor:
        return self._tensors.dense(name).to(self._device, torch.float32).contiguous()

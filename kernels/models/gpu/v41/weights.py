"""Which tensors does V4.1 keep on a GPU, in which formats, and how do they get there from a checkpoint?

fp8 matrices become e4m3 under one scale a row, for products on the fp8 units; or bf16, which holds their values
exactly, where a row's bits must not depend on its batch and the GPU is none that our own such products are for.
Experts keep their fp4 bytes, or become e4m3 where there is room: twice the bytes, nothing to unpack. What cannot be
restated without loss is kept as it was, and `notes` say so. N-gram tables stay in the host's memory, pinned, where a
kernel reads single rows. What is small is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.gpu.v41.expert_weights import ExpertFormat, ExpertLoader, Experts, Placement, Tensors
from kernels.models.v41.config import V41Config
from kernels.models.v41.engram import tables_of
from kernels.models.v41.tensors import expected_tensors
from kernels.ops import gpu_dense_fp8
from kernels.ops.engram import HashTables
from kernels.ops.gpu_engram import HashNumbers
from kernels.ops.gpu_fp8 import RowScaled, restated, row_scaled
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_hyper import MixingWeights, split_weight
from kernels.ops.hyper import COEFFICIENTS, STREAMS

Matrix = Tensor | RowScaled
"""[out, in]: bf16, or one e4m3 matrix under a scale a row."""
MOST_LOST = 1e-5
"""Relative L2 that a matrix may lose under one scale a row: a hundredth of what rounding its products to bf16 is."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Of one attention."""

    down: Matrix
    """wq_a on top of wkv, [q_lora + head_dim, hidden]; bf16 for the library, which is no faster in fp8 at that size."""
    q_norm: Tensor
    wq_b: Matrix
    kv_norm: Tensor
    wo_a: Weights | RowScaled
    """A matrix for each group of heads."""
    wo_b: Matrix
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

    queries: Matrix
    weights: Tensor


@dataclass(frozen=True, slots=True)
class MemoryWeights:
    """Of a layer with n-gram memory."""

    numbers: HashNumbers
    data: Tensor
    scale: Tensor
    """The table, in host memory."""
    wkv: Matrix
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
    up: Experts
    down: Experts
    """Both are kept alike."""
    shared_up: Matrix
    shared_down: Matrix


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

    project: Matrix
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
    notes: tuple[str, ...] = ()
    """What is kept otherwise than was asked for, in words."""


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
        is_invariant: bool = True,
        unpacks: bool = False,
    ) -> None:
        """is_invariant: else all dense matrices are made for fp8 products, where they lose nothing.

        unpacks: fp4 experts get room to become e4m3 in, where they cannot in registers.
        """
        self._config, self._tensors, self._device = config, tensors, device
        self._experts: ExpertFormat = experts
        self._placement = placement or Placement(tuple(range(config.moe.num_experts)))
        self._is_invariant = is_invariant
        self._wide: list[str] = []
        self._routed = ExpertLoader(
            config,
            tensors,
            device,
            experts=experts,
            placement=self._placement,
            unpacks=unpacks,
        )

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, without reading any."""
        return {name: tuple(spec.shape) for name, spec in expected_tensors(self._config).items()}

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
            notes=self.notes(),
        )

    def notes(self) -> tuple[str, ...]:
        """What of that which was loaded is kept otherwise than was asked for, in words."""
        kept = {
            "kept in bf16, since one scale a row would lose bits": self._wide,
            "multiplied in bf16 from fp4, since the scales of a row are too far apart": self._routed.packed,
        }
        return tuple(
            f"{why}: {len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"
            for why, names in kept.items()
            if names
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
                self._matrix(f"{attn}indexer.wq_b.weight"), self._bf16(f"{attn}indexer.weights_proj.weight")
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
        return AttentionWeights(
            down=self._matrix(*(f"{prefix}{name}.weight" for name in ("wq_a", "wkv")), is_small=True),
            q_norm=self._fp32(f"{prefix}q_norm.weight"),
            wq_b=self._matrix(f"{prefix}wq_b.weight"),
            kv_norm=self._fp32(f"{prefix}kv_norm.weight"),
            wo_a=self._grouped(f"{prefix}wo_a.weight"),
            wo_b=self._matrix(f"{prefix}wo_b.weight"),
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
        up, down = self._routed.load(prefix)
        return MoeWeights(
            router=self._bf16(f"{prefix}gate.weight"),
            bias=self._fp32(f"{prefix}gate.bias"),
            image_bias=self._fp32(f"{prefix}gate.bias_vl"),
            rows=None if rows is None else torch.tensor(rows, dtype=torch.int32, device=self._device),
            up=up,
            down=down,
            shared_up=self._matrix(*(f"{shared}{part}.weight" for part in ("w1", "w3"))),
            shared_down=self._matrix(f"{shared}w2.weight"),
        )

    def _memory(self, layer: int, tables: HashTables) -> MemoryWeights:
        prefix = f"layers.{layer}.engram."
        data, scale = (self._pinned(part) for part in self._tensors.table(layer))
        return MemoryWeights(
            numbers=HashNumbers.of(tables, self._device),
            data=data,
            scale=scale,
            wkv=self._matrix(f"{prefix}wkv.weight"),
            gate=self._fp32(f"{prefix}q_weight") * self._fp32(f"{prefix}k_weight"),
        )

    def _pinned(self, array: NDArray[np.uint8]) -> Tensor:
        """Host memory that a GPU reads by itself."""
        held = torch.empty(array.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.copyto(held.numpy(), array)
        return held

    def _draft_windows(self) -> DraftWindowWeights:
        return DraftWindowWeights(
            project=self._matrix("mtp.0.main_proj.weight"),
            norm=self._fp32("mtp.0.main_norm.weight"),
            layers=tuple(
                (self._bf16(f"mtp.{index}.attn.wkv.weight"), self._fp32(f"mtp.{index}.attn.kv_norm.weight"))
                for index in range(self._config.drafter.num_layers)
            ),
        )

    def _matrix(self, *names: str, is_small: bool = False) -> Matrix:
        """fp8 matrices on top of each other, as this GPU multiplies them.  is_small: in bf16, by the library."""
        if is_small if not self._is_invariant else not self._own_product_fits(names):
            return torch.cat([self._bf16(name) for name in names])
        parts = [restated(self._tensors.dense(name).to(self._device)) for name in names]
        if max(lost for *_, lost in parts) > MOST_LOST:
            self._wide.extend(names)
            return torch.cat([self._bf16(name) for name in names])
        data, scale = torch.cat([data for data, *_ in parts]), torch.cat([scale for _, scale, _ in parts])
        return RowScaled(data.unsqueeze(0), scale.unsqueeze(0))

    def _own_product_fits(self, names: Sequence[str]) -> bool:
        """Whether the product whose bits do not depend on the batch takes all of them on top of each other."""
        shapes = [self._shapes[name] for name in names]
        return gpu_dense_fp8.fits(self._device, sum(out for out, _ in shapes), shapes[0][1])

    def _grouped(self, name: str) -> Weights | RowScaled:
        """A matrix for each group of heads."""
        wide = self._bf16(name)
        groups = wide.view(self._config.o_groups, -1, wide.shape[1])
        if not self._is_invariant or gpu_dense_fp8.fits(self._device, *groups.shape[1:]):
            made, lost = row_scaled(list(groups))
            if lost <= MOST_LOST:
                return made
            self._wide.append(name)
        return Weights("bf16", groups, groups.new_empty(0, dtype=torch.uint8), wide.shape[1])

    def _bf16(self, name: str) -> Tensor:
        """Exact for bf16 tensors, and for fp8 ones under powers of two."""
        return self._tensors.dense(name).to(self._device, torch.bfloat16).contiguous()

    def _fp32(self, name: str) -> Tensor:
        return self._tensors.dense(name).to(self._device, torch.float32).contiguous()

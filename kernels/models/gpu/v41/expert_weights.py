"""In which format does a GPU keep V4.1's routed experts, and how do they get there from a checkpoint?

As fp4 bytes, which Hopper's fp8 units take by way of registers; elsewhere as e4m3 under one power of two a row if there
is room: twice the bytes, nothing to unpack. Where a row's scales are too far apart for either, its layer's experts are
fp4 that become bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.v41.config import V41Config
from kernels.ops import gpu_grouped_packed, gpu_swiglu_rows
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import DEPTH, Weights, bf16_weights, fp4_weights
from kernels.ops.gpu_grouped_unpack import Packed, alternating, powers_of, unpack
from kernels.ops.gpu_launch import check
from kernels.ops.quant import GROUP

ExpertFormat = Literal["fp4", "bf16", "fp8"]
"""bf16 holds their values as well as fp8, in twice the bytes: for comparisons."""
Experts = Weights | RowScaled | Packed
GATES_IN_PRODUCT = False
"""Whether experts that become e4m3 in registers are gated where gate and up are multiplied: a rounding to bf16 more."""
_AT_ONCE_BYTES = 64 << 20
"""Of fp4 experts that are brought into the kernel's order together: with what that takes, less than the index scores
that a step keeps memory for, and nobody uses yet."""


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


def _width(config: V41Config) -> int:
    """Of an expert, with the zeros behind it."""
    return -(-config.moe.width // DEPTH) * DEPTH


def room_bytes(config: V41Config, experts_here: int) -> int:
    """Of the memory in which a layer's fp4 experts become e4m3: first one matrix of each, then the other."""
    return experts_here * 2 * _width(config) * config.hidden_size


def in_registers(config: V41Config, device: torch.device) -> bool:
    """Whether fp4 experts of this model become e4m3 in this GPU's registers."""
    width = _width(config)
    shapes = (2 * width, config.hidden_size), (config.hidden_size, width)
    return gpu_grouped_packed.fits(device, *shapes)


class ExpertLoader:
    """Reads the routed experts of one checkpoint."""

    def __init__(
        self,
        config: V41Config,
        tensors: Tensors,
        device: torch.device,
        *,
        experts: ExpertFormat,
        placement: Placement,
        unpacks: bool,
    ) -> None:
        """unpacks: fp4 experts get room to become e4m3 in, where they cannot in registers."""
        self._config, self._tensors, self._device = config, tensors, device
        self._experts, self._placement = experts, placement
        self._in_registers = experts == "fp4" and in_registers(config, device)
        self._interleaves = GATES_IN_PRODUCT and self._in_registers and gpu_swiglu_rows.takes(_width(config))
        self._room: Tensor | None = None
        if unpacks and experts == "fp4" and not self._in_registers:
            size = room_bytes(config, len(placement.here))
            self._room = torch.empty(size, dtype=torch.uint8, device=device)
        self.packed: list[str] = []
        """Layers whose experts were to become e4m3 and stay fp4."""

    def load(self, prefix: str) -> tuple[Experts, Experts]:
        """Gate and up, and down, of every expert here."""
        if self._experts == "fp8":
            up, down = self._all_e4m3(prefix, is_up=True), self._all_e4m3(prefix, is_up=False)
            if up is not None and down is not None:
                return up, down
            self.packed.append(prefix)
        packed_up = self._all(prefix, is_up=True, interleaves=self._interleaves)
        packed_down = self._all(prefix, is_up=False)
        if self._in_registers or self._room is not None:
            powers = powers_of(packed_up), powers_of(packed_down)
            if all(each.is_near if self._in_registers else each.is_exact for each in powers):
                gate_up = Packed(packed_up, powers[0], self._room, is_interleaved=self._interleaves)
                return gate_up, Packed(packed_down, powers[1], self._room)
            self.packed.append(prefix)
            if self._interleaves:  # which such a layer's product does not know: read once more, in the same memory
                del packed_up
                packed_up = self._all(prefix, is_up=True)
        return packed_up, packed_down

    def _slices(self, prefix: str, *, is_up: bool) -> Iterator[tuple[slice, Weights]]:
        """fp4, some experts at a time and where they lie: gate on top of the projection, or down.

        Zeros stand where the width is no multiple of the kernel's depth: columns of zeros meet rows of zeros.
        """
        own, hidden = self._config.moe.width, self._config.hidden_size
        width = _width(self._config)
        parts, rows, size = (("w1", "w3"), width, hidden) if is_up else (("w2",), hidden, width)
        stored = (own, hidden) if is_up else (hidden, own)
        here, at_once = self._placement.here, max(2 * _AT_ONCE_BYTES // (len(parts) * rows * size), 1)
        for start in range(0, len(here), at_once):
            names = [f"{prefix}experts.{expert}.{part}" for expert in here[start : start + at_once] for part in parts]
            data, scale = (
                self._stored(names, "weight", (stored[0], stored[1] // 2), (rows, size // 2)),
                self._stored(names, "scale", (stored[0], -(-stored[1] // GROUP)), (rows, size // GROUP)),
            )
            both = (each.view(-1, len(parts) * rows, each.shape[2]) for each in (data, scale))
            yield slice(start, start + len(names) // len(parts)), fp4_weights(*both)

    def _stored(
        self, names: list[str], kind: Literal["weight", "scale"], own: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        """Matrices of `own` size as they are stored, [names, *size] uint8, with zeros behind their own."""
        made = torch.zeros(len(names), *size, dtype=torch.uint8, device=self._device)
        for mine, name in zip(made[:, : own[0], : own[1]].unbind(), names, strict=True):
            tensor = self._tensors.stored(f"{name}.{kind}").view(torch.uint8)
            check(tensor.shape == own, f"{name}.{kind} is {tuple(tensor.shape)}, which the config says is {own}")
            mine.copy_(tensor)
        if kind == "scale" and own[1] < size[1]:  # zeros under a scale that the row has anyway
            made[:, :, own[1] :] = made[:, :, :1]
        return made

    def _all_e4m3(self, prefix: str, *, is_up: bool) -> RowScaled | None:
        """One matrix of every expert here, under one scale a row; None if one of them would lose bits."""
        made: RowScaled | None = None
        for own, packed in self._slices(prefix, is_up=is_up):
            powers = powers_of(packed)
            if not powers.is_exact:
                return None
            if made is None:
                made = self._empty_e4m3(packed)
            unpack(packed, powers, made.data[own])
            made.scale[own] = powers.scale
        assert made is not None, "a GPU has one expert at least"
        return made

    def _empty_e4m3(self, like: Weights) -> RowScaled:
        experts = len(self._placement.here)
        data = torch.empty(experts, like.out, like.size, dtype=torch.float8_e4m3fn, device=self._device)
        return RowScaled(data, torch.empty(experts, like.out, device=self._device))

    def _all(self, prefix: str, *, is_up: bool, interleaves: bool = False) -> Weights:
        """One matrix of every expert here, end to end; gate and up with their rows as they lie, or interleaved."""
        made: Weights | None = None
        for own, packed in self._slices(prefix, is_up=is_up):
            part = bf16_weights(packed) if self._experts == "bf16" else packed
            if made is None:
                experts = len(self._placement.here)
                data = part.data.new_empty(experts, *part.data.shape[1:])
                scale = part.scale.new_empty(experts if len(part.scale) else 0, *part.scale.shape[1:])
                made = Weights(part.format, data, scale, part.size)
            for whole, rows in (made.data, part.data), (made.scale, part.scale):
                seen = alternating(rows) if interleaves else rows
                whole[own].view(seen.shape).copy_(seen)  # scales of bf16 are none, in either
        assert made is not None, "a GPU has one expert at least"
        return made

"""In which format does a GPU keep V4.1's routed experts, and how do they get there from a checkpoint?

As fp4 bytes, which Hopper's fp8 units take by way of registers; elsewhere, and where bits must not depend on the batch,
as e4m3 under one power of two a row if there is room: twice the bytes, nothing to unpack. Where a row's scales are too
far apart for either, its layer's experts are fp4 that become bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.models.v41.config import V41Config
from kernels.ops import gpu_grouped_packed
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import DEPTH, Weights, bf16_weights, fp4_weights
from kernels.ops.gpu_grouped_unpack import Packed, powers_of, unpack
from kernels.ops.quant import GROUP

ExpertFormat = Literal["fp4", "bf16", "fp8"]
"""bf16 holds their values as well as fp8, in twice the bytes: for comparisons."""
Experts = Weights | RowScaled | Packed


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


def room_bytes(config: V41Config, experts_here: int) -> int:
    """Of the memory in which a layer's fp4 experts become e4m3: first one matrix of each, then the other."""
    width = -(-config.moe.width // DEPTH) * DEPTH
    return experts_here * 2 * width * config.hidden_size


def in_registers(config: V41Config, device: torch.device, *, is_invariant: bool) -> bool:
    """Whether fp4 experts of this model become e4m3 in this GPU's registers."""
    width = -(-config.moe.width // DEPTH) * DEPTH
    shapes = (2 * width, config.hidden_size), (config.hidden_size, width)
    return not is_invariant and gpu_grouped_packed.fits(device, *shapes)


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
        is_invariant: bool,
    ) -> None:
        """unpacks: fp4 experts get room to become e4m3 in, where they cannot in registers."""
        self._config, self._tensors, self._device = config, tensors, device
        self._experts, self._placement = experts, placement
        self._in_registers = experts == "fp4" and in_registers(config, device, is_invariant=is_invariant)
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
        packed_up, packed_down = self._all(prefix, is_up=True), self._all(prefix, is_up=False)
        if self._in_registers or self._room is not None:
            powers = powers_of(packed_up), powers_of(packed_down)
            if all(each.is_near if self._in_registers else each.is_exact for each in powers):
                return Packed(packed_up, powers[0], self._room), Packed(packed_down, powers[1], self._room)
            self.packed.append(prefix)
        return packed_up, packed_down

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
            padded = torch.nn.functional.pad(tensor, (0, columns // per_column, 0, rows))
            if part == "scale" and columns:  # zeros under a scale that the row has anyway
                padded[:, tensor.shape[1] :] = tensor[:, :1]
            made.append(padded)
        return made[0], made[1]

    def _expert(self, data: Tensor, scale: Tensor) -> Weights:
        made = fp4_weights(data.unsqueeze(0), scale.unsqueeze(0))
        return bf16_weights(made) if self._experts == "bf16" else made

    def _all_e4m3(self, prefix: str, *, is_up: bool) -> RowScaled | None:
        """One matrix of every expert here, under one scale a row; None if one of them would lose bits."""
        make, here = self._up if is_up else self._down, self._placement.here
        all_of_them: RowScaled | None = None
        for place, expert in enumerate(here):
            packed = make(f"{prefix}experts.{expert}.")
            powers = powers_of(packed)
            if not powers.is_exact:
                return None
            if all_of_them is None:
                data = torch.empty(len(here), packed.out, packed.size, dtype=torch.float8_e4m3fn, device=self._device)
                all_of_them = RowScaled(data, torch.empty(len(here), packed.out, device=self._device))
            unpack(packed, powers, all_of_them.data[place : place + 1])
            all_of_them.scale[place] = powers.scale[0]
        assert all_of_them is not None, "a GPU has one expert at least"
        return all_of_them

    def _all(self, prefix: str, *, is_up: bool) -> Weights:
        """One matrix of every expert here, end to end."""
        make = self._up if is_up else self._down
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

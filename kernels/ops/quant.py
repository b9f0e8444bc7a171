"""How do the fp8 and fp4 formats of V4.1 turn fp32 values into bytes, and back?

Three formats of cache records, a fourth that rounds nothing, and the two formats of weights. Sources: DeepInfer and
tile-kernels (both open source), whose bytes the golden vectors hold.

Every element is divided, rounded and looked up on its own and a scale looks at its own group only, so that the bytes of
a record do not depend on how many records are written with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops.constants import constant

GROUP = 32
"""Values that share a power-of-two scale: along a row of activations or fp4 weights, and both ways in fp8 weights."""
_MAIN_GROUP = 16
_FP8_MAX = 448.0
_FP4_MAX = 6.0
_FP8_FLOOR = 1e-4
"""Largest value a group counts as at least: a group of zeros needs a scale too."""
_INDEX_FLOOR = 6 * 2.0**-126
_MAIN_FLOOR = 6 * 2.0**-9
_SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Codec(Protocol):
    """One format of cache record: `dim` values as data_bytes of data followed by scale_bytes of scales."""

    @property
    def dim(self) -> int: ...
    @property
    def data_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    def encode(self, x: Tensor) -> Tensor:
        """[n, dim] fp32 -> [n, record_bytes] uint8."""
        ...

    def decode(self, records: Tensor) -> Tensor:
        """[n, record_bytes] uint8 -> [n, dim] fp32."""
        ...


@dataclass(frozen=True, slots=True)
class WindowFp8:
    """e4m3 values, one ue8m0 scale for 32: 528 bytes for 512 values."""

    dim: int

    @property
    def data_bytes(self) -> int:
        return self.dim

    @property
    def scale_bytes(self) -> int:
        return self.dim // GROUP

    @property
    def record_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def encode(self, x: Tensor) -> Tensor:
        data, exponents = _fp8_groups(_grouped(x, GROUP))
        return torch.cat([data.view(torch.uint8).flatten(1), exponents.to(torch.uint8)], dim=1)

    def decode(self, records: Tensor) -> Tensor:
        values = _grouped(records[:, : self.dim].view(torch.float8_e4m3fn).float(), GROUP)
        return values.mul_(_ue8m0(records[:, self.dim :]).unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, slots=True)
class MainFp4:
    """e2m1 values, two in a byte, one e4m3 scale for 16: 288 bytes for 512 values."""

    dim: int

    @property
    def data_bytes(self) -> int:
        return self.dim // 2

    @property
    def scale_bytes(self) -> int:
        return self.dim // _MAIN_GROUP

    @property
    def record_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def encode(self, x: Tensor) -> Tensor:
        groups = _grouped(x, _MAIN_GROUP)
        largest = groups.abs().amax(-1, keepdim=True).clamp_min_(_MAIN_FLOOR)
        scales = largest.mul_(_SIXTH).clamp_max_(_FP8_MAX).to(torch.float8_e4m3fn)
        # Multiplied by the reciprocal, as the source does: a division rounds three of the golden values otherwise.
        packed = _pack_fp4(groups * scales.float().reciprocal_())
        return torch.cat([packed.flatten(1), scales.view(torch.uint8).squeeze(-1)], dim=1)

    def decode(self, records: Tensor) -> Tensor:
        half = self.dim // 2
        values = _unpack_fp4(records[:, :half]).view(len(records), self.dim // _MAIN_GROUP, _MAIN_GROUP)
        scales = records[:, half:].view(torch.float8_e4m3fn).float()
        return values.mul_(scales.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, slots=True)
class IndexFp4:
    """e2m1 values, two in a byte, one ue8m0 scale for 32: 68 bytes for 128 values."""

    dim: int

    @property
    def data_bytes(self) -> int:
        return self.dim // 2

    @property
    def scale_bytes(self) -> int:
        return self.dim // GROUP

    @property
    def record_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def encode(self, x: Tensor) -> Tensor:
        packed, exponents = _fp4_groups(_grouped(x, GROUP))
        return torch.cat([packed.flatten(1), exponents.to(torch.uint8)], dim=1)

    def decode(self, records: Tensor) -> Tensor:
        half = self.dim // 2
        values = _unpack_fp4(records[:, :half]).view(len(records), self.dim // GROUP, GROUP)
        return values.mul_(_ue8m0(records[:, half:]).unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, slots=True)
class Fp32Record:
    """The values as they are: 4 bytes each, no scales."""

    dim: int
    scale_bytes: int = 0

    @property
    def data_bytes(self) -> int:
        return self.dim * 4

    @property
    def record_bytes(self) -> int:
        return self.dim * 4

    def encode(self, x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    def decode(self, records: Tensor) -> Tensor:
        # A row of a larger buffer may start anywhere; fp32 wants its own four-byte steps.
        return records.clone(memory_format=torch.contiguous_format).view(torch.float32)


def fp8_round_trip(x: Tensor) -> Tensor:
    """What an fp8 matrix product sees of its rows: e4m3 values under one power-of-two scale per 32 of a row.

    x: [..., size] fp32, size a multiple of 32.  Returns a new tensor like it.
    """
    groups = x.reshape(-1, GROUP)
    exponents = _exponents(groups, _FP8_FLOOR, _FP8_MAX)
    scales = _power(exponents)
    return (groups / scales).to(torch.float8_e4m3fn).float().mul_(scales).view(x.shape)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """weight: [out, in] e4m3.  scale: [ceil(out / 32), ceil(in / 32)] ue8m0.  Returns [out, in] fp32."""
    values = weight.float()
    columns = scale.float().repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]]
    for band, factors in zip(torch.split(values, GROUP), columns, strict=True):
        band.mul_(factors)  # in bands: no second copy of a large matrix
    return values


def dequantise_fp8_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """rows: [n, size] e4m3.  scale: [n, size / 32] ue8m0.  Returns [n, size] fp32."""
    return _grouped(rows.float(), GROUP).mul_(scale.float().unsqueeze(-1)).flatten(1)


def dequantise_fp4_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """weight: [out, in / 2], two e2m1 in a byte, the lower nibble first.  scale: [out, in / 32] ue8m0.

    Returns [out, in] fp32.
    """
    values = _unpack_fp4(weight.view(torch.uint8)).view(len(weight), -1, GROUP)
    return values.mul_(scale.float().unsqueeze(-1)).view(len(weight), -1)


def quantise_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] fp32 -> ([out, in] e4m3, [ceil(out / 32), ceil(in / 32)] ue8m0), one scale per 32 x 32 block."""
    out, size = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -size % GROUP, 0, -out % GROUP))
    blocks = padded.view(len(padded) // GROUP, GROUP, -1, GROUP)
    data, exponents = _fp8_groups(blocks.transpose(1, 2).reshape(-1, GROUP * GROUP))
    quantised = data.view(blocks.shape[0], blocks.shape[2], GROUP, GROUP).transpose(1, 2).reshape(padded.shape)
    scale = exponents.view(blocks.shape[0], blocks.shape[2])
    return quantised[:out, :size].contiguous(), _as_ue8m0(scale)


def quantise_fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, size] fp32 -> ([n, size] e4m3, [n, size / 32] ue8m0), one scale per 32 values of a row."""
    data, exponents = _fp8_groups(rows.reshape(len(rows), -1, GROUP))
    return data.view(rows.shape), _as_ue8m0(exponents)


def quantise_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] fp32 -> ([out, in / 2] int8, [out, in / 32] ue8m0); the layout dequantise_fp4_weight reads."""
    packed, exponents = _fp4_groups(weight.reshape(len(weight), -1, GROUP))
    return packed.view(len(weight), -1).view(torch.int8), _as_ue8m0(exponents)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[n, size] -> [n, size / group, group], a view; n may be 0."""
    rows, size = x.shape
    return x.view(rows, size // group, group)


def _fp8_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[..., group] fp32 -> (e4m3 like it, [...] int32 biased exponents of the scales)."""
    exponents = _exponents(groups, _FP8_FLOOR, _FP8_MAX)
    # No clamp: the scale is rounded up, so a quotient exceeds 448 by rounding at most and e4m3 rounds it down again.
    return (groups / _power(exponents)).to(torch.float8_e4m3fn), exponents.squeeze(-1)


def _fp4_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[..., group] fp32 -> ([..., group / 2] uint8, [...] int32 biased exponents of the scales)."""
    exponents = _exponents(groups, _INDEX_FLOOR, _FP4_MAX)
    return _pack_fp4(groups / _power(exponents)), exponents.squeeze(-1)


def _exponents(groups: Tensor, floor: float, limit: float) -> Tensor:
    """Biased exponent of the least power of two that brings a group within `limit`: [..., group] -> [..., 1] int32."""
    device = groups.device
    ratio = groups.abs().amax(-1, keepdim=True).clamp_min_(floor).div_(constant(limit, device))
    rounded_up = ratio.view(torch.int32).add_(constant(0x7FFFFF, device, torch.int32))
    return rounded_up.bitwise_right_shift_(constant(23, device, torch.int32))


def _power(exponents: Tensor) -> Tensor:
    return (exponents << constant(23, exponents.device, torch.int32)).view(torch.float32)


def _ue8m0(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e8m0fnu).float()


def _as_ue8m0(exponents: Tensor) -> Tensor:
    return exponents.to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)


def _pack_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1, ties to the even code, beyond 6 saturated: [..., size] fp32 -> [..., size / 2] uint8.

    A nibble is sign, then the index into _FP4_VALUES; element 2i is the low nibble.
    """
    signs = (x.view(torch.int32) >> 28).bitwise_and_(8)
    codes = torch.bucketize(x.abs(), _fp4_bounds(x.device), out_int32=True).bitwise_or_(signs)
    return (codes[..., 1::2] << 4).bitwise_or_(codes[..., ::2]).to(torch.uint8)


def _unpack_fp4(packed: Tensor) -> Tensor:
    """[..., bytes] uint8 -> [..., bytes, 2] fp32."""
    return torch.nn.functional.embedding(packed.int(), _fp4_pairs(packed.device))


@lru_cache(maxsize=8)
def _fp4_bounds(device: torch.device) -> Tensor:
    """Largest value that still rounds to each code: the middle, or just below it where the tie goes up."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(_FP4_VALUES)])
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
    return middles.to(device)


@lru_cache(maxsize=8)
def _fp4_pairs(device: torch.device) -> Tensor:
    """[256, 2] fp32: the two values of every byte."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    both = torch.arange(256)
    return torch.stack([values[both & 15], values[both >> 4]], dim=1).to(device)

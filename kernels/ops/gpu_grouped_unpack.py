"""How do a layer's fp4 experts become e4m3 with one power of two a row, just before many rows are multiplied by them?

An e2m1 value times a power of two is an e4m3 value over 15 binades, so under the largest power of its row minus six
every value is exact whose own power is at most 14 binades below that. Four values are looked up at once: the eight
magnitudes of e2m1 under each power are two words of a table, from which one instruction takes four bytes.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import IN_PYTHON
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import HALF_DEPTH, Weights
from kernels.ops.gpu_launch import check, runs_kernels, tiles

HIGHEST = 6
"""A row's largest power becomes 2^6 in its e4m3 values: 6 * 2^6 = 384."""
EXACT_BINADES = 14
"""Powers of a row may be so many binades apart before small values lose bits."""
NEAR_BINADES = 11
"""Up to so many, no value but zero is a subnormal one: its byte is found by adding to another's exponent."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MOST_PACKED_ROWS = 64
"""Of an expert, up to which its fp4 bytes are multiplied as they are: 384 experts of 5,120 x 2,304 are unpacked in
5.6 ms, and each row of all of them then takes 87 us less (by what was measured at 256)."""
ALTERNATE = 8
"""Rows of gate, and then of up: those of which a lane of the units' sums has a pair, that many apart."""
_ROWS, _BYTES = 4, 512
"""Of a program of the unpacking kernel."""


@dataclass(frozen=True, slots=True)
class Powers:
    """What unpacking needs beside the packed matrices; made once."""

    largest: Tensor
    """[experts, out] uint8: biased exponent of a row's largest scale."""
    scale: Tensor
    """[experts, out] fp32: the row's power of two when it is unpacked."""
    table: Tensor
    """[64, 2] int32: e4m3 bytes of the eight magnitudes under 2^(6 - index)."""
    spread_binades: int
    """Between the powers of one row, at most."""

    @property
    def is_exact(self) -> bool:
        """Whether no value loses bits as e4m3."""
        return self.spread_binades <= EXACT_BINADES

    @property
    def is_near(self) -> bool:
        """Whether no value becomes a subnormal one, too."""
        return self.spread_binades <= NEAR_BINADES


def alternating(rows: Tensor) -> Tensor:
    """Gate on top of up, [experts, 2 * width, ...], seen as they alternate: [experts, width / 8, 2, 8, ...]."""
    return rows.view(len(rows), 2, -1, ALTERNATE, *rows.shape[2:]).transpose(1, 2)


def apart(columns: Tensor) -> Tensor:
    """What such matrices make, gate and then up: [positions, 2 * width], new."""
    return columns.view(len(columns), -1, 2, ALTERNATE).transpose(1, 2).flatten(1)


def powers_of(weights: Weights) -> Powers:
    """weights: fp4."""
    check(weights.format == "fp4", "only fp4 is unpacked")
    largest, smallest = weights.scale.amax(2), weights.scale.amin(2)
    spread = int((largest.int() - smallest.int()).max()) if weights.scale.numel() else 0
    exponent = largest.float() - (127.0 + HIGHEST)
    scale = torch.ldexp(torch.ones_like(exponent), exponent.to(torch.int32))
    magnitudes = torch.tensor(_MAGNITUDES)[None, :] * 2.0 ** (HIGHEST - torch.arange(64.0))[:, None]
    table = magnitudes.to(torch.float8_e4m3fn).view(torch.uint8).contiguous().view(torch.int32)
    return Powers(largest, scale, table.to(weights.data.device), spread)


def unpack(weights: Weights, powers: Powers, out: Tensor | None = None) -> RowScaled:
    """weights: fp4.  out: [experts, out, in] e4m3 that is written, or None."""
    if not runs_kernels(weights.data):
        wide = torch.stack([weights.dense(expert) for expert in range(weights.experts)])
        data = (wide / powers.scale[:, :, None]).to(torch.float8_e4m3fn)
        return RowScaled(data if out is None else out.copy_(data), powers.scale)
    experts, rows, size = weights.experts, weights.out, weights.size
    data = torch.empty(experts, rows, size, dtype=torch.uint8, device=weights.data.device) if out is None else out
    data = data.view(torch.uint8)
    _unpack_kernel[tiles(experts * rows, _ROWS), tiles(size // 2, _BYTES)](
        weights.data,
        weights.scale,
        powers.largest,
        powers.table,
        data,
        experts * rows,
        SIZE=size,
        HALF=HALF_DEPTH,
        ROWS=_ROWS,
        BYTES=_BYTES,
        num_warps=4,
    )
    return RowScaled(data.view(torch.float8_e4m3fn), powers.scale)


@dataclass(frozen=True, slots=True)
class Packed:
    """fp4 experts that become e4m3 for the fp8 units: in registers, or in memory that all layers' experts share."""

    weights: Weights
    powers: Powers
    room: Tensor | None
    """[bytes] uint8; what it holds is good until the next are unpacked. None: in registers (`gpu_grouped_packed`)."""
    is_interleaved: bool = False
    """Whether eight rows of gate and the same eight of up alternate, for a product that gates. Else gate is on top."""

    @property
    def experts(self) -> int:
        return self.weights.experts

    def is_worth(self, positions: int) -> bool:
        """Whether the fp8 units pay for so many rows of all experts."""
        return self.room is None or positions > MOST_PACKED_ROWS * self.experts

    def interleaved(self) -> Packed:
        """Gate and up whose rows alternate, in new memory."""
        check(not self.is_interleaved and self.room is None, "gate is on top of up, for products in registers")
        data, scale, largest, own = (
            alternating(each).flatten(1, 3)
            for each in (self.weights.data, self.weights.scale, self.powers.largest, self.powers.scale)
        )
        weights = replace(self.weights, data=data, scale=scale)
        return Packed(weights, replace(self.powers, largest=largest, scale=own), None, is_interleaved=True)

    def unpacked(self) -> RowScaled:
        """Written now, on the current stream, where there is room."""
        assert self.room is not None, "unpacked in registers"
        shape = (self.experts, self.weights.out, self.weights.size)
        data = self.room[: shape[0] * shape[1] * shape[2]].view(torch.float8_e4m3fn)
        return unpack(self.weights, self.powers, data.view(shape))


@triton.jit
def looked_up(both: tl.tensor, low_words: tl.tensor, high_words: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """e4m3 bits of the low and of the high nibbles of bytes; words: int32 of each byte's table, broadcast.

    Four neighbours must share a table.
    """
    if IN_PYTHON:
        low, high = _byte(both & 15, low_words, high_words), _byte(both >> 4, low_words, high_words)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s;
            and.b32 a, $2, 0x07070707;
            shr.b32 b, a, 4;
            or.b32 a, a, b;
            prmt.b32 a, a, 0, 0x4420;
            prmt.b32 a, $3, $7, a;
            shl.b32 s, $2, 4;
            lop3.b32 $0, s, 0x80808080, a, 0xEA;
            shr.b32 b, $2, 4;
            and.b32 a, b, 0x07070707;
            shr.b32 b, a, 4;
            or.b32 a, a, b;
            prmt.b32 a, a, 0, 0x4420;
            prmt.b32 a, $3, $7, a;
            lop3.b32 $1, $2, 0x80808080, a, 0xEA;
            }
            """,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [both, low_words, high_words],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _byte(nibble: tl.tensor, low_words: tl.tensor, high_words: tl.tensor) -> tl.tensor:
    wide = nibble.to(tl.int32)
    word = tl.where((wide & 4) != 0, high_words, low_words)
    return (((word >> ((wide & 3) * 8)) & 0xFF) | ((wide & 8) << 4)).to(tl.uint8)


@triton.jit
def _unpack_kernel(
    packed: tl.tensor,
    scale: tl.tensor,
    largest: tl.tensor,
    table: tl.tensor,
    data: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    GROUPS: tl.constexpr = BYTES // 32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    mine = (row < rows)[:, None] & (group < SIZE // 64)[None, :]
    # Bytes of a tile hold its columns from the first on in low nibbles, those from the middle on in high ones.
    column = group * 32 // HALF * (2 * HALF) + group * 32 % HALF
    own = tl.load(largest + row, mask=row < rows, other=0).to(tl.int32)[:, None]
    scale_at = scale + row[:, None] * (SIZE // 32) + (column // 32)[None, :]
    below = tl.minimum(own - tl.load(scale_at, mask=mine, other=0).to(tl.int32), 63)
    above = tl.minimum(own - tl.load(scale_at + HALF // 32, mask=mine, other=0).to(tl.int32), 63)
    step = tl.arange(0, 32)[None, None, :]
    mine_all = tl.broadcast_to(mine[:, :, None], (ROWS, GROUPS, 32))
    place = packed + (row[:, None] * (SIZE // 2) + group[None, :] * 32)[:, :, None] + step
    both = tl.load(place, mask=mine_all, other=0)
    low_words = tl.broadcast_to(tl.load(table + 2 * below)[:, :, None], (ROWS, GROUPS, 32))
    high_words = tl.broadcast_to(tl.load(table + 2 * below + 1)[:, :, None], (ROWS, GROUPS, 32))
    low, _ = looked_up(both, low_words, high_words)
    low_words = tl.broadcast_to(tl.load(table + 2 * above)[:, :, None], (ROWS, GROUPS, 32))
    high_words = tl.broadcast_to(tl.load(table + 2 * above + 1)[:, :, None], (ROWS, GROUPS, 32))
    _, high = looked_up(both, low_words, high_words)
    place = data + (row[:, None] * SIZE + column[None, :])[:, :, None] + step
    tl.store(place, low, mask=mine_all)
    tl.store(place + HALF, high, mask=mine_all)

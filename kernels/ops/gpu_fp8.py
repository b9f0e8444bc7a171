"""How do rows and matrices become e4m3 under one power of two each, and how does the library multiply them?

A scale that runs along the sum would interrupt the fp8 units at each of its steps, and V4.1 has one for every 32
columns of rows and weights both. So both are restated, once: a weight's row has one power of two (fp4 times the powers
of a row is e4m3 exactly while these span at most 14 binades; e4m3 times them while they are near each other), and so
has a row of activations, or each span of its columns. Where values are restated under a larger power, those less than
1/28,000 of it can lose their last bits: at most 2^-10 of the power, a two hundred thousandth of the largest value
beside them. `restated` says what a matrix lost, so that whoever loads it can keep it in bf16.

The kernels that make rows see whole ones, so they write them restated at once. The library's products sum in fp32
(`use_fast_accum=False`); whether a product is the library's, and by which algorithm, depends on the number of rows.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_dense_fp8
from kernels.ops.gpu_formats import FP8_FLOOR, bf16, e4m3_bits, exponents, fp8_round_trip, power
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels
from kernels.ops.gpu_overlap import let_next_start, overlaps
from kernels.ops.gpu_quant import norm_twin, swiglu_twin
from kernels.ops.quant import GROUP
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin

_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Rows of activations, as the fp8 units read them."""

    data: Tensor
    """[rows, size] e4m3."""
    scale: Tensor
    """[spans, rows] fp32, powers of two: of equal shares of the columns, mostly of all of them."""
    is_turned: bool = False
    """Whether columns lie in the order of the operand that `gpu_grouped_packed` unpacks."""

    def __len__(self) -> int:
        return self.data.shape[0]

    def dense(self) -> Tensor:
        """By torch, [rows, size] fp32."""
        plain = self.data[:, turned_places(self.data.shape[1])] if self.is_turned else self.data
        wide = plain.float().view(len(self.data), len(self.scale), -1)
        return (wide * self.scale.t()[:, :, None]).flatten(1)


@dataclass(frozen=True, slots=True)
class RowScaled:
    """Matrices of one shape, as the fp8 units read them."""

    data: Tensor
    """[experts, out, in] e4m3."""
    scale: Tensor
    """[experts, out] fp32, powers of two."""

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def out(self) -> int:
        return self.data.shape[1]

    @property
    def size(self) -> int:
        return self.data.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dense(self, expert: int) -> Tensor:
        """One matrix by torch, [out, in] fp32."""
        return self.data[expert].float() * self.scale[expert][:, None]


def turned_places(size: int) -> Tensor:
    """Where each column lies in a turned row, [size] int64: words of four columns change places in tiles of 128.

    In a tile, lane t of a quad reads the packed words 4t to 4t + 3, of which each is columns c to c + 3 in its low
    nibbles and 64 + c on in its high ones; word j of each lane makes the product j, whose operand takes columns 4t to
    4t + 3 and 16 + 4t on from lane t.
    """
    column = torch.arange(size)
    word = column % 128 // 4
    return column // 128 * 128 + word % 4 * 32 + word // 16 * 16 + word % 16 // 4 * 4 + column % 4


def restated(matrix: Tensor) -> tuple[Tensor, Tensor, float]:
    """A matrix of fp8 or fp4 values times powers of two, with one power for a row.

    matrix: [out, in] fp32 or bf16.  Returns ([out, in] e4m3, [out] fp32, what was lost: relative L2).
    """
    wide = matrix.float()
    largest = wide.abs().amax(1).clamp_min_(2.0**-100)
    _, exponent = torch.frexp(largest / 448.0)  # largest / 448 = mantissa in [1/2, 1) times 2^exponent
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest <= scale * 224.0, scale * 0.5, scale)
    data = (wide / scale[:, None]).to(_E4M3)
    lost = (data.float() * scale[:, None] - wide).norm() / wide.norm().clamp_min(1e-30)
    return data, scale, float(lost)


def row_scaled(matrices: list[Tensor]) -> tuple[RowScaled, float]:
    """Matrices, one an expert, and the most that one of them lost."""
    parts = [restated(matrix) for matrix in matrices]
    made = RowScaled(torch.stack([data for data, *_ in parts]), torch.stack([scale for _, scale, _ in parts]))
    return made, max(lost for *_, lost in parts)


def product(x: SpanRows, matrix: RowScaled, *, is_invariant: bool = False, follows_rows: bool = False) -> Tensor:
    """Rows under one scale each times one matrix: [rows, in] -> [rows, out] bf16.

    By the library, or by `gpu_dense_fp8` where that is faster: of short sums, which its fewer bits leave as near.
    is_invariant: by `gpu_dense_fp8` always, whose bits of a row do not depend on the others.  follows_rows: as there.
    """
    check(len(x.scale) == 1 and matrix.experts == 1, "a row has one scale, and a matrix no experts")
    check(not x.is_turned, "the library takes columns in their order")
    if x.data.is_cpu:
        return (x.dense() @ matrix.dense(0).t()).bfloat16()
    if not len(x):
        return torch.empty(0, matrix.out, dtype=torch.bfloat16, device=x.data.device)
    if is_invariant or gpu_dense_fp8.is_worth(x.data, matrix.out):
        given = x.data, x.scale[0], matrix.data[0], matrix.scale[0]
        return gpu_dense_fp8.multiply(*given, follows_rows=follows_rows)
    own = x.scale[0].unsqueeze(1)
    return torch._scaled_mm(  # noqa: SLF001 - no public name
        x.data, matrix.data[0].t(), own, matrix.scale, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def grouped_product(x: SpanRows, matrices: RowScaled, ends: Tensor) -> Tensor:
    """Rows in the order of experts, each times its own's matrix: [positions, in] -> [positions, out] bf16.

    ends: [experts] int32, position after each expert's last row; what comes behind the last one's is garbage.
    """
    check(len(x.scale) == 1 and matrices.experts == len(ends), "a row has one scale, an expert one end")
    check(not x.is_turned, "the library takes columns in their order")
    if x.data.is_cpu:
        return grouped_twin(x, matrices.out, matrices.dense, ends)
    if not len(x):
        return torch.empty(0, matrices.out, dtype=torch.bfloat16, device=x.data.device)
    return torch._scaled_grouped_mm(  # noqa: SLF001 - no public name
        x.data,
        matrices.data.transpose(1, 2),
        x.scale[0],
        matrices.scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def grouped_twin(x: SpanRows, out: int, dense: Callable[[int], Tensor], ends: Tensor) -> Tensor:
    """The same by torch.  dense: an expert's matrix, [out, in] fp32."""
    made = torch.full((len(x), out), float("nan"), dtype=torch.bfloat16, device=x.data.device)
    rows, start = x.dense(), 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            made[start:end] = (rows[start:end] @ dense(expert).t()).bfloat16()
        start = end
    return made


def span_rows(x: Tensor, sources: Tensor | None = None, *, span: int = 0, rounds: bool = False) -> SpanRows:
    """What an fp8 product sees of rows, restated.

    x: [rows, size] bf16 or fp32, contiguous.  sources: [positions] int32, the row that stands at each position; None =
    all, in order.  span: columns under one scale; 0 = all of a row's.  rounds: to fp8 first; else they were already.
    """
    kinds = {torch.bfloat16, torch.float32}
    positions, size = len(x) if sources is None else len(sources), x.shape[1]
    check(x.dtype in kinds and x.is_contiguous() and size % (span or GROUP) == 0, "rows are bf16 or fp32, end to end")
    if not runs_kernels(x):
        rows = (x if sources is None else x[sources.long()]).float()
        return _restated_twin(fp8_round_trip_twin(rows) if rounds else rows, span)
    made, block = _empty(x, positions, size, span), power_of_two(size)
    if positions:
        _rows_kernel[(positions,)](
            x,
            x if sources is None else sources,
            made.data,
            made.scale,
            positions,
            SIZE=size,
            SPAN=span or block,
            BLOCK=block,
            GATHERED=sources is not None,
            ROUNDS=rounds,
            num_warps=_warps(block),
        )
    return SpanRows(made.data.view(_E4M3), made.scale)


def norm_rows(x: Tensor, weight: Tensor, *, eps: float) -> SpanRows:
    """RMSNorm of rows, rounded to fp8 and restated under one scale a row.

    x: [rows, size] bf16; rows may lie apart.  weight: [size] fp32.
    """
    check(x.dtype == torch.bfloat16 and weight.dtype == torch.float32, "rows are bf16, their weight fp32")
    check(weight.shape == x.shape[1:] and x.shape[1] % GROUP == 0, "the weight has a row's length, a multiple of 32")
    if not runs_kernels(x):
        return _restated_twin(fp8_round_trip_twin(norm_twin(x, weight, eps=eps).float()), 0)
    made, block = _empty(x, len(x), x.shape[1], 0), power_of_two(x.shape[1])
    if len(x):
        _norm_rows_kernel[(len(x),)](
            x,
            weight,
            made.data,
            made.scale,
            len(x),
            x.stride(0),
            eps,
            SIZE=x.shape[1],
            BLOCK=block,
            LETS_START=overlaps(x),
            num_warps=_warps(block),
        )
    return SpanRows(made.data.view(_E4M3), made.scale)


def swiglu_rows(
    gate_up: Tensor,
    targets: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    limit: float,
    span: int = 0,
    turns: bool = False,
) -> SpanRows:
    """The clamped SwiGLU of rows, rounded to fp8 and restated.

    gate_up: [positions, 2 * width] bf16, gate first, contiguous.  factors: [slots] fp32, of each position's target (at
    `targets`, [positions] int32), or None for ones.  span: as for `span_rows`.  turns: its columns (`turned_places`).
    """
    positions, width = len(gate_up), gate_up.shape[1] // 2
    check(gate_up.dtype == torch.bfloat16 and gate_up.is_contiguous(), "rows are bf16, end to end")
    check(width % (span or GROUP) == 0 and (factors is None) == (targets is None), "factors have targets")
    if not runs_kernels(gate_up):
        mine = None if factors is None or targets is None else factors[targets.long()]
        rows = _restated_twin(fp8_round_trip_twin(swiglu_twin(gate_up.float(), mine, limit=limit)), span)
        return _turned_twin(rows) if turns else rows
    made, block = _empty(gate_up, positions, width, span), power_of_two(width)
    if positions:
        _swiglu_rows_kernel[(positions,)](
            gate_up,
            gate_up if targets is None else targets,
            gate_up if factors is None else factors,
            made.data,
            made.scale,
            positions,
            limit,
            SIZE=width,
            SPAN=span or block,
            BLOCK=block,
            WEIGHED=factors is not None,
            TURNS=turns,
            num_warps=_warps(block),
        )
    return SpanRows(made.data.view(_E4M3), made.scale, turns)


def gathered(x: SpanRows, sources: Tensor, *, turns: bool = False) -> SpanRows:
    """Rows under one scale each, copied to where they are wanted.

    sources: [positions] int32, the row that stands at each position.  turns: their columns (`turned_places`).
    """
    check(len(x.scale) == 1 and x.data.shape[1] % GROUP == 0, "a row has one scale, and a multiple of 32 values")
    positions, words = len(sources), x.data.shape[1] // 4
    if not runs_kernels(x.data):
        rows = sources.long()
        plain = SpanRows(x.data.view(torch.uint8)[rows].view(_E4M3), x.scale[:, rows])
        return _turned_twin(plain) if turns else plain
    made = _empty(x.data, positions, x.data.shape[1], 0)
    if positions:
        block = min(power_of_two(words), 2048)
        _gather_kernel[(positions,)](
            x.data.view(torch.int32),
            x.scale,
            sources,
            made.data.view(torch.int32),
            made.scale,
            WORDS=words,
            BLOCK=block,
            TURNS=turns,
            num_warps=4,
        )
    return SpanRows(made.data.view(_E4M3), made.scale, turns)


def empty_rows(like: Tensor) -> SpanRows:
    """Room for [rows, size] under one scale a row; its data are bytes."""
    return _empty(like, len(like), like.shape[1], 0)


def as_rows(room: SpanRows) -> SpanRows:
    """Such room once it is written."""
    return SpanRows(room.data.view(_E4M3), room.scale)


def restated_twin(rows: Tensor) -> SpanRows:
    """Rows of fp8 values by torch, under one scale each: [rows, size] fp32."""
    return _restated_twin(rows, 0)


def _empty(like: Tensor, rows: int, size: int, span: int) -> SpanRows:
    data = torch.empty(rows, size, dtype=torch.uint8, device=like.device)
    return SpanRows(data, torch.empty(size // (span or size), rows, dtype=torch.float32, device=like.device))


def _restated_twin(rows: Tensor, span: int) -> SpanRows:
    spans = rows.view(len(rows), -1, span or rows.shape[1])
    ratio = spans.abs().amax(-1).clamp_min_(1e-4).div_(448.0)
    scale = (ratio.view(torch.int32).add_(0x7FFFFF).bitwise_right_shift_(23) << 23).view(torch.float32)
    return SpanRows((spans / scale[:, :, None]).to(_E4M3).flatten(1), scale.t().contiguous())


def _turned_twin(rows: SpanRows) -> SpanRows:
    data = torch.empty_like(rows.data)
    data.view(torch.uint8)[:, turned_places(rows.data.shape[1])] = rows.data.view(torch.uint8)
    return SpanRows(data, rows.scale, is_turned=True)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


@triton.jit
def write_spans(
    values: tl.tensor,
    row: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """One row of fp8 values, [BLOCK] fp32 with zeros from SIZE on, restated; a span of BLOCK is all of it."""
    spans = tl.reshape(values, (BLOCK // SPAN, SPAN))
    exponent = exponents(tl.max(tl.abs(spans), axis=1), FP8_FLOOR, 448.0)
    # A power of two's inverse is exact, and multiplying is several times as fast as dividing.
    bits = e4m3_bits(spans * tl.broadcast_to(power(254 - exponent)[:, None], (BLOCK // SPAN, SPAN)))
    column = tl.arange(0, BLOCK)
    place = column
    if TURNS:
        word = column % 128 // 4
        place = column // 128 * 128 + word % 4 * 32 + word // 16 * 16 + word % 16 // 4 * 4 + column % 4
    tl.store(data + row * SIZE + place, tl.reshape(bits, (BLOCK,)), mask=column < SIZE)
    span = tl.arange(0, BLOCK // SPAN)
    tl.store(scale + span.to(tl.int64) * rows + row, power(exponent), mask=span * SPAN < SIZE)


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    sources: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    positions: tl.tensor,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERED: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(sources + position).to(tl.int64) if GATHERED else position
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ROUNDS:
        values = tl.reshape(fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32), (BLOCK,))
    write_spans(values, position, data, scale, positions, SIZE, SPAN, BLOCK, False)


@triton.jit
def _norm_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LETS_START: tl.constexpr,
) -> None:
    let_next_start(LETS_START)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mine = column < SIZE
    values = tl.load(x + row * stride + column, mask=mine, other=0.0).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(values * values, axis=0) / SIZE + eps)
    values = bf16(values / length * tl.load(weight + column, mask=mine, other=0.0))
    values = tl.reshape(fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32), (BLOCK,))
    write_spans(values, row, data, scale, rows, SIZE, BLOCK, BLOCK, False)


@triton.jit
def _swiglu_rows_kernel(
    gate_up: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    positions: tl.tensor,
    limit: tl.tensor,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mine = column < SIZE
    gate = tl.load(gate_up + position * 2 * SIZE + column, mask=mine, other=0.0).to(tl.float32)
    up = tl.load(gate_up + position * 2 * SIZE + SIZE + column, mask=mine, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    values = gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
    if WEIGHED:
        values *= tl.load(factors + tl.load(targets + position))
    values = tl.reshape(fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32), (BLOCK,))
    write_spans(values, position, data, scale, positions, SIZE, SPAN, BLOCK, TURNS)


@triton.jit
def _gather_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    sources: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(sources + position).to(tl.int64)
    for first in tl.static_range(0, WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        source = word
        if TURNS:
            source = word // 32 * 32 + word // 4 % 2 * 16 + word % 4 * 4 + word // 8 % 4
        values = tl.load(x + row * WORDS + source, mask=word < WORDS)
        tl.store(data + position * WORDS + word, values, mask=word < WORDS)
    tl.store(scale + position, tl.load(x_scale + row))

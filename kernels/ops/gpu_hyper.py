"""How do a token's four streams go from one sublayer into the next, on a GPU, reading them once?

Between two sublayers three things happen to a token: its streams take the output of the one, their mixture enters the
other, and the other's coefficients are made of them. The products with the fp32 mixing weight are exact in bf16 by
cutting the weight in three.

One program takes a token's whole row on (`gpu_hyper_rows`), and beside the sublayer that follows the products are made,
and of them its coefficients by a warp. The products are the library's, or, where a token's bits must not depend on
others, sums of fixed shares of the columns by our own tiles. For a hidden size of many or odd turns one kernel does all
that goes over the streams, slice by slice; a second adds the slices up in their order, runs Sinkhorn's iteration and
normalises.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_hyper_rows
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_formats import bf16, dot, fp8_round_trip
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, as_rows, empty_rows, restated_twin, span_rows
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_linear import library_linear, linear_parts
from kernels.ops.gpu_quant import norm_twin
from kernels.ops.hyper import COEFFICIENTS, STREAMS, Coefficients, coefficients, collapse, mean_square, update
from kernels.ops.quant import fp8_round_trip as fp8_round_trip_twin

ROWS = 32
"""Coefficients, padded to a size that matrix units take."""
SLICE = 128
"""Hidden values that one program goes over; fixed, so that sums have one order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a slice a program takes, frozen by measurement (docs/performance_v41.md)."""

    tokens: int
    step: int
    """Hidden values at a time."""
    warps: int = 4


ENTER, LEAVE = Cut(tokens=16, step=64), Cut(tokens=8, step=128)
_MOST_SHARES, _TURN = 8, 128
"""Of a token's columns, each summed by programs of its own, and columns of a turn of any tile of `gpu_linear`."""


@dataclass(frozen=True, slots=True)
class MixingWeights:
    """Of one sublayer."""

    parts: Tensor
    """[3, ROWS, 4 * hidden] bf16, whose sum is the weight."""
    scale: Tensor
    """[3] fp32."""
    base: Tensor
    """[24] fp32."""
    norm: Tensor
    """[hidden] fp32: of the sublayer's input."""
    eps: float
    hc_eps: float
    iterations: int


@dataclass(frozen=True, slots=True)
class Entered:
    """A sublayer's beginning."""

    streams: Tensor
    """[tokens, 4, hidden] bf16, after the sublayer before."""
    x: Tensor
    """[tokens, hidden] bf16, the sublayer's input, normalised; and as an fp8 product sees it."""
    rounded: Tensor
    made: Coefficients
    """For this sublayer's own output, and for the input of the next."""
    restated: SpanRows | None = None
    """What an fp8 product sees of x once more, under one scale a row; where it was asked for."""

    def seen_by(self, matrix: Tensor | RowScaled) -> Tensor | SpanRows:
        """What a product with this matrix takes."""
        return self.rounded if self.restated is None or isinstance(matrix, Tensor) else self.restated


def split_weight(weight: Tensor) -> Tensor:
    """[24, 4 * hidden] fp32 -> [3, ROWS, 4 * hidden] bf16 parts: 24 bits of every value."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, ROWS - COEFFICIENTS))
    parts = []
    for _ in range(3):
        parts.append(padded.bfloat16())
        padded = padded - parts[-1].float()
    return torch.stack(parts)


def enter(
    streams: Tensor,
    output: Tensor | None,
    before: Coefficients,
    weights: MixingWeights,
    *,
    pre: Tensor | None = None,
    is_invariant: bool = False,
    restates: bool = False,
    beside: Beside | None = None,
) -> Entered:
    """Leave a sublayer and enter the next.

    streams: [tokens, 4, hidden] bf16, as the sublayer before met them.  output: [tokens, hidden] bf16, of that one, or
    None where the streams are what enters (the first layer, and after n-gram memory).  before: its coefficients; of
    them only `pre` counts without an output.  pre: instead of that one's.  is_invariant: make the products so that a
    token's bits do not depend on how many there are; else by the library.  restates: write the input under one scale a
    row, too.  beside: where the products and this sublayer's own coefficients are made, which nobody asks for before
    the sublayer ends; what it still does is waited for first, and `made` must not be read before it has joined.
    """
    tokens, _, hidden = streams.shape
    check(streams.dtype == torch.bfloat16 and streams.is_contiguous(), "streams are bf16, end to end")
    check(weights.parts.shape == (3, ROWS, STREAMS * hidden), "the weight is split, and of these streams")
    mixed_by = before.pre if pre is None else pre
    if not runs_kernels(streams):
        return _enter_twin(streams, output, before, weights, mixed_by, restates=restates)
    if beside is not None:
        beside.join()
    if gpu_hyper_rows.takes(hidden):
        given = streams, output, before, weights, mixed_by
        return _enter_by_rows(*given, is_invariant=is_invariant, restates=restates, beside=beside)
    after = streams if output is None else torch.empty_like(streams)
    mixed = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    sums, squares = _go_over(streams, output, before, mixed_by, weights.parts, after=after, mixed=mixed)
    entered = _room(after, restates=False)
    _finish(entered, mixed, sums.unsqueeze(2), squares, weights)
    return replace(entered, restated=span_rows(entered.rounded)) if restates else entered


def _enter_by_rows(
    streams: Tensor,
    output: Tensor | None,
    before: Coefficients,
    weights: MixingWeights,
    mixed_by: Tensor,
    *,
    is_invariant: bool,
    restates: bool,
    beside: Beside | None,
) -> Entered:
    """One launch, and beside it what the sublayer's end wants."""
    after = streams if output is None else torch.empty_like(streams)
    entered = _room(after, restates=restates)
    squares = gpu_hyper_rows.go_on(
        streams,
        output,
        before,
        mixed_by,
        weights.norm,
        eps=weights.eps,
        after=after,
        x=entered.x,
        rounded=entered.rounded,
        restated=entered.restated,
    )
    with nullcontext() if beside is None else beside.begun(after, squares):
        sums = _own_sums(after, weights.parts) if is_invariant else _library_sums(after, weights.parts)
        _finish(entered, entered.x, sums, squares, weights, enters=False)
    return entered


def _go_over(
    streams: Tensor,
    output: Tensor | None,
    before: Coefficients,
    mixed_by: Tensor,
    parts: Tensor,
    *,
    after: Tensor,
    mixed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the streams after the update (`after`) and their mixture (`mixed`).

    Returns parts of the products with the weight, [slices, tokens, ROWS] fp32, and the squares of streams and of their
    mixture, [slices, tokens, 2] fp32.
    """
    tokens, hidden = mixed.shape
    slices = tiles(hidden, SLICE)
    squares = torch.empty(slices, tokens, 2, dtype=torch.float32, device=streams.device)
    sums = torch.empty(slices, tokens, ROWS, dtype=torch.float32, device=streams.device)
    _slice_kernel[(tiles(tokens, ENTER.tokens), slices)](
        streams,
        streams if output is None else output,
        before.post,
        before.mix,
        mixed_by,
        parts,
        after,
        mixed,
        sums,
        squares,
        tokens,
        HIDDEN=hidden,
        UPDATE=output is not None,
        ENTER=True,
        TOKENS=ENTER.tokens,
        SLICE=SLICE,
        STEP=min(ENTER.step, SLICE),
        COUNT=ROWS,
        num_warps=ENTER.warps,
        num_stages=1,
    )
    return sums, squares


def _room(after: Tensor, *, restates: bool) -> Entered:
    """A sublayer's beginning, of which only the streams are written yet."""
    tokens, _, hidden = after.shape
    x, rounded = (torch.empty(tokens, hidden, dtype=after.dtype, device=after.device) for _ in range(2))
    shapes = ((tokens, STREAMS), (tokens, STREAMS), (tokens, STREAMS, STREAMS))
    made = Coefficients(*(torch.empty(shape, device=after.device) for shape in shapes))
    return Entered(after, x, rounded, made, as_rows(empty_rows(x)) if restates else None)


def _finish(
    entered: Entered,
    mixed: Tensor,
    sums: Tensor,
    squares: Tensor,
    weights: MixingWeights,
    *,
    enters: bool = True,
) -> None:
    """Write coefficients of sums, [shares, tokens, pieces, ROWS], and the mixture normalised (enters)."""
    tokens, hidden = mixed.shape
    made, block = entered.made, power_of_two(hidden)
    _finish_kernel[(tokens,)](
        sums,
        squares,
        mixed,
        weights.scale,
        weights.base,
        weights.norm,
        made.pre,
        made.post,
        made.mix,
        entered.x,
        entered.rounded,
        tokens,
        weights.eps,
        weights.hc_eps,
        HIDDEN=hidden,
        SLICES=len(squares),
        SLICES_BLOCK=power_of_two(len(squares)),
        SUMS=len(sums) * sums.shape[2],
        SUMS_BLOCK=power_of_two(len(sums) * sums.shape[2]),
        PIECES=sums.shape[2],
        TOKEN_STRIDE=sums.stride(1),
        ITERATIONS=weights.iterations,
        ENTERS=enters,
        BLOCK=block,
        # Coefficients alone are a warp's work, and leave the other warps' places to the sublayer.
        num_warps=min(max(block // 1024, 1), 8) if enters else 1,
    )


def _library_sums(streams: Tensor, parts: Tensor) -> Tensor:
    """Products with each part of a weight: [tokens, 4, hidden] -> [1, tokens, 3, ROWS] fp32."""
    return library_linear(streams.flatten(1), parts.flatten(0, 1), wide=True).view(1, len(streams), 3, ROWS)


def _own_sums(streams: Tensor, parts: Tensor) -> Tensor:
    """The same, a token's in the same bits whatever the others: [shares, tokens, 3, ROWS] fp32."""
    rows = streams.flatten(1)
    # Shares of whole turns of every tile: else where they end would depend on the number of rows.
    shares = next((each for each in range(_MOST_SHARES, 1, -1) if rows.shape[1] % (each * _TURN) == 0), 1)
    made = linear_parts(rows, parts.flatten(0, 1), parts=shares)
    return made.view(len(made), len(streams), 3, ROWS)


def leave(streams: Tensor, output: Tensor, made: Coefficients) -> Tensor:
    """The streams after a sublayer where n-gram memory comes next: a new [tokens, 4, hidden] bf16."""
    tokens, _, hidden = streams.shape
    check(streams.dtype == torch.bfloat16 and streams.is_contiguous(), "streams are bf16, end to end")
    if not runs_kernels(streams):
        return update(streams.float(), output.float(), made).bfloat16()
    after = torch.empty_like(streams)
    _slice_kernel[(tiles(tokens, LEAVE.tokens), tiles(hidden, SLICE))](
        streams,
        output,
        made.post,
        made.mix,
        made.pre,
        streams,
        after,
        streams,
        made.pre,
        made.pre,
        tokens,
        HIDDEN=hidden,
        UPDATE=True,
        ENTER=False,
        TOKENS=LEAVE.tokens,
        SLICE=SLICE,
        STEP=min(LEAVE.step, SLICE),
        COUNT=ROWS,
        num_warps=LEAVE.warps,
        num_stages=1,
    )
    return after


def _enter_twin(
    streams: Tensor,
    output: Tensor | None,
    before: Coefficients,
    weights: MixingWeights,
    mixed_by: Tensor,
    *,
    restates: bool,
) -> Entered:
    wide = streams.float()
    if output is not None:
        wide = update(wide, output.float(), before).bfloat16().float()
    mixed = collapse(wide, mixed_by).bfloat16()
    x = norm_twin(mixed, weights.norm, eps=weights.eps)
    weight = weights.parts.float().sum(0)[:COEFFICIENTS]
    made = coefficients(
        wide.flatten(1) @ weight.T,
        mean_square(wide),
        scale=weights.scale,
        base=weights.base,
        eps=weights.eps,
        hc_eps=weights.hc_eps,
        iterations=weights.iterations,
    )
    rounded = fp8_round_trip_twin(x.float())
    return Entered(wide.bfloat16(), x, rounded.bfloat16(), made, restated_twin(rounded) if restates else None)


@triton.jit
def _slice_kernel(
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    pre: tl.tensor,
    parts: tl.tensor,
    after: tl.tensor,
    mixed: tl.tensor,
    sums: tl.tensor,
    squares: tl.tensor,
    tokens: tl.tensor,
    HIDDEN: tl.constexpr,
    UPDATE: tl.constexpr,
    ENTER: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    part = tl.program_id(1)
    step = tl.arange(0, STEP)
    count = tl.arange(0, COUNT)
    acc = tl.zeros((TOKENS, COUNT), tl.float32)
    square = tl.zeros((TOKENS,), tl.float32)
    mixed_square = tl.zeros((TOKENS,), tl.float32)
    place = token[:, None] * (4 * HIDDEN)
    for first in range(0, SLICE, STEP):
        column = part * SLICE + first + step
        mine = is_token[:, None] & (column < HIDDEN)[None, :]
        here = place + column[None, :]
        s0 = tl.load(streams + here, mask=mine, other=0.0).to(tl.float32)
        s1 = tl.load(streams + here + HIDDEN, mask=mine, other=0.0).to(tl.float32)
        s2 = tl.load(streams + here + 2 * HIDDEN, mask=mine, other=0.0).to(tl.float32)
        s3 = tl.load(streams + here + 3 * HIDDEN, mask=mine, other=0.0).to(tl.float32)
        if UPDATE:
            y = tl.load(output + token[:, None] * HIDDEN + column[None, :], mask=mine, other=0.0).to(tl.float32)
        total = tl.zeros((TOKENS, STEP), tl.float32)
        for stream in tl.static_range(4):
            if UPDATE:
                share = mix + token * 16 + stream
                values = y * tl.load(post + token * 4 + stream, mask=is_token, other=0.0)[:, None]
                values += s0 * tl.load(share, mask=is_token, other=0.0)[:, None]
                values += s1 * tl.load(share + 4, mask=is_token, other=0.0)[:, None]
                values += s2 * tl.load(share + 8, mask=is_token, other=0.0)[:, None]
                values += s3 * tl.load(share + 12, mask=is_token, other=0.0)[:, None]
                values = bf16(values)
                tl.store(after + here + stream * HIDDEN, values.to(tl.bfloat16), mask=mine)
            else:
                values = s0 if stream == 0 else (s1 if stream == 1 else (s2 if stream == 2 else s3))
            if ENTER:
                total += values * tl.load(pre + token * 4 + stream, mask=is_token, other=0.0)[:, None]
                square += tl.sum(values * values, axis=1)
                for piece in tl.static_range(3):
                    weight = (piece * COUNT + count)[None, :] * (4 * HIDDEN) + stream * HIDDEN + column[:, None]
                    acc = dot(values, tl.load(parts + weight, mask=(column < HIDDEN)[:, None], other=0.0), acc)
        if ENTER:
            total = bf16(total)
            mixed_square += tl.sum(total * total, axis=1)
            tl.store(mixed + token[:, None] * HIDDEN + column[None, :], total.to(tl.bfloat16), mask=mine)
    row = part * tokens + token
    if ENTER:
        tl.store(sums + row[:, None] * COUNT + count[None, :], acc, mask=is_token[:, None])
        tl.store(squares + row * 2, square, mask=is_token)
        tl.store(squares + row * 2 + 1, mixed_square, mask=is_token)


@triton.jit
def _finish_kernel(
    sums: tl.tensor,
    squares: tl.tensor,
    mixed: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    norm: tl.tensor,
    pre: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    x: tl.tensor,
    rounded: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    hc_eps: tl.tensor,
    HIDDEN: tl.constexpr,
    SLICES: tl.constexpr,
    SLICES_BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ENTERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES_BLOCK)
    is_part = part < SLICES
    four = tl.arange(0, 4)
    row = part * tokens + token
    square = tl.sum(tl.load(squares + row * 2, mask=is_part, other=0.0), axis=0)
    if ENTERS:
        mixed_square = tl.sum(tl.load(squares + row * 2 + 1, mask=is_part, other=0.0), axis=0)
    length = tl.sqrt_rn(square / (4 * HIDDEN) + eps)
    piece = tl.arange(0, SUMS_BLOCK)
    is_piece = piece < SUMS
    # Shares of a sum lie one behind the other, each with as many pieces of every token.
    first = (piece // PIECES) * (tokens * TOKEN_STRIDE) + (piece % PIECES) * 32 + token * TOKEN_STRIDE
    start = first[:, None] + four[None, :]
    raw_pre = tl.sum(tl.load(sums + start, mask=is_piece[:, None], other=0.0), axis=0)
    raw_post = tl.sum(tl.load(sums + start + 4, mask=is_piece[:, None], other=0.0), axis=0)
    place = four[:, None] * 4 + four[None, :]
    cells = first[:, None, None] + 8 + place[None, :, :]
    raw_mix = tl.sum(tl.load(sums + cells, mask=is_piece[:, None, None], other=0.0), axis=0)
    raw_pre = raw_pre / length * tl.load(scale) + tl.load(base + four)
    raw_post = raw_post / length * tl.load(scale + 1) + tl.load(base + 4 + four)
    raw_mix = raw_mix / length * tl.load(scale + 2) + tl.load(base + 8 + place)
    tl.store(pre + token * 4 + four, 1.0 / (1.0 + tl.exp(-raw_pre)) + hc_eps)
    tl.store(post + token * 4 + four, 2.0 / (1.0 + tl.exp(-raw_post)))
    powers = tl.exp(raw_mix - tl.max(raw_mix, axis=1)[:, None])
    matrix = powers / tl.sum(powers, axis=1)[:, None] + hc_eps
    matrix = matrix / (tl.sum(matrix, axis=0) + hc_eps)[None, :]
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (tl.sum(matrix, axis=1) + hc_eps)[:, None]
        matrix = matrix / (tl.sum(matrix, axis=0) + hc_eps)[None, :]
    tl.store(mix + token * 16 + place, matrix)
    if ENTERS:
        column = tl.arange(0, BLOCK)
        mine = column < HIDDEN
        values = tl.load(mixed + token * HIDDEN + column, mask=mine, other=0.0).to(tl.float32)
        values = bf16(values / tl.sqrt_rn(mixed_square / HIDDEN + eps) * tl.load(norm + column, mask=mine, other=0.0))
        tl.store(x + token * HIDDEN + column, values.to(tl.bfloat16), mask=mine)
        values = tl.reshape(fp8_round_trip(tl.reshape(values, (1, BLOCK)), BLOCK // 32), (BLOCK,))
        tl.store(rounded + token * HIDDEN + column, values.to(tl.bfloat16), mask=mine)

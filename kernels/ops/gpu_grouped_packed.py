"""How are rows multiplied on Hopper's fp8 units by fp4 experts that become e4m3 on the way, in registers?

A matrix is the first operand, which the units take from registers: a lane reads 16 packed bytes of its two rows, and
each word of them becomes eight e4m3 values of the row's power of two (`gpu_grouped_unpack`) in 14 instructions, while
the units multiply. Nothing is unpacked into memory, and half the bytes are read. What a lane holds is the operand of
four products once the order of a row's columns is turned, so rows of activations are laid down in that order.

The units add a whole row of columns with about 14 bits: 2.3e-3 from exact sums of 5,120, where rounding to bf16 alone
makes 1.7e-3, and to fp8 before it 2e-2. A row's sum does not depend on others, nor on how many rows its tile has.

Of matrices whose rows of gate and of up alternate by eights, a lane's two sums are a gate and the up of its column, so
that they are gated where they are, and half of them are written.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.ops.gpu_fp8 import SpanRows, grouped_twin
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_gate import gated
from kernels.ops.gpu_grouped_tiles import (
    PIECES,
    box_of,
    can_be_widths,
    num_pieces,
    num_widths,
    rows_before,
    rows_of,
    rows_past,
    tile_of,
    width_at,
    width_of,
)
from kernels.ops.gpu_grouped_unpack import Packed, Powers, apart
from kernels.ops.gpu_launch import check, is_hopper, multiprocessors, power_of_two, runs_kernels
from kernels.ops.gpu_overlap import early, overlaps
from kernels.ops.gpu_quant import swiglu_twin
from kernels.ops.gpu_words import e2m1_halves

_DEPTH = 128
DEPTH = gl.constexpr(_DEPTH)
"""Columns of a turn of the loop: four products of 32."""
WORDS_A_ROW = gl.constexpr(16)
"""int32 of a packed row's turn."""
LOW, HIGH = gl.constexpr(0x3C383000), gl.constexpr(0x4C484440)
"""e4m3 bytes of the magnitudes 0, 1/2, 1, 3/2 and 2, 3, 4, 6."""
ONE_LOW, ONE_HIGH = gl.constexpr(0x08080800), gl.constexpr(0x08080808)
"""A power of two more, in each of their bytes."""
_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
_MADE, _GATED = (gl.constexpr(gl.NVMMASharedLayout(size, 16, 2)) for size in (128, 64))
_FLAGS = gl.constexpr(mbarrier.MBarrierLayout())
WARPS = 4
"""Of each of the two groups that multiply."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a program cuts the work."""

    widths: tuple[int, ...]
    """Numbers of rows that a program multiplies, ascending: all of the last, or as few as an expert's last rows need.

    Each is a sum of different powers of two from 16 to 256, as the layouts of a product are. The last is one of them,
    or 256 and one of them: rooms for four turns are of at most 256 rows, for three of 288.
    """
    stages: int
    registers: int
    """Of a thread that multiplies."""
    sharing_rounds: int
    """Up to so many rounds of tiles over the multiprocessors, a last one that is at most half full is of halves or
    quarters of its tiles' rows, each by a program of its own; 0: never.
    """


CUT = Cut(widths=(64, 128, 192, 224, 256), stages=4, registers=232, sharing_rounds=4)
MANY = Cut(widths=(64, 128, 192, 224, 240, 256, 288), stages=3, registers=232, sharing_rounds=0)
"""Frozen by measurement (docs/performance_v41.md). Programs are one a multiprocessor. Of many tiles, some experts have
a few rows more than 256: a tile of 288 spares them another, for which one turn fewer is on its way."""
_FEW_ROUNDS = 4
"""Of tiles over the multiprocessors; more are many."""
_OUTS = 128
OUTS = gl.constexpr(_OUTS)
"""Rows of a matrix in a program: two groups of four warps multiply half of them each."""
_FEEDING_REGISTERS = gl.constexpr(24)


def multiply(
    x: SpanRows, weights: Weights, powers: Powers, ends: Tensor, *, cut: Cut | None = None, follows_gate: bool = False
) -> Tensor:
    """Rows in the order of experts, each times its own's matrix: [positions, in] -> [positions, out] bf16.

    x: under one scale a row, turned (`gpu_fp8.gathered` and `swiglu_rows`).  weights: fp4, whose powers are near.
    ends: [experts] int32, position after each expert's last row; what comes behind the last one's is garbage.
    cut: None is by the number of tiles.  follows_gate: x is what was launched last on this stream, and what that waits
    for began when ends were there: tiles are found, and their first turns read, while rows are gated.
    """
    _check(x, weights, ends, cut)
    if not runs_kernels(x.data):
        return grouped_twin(x, weights.out, weights.dense, ends)
    out = torch.empty(len(x), weights.out, dtype=torch.bfloat16, device=x.data.device)
    _launch(x, weights, powers, ends, out, None, cut=cut, follows_gate=follows_gate)
    return out


def multiply_gated(x: SpanRows, up: Packed, ends: Tensor, *, limit: float, cut: Cut | None = None) -> Tensor:
    """The same, and the clamped SwiGLU of what is made: [positions, in] -> [positions, out / 2] bf16.

    up: gate and up, interleaved.  Values are rounded to bf16 before they are gated, as `multiply` leaves them, and once
    more after: what `gpu_swiglu_rows.weigh_rows` then rounds to fp8 is half as long as what `gate_rows` reads, but that
    one does not round in between, so that some values are neighbours of its own.
    """
    check(up.is_interleaved, "rows of gate and of up alternate")
    weights = up.weights
    _check(x, weights, ends, cut)
    if not runs_kernels(x.data):
        both = grouped_twin(x, weights.out, weights.dense, ends).float()
        return swiglu_twin(apart(both), None, limit=limit).bfloat16()
    out = torch.empty(len(x), weights.out // 2, dtype=torch.bfloat16, device=x.data.device)
    _launch(x, weights, up.powers, ends, out, limit, cut=cut, follows_gate=False)
    return out


def _check(x: SpanRows, weights: Weights, ends: Tensor, cut: Cut | None) -> None:
    check(weights.format == "fp4" and len(x.scale) == 1 and x.is_turned, "matrices are fp4, rows turned, of one scale")
    check(
        x.data.shape[1] == weights.size and len(ends) == weights.experts, "rows are the matrix's, an expert has an end"
    )
    check(weights.out % OUTS.value == 0 and weights.size % _DEPTH == 0, f"a matrix is of {OUTS.value}s by {_DEPTH}s")
    check(
        cut is None or can_be_widths(cut.widths),
        "widths are sums of powers of two from 16 to 256, ascending, the last one",
    )


def _launch(
    x: SpanRows,
    weights: Weights,
    powers: Powers,
    ends: Tensor,
    out: Tensor,
    limit: float | None,
    *,
    cut: Cut | None,
    follows_gate: bool,
) -> None:
    """limit: of what is gated; None: nothing is."""
    if not len(x):
        return
    programs = multiprocessors(x.data.device)
    if cut is None:
        cut = CUT if _most_tiles(x, weights, CUT) <= _FEW_ROUNDS * programs else MANY
    most_tiles, can_overlap = _most_tiles(x, weights, cut), overlaps(x.data)
    overlap = follows_gate and can_overlap
    packed_kernel[(most_tiles + (3 * programs // 4 if cut.sharing_rounds else 0),)](
        *_row_boxes(x.data, cut.widths),
        _boxes(weights.data.view(torch.int32).flatten(0, 1), [OUTS.value // 2, _DEPTH // 8], _WORDS.value),
        x.scale,
        weights.scale,
        powers.largest,
        powers.scale,
        ends,
        out,
        len(x),
        limit,
        SIZE=weights.size,
        WIDTH=weights.out,
        EXPERTS=weights.experts,
        EXPERTS_BLOCK=max(power_of_two(weights.experts), 32),
        WIDTHS=cut.widths,
        STAGES=cut.stages,
        REGISTERS=cut.registers,
        PROGRAMS=programs,
        SHARING_ROUNDS=cut.sharing_rounds,
        OVERLAP=overlap,
        LETS_START=can_overlap,
        num_warps=WARPS,
        **early(overlap),
    )


def _most_tiles(x: SpanRows, weights: Weights, cut: Cut) -> int:
    """Of each expert's rows, a tile has at least one."""
    most = (len(x) + min(weights.experts, len(x)) * (cut.widths[-1] - 1)) // cut.widths[-1]
    return most * (weights.out // _OUTS)


def fits(device: torch.device, *shapes: tuple[int, int]) -> bool:
    """Is this the GPU, and are these matrices, out by in, that the kernel is made for?"""
    is_ours = device.type == "cuda" and is_hopper(device)
    return is_ours and all(out % OUTS.value == 0 and size % _DEPTH == 0 for out, size in shapes)


def _row_boxes(rows: Tensor, widths: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """Rows as the tensor engine copies them for the pieces of these widths: boxes of 256, 128, 64, 32 and 16."""
    return [
        _boxes(rows, [size, _DEPTH], _ROWS.value) if any(width & size for width in widths) else None for size in PIECES
    ]


def _boxes(matrix: Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """A matrix as the tensor engine copies it."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@gluon.constexpr_function
def _sums(rows: int) -> gl.NVMMADistributedLayout:
    """How four warps hold the sums of so many rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])


@gluon.jit
def _spread(each: gl.tensor, WORDS: gl.constexpr) -> gl.tensor:
    """[outs, 2] -> [outs, 4] in the layout of a product's words."""
    wide = gl.expand_dims(each, 2).broadcast_to([each.shape[0], 2, 2])
    return gl.convert_layout(wide.reshape([each.shape[0], 4]), WORDS, assert_trivial=True)


@gluon.jit
def _by_product(words: gl.tensor) -> gl.tuple:
    """[outs, 16] -> [outs, 4] four times: word j of every lane."""
    even, odd = gl.split(words.reshape([words.shape[0], 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _operand(first: gl.tensor, last: gl.tensor, operand: gl.constexpr) -> gl.tensor:
    """Values of low and of high nibbles of each word, [outs, 4] int32 -> [outs, 32] e4m3 as lanes hold them."""
    outs: gl.constexpr = first.shape[0]
    words = gl.join(first, last)
    even = gl.join(words.to(gl.uint8), (words >> 16).to(gl.uint8))
    odd = gl.join((words >> 8).to(gl.uint8), (words >> 24).to(gl.uint8))
    # [outs, lane, half, byte's high bit, its low bit] -> half, lane, byte.
    parts = gl.join(even, odd).permute((0, 2, 1, 3, 4))
    return gl.convert_layout(parts.reshape([outs, 32]).to(gl.float8e4nv, bitcast=True), operand)


@gluon.jit
def _room(rooms: gl.tuple, slot: gl.tensor, ROWS: gl.constexpr, piece: gl.constexpr) -> gl.tensor:
    """Where a piece of so many rows lies."""
    BEFORE: gl.constexpr = rows_before(ROWS, piece)
    room = rooms[0] if BEFORE < 256 else rooms[1]
    return room.index(slot).slice(BEFORE % 256, rows_of(ROWS, piece), dim=0)


@gluon.jit
def _copy_matrix(
    w_boxes: gl.tensor, places: gl.tuple, spot: gl.tuple, turn: gl.tensor, ROWS: gl.constexpr, STAGES: gl.constexpr
) -> None:
    """A turn's part of the matrix, of which a flag then waits for the rows' as well."""
    _, w_smem, full, _, _ = places
    slot, w_first = turn % STAGES, spot[2]
    flag, at = full.index(slot), turn * WORDS_A_ROW
    mbarrier.expect(flag, OUTS * WORDS_A_ROW * 4 + ROWS * DEPTH)
    tma.async_copy_global_to_shared(w_boxes, [w_first, at], flag, w_smem.index(2 * slot))
    tma.async_copy_global_to_shared(w_boxes, [w_first + OUTS // 2, at], flag, w_smem.index(2 * slot + 1))


@gluon.jit
def _copy_rows(
    boxes: gl.tuple, places: gl.tuple, spot: gl.tuple, turn: gl.tensor, ROWS: gl.constexpr, STAGES: gl.constexpr
) -> None:
    """A turn's part of the rows, on the matrix's flag."""
    slot = turn % STAGES
    for piece in gl.static_range(num_pieces(ROWS)):
        box, corner = boxes[box_of(rows_of(ROWS, piece))], [spot[0] + rows_before(ROWS, piece), turn * DEPTH]
        tma.async_copy_global_to_shared(box, corner, places[2].index(slot), _room(places[0], slot, ROWS, piece))


@gluon.jit
def _feed(
    boxes: gl.tuple,
    w_boxes: gl.tensor,
    places: gl.tuple,
    spot: gl.tuple,
    SIZE: gl.constexpr,
    WIDTHS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Copy what each turn multiplies to where an earlier one is done with, by one warp: the matrix first, from afar."""
    empty, which = places[3], width_of(spot[1], WIDTHS)
    AHEAD: gl.constexpr = min(STAGES, SIZE // DEPTH) if OVERLAP else 0
    if OVERLAP:
        for at in gl.static_range(num_widths(WIDTHS)):
            if which == at:
                for turn in range(AHEAD):
                    _copy_matrix(w_boxes, places, spot, turn, width_at(WIDTHS, at), STAGES)
        gdc_wait()
    for turn in range(SIZE // DEPTH):
        if turn >= STAGES:
            mbarrier.wait(empty.index(turn % STAGES), (turn // STAGES - 1) & 1)
        for at in gl.static_range(num_widths(WIDTHS)):
            if which == at:
                if not OVERLAP or turn >= AHEAD:
                    _copy_matrix(w_boxes, places, spot, turn, width_at(WIDTHS, at), STAGES)
                _copy_rows(boxes, places, spot, turn, width_at(WIDTHS, at), STAGES)


@gluon.jit
def _zeros(HALF: gl.constexpr, ROWS: gl.constexpr) -> gl.tuple:
    """Sums of each piece's rows."""
    acc: gl.tuple = ()
    for piece in gl.static_range(num_pieces(ROWS)):
        acc += (gl.zeros([HALF, rows_of(ROWS, piece)], gl.float32, _sums(rows_of(ROWS, piece))),)
    return acc


@gluon.jit
def _products(
    words: gl.tuple, x_rooms: gl.tuple, slot: gl.tensor, acc: gl.tuple, COLUMN: gl.constexpr, ROWS: gl.constexpr
) -> gl.tuple:
    """One word of every lane times 32 columns of all pieces of rows."""
    made: gl.tuple = ()
    for piece in gl.static_range(num_pieces(ROWS)):
        operand = _operand(words[0], words[1], gl.DotOperandLayout(0, _sums(rows_of(ROWS, piece)), 4))
        columns = _room(x_rooms, slot, ROWS, piece).slice(COLUMN, 32, dim=1).permute((1, 0))
        made += (warpgroup_mma(operand, columns, acc[piece], is_async=True),)
    return made


@gluon.jit
def _row_scales(x_scale: gl.tensor, first: gl.tensor, positions: gl.tensor, ROWS: gl.constexpr) -> gl.tuple:
    """Of each piece's rows, one or two a thread: asked for before the loop, they take next to no registers in it."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    made: gl.tuple = ()
    for piece in gl.static_range(num_pieces(ROWS)):
        row = first + rows_before(ROWS, piece) + gl.arange(0, rows_of(ROWS, piece), layout=LINE)
        made += (gl.load(x_scale + gl.minimum(row, positions - 1)),)
    return made


@gluon.jit
def _scaled(acc: gl.tensor, out_scale: gl.tensor, row_scale: gl.tensor, ROWS: gl.constexpr) -> gl.tensor:
    """Sums of a piece of the rows, in fp32."""
    values = acc * gl.convert_layout(out_scale, gl.SliceLayout(1, _sums(ROWS)), assert_trivial=True)[:, None]
    return values * gl.convert_layout(row_scale, gl.SliceLayout(0, _sums(ROWS)))[None, :]


@gluon.jit
def _store(
    place: gl.tensor, values: gl.tensor, left: gl.tensor, HALF: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr
) -> None:
    """So many rows, of which some are the expert's, in 128 bytes each, or 64 of gated ones."""
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [HALF // 8, 256 // HALF], [1, 4], [0, 1])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    out = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    # Rows past the expert's are another's, or none: multiplied, and not stored.
    gl.store(place + row[None, :] * WIDTH + out[:, None], values.load(STORED), mask=(row < left)[None, :])


@gluon.jit
def _finish(
    acc: gl.tuple,
    out_scale: gl.tensor,
    row_scales: gl.tuple,
    limit: gl.tensor | None,
    place: gl.tensor,
    left: gl.tensor,
    out_rooms: gl.tuple,
    PART: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:
    """Sums of all pieces of the rows, scaled, gated where there is a limit, and stored by way of shared memory."""
    NUM: gl.constexpr = num_pieces(ROWS)
    for piece in gl.static_range(NUM):
        values = _scaled(acc[piece], out_scale, row_scales[piece], rows_of(ROWS, piece))
        made = values.to(gl.bfloat16) if limit is None else gated(values, limit)
        _room(out_rooms, PART, ROWS, piece).permute((1, 0)).store(made)
    MADE: gl.constexpr = OUTS // 2 if limit is None else OUTS // 4
    for piece in gl.static_range(NUM):
        BEFORE = rows_before(ROWS, piece)
        values = _room(out_rooms, PART, ROWS, piece).permute((1, 0))
        _store(place + BEFORE * WIDTH + PART * MADE, values, left - BEFORE, MADE, rows_of(ROWS, piece), WIDTH)


@gluon.jit
def _multiply(
    given: gl.tuple,
    places: gl.tuple,
    spot: gl.tuple,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    LETS_START: gl.constexpr,
) -> None:
    """So many rows times half of a tile of their expert's matrix, by four warps.  WIDTH: of a row of the result."""
    x_scale, scale, largest, powers, result, positions, limit = given
    first, left, w_first, column_first = spot
    x_rooms, w_smem, full, empty, out_rooms = places
    NUM: gl.constexpr = num_pieces(ROWS)
    HALF: gl.constexpr = OUTS // 2
    TURNS: gl.constexpr = SIZE // DEPTH
    # A lane has two rows of the matrix, eight apart, and of each 16 bytes a turn: a word for each product.
    BY_WARP: gl.constexpr = [[16, 0], [32, 0]]
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [HALF, WORDS_A_ROW]
    )
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [HALF, 4]
    )
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0]],
        [[0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [HALF, 2, 2],
    )
    HALVES: gl.constexpr = gl.SliceLayout(2, SPREAD)

    mine = w_first.to(gl.int64) + PART * HALF
    out = gl.arange(0, HALF, layout=gl.SliceLayout(1, HALVES))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, HALVES))
    # Powers of two between a value times its scale and what its bytes say.
    base = 6 - gl.load(largest + mine + out).to(gl.int32)
    scale_at = scale + mine * (SIZE // 32)
    scale_place = out[:, None] * (SIZE // 32) + half[None, :]
    low_scale = gl.load(scale_at + scale_place)
    high_scale = gl.load(scale_at + 2 + scale_place)
    out_scale = gl.load(powers + mine + gl.arange(0, HALF, layout=gl.SliceLayout(1, _sums(rows_of(ROWS, 0)))))
    if OVERLAP:
        gdc_wait()
    row_scales = _row_scales(x_scale, first, positions, ROWS)
    acc = _zeros(HALF, ROWS)
    for turn in range(TURNS):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        packed = _by_product(w_smem.index(2 * slot + PART).load(LOADED))
        low, high = low_scale.to(gl.int32) + base[:, None], high_scale.to(gl.int32) + base[:, None]
        low_near, high_near = _spread(LOW + low * ONE_LOW, WORDS), _spread(HIGH + low * ONE_HIGH, WORDS)
        low_far, high_far = _spread(LOW + high * ONE_LOW, WORDS), _spread(HIGH + high * ONE_HIGH, WORDS)
        # The units multiply what is unpacked while the next is. A wait must hold them all.
        held: gl.tuple = ()
        for word in gl.static_range(4):
            four = gl.convert_layout(packed[word], WORDS, assert_trivial=True)
            both = e2m1_halves(four, low_near, high_near, low_far, high_far)
            acc = _products(both, x_rooms, slot, acc, 32 * word, ROWS)
            held += both
        later = gl.minimum(turn + 1, TURNS - 1) * 4
        low_scale = gl.load(scale_at + later + scale_place)
        high_scale = gl.load(scale_at + later + 2 + scale_place)
        # The operands' registers are these words'; a wait takes no values of eight bits.
        acc = warpgroup_mma_wait(0, deps=acc + held)[:NUM]
        mbarrier.arrive(empty.index(slot), count=1)
    if LETS_START:
        gdc_launch_dependents()
    place = result + first.to(gl.int64) * WIDTH + column_first
    _finish(acc, out_scale, row_scales, limit, place, left, out_rooms, PART, WIDTH, ROWS)


@gluon.jit
def _part(
    given: gl.tuple,
    places: gl.tuple,
    spot: gl.tuple,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    WIDTHS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    LETS_START: gl.constexpr,
) -> None:
    """As many rows as there are, by the least width that has them."""
    which = width_of(spot[1], WIDTHS)
    for at in gl.static_range(num_widths(WIDTHS)):
        if which == at:
            _multiply(given, places, spot, PART, SIZE, WIDTH, width_at(WIDTHS, at), STAGES, OVERLAP, LETS_START)


@gluon.jit
def _rooms(ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr) -> gl.tuple:
    """Where turns are copied to, and what says that each is there, or done with."""
    PAST: gl.constexpr = rows_past(ROWS)
    MADE: gl.constexpr = OUTS // 4 if GATED else OUTS // 2
    LAYOUT: gl.constexpr = _GATED if GATED else _MADE
    x_rooms: gl.tuple = (gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS - PAST, DEPTH], _ROWS),)
    out_rooms: gl.tuple = (gl.allocate_shared_memory(gl.bfloat16, [2, ROWS - PAST, MADE], LAYOUT),)
    if PAST:
        x_rooms += (gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PAST, DEPTH], _ROWS),)
        out_rooms += (gl.allocate_shared_memory(gl.bfloat16, [2, PAST, MADE], LAYOUT),)
    w_smem = gl.allocate_shared_memory(gl.int32, [2 * STAGES, OUTS // 2, WORDS_A_ROW], _WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    return x_rooms, w_smem, full, empty, out_rooms


@gluon.jit
def packed_kernel(
    boxes_256: gl.tensor,
    boxes_128: gl.tensor,
    boxes_64: gl.tensor,
    boxes_32: gl.tensor,
    boxes_16: gl.tensor,
    w_boxes: gl.tensor,
    x_scale: gl.tensor,
    scale: gl.tensor,
    largest: gl.tensor,
    powers: gl.tensor,
    ends: gl.tensor,
    result: gl.tensor,
    positions: gl.tensor,
    limit: gl.tensor | None,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    EXPERTS_BLOCK: gl.constexpr,
    WIDTHS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SHARING_ROUNDS: gl.constexpr,
    OVERLAP: gl.constexpr,
    LETS_START: gl.constexpr,
) -> None:
    ROWS: gl.constexpr = width_at(WIDTHS, num_widths(WIDTHS) - 1)
    first, left, expert, tile = tile_of(
        ends, EXPERTS, EXPERTS_BLOCK, ROWS, width_at(WIDTHS, 0), WIDTH // OUTS, PROGRAMS, SHARING_ROUNDS
    )
    if left > 0:
        boxes = (boxes_256, boxes_128, boxes_64, boxes_32, boxes_16)
        GATED: gl.constexpr = limit is not None
        MADE: gl.constexpr = WIDTH // 2 if GATED else WIDTH
        given = (x_scale, scale, largest, powers, result, positions, limit)
        spot = (first, left, expert * WIDTH + tile * OUTS, tile * (OUTS // 2 if GATED else OUTS))
        places = _rooms(ROWS, STAGES, GATED)
        gl.warp_specialize(
            [
                (_part, (given, places, spot, 0, SIZE, MADE, WIDTHS, STAGES, OVERLAP, LETS_START)),
                (_part, (given, places, spot, 1, SIZE, MADE, WIDTHS, STAGES, OVERLAP, LETS_START)),
                (_feed, (boxes, w_boxes, places, spot, SIZE, WIDTHS, STAGES, OVERLAP)),
            ],
            [4, 1],
            [REGISTERS, _FEEDING_REGISTERS],
        )
    elif OVERLAP:
        gdc_wait()  # a launch whose programs have all waited ends after the one before

"""How are rows multiplied on Hopper's fp8 units by fp4 experts that become e4m3 on the way, in registers?

A matrix is the first operand, which the units take from registers: a lane reads 16 packed bytes of its two rows, and
each word of them becomes eight e4m3 values of the row's power of two (`gpu_grouped_unpack`) in 14 instructions, while
the units multiply. Nothing is unpacked into memory, and half the bytes are read. What a lane holds is the operand of
four products once the order of a row's columns is turned, so rows of activations are laid down in that order.

The units add a whole row of columns with about 14 bits: 2.3e-3 from exact sums of 5,120, where rounding to bf16 alone
makes 1.7e-3. So this is a way of the fastest mode. A row's sum does not depend on others.
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

from kernels.ops.gpu_fp8 import SpanRows, grouped_twin
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_unpack import Powers
from kernels.ops.gpu_launch import check, is_hopper, multiprocessors, power_of_two, runs_kernels, tiles
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
_FLAGS = gl.constexpr(mbarrier.MBarrierLayout())
WARPS = 4
"""Of each of the two groups that multiply."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a program cuts the work."""

    rows: int
    """At most: of an expert's last rows, a quarter or half of them are multiplied if they are not more."""
    stages: int
    registers: int
    """Of a thread that multiplies."""
    scales_ahead: bool = False
    """Whether who feeds, where programs stay, has a tile's scales brought into the L2 before they are asked for."""


CUT = Cut(rows=256, stages=4, registers=232)
"""Frozen by measurement (docs/performance_v41.md). Programs are one a multiprocessor."""
MOST_ROUNDS = 0
"""Up to so many rounds of tiles, programs stay and make one tile after the other; 0: each makes one and ends.

Those that stay feed the next tile while they finish one, and share a last round that is at most half full. Of many
rounds the hardware's own order is better: tiles differ, and whoever is done first takes the next.
"""
OUTS = gl.constexpr(128)
"""Rows of a matrix in a program: two groups of four warps multiply half of them each."""
_FEEDING_REGISTERS = gl.constexpr(24)
_STAYING_REGISTERS = gl.constexpr(32)
"""Of a thread that feeds, where it also finds the next tile: 40 would leave too few for the first that multiply."""


def multiply(x: SpanRows, weights: Weights, powers: Powers, ends: Tensor, *, cut: Cut = CUT) -> Tensor:
    """Rows in the order of experts, each times its own's matrix: [positions, in] -> [positions, out] bf16.

    x: under one scale a row, turned (`gpu_fp8.gathered` and `swiglu_rows`).  weights: fp4, whose powers are near.
    ends: [experts] int32, position after each expert's last row; what comes behind the last one's is garbage.
    """
    check(weights.format == "fp4" and len(x.scale) == 1 and x.is_turned, "matrices are fp4, rows turned, of one scale")
    check(
        x.data.shape[1] == weights.size and len(ends) == weights.experts, "rows are the matrix's, an expert has an end"
    )
    check(weights.out % OUTS.value == 0 and weights.size % _DEPTH == 0, f"a matrix is of {OUTS.value}s by {_DEPTH}s")
    positions = len(x)
    if not runs_kernels(x.data):
        return grouped_twin(x, weights.out, weights.dense, ends)
    out = torch.empty(positions, weights.out, dtype=torch.bfloat16, device=x.data.device)
    if not positions:
        return out
    most_tiles = (tiles(positions, cut.rows) + min(weights.experts, positions)) * (weights.out // OUTS.value)
    staying = _staying(x.data.device, most_tiles)
    packed_kernel[(staying or most_tiles,)](
        _boxes(x.data, [cut.rows, _DEPTH], _ROWS.value),
        _boxes(x.data, [cut.rows // 2, _DEPTH], _ROWS.value),
        _boxes(x.data, [cut.rows // 4, _DEPTH], _ROWS.value),
        _boxes(weights.data.view(torch.int32).flatten(0, 1), [OUTS.value // 2, _DEPTH // 8], _WORDS.value),
        x.scale,
        weights.scale,
        powers.largest,
        powers.scale,
        ends,
        out,
        positions,
        SIZE=weights.size,
        WIDTH=weights.out,
        EXPERTS=weights.experts,
        EXPERTS_BLOCK=max(power_of_two(weights.experts), 32 * WARPS),
        ROWS=cut.rows,
        STAGES=cut.stages,
        REGISTERS=cut.registers,
        STAYS=staying > 0,
        SCALES_AHEAD=cut.scales_ahead,
        num_warps=WARPS,
    )
    return out


def fits(device: torch.device, *shapes: tuple[int, int]) -> bool:
    """Is this the GPU, and are these matrices, out by in, that the kernel is made for?"""
    is_ours = device.type == "cuda" and is_hopper(device)
    return is_ours and all(out % OUTS.value == 0 and size % _DEPTH == 0 for out, size in shapes)


def _staying(device: torch.device, most_tiles: int) -> int:
    """Programs that stay; 0: none."""
    if not MOST_ROUNDS:
        return 0
    programs = multiprocessors(device)
    return programs if tiles(most_tiles, programs) <= MOST_ROUNDS else 0


def _boxes(matrix: Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """A matrix as the tensor engine copies it."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@gluon.jit
def _plus(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def _tile(
    ends: gl.tensor, EXPERTS: gl.constexpr, EXPERTS_BLOCK: gl.constexpr, ROWS: gl.constexpr, NUM_OUTS: gl.constexpr
) -> gl.tuple:
    """A program's expert (EXPERTS: none), its first row, where the expert's end, and its tile of the matrix.

    Experts one after the other, and in each, tiles of rows next to each other for one tile of its matrix.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    program = gl.program_id(0)
    index = gl.arange(0, EXPERTS_BLOCK, layout=LINE)
    known = index < EXPERTS
    end = gl.load(ends + index, mask=known, other=0)
    begin = gl.load(ends + index - 1, mask=known & (index > 0), other=0)
    row_tiles = gl.where(known, (end - begin + ROWS - 1) // ROWS, 0)
    last = gl.associative_scan(row_tiles, 0, _plus) * NUM_OUTS
    expert = gl.sum(((last <= program) & known).to(gl.int32), axis=0)
    mine = index == expert
    count = gl.sum(gl.where(mine, row_tiles, 0), axis=0)
    local = program - gl.sum(gl.where(mine, last - row_tiles * NUM_OUTS, 0), axis=0)
    first = gl.sum(gl.where(mine, begin, 0), axis=0)
    stop = gl.sum(gl.where(mine, end, 0), axis=0)
    safe = gl.maximum(count, 1)
    return expert, first + local % safe * ROWS, stop, local // safe


@gluon.jit
def _row_tiles(ends: gl.tensor, index: gl.tensor, EXPERTS: gl.constexpr, ROWS: gl.constexpr) -> gl.tuple:
    """Of each of these experts: its first row, its end, and its tiles of rows."""
    end = gl.load(ends + index, mask=index < EXPERTS, other=0)
    begin = gl.load(ends + index - 1, mask=(index < EXPERTS) & (index > 0), other=0)
    return begin, end, gl.where(index < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)


@gluon.jit
def _plan(ends: gl.tensor, EXPERTS: gl.constexpr, ROWS: gl.constexpr, NUM_OUTS: gl.constexpr) -> gl.tuple:
    """Of programs that stay: tiles of full rounds, how often each other tile is halved, how many units that makes.

    A last round that is at most half or a quarter full is of halves or quarters of its tiles' rows: the same sums, and
    no program waits for another's part of one. A lane for an expert, in each warp: none waits for another.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout=LINE)
    row_tiles = gl.zeros([32], gl.int32, LINE)
    for some in range(0, EXPERTS, 32):
        row_tiles += _row_tiles(ends, some + lane, EXPERTS, ROWS)[2]
    num_tiles = gl.sum(row_tiles, axis=0) * NUM_OUTS
    programs = gl.num_programs(0)
    rest = num_tiles % programs
    halvings = (rest * 2 <= programs).to(gl.int32) + (rest * 4 <= programs).to(gl.int32)
    return num_tiles - rest, halvings, num_tiles - rest + (rest << halvings)


@gluon.jit
def _unit(
    unit: gl.tensor,
    plan: gl.tuple,
    ends: gl.tensor,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    ROWS: gl.constexpr,
) -> gl.tuple:
    """A tile's or piece's first row, how many rows (a piece: maybe none), its first of all matrices' and of its own's.

    In the order of `_tile`, the pieces of a tile one after the other.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    NUM_OUTS: gl.constexpr = WIDTH // OUTS
    full, halvings, _ = plan
    late = gl.maximum(unit - full, 0)
    number = gl.minimum(unit, full) + (late >> halvings)
    lane = gl.arange(0, 32, layout=LINE)
    expert = gl.zeros([32], gl.int32, LINE)
    first, stop, count, local = expert, expert, expert, expert
    before = number * 0
    for some in range(0, EXPERTS, 32):
        begin, end, row_tiles = _row_tiles(ends, some + lane, EXPERTS, ROWS)
        last = before + gl.associative_scan(row_tiles, 0, _plus)
        inside = number - (last - row_tiles) * NUM_OUTS
        mine = (inside >= 0) & (inside < row_tiles * NUM_OUTS)
        expert = gl.where(mine, some + lane, expert)
        first = gl.where(mine, begin, first)
        stop = gl.where(mine, end, stop)
        count = gl.where(mine, row_tiles, count)
        local = gl.where(mine, inside, local)
        before += gl.sum(row_tiles, axis=0)
    safe = gl.maximum(gl.sum(count, axis=0), 1)
    inside = gl.sum(local, axis=0)
    rows = gl.where(unit < full, ROWS, ROWS >> halvings)
    begin = gl.sum(first, axis=0) + inside % safe * ROWS + (late - (late >> halvings << halvings)) * rows
    tile = inside // safe * OUTS
    return begin, gl.minimum(gl.sum(stop, axis=0) - begin, rows), gl.sum(expert, axis=0) * WIDTH + tile, tile


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
def _feed(
    boxes: gl.tuple,
    w_boxes: gl.tensor,
    places: gl.tuple,
    first: gl.tensor,
    left: gl.tensor,
    w_first: gl.tensor,
    done: gl.tensor,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy what each turn multiplies to where an earlier one is done with, by one warp.

    boxes: of all, half and a quarter of the rows.  left: rows that there are from the first on.
    done: turns of earlier tiles.
    """
    x_smem, w_smem, full, empty = places
    W_BYTES: gl.constexpr = OUTS * WORDS_A_ROW * 4
    for turn in range(SIZE // DEPTH):
        past = done + turn
        slot = past % STAGES
        if past >= STAGES:
            mbarrier.wait(empty.index(slot), (past // STAGES - 1) & 1)
        flag = full.index(slot)
        x_slot = x_smem.index(slot)
        if left > ROWS // 2:
            mbarrier.expect(flag, W_BYTES + ROWS * DEPTH)
            tma.async_copy_global_to_shared(boxes[0], [first, turn * DEPTH], flag, x_slot)
        elif left > ROWS // 4:
            mbarrier.expect(flag, W_BYTES + ROWS // 2 * DEPTH)
            tma.async_copy_global_to_shared(boxes[1], [first, turn * DEPTH], flag, x_slot.slice(0, ROWS // 2, dim=0))
        else:
            mbarrier.expect(flag, W_BYTES + ROWS // 4 * DEPTH)
            tma.async_copy_global_to_shared(boxes[2], [first, turn * DEPTH], flag, x_slot.slice(0, ROWS // 4, dim=0))
        at = turn * WORDS_A_ROW
        tma.async_copy_global_to_shared(w_boxes, [w_first, at], flag, w_smem.index(2 * slot))
        tma.async_copy_global_to_shared(w_boxes, [w_first + OUTS // 2, at], flag, w_smem.index(2 * slot + 1))


@gluon.jit
def _multiply(  # noqa: PLR0915 - one pass over the columns
    given: gl.tuple,
    places: gl.tuple,
    first: gl.tensor,
    left: gl.tensor,
    w_first: gl.tensor,
    column_first: gl.tensor,
    done: gl.tensor,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """So many rows times half of a tile of their expert's matrix, by four warps."""
    x_scale, scale, largest, powers, result, positions = given
    x_smem, w_smem, full, empty = places
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
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 4)
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])

    mine = w_first.to(gl.int64) + PART * HALF
    out = gl.arange(0, HALF, layout=gl.SliceLayout(1, HALVES))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, HALVES))
    # Powers of two between a value times its scale and what its bytes say.
    base = 6 - gl.load(largest + mine + out).to(gl.int32)
    scale_at = scale + mine * (SIZE // 32)
    scale_place = out[:, None] * (SIZE // 32) + half[None, :]
    low_scale = gl.load(scale_at + scale_place)
    high_scale = gl.load(scale_at + 2 + scale_place)
    acc = gl.zeros([HALF, ROWS], gl.float32, PRODUCTS)
    for turn in range(TURNS):
        slot = (done + turn) % STAGES
        mbarrier.wait(full.index(slot), ((done + turn) // STAGES) & 1)
        packed = _by_product(w_smem.index(2 * slot + PART).load(LOADED))
        low, high = low_scale.to(gl.int32) + base[:, None], high_scale.to(gl.int32) + base[:, None]
        low_near, high_near = _spread(LOW + low * ONE_LOW, WORDS), _spread(HIGH + low * ONE_HIGH, WORDS)
        low_far, high_far = _spread(LOW + high * ONE_LOW, WORDS), _spread(HIGH + high * ONE_HIGH, WORDS)
        x_slot = x_smem.index(slot).slice(0, ROWS, dim=0)
        # The units multiply what is unpacked while the next is. Each has names of its own: a wait must hold them all.
        four = gl.convert_layout(packed[0], WORDS, assert_trivial=True)
        a0, b0 = e2m1_halves(four, low_near, high_near, low_far, high_far)
        columns = x_slot.slice(0, 32, dim=1).permute((1, 0))
        acc = warpgroup_mma(_operand(a0, b0, OPERAND), columns, acc, is_async=True)
        four = gl.convert_layout(packed[1], WORDS, assert_trivial=True)
        a1, b1 = e2m1_halves(four, low_near, high_near, low_far, high_far)
        columns = x_slot.slice(32, 32, dim=1).permute((1, 0))
        acc = warpgroup_mma(_operand(a1, b1, OPERAND), columns, acc, is_async=True)
        four = gl.convert_layout(packed[2], WORDS, assert_trivial=True)
        a2, b2 = e2m1_halves(four, low_near, high_near, low_far, high_far)
        columns = x_slot.slice(64, 32, dim=1).permute((1, 0))
        acc = warpgroup_mma(_operand(a2, b2, OPERAND), columns, acc, is_async=True)
        four = gl.convert_layout(packed[3], WORDS, assert_trivial=True)
        a3, b3 = e2m1_halves(four, low_near, high_near, low_far, high_far)
        columns = x_slot.slice(96, 32, dim=1).permute((1, 0))
        acc = warpgroup_mma(_operand(a3, b3, OPERAND), columns, acc, is_async=True)
        later = gl.minimum(turn + 1, TURNS - 1) * 4
        low_scale = gl.load(scale_at + later + scale_place)
        high_scale = gl.load(scale_at + later + 2 + scale_place)
        # The operands' registers are these words'; a wait takes no values of eight bits.
        acc, a0, b0, a1, b1, a2, b2, a3, b3 = warpgroup_mma_wait(0, deps=[acc, a0, b0, a1, b1, a2, b2, a3, b3])
        mbarrier.arrive(empty.index(slot), count=1)
    made_out = gl.arange(0, HALF, layout=gl.SliceLayout(1, PRODUCTS))
    made_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCTS))
    acc *= gl.load(powers + mine + made_out)[:, None]
    acc *= gl.load(x_scale + gl.minimum(first + made_row, positions - 1))[None, :]
    values = gl.convert_layout(acc.to(gl.bfloat16), STORED)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
    place = result + first.to(gl.int64) * WIDTH + column_first + PART * HALF
    # Rows past the expert's are another's, or none: multiplied, and not stored.
    gl.store(place + row[None, :] * WIDTH + column[:, None], values, mask=(row < left)[None, :])


@gluon.jit
def _part(
    given: gl.tuple,
    places: gl.tuple,
    first: gl.tensor,
    left: gl.tensor,
    w_first: gl.tensor,
    column_first: gl.tensor,
    done: gl.tensor,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """As many rows as there are, in halves."""
    if left > ROWS // 2:
        _multiply(given, places, first, left, w_first, column_first, done, PART, SIZE, WIDTH, ROWS, STAGES)
    elif left > ROWS // 4:
        _multiply(given, places, first, left, w_first, column_first, done, PART, SIZE, WIDTH, ROWS // 2, STAGES)
    else:
        _multiply(given, places, first, left, w_first, column_first, done, PART, SIZE, WIDTH, ROWS // 4, STAGES)


@gluon.jit
def _stay_and_multiply(
    given: gl.tuple,
    places: gl.tuple,
    ends: gl.tensor,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Half of each tile that a program makes."""
    plan = _plan(ends, EXPERTS, ROWS, WIDTH // OUTS)
    done = 0
    for unit in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        first, left, w_first, column_first = _unit(unit, plan, ends, WIDTH, EXPERTS, ROWS)
        if left > 0:
            _part(given, places, first, left, w_first, column_first, done, PART, SIZE, WIDTH, ROWS, STAGES)
            done += SIZE // DEPTH


@gluon.jit
def bring(at: gl.tensor) -> None:
    """The 64 bytes at each of these addresses into the L2: in bulk, lanes would ask one after the other."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _bring_scales(given: gl.tuple, w_first: gl.tensor, SIZE: gl.constexpr) -> None:
    """Of a tile of a matrix, those of groups and of rows."""
    _, scale, largest, powers, _, _ = given
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    PARTS: gl.constexpr = OUTS * SIZE // 32 // 64
    first = w_first.to(gl.int64)
    for some in gl.static_range(0, PARTS, 32):
        bring(scale + first * (SIZE // 32) + gl.minimum(some + lane, PARTS - 1) * 64)
    bring(powers + first + lane % 8 * 16)
    bring(largest + first + lane % 2 * 64)


@gluon.jit
def _stay_and_feed(
    given: gl.tuple,
    boxes: gl.tuple,
    w_boxes: gl.tensor,
    places: gl.tuple,
    ends: gl.tensor,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALES_AHEAD: gl.constexpr,
) -> None:
    """What they multiply, ahead of them into the next tile."""
    plan = _plan(ends, EXPERTS, ROWS, WIDTH // OUTS)
    done = 0
    for unit in range(gl.program_id(0), plan[2], gl.num_programs(0)):
        first, left, w_first, _ = _unit(unit, plan, ends, WIDTH, EXPERTS, ROWS)
        if left > 0:
            if SCALES_AHEAD:
                _bring_scales(given, w_first, SIZE)
            _feed(boxes, w_boxes, places, first, left, w_first, done, SIZE, ROWS, STAGES)
            done += SIZE // DEPTH


@gluon.jit
def _rooms(ROWS: gl.constexpr, STAGES: gl.constexpr) -> gl.tuple:
    """Where turns are copied to, and what says that each is there, or done with."""
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, DEPTH], _ROWS)
    w_smem = gl.allocate_shared_memory(gl.int32, [2 * STAGES, OUTS // 2, WORDS_A_ROW], _WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    return x_smem, w_smem, full, empty


@gluon.jit
def packed_kernel(
    x_boxes: gl.tensor,
    half_boxes: gl.tensor,
    quarter_boxes: gl.tensor,
    w_boxes: gl.tensor,
    x_scale: gl.tensor,
    scale: gl.tensor,
    largest: gl.tensor,
    powers: gl.tensor,
    ends: gl.tensor,
    result: gl.tensor,
    positions: gl.tensor,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    EXPERTS_BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    STAYS: gl.constexpr,
    SCALES_AHEAD: gl.constexpr,
) -> None:
    given = (x_scale, scale, largest, powers, result, positions)
    boxes = (x_boxes, half_boxes, quarter_boxes)
    if STAYS:
        places = _rooms(ROWS, STAGES)
        gl.warp_specialize(
            [
                (_stay_and_multiply, (given, places, ends, 0, SIZE, WIDTH, EXPERTS, ROWS, STAGES)),
                (_stay_and_multiply, (given, places, ends, 1, SIZE, WIDTH, EXPERTS, ROWS, STAGES)),
                (
                    _stay_and_feed,
                    (given, boxes, w_boxes, places, ends, SIZE, WIDTH, EXPERTS, ROWS, STAGES, SCALES_AHEAD),
                ),
            ],
            [4, 1],
            [REGISTERS, _STAYING_REGISTERS],
        )
    else:
        expert, first, stop, tile = _tile(ends, EXPERTS, EXPERTS_BLOCK, ROWS, WIDTH // OUTS)
        if expert < EXPERTS:
            w_first, column_first, left = expert * WIDTH + tile * OUTS, tile * OUTS, stop - first
            places = _rooms(ROWS, STAGES)
            gl.warp_specialize(
                [
                    (_part, (given, places, first, left, w_first, column_first, 0, 0, SIZE, WIDTH, ROWS, STAGES)),
                    (_part, (given, places, first, left, w_first, column_first, 0, 1, SIZE, WIDTH, ROWS, STAGES)),
                    (_feed, (boxes, w_boxes, places, first, left, w_first, 0, SIZE, ROWS, STAGES)),
                ],
                [4, 1],
                [REGISTERS, _FEEDING_REGISTERS],
            )

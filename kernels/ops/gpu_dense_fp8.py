"""How are rows multiplied on Hopper's fp8 units by a matrix of many rows and few columns?

The library's tiles are 128 by 128, so a step of 256 rows brings each weight from the L2 twice. Here a tile is 256 rows
of activations by 128 of the matrix; programs stay, one a multiprocessor, and the tensor engine brings the next tile's
operands while one is stored: the shorter the sums, the more that is worth.

The units add a whole row of columns with about 14 bits, as in `gpu_grouped_packed`: the nearer to exact sums the fewer
columns there are (1.8e-3 of 1,280, 2.6e-3 of 8,192, where rounding to bf16 alone makes 1.7e-3, and rounding rows to fp8
before it 2e-2). A row's sum does not depend on others, so this is also what the invariant mode multiplies by.
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
from triton.language.extra.cuda import gdc_wait

from kernels.ops.gpu_launch import check, is_hopper, multiprocessors, runs_kernels, tiles
from kernels.ops.gpu_overlap import early, overlaps

_ROWS, _OUTS, _DEPTH = (256, 128, 64), 128, 128
"""Rows of activations in a tile are the columns of one instruction: a row's bits are the same in each."""
OUTS = gl.constexpr(_OUTS)
"""Rows of the matrix in a tile: two groups of four warps multiply half of them each."""
DEPTH = gl.constexpr(_DEPTH)
"""Columns of a turn of the loop: four instructions of 32."""
WARPS = 4
"""Of each of the two groups that multiply."""
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_ROOM = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Where half of a group's results turn, on their way out."""
_FLAGS = gl.constexpr(mbarrier.MBarrierLayout())
_REGISTERS, _FEEDING_REGISTERS = gl.constexpr(232), gl.constexpr(24)
_FULL_SHARE = 0.9
"""Of the multiprocessors' rounds that tiles must fill."""
_MOST_TURNS = 10
"""Of a sum that is worth it: of 1,280 columns (wq_b) on an H200 256 rows took 20.8 us where the library takes 24.3, and
16,384 rows 1,094 us, not 1,188; of 8,192 columns (wo_b) these took 1,132 us, not 959."""
_MANY_ROWS = 2048
"""Beside which half a tile of rows that are nobody's, where the library's smaller ones have none, is little."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut."""

    stages: int = 4
    """Turns whose operands have room in shared memory, 48 KiB each."""
    programs: int = 0
    """At most; 0: one for each multiprocessor."""


CUT = Cut()


def multiply(
    x: Tensor, x_scale: Tensor, matrix: Tensor, scale: Tensor, *, cut: Cut = CUT, follows_rows: bool = False
) -> Tensor:
    """Rows under one scale each times a matrix under one scale a row: [rows, in] -> [rows, out] bf16.

    x: [rows, in] e4m3.  x_scale: [rows] fp32.  matrix: [out, in] e4m3.  scale: [out] fp32.  Scales are powers of two;
    there is a row.  follows_rows: whatever was launched last on this stream, the matrix and its scales were there
    before: their first turns are read while it ends.
    """
    (rows, size), out = x.shape, len(matrix)
    check(matrix.shape[1] == size and len(x_scale) == rows and len(scale) == out, "rows are the matrix's, with scales")
    check(all(each.is_contiguous() for each in (x, x_scale, matrix, scale)), "all lie end to end")
    check(_is_whole(out, size), f"a matrix is of {_OUTS}s by {_DEPTH}s")
    if not runs_kernels(x):
        return ((x.float() * x_scale[:, None]) @ (matrix.float() * scale[:, None]).t()).bfloat16()
    made = torch.empty(rows, out, dtype=torch.bfloat16, device=x.device)
    most = cut.programs or multiprocessors(x.device)
    in_tile = rows_of_tile(rows, out // _OUTS, most)
    row_tiles = tiles(rows, in_tile)
    num_tiles = row_tiles * (out // _OUTS)
    at_once = min(most, num_tiles)
    # As few programs as need no more rounds: of 256 tiles 128 have two each, and none waits for another's second.
    programs = tiles(num_tiles, tiles(num_tiles, at_once))
    overlap = follows_rows and overlaps(x)
    dense_kernel[(programs,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [in_tile, _DEPTH], _SHARED.value),
        TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [_OUTS, _DEPTH], _SHARED.value),
        x_scale,
        scale,
        made,
        rows,
        row_tiles,
        num_tiles,
        programs,
        out,
        SIZE=size,
        ROWS=in_tile,
        STAGES=cut.stages,
        OVERLAP=overlap,
        num_warps=WARPS,
        **early(overlap),
    )
    return made


def rows_of_tile(rows: int, out_tiles: int, programs: int) -> int:
    """How many a program takes at a time: most, unless half of a tile is nobody's, or of the programs have none."""
    for in_tile in _ROWS:
        if rows > in_tile // 2 and 2 * out_tiles * tiles(rows, in_tile) > programs:
            return in_tile
    return _ROWS[-1]


def fits(device: torch.device, out: int, size: int) -> bool:
    """Is this the GPU, and is this matrix one, that the kernel is made for?"""
    return device.type == "cuda" and is_hopper(device) and _is_whole(out, size)


def _is_whole(out: int, size: int) -> bool:
    return out % _OUTS == 0 and size % _DEPTH == 0


def is_worth(x: Tensor, out: int) -> bool:
    """Is this the GPU, and are these rows, [rows, in], and the matrix's of those for which the kernel measured faster?

    Short sums, rows that fill more than half of their last tile or are many, and tiles that fill the GPU. What others
    win if they are cut along their columns until they do, meeting costs them (bench/NOTES.md).
    """
    rows, size = x.shape
    if not x.is_cuda or not is_hopper(x.device) or not _is_whole(out, size) or size > _MOST_TURNS * _DEPTH:
        return False
    if rows < _MANY_ROWS and -rows % _ROWS[0] >= _ROWS[0] // 2:
        return False
    at_once, num_tiles = multiprocessors(x.device), tiles(rows, _ROWS[0]) * (out // _OUTS)
    return num_tiles >= _FULL_SHARE * at_once * tiles(num_tiles, at_once)


@gluon.jit
def _copy_matrix(w_boxes: gl.tensor, places: gl.tuple, corner: gl.tuple, slot: gl.tensor, ROWS: gl.constexpr) -> None:
    """A turn's part of the matrix, of which a flag then waits for the rows' as well."""
    _, w_smem, _, full, _ = places
    mbarrier.expect(full.index(slot), (ROWS + OUTS) * DEPTH)
    tma.async_copy_global_to_shared(w_boxes, [corner[0], corner[1]], full.index(slot), w_smem.index(slot))


@gluon.jit
def _feed(
    boxes: gl.tuple,
    places: gl.tuple,
    walk: gl.tuple,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Copy what each turn multiplies to where an earlier one is done with, tile after tile, by one warp."""
    x_boxes, w_boxes = boxes
    program, row_tiles, num_tiles, programs = walk
    x_smem, _, _, full, empty = places
    AHEAD: gl.constexpr = min(STAGES, SIZE // DEPTH) if OVERLAP else 0
    if OVERLAP:
        for slot in range(AHEAD):
            _copy_matrix(w_boxes, places, (program // row_tiles * OUTS, slot * DEPTH), slot, ROWS)
        gdc_wait()
    turn = 0
    for tile in range(program, num_tiles, programs):
        first, w_first = tile % row_tiles * ROWS, tile // row_tiles * OUTS
        for depth in range(0, SIZE, DEPTH):
            slot = turn % STAGES
            if turn >= STAGES:
                mbarrier.wait(empty.index(slot), (turn // STAGES - 1) & 1)
            if not OVERLAP or turn >= AHEAD:
                _copy_matrix(w_boxes, places, (w_first, depth), slot, ROWS)
            tma.async_copy_global_to_shared(x_boxes, [first, depth], full.index(slot), x_smem.index(slot))
            turn += 1


@gluon.jit
def _multiply(
    given: gl.tuple,
    places: gl.tuple,
    walk: gl.tuple,
    width: gl.tensor,
    PART: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Half of each tile's rows of the matrix, by four warps."""
    x_scale, scale, result, rows = given
    x_smem, w_smem, rooms, full, empty = places
    program, row_tiles, num_tiles, programs = walk
    WIDE: gl.constexpr = OUTS // 2
    LONG: gl.constexpr = ROWS // 2
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, LONG, layout=gl.SliceLayout(1, STORED))
    out = gl.arange(0, WIDE, layout=gl.SliceLayout(0, STORED))
    room, turn = rooms.index(PART), 0
    if OVERLAP:
        gdc_wait()
    for tile in range(program, num_tiles, programs):
        first, column = tile % row_tiles * ROWS, tile // row_tiles * OUTS + PART * WIDE
        outs = gl.load(scale + column + out)
        early, late = first + row, first + LONG + row
        early_scale = gl.load(x_scale + gl.minimum(early, rows - 1))
        late_scale = gl.load(x_scale + gl.minimum(late, rows - 1))
        # Nothing is made of scales before the turns: nobody waits for them.
        acc = gl.zeros([WIDE, ROWS], gl.float32, PRODUCTS)
        for depth in range(0, SIZE, DEPTH):
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            matrix = w_smem.index(slot).slice(PART * WIDE, WIDE, dim=0)
            acc = warpgroup_mma(matrix, x_smem.index(slot).permute((1, 0)), acc, is_async=True)
            # The units have this turn's instructions before those of the turn before are waited for.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if depth > 0:
                mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
            turn += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
        parts = acc.to(gl.bfloat16).reshape([WIDE, 2, LONG])
        first_rows, last_rows = gl.split(parts.permute((0, 2, 1)))
        place = result + column + out[None, :]
        _store(first_rows, room, early_scale, outs, place, early, rows, width, STORED)
        _store(last_rows, room, late_scale, outs, place, late, rows, width, STORED)


@gluon.jit
def _store(
    part: gl.tensor,
    room: gl.tensor,
    row_scale: gl.tensor,
    outs: gl.tensor,
    place: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    width: gl.tensor,
    STORED: gl.constexpr,
) -> None:
    """Half of a tile's rows, [outs, rows] bf16, to their places, times their scales.

    Rounding comes before scales, which is the same for powers of two and moves half the bytes. Rows past the last one
    were multiplied as zeros, and are not stored.
    """
    room.permute((1, 0)).store(part)
    values = room.load(STORED) * outs.to(gl.bfloat16)[None, :] * row_scale.to(gl.bfloat16)[:, None]
    gl.store(place + row.to(gl.int64)[:, None] * width, values, mask=(row < rows)[:, None])


@gluon.jit(do_not_specialize=["rows", "row_tiles", "num_tiles", "programs"])
def dense_kernel(
    x_boxes: gl.tensor,
    w_boxes: gl.tensor,
    x_scale: gl.tensor,
    scale: gl.tensor,
    result: gl.tensor,
    rows: gl.tensor,
    row_tiles: gl.tensor,
    num_tiles: gl.tensor,
    programs: gl.tensor,
    width: gl.tensor,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, DEPTH], _SHARED)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, OUTS, DEPTH], _SHARED)
    rooms = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS // 2, OUTS // 2], _ROOM)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _FLAGS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    program = gl.program_id(0)
    places = (x_smem, w_smem, rooms, full, empty)
    given = (x_scale, scale, result, rows)
    walk = (program, row_tiles, num_tiles, programs)
    gl.warp_specialize(
        [
            (_multiply, (given, places, walk, width, 0, SIZE, ROWS, STAGES, OVERLAP)),
            (_multiply, (given, places, walk, width, 1, SIZE, ROWS, STAGES, OVERLAP)),
            (_feed, ((x_boxes, w_boxes), places, walk, SIZE, ROWS, STAGES, OVERLAP)),
        ],
        [4, 1],
        [_REGISTERS, _FEEDING_REGISTERS],
    )

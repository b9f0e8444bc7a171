"""Which rows, of which expert, does a program of the packed experts' product take, and how is their number cut?"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECES = (256, 128, 64, 32, 16)
"""Rows of one product of the units."""


def can_be_widths(widths: tuple[int, ...]) -> bool:
    """Do layouts of products and boxes have them?"""
    return bool(
        widths
        and list(widths) == sorted(set(widths))
        and widths[-1] in (*PIECES, *(256 + piece for piece in PIECES[1:]))
        and all(width > 0 and width % PIECES[-1] == 0 for width in widths)
    )


@gluon.constexpr_function
def num_pieces(rows: int) -> int:
    """Powers of two whose sum it is."""
    return rows.bit_count()


@gluon.constexpr_function
def rows_of(rows: int, at: int) -> int:
    """Rows of one of them, the largest first."""
    return [1 << bit for bit in range(rows.bit_length() - 1, -1, -1) if rows >> bit & 1][at]


@gluon.constexpr_function
def rows_before(rows: int, at: int) -> int:
    """Rows of those that are before it."""
    size: int = rows_of(rows, at)
    return rows // (2 * size) * (2 * size)


@gluon.constexpr_function
def rows_past(rows: int) -> int:
    """How many are past the 256 of the largest piece."""
    return max(rows - 256, 0)


@gluon.constexpr_function
def box_of(rows: int) -> int:
    """Which of the boxes has so many."""
    return 9 - rows.bit_length()


@gluon.constexpr_function
def num_widths(widths: tuple[int, ...]) -> int:
    return len(widths)


@gluon.constexpr_function
def width_at(widths: tuple[int, ...], index: int) -> int:
    return widths[index]


@gluon.jit
def _plus(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def width_of(left: gl.tensor, WIDTHS: gl.constexpr) -> gl.tensor:
    """Which is the least that so many rows need."""
    which = left * 0
    for at in gl.static_range(num_widths(WIDTHS) - 1):
        which += (left > width_at(WIDTHS, at)).to(gl.int32)
    return which


@gluon.jit
def tile_of(
    ends: gl.tensor,
    EXPERTS: gl.constexpr,
    EXPERTS_BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    LEAST: gl.constexpr,
    NUM_OUTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SHARING_ROUNDS: gl.constexpr,
) -> gl.tuple:
    """A program's first row, how many (none: nothing to do), their expert, and its tile of the matrix.

    Experts one after the other, and in each, tiles of rows next to each other for one tile of its matrix. Tiles of a
    last round that is at most half or a quarter full are cut along their rows: no sum is, so that bits are the same.
    Up to 32 experts, each warp finds it alone.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    program = gl.program_id(0)
    index = gl.arange(0, EXPERTS_BLOCK, layout=LINE)
    known = index < EXPERTS
    end = gl.load(ends + index, mask=known, other=0)
    begin = gl.load(ends + index - 1, mask=known & (index > 0), other=0)
    row_tiles = gl.where(known, (end - begin + ROWS - 1) // ROWS, 0)
    number, part, halvings = program, program * 0, program * 0
    if SHARING_ROUNDS:
        num_tiles = gl.sum(row_tiles, axis=0) * NUM_OUTS
        rest = gl.where(num_tiles <= SHARING_ROUNDS * PROGRAMS, num_tiles % PROGRAMS, PROGRAMS)
        late = program - (num_tiles - rest)
        if late >= 0:
            halvings += (rest * 2 <= PROGRAMS).to(gl.int32) + (rest * 4 <= PROGRAMS).to(gl.int32)
            number += (late >> halvings) - late
            part += late - (late >> halvings << halvings)
    inside = number - (gl.associative_scan(row_tiles, 0, _plus) - row_tiles) * NUM_OUTS
    mine = (inside >= 0) & (inside < row_tiles * NUM_OUTS)
    expert = gl.sum(gl.where(mine, index, 0), axis=0)
    count = gl.sum(gl.where(mine, row_tiles, 0), axis=0)
    local = gl.sum(gl.where(mine, inside, 0), axis=0)
    first = gl.sum(gl.where(mine, begin, 0), axis=0)
    stop = gl.sum(gl.where(mine, end, 0), axis=0)
    safe = gl.maximum(count, 1)
    first += local % safe * ROWS
    left = gl.minimum(stop - first, ROWS)
    rows = gl.maximum((left + (1 << halvings) - 1) >> halvings, LEAST)
    return first + part * rows, gl.minimum(left - part * rows, rows), expert, local // safe

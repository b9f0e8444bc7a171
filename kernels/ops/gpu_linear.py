"""How are rows multiplied by a weight on a GPU: by the library, or by fixed tiles of our own?

The library is fastest for many rows, but it picks another algorithm for another row count. Our tiles add up the
products of an output in ascending order of K, whatever the tile's rows and columns, so a row's bits do not depend on
the others; for few rows, where only the weight's bytes count, they are also the faster of the two.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import runs_kernels
from kernels.ops.gpu_overlap import let_next_start, overlaps, wait_alone
from kernels.ops.gpu_swiglu import silu_times, twin_swiglu

_GROUP_ROWS = 8
_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of one program's share, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Frozen for SM90, measured with bench/gpu_tune.py; every tile gives the same bits (bench/gpu_check.py).
_FEW = Tile(16, 64, 128, 4, 5)
_BATCH_WIDE, _BATCH_NARROW = Tile(64, 64, 128, 4, 4), Tile(64, 32, 128, 4, 5)
_LARGE_WIDE, _LARGE_NARROW = Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4)
_CHUNK = Tile(256, 128, 64, 8, 3)
_WIDE_COLUMNS = 6144
MOST_GATED_ROWS = 256
"""From there on the gate is not worth fusing: two accumulators leave room for small tiles only."""


def tile_for(rows: int, columns: int) -> Tile:
    """The frozen choice for that many rows and columns of the output."""
    if rows <= 16:
        return _FEW
    is_wide = columns >= _WIDE_COLUMNS
    if rows <= 64:
        return _BATCH_WIDE if is_wide else _BATCH_NARROW
    if rows <= 256:
        return _LARGE_WIDE if is_wide else _LARGE_NARROW
    return _CHUNK


def parts_for(rows: int, columns: int, depth: int) -> int:
    """Into how many parts few rows' depth is worth cutting: about two programs for each multiprocessor."""
    tile = tile_for(rows, columns)
    wanted = _PROGRAMS // -(-columns // tile.columns)
    return max(1, min(wanted, depth // (4 * tile.depth)))


def library_linear(x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
    """X @ weight.T by the library.  Returns bf16, or fp32 when `wide`."""
    if wide and x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T if wide else x @ weight.T


def linear(x: Tensor, weight: Tensor, *, wide: bool = False, tile: Tile | None = None) -> Tensor:
    """X @ weight.T, a row's bits the same in any batch.

    x: [rows, in] bf16, contiguous rows.  weight: [out, in] bf16, contiguous.  Sums are fp32.  Returns [rows, out] bf16,
    or fp32 when `wide`.
    """
    _check(x, weight)
    dtype = torch.float32 if wide else x.dtype
    if not runs_kernels(x):
        return twin_linear(x, weight, wide=wide)
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    chosen = tile or tile_for(len(x), len(weight))
    if len(x):
        _launch(x, weight, out, chosen, gated=False)
    return out


def linear_parts(x: Tensor, weight: Tensor, *, parts: int, tile: Tile | None = None) -> Tensor:
    """X @ weight.T with the depth cut into parts, each of which programs of its own sum: whoever reads them adds them.

    For few rows and columns, where one program a tile leaves most of the GPU idle.  Returns [parts, rows, out] fp32.
    """
    _check(x, weight)
    chosen = tile or tile_for(len(x), len(weight))
    share = triton.cdiv(triton.cdiv(x.shape[1], parts), chosen.depth) * chosen.depth
    if not runs_kernels(x):
        pieces = zip(torch.split(x.float(), share, dim=1), torch.split(weight.float(), share, dim=1), strict=True)
        return torch.stack([a @ b.T for a, b in pieces])
    out = torch.empty(triton.cdiv(x.shape[1], share), len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, chosen, gated=False, share=share)
    return out


def twin_linear(x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
    """`linear` in plain torch."""
    return (x.float() @ weight.float().T).to(torch.float32 if wide else x.dtype)


def linear_swiglu(x: Tensor, weight: Tensor, *, tile: Tile | None = None) -> Tensor:
    """swiglu(linear(x, weight)) without the round trip, in the same bits.

    weight: [2 * ffn, in], the gate's rows first.  Returns [rows, ffn] bf16.
    """
    _check(x, weight)
    if not runs_kernels(x):
        return twin_swiglu(twin_linear(x, weight))
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    if len(x):
        _launch(x, weight, out, tile or _gated_tile(len(x)), gated=True)
    return out


def _gated_tile(rows: int) -> Tile:
    return _FEW if rows <= 16 else _BATCH_WIDE if rows <= 64 else _LARGE_WIDE


def _check(x: Tensor, weight: Tensor) -> None:
    if x.shape[1] != weight.shape[1] or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"cannot multiply rows of {list(x.shape)} by a weight of {list(weight.shape)}")


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, *, gated: bool, share: int | None = None) -> None:
    """share: depth of a part, a multiple of the tile's; None is all."""
    rows, depth = x.shape
    columns, overlap = out.shape[-1], overlaps(x)
    parts = 1 if share is None else len(out)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), parts)
    _linear_kernel[grid](
        x,
        weight,
        out,
        rows,
        columns,
        depth,
        x.stride(0),
        share or depth,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP_ROWS=_GROUP_ROWS,
        WHOLE=depth % tile.depth == 0,
        GATED=gated,
        PARTS=parts,
        UPCAST=not x.is_cuda,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    # Triton's interpreter multiplies bf16 wrongly.
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, acc)


@triton.jit
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    share: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Programs that run at the same time share rows and columns: they meet in the L2 cache.
    program = tl.program_id(0)
    tiles_down = tl.cdiv(rows, ROWS)
    tiles_across = tl.cdiv(columns, COLUMNS)
    group = program // (GROUP_ROWS * tiles_across)
    group_size = tl.minimum(tiles_down - group * GROUP_ROWS, GROUP_ROWS)
    within = program % (GROUP_ROWS * tiles_across)
    row = (group * GROUP_ROWS + within % group_size) * ROWS + tl.arange(0, ROWS)
    column = (within // group_size) * COLUMNS + tl.arange(0, COLUMNS)
    begin = 0
    end = depth
    if PARTS > 1:
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, depth)
    # Beyond the end the last one is computed again, and not stored.
    a_at = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * row_stride
    b_at = weight + tl.minimum(column, columns - 1).to(tl.int64)[None, :] * depth
    k = tl.arange(0, DEPTH)
    acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    if GATED:
        up_acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        up_at = b_at + (column * 0 + columns).to(tl.int64)[None, :] * depth
    wait_alone(OVERLAP)
    for start in range(begin, end, DEPTH):
        if WHOLE:
            a = tl.load(a_at + (start + k)[None, :])
            b = tl.load(b_at + (start + k)[:, None])
        else:
            a = tl.load(a_at + (start + k)[None, :], mask=(start + k < depth)[None, :], other=0.0)
            b = tl.load(b_at + (start + k)[:, None], mask=(start + k < depth)[:, None], other=0.0)
        acc = _multiply(a, b, acc, UPCAST)
        if GATED:
            if WHOLE:
                up = tl.load(up_at + (start + k)[:, None])
            else:
                up = tl.load(up_at + (start + k)[:, None], mask=(start + k < depth)[:, None], other=0.0)
            up_acc = _multiply(a, up, up_acc, UPCAST)
    let_next_start(OVERLAP)
    if GATED:
        kind = out.dtype.element_ty
        acc = silu_times(acc.to(kind).to(tl.float32), up_acc.to(kind).to(tl.float32))
    if PARTS > 1:
        out += tl.program_id(1).to(tl.int64) * rows * columns
    out_at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])

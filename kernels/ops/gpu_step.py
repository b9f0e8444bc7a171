"""How does the device keep a batch from step to step, when the host sends it only what changed?

The host owns a mirror of every table row and sends single entries. A token the host does not know yet (its step
still runs) is named by where the sampler will have put it.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import power_of_two, runs_kernels

_BLOCK = 256
_STRIDE = 3 * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 64)
"""Of gumbel.py's keys from position to position, as a signed number: int64 wraps as uint64 does."""
STRIDE = tl.constexpr(_STRIDE)


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """Set single entries.  tables: [table rows, most blocks] int32.  changes: [n, 2] int32, flat index and value."""
    if not len(changes):
        return
    if not runs_kernels(tables):
        tables.view(-1)[changes[:, 0].long()] = changes[:, 1]
        return
    _update_kernel[(triton.cdiv(len(changes), _BLOCK),)](tables, changes, len(changes), BLOCK=_BLOCK)


def fill_tokens(
    told: Tensor, sampled: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, tiles: Tensor | None = None
) -> None:
    """Lay a step's tokens out for the kernels of a model.

    told: [4, most tokens] int32, what the host knows: token id (or -1 - place in `sampled` of a token to come), table
    row (0 for padding), position, and in told[3, 0] how many there are; all after that is padding.
    token_ids [n] int64, rows and positions [n] int32 are written, n at most told's width; and tiles [n, 4] int32 for
    `attend`, one token each.
    """
    if not runs_kernels(told):
        twin_fill_tokens(told, sampled, token_ids, rows, positions, tiles)
        return
    size = len(token_ids)
    if size:
        _fill_kernel[(triton.cdiv(size, _BLOCK),)](
            told,
            told.stride(0),
            sampled,
            token_ids,
            rows,
            positions,
            rows if tiles is None else tiles,
            size,
            TILES=tiles is not None,
            BLOCK=_BLOCK,
        )


def twin_fill_tokens(
    told: Tensor, sampled: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, tiles: Tensor | None = None
) -> None:
    """`fill_tokens` in plain torch."""
    size = len(token_ids)
    is_live = torch.arange(size, device=told.device) < told[3, 0]
    named = told[0, :size]
    ids = torch.where(named < 0, sampled[(-1 - named).clamp_min(0).long()].clamp_min(0), named)
    token_ids.copy_(torch.where(is_live, ids, 0))
    rows.copy_(torch.where(is_live, told[1, :size], 0))
    positions.copy_(torch.where(is_live, told[2, :size], 0))
    if tiles is not None:
        order = torch.arange(size, dtype=torch.int32, device=told.device)
        tiles.copy_(torch.stack([rows, order, is_live.int(), positions], dim=1))


def move_back(ends: Tensor, preceding: Tensor, earlier: Tensor, rejected: Tensor, before: Tensor) -> None:
    """Set a step's sequences, planned as if all drafts of the step before were accepted, to where they really are.

    ends: [sequences] int32, positions after the last tokens as planned.  preceding: [sequences, reach] int32, the
    tokens before each one's first.  Both are written.  earlier: [sequences] int32, place in the step before of those
    that go on from drafts, -1 for others, which stay as they are.  rejected: [places] int32 drafts that were not
    accepted.  before: [places, reach] int32, what really precedes.
    """
    if not runs_kernels(ends):
        goes_on = earlier >= 0
        place = earlier.clamp_min(0).long()
        ends -= torch.where(goes_on, rejected[place], 0)
        preceding.copy_(torch.where(goes_on[:, None], before[place], preceding))
        return
    width = preceding.shape[1]
    if len(ends):
        _back_kernel[(len(ends),)](
            ends, preceding, earlier, rejected, before, width, BLOCK=power_of_two(max(width, 1)), num_warps=1
        )


def noise_keys(told: Tensor, rejected: Tensor) -> Tensor:
    """What to draw with, at the positions that tokens really have.

    told: [8, lines] int64; lines 0 to 5 as `gpu_sampler.draw` takes them, but seeds instead of keys in 3; then planned
    positions, and places in the step before of lines that go on from its drafts, else -1.  rejected: [places] int32.
    Returns [6, lines] int64.  The keys are those of `gumbel.noise_key`.
    """
    lines = told.shape[1]
    if not runs_kernels(told):
        goes_on = told[7] >= 0
        shifted = (told[6] - torch.where(goes_on, rejected[told[7].clamp_min(0)], 0)) * _STRIDE
        asked = told[:6].clone()
        asked[3] += shifted ^ (shifted << 13)
        return asked
    asked = torch.empty(6, lines, dtype=torch.int64, device=told.device)
    if lines:
        _keys_kernel[(triton.cdiv(lines, _BLOCK),)](told, rejected, asked, lines, BLOCK=_BLOCK)
    return asked


@triton.jit
def _back_kernel(
    ends: tl.tensor,
    preceding: tl.tensor,
    earlier: tl.tensor,
    rejected: tl.tensor,
    before: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    place = tl.load(earlier + sequence)
    if place >= 0:
        tl.store(ends + sequence, tl.load(ends + sequence) - tl.load(rejected + place))
        at = tl.arange(0, BLOCK)
        token = tl.load(before + place * width + at, mask=at < width, other=0)
        tl.store(preceding + sequence * width + at, token, mask=at < width)


@triton.jit
def _keys_kernel(told: tl.tensor, rejected: tl.tensor, asked: tl.tensor, lines: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < lines
    for line in tl.static_range(6):
        value = tl.load(told + line * lines + at, mask=inside, other=0)
        if line == 3:
            place = tl.load(told + 7 * lines + at, mask=inside, other=-1)
            back = tl.load(rejected + tl.maximum(place, 0), mask=inside & (place >= 0), other=0)
            position = tl.load(told + 6 * lines + at, mask=inside, other=0) - back.to(tl.int64)
            shifted = position * STRIDE
            value += shifted ^ (shifted << 13)
        tl.store(asked + line * lines + at, value, mask=inside)


@triton.jit
def _update_kernel(tables: tl.tensor, changes: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(changes + at * 2, mask=at < count, other=0)
    tl.store(tables + index, tl.load(changes + at * 2 + 1, mask=at < count, other=0), mask=at < count)


@triton.jit
def _fill_kernel(
    told: tl.tensor,
    told_stride: tl.tensor,
    sampled: tl.tensor,
    token_ids: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    tiles: tl.tensor,
    size: tl.tensor,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    is_live = inside & (at < tl.load(told + 3 * told_stride))
    named = tl.load(told + at, mask=is_live, other=0)
    row = tl.load(told + told_stride + at, mask=is_live, other=0)
    position = tl.load(told + 2 * told_stride + at, mask=is_live, other=0)
    is_coming = is_live & (named < 0)
    coming = tl.load(sampled + tl.where(is_coming, -1 - named, 0), mask=is_coming, other=0)
    tl.store(token_ids + at, tl.where(is_coming, tl.maximum(coming, 0), named).to(tl.int64), mask=inside)
    tl.store(rows + at, row, mask=inside)
    tl.store(positions + at, position, mask=inside)
    if TILES:
        tl.store(tiles + at * 4, row, mask=inside)
        tl.store(tiles + at * 4 + 1, at, mask=inside)
        tl.store(tiles + at * 4 + 2, is_live.to(tl.int32), mask=inside)
        tl.store(tiles + at * 4 + 3, position, mask=inside)

"""Which token of a verification step belongs to which sequence, and at which position, without asking the host?

Sequences verify different numbers of drafts, so a step's tokens lie end to end and a graph has room for a fixed number
of them. The host planned the step before it knew how many drafts of the step before were accepted; `gpu_step.move_back`
has set the ends right on the device before they come here.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import check, power_of_two, runs_kernels, tiles


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's tokens; padding behind them belongs to no sequence."""

    spans: Tensor
    """[tokens] int32: sequence of each token, -1 for padding."""
    positions: Tensor
    """[tokens] int64; 0 for padding."""
    begins: Tensor
    """[tokens] int64: position of the sequence's first token in the step; 0 for padding."""
    starts: Tensor
    """[tokens] int64: row of that token; its own row for padding."""
    tiles: Tensor
    """[tiles, 3] int32: first token, number of tokens, sequence; number 0 behind the last."""


def lay_out(
    counts: Tensor,
    ends: Tensor,
    *,
    num_tokens: int,
    tile_tokens: int,
) -> Layout:
    """Lay a step's sequences end to end.

    counts: [sequences] int32 tokens of each in this step, together at most num_tokens.  ends: [sequences] int32
    position after each one's last token.
    """
    sequences = len(counts)
    check(counts.dtype == ends.dtype == torch.int32, "counts and ends are int32")
    most = sequences + tiles(num_tokens, tile_tokens)
    if not runs_kernels(counts):
        return _twin(counts, ends, num_tokens, tile_tokens, most)
    device = counts.device
    spans = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions, begins, starts = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
    tile_table = torch.empty(most, 3, dtype=torch.int32, device=device)
    _layout_kernel[(sequences + 1,)](
        counts,
        ends,
        spans,
        positions,
        begins,
        starts,
        tile_table,
        sequences,
        num_tokens,
        most,
        BLOCK=power_of_two(sequences),
        TILE=tile_tokens,
        STEP=32,
        num_warps=1,
    )
    return Layout(spans, positions, begins, starts, tile_table)


def _twin(
    counts: Tensor,
    ends: Tensor,
    num_tokens: int,
    tile_tokens: int,
    most: int,
) -> Layout:
    spans = torch.full((num_tokens,), -1, dtype=torch.int32)
    positions, begins = (torch.zeros(num_tokens, dtype=torch.int64) for _ in range(2))
    starts = torch.arange(num_tokens)
    table, start = [], 0
    for sequence, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        mine = slice(start, start + count)
        spans[mine], begins[mine], starts[mine] = sequence, end - count, start
        positions[mine] = torch.arange(end - count, end)
        table += [[start + first, min(tile_tokens, count - first), sequence] for first in range(0, count, tile_tokens)]
        start += count
    table += [[0, 0, 0]] * (most - len(table))
    return Layout(spans, positions, begins, starts, torch.tensor(table, dtype=torch.int32))


@triton.jit
def _layout_kernel(
    counts: tl.tensor,
    ends: tl.tensor,
    spans: tl.tensor,
    positions: tl.tensor,
    begins: tl.tensor,
    starts: tl.tensor,
    tile_table: tl.tensor,
    sequences: tl.tensor,
    num_tokens: tl.tensor,
    most: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    before = tl.load(counts + index, mask=(index < sequences) & (index < sequence), other=0)
    start = tl.sum(before, axis=0)
    first_tile = tl.sum((before + TILE - 1) // TILE, axis=0)
    is_real = sequence < sequences
    count = tl.load(counts + sequence, mask=is_real, other=0)
    end = tl.load(ends + sequence, mask=is_real, other=0)
    begin = (end - count).to(tl.int64)
    span = tl.where(is_real, sequence, -1)
    stop = tl.where(is_real, start + count, num_tokens)
    first = start
    while first < stop:
        token = first + tl.arange(0, STEP)
        mine = token < stop
        wide = token.to(tl.int64)
        tl.store(spans + token, tl.zeros((STEP,), tl.int32) + span, mask=mine)
        tl.store(positions + token, tl.where(is_real, begin + wide - start, 0), mask=mine)
        tl.store(begins + token, tl.where(is_real, begin + wide * 0, 0), mask=mine)
        tl.store(starts + token, tl.where(is_real, wide * 0 + start, wide), mask=mine)
        first += STEP
    num = tl.where(is_real, (count + TILE - 1) // TILE, most - first_tile)
    tile = 0
    while tile < num:
        step = tile + tl.arange(0, STEP)
        place = tile_table + (first_tile + step) * 3
        mine = step < num
        tl.store(place, tl.where(is_real, start + step * TILE, 0), mask=mine)
        tl.store(place + 1, tl.where(is_real, tl.minimum(count - step * TILE, TILE), 0), mask=mine)
        tl.store(place + 2, tl.where(is_real, sequence + step * 0, 0), mask=mine)
        tile += STEP

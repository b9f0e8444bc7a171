"""How do a token's rows get to where they stand among their experts', in one launch?

What `gpu_moe.group` and then `gpu_fp8.gathered` do, for the few slots of a decode step. A slot stands behind as many
others as come before it by expert and then by slot: a token's program counts those of its own slots, and no program
sorts for all. It reads its row once, and writes it to each place.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import gpu_moe
from kernels.ops.gpu_fp8 import SpanRows, gathered
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels

_MOST_SLOTS, _WORDS = 2048, 512
"""Slots that every program counts, and words of a row that it moves at a time, at most."""


def takes(slots: int) -> bool:
    """Whether so many slots are few enough for every program to count them all."""
    return slots <= _MOST_SLOTS


def place_rows(experts: Tensor, x: SpanRows, *, num_experts: int, turns: bool) -> tuple[Groups, SpanRows]:
    """(Token, slot) pairs sorted by expert, as by `group`, and each one's row, as by `gathered`.

    experts: [tokens, top_k] int32.  x: [tokens, size] under one scale a row.  turns: its columns (`turned_places`).
    """
    tokens, top_k = experts.shape
    check(experts.dtype == torch.int32 and experts.is_contiguous(), "experts are int32, end to end")
    check(len(x) == tokens and len(x.scale) == 1 and not x.is_turned, "a token has a row under one scale, in order")
    check(takes(experts.numel()), f"at most {_MOST_SLOTS} slots are placed so")
    if not runs_kernels(experts):
        groups = gpu_moe.group(experts, num_experts=num_experts)
        return groups, gathered(x, groups.sources, turns=turns)
    slots, device = experts.numel(), experts.device
    order, sources, places = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(3))
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    data = torch.empty(slots, x.data.shape[1], dtype=torch.uint8, device=device)
    scale, words = torch.empty(1, slots, dtype=torch.float32, device=device), x.data.shape[1] // 4
    if tokens:
        _place_rows_kernel[(tokens,)](
            experts,
            x.data.view(torch.int32),
            x.scale,
            ends,
            order,
            sources,
            places,
            data.view(torch.int32),
            scale,
            slots,
            EXPERTS=num_experts,
            SLOTS=power_of_two(slots),
            TOP=top_k,
            WORDS=words,
            BLOCK=min(words & -words, _WORDS),
            TURNS=turns,
            num_warps=4,
        )
    return Groups(ends, sources, order, places), SpanRows(data.view(x.data.dtype), scale, turns)


@triton.jit
def _place_rows_kernel(
    experts: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    slots: tl.tensor,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    slot, word = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    from_word = word
    if TURNS:
        from_word = word // 32 * 32 + word // 4 % 2 * 16 + word % 4 * 4 + word // 8 % 4
    # All of the row is asked for before anything is stored.
    row = x + token.to(tl.int64) * WORDS
    values = ()
    for first in tl.static_range(0, WORDS, BLOCK):
        values = values + (tl.load(row + first + from_word),)  # noqa: RUF005 - a tuple of Triton's
    own_scale = tl.load(x_scale + token)
    expert = tl.load(experts + slot, mask=slot < slots, other=-1)
    rank = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS) * SLOTS + slot
    for begin in tl.static_range(0, TOP, 3):
        # Three counts, 20 bits each, in one sum.
        counts = tl.zeros((SLOTS,), tl.int64)
        for each in tl.static_range(3):
            if begin + each < TOP:
                own = token * TOP + begin + each
                mine = tl.load(experts + own)
                mine = tl.where((mine >= 0) & (mine < EXPERTS), mine, EXPERTS) * SLOTS + own
                counts += (rank < mine).to(tl.int64) << (20 * each)
        count = tl.sum(counts, axis=0)
        for each in tl.static_range(3):
            if begin + each < TOP:
                own = token * TOP + begin + each
                place = (count >> (20 * each)) & 0xFFFFF
                tl.store(order + place, own)
                tl.store(sources + place, token)
                tl.store(places + own, place.to(tl.int32))
                tl.store(scale + place, own_scale)
                for turn in tl.static_range(WORDS // BLOCK):
                    tl.store(data + place * WORDS + turn * BLOCK + word, values[turn])
    # How many slots come up to an expert's end, shared out among the first programs.
    index = token
    while index < EXPERTS:
        tl.store(ends + index, tl.sum((rank < (index + 1) * SLOTS).to(tl.int32), axis=0))
        index += tl.num_programs(0)

"""Where do a token's rows stand among its experts', and how do their outputs come together?

Everything stays on the device and nothing depends on chance: counts are sums of whole numbers, an expert's rows stand
in the order of tokens, and a token's experts are added in the order of its slots.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import bf16
from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels, tiles

CHUNK = 128
"""Slots that one program counts."""
_MOST_AT_ONCE, _MOST_EXPERTS = 2048, 15
"""Slots and experts that one program sorts: launches cost a decode step more than a GPU that is idle but for it."""


def group(experts: Tensor, *, num_experts: int, first_expert: int = 0) -> Groups:
    """Sort (token, slot) pairs by expert: sources are tokens, targets slots.

    experts: [tokens, top_k] int32.  first_expert: of num_experts that are here; pairs of others, and padding (-1),
    stand behind the last expert's end.
    """
    flat, top_k, slots = experts.reshape(-1), experts.shape[1], experts.numel()
    check(flat.dtype == torch.int32, "experts are int32")
    if not runs_kernels(experts):
        return _group_twin(flat, num_experts, first_expert, top_k)
    device, block = experts.device, power_of_two(num_experts + 1)
    order, sources, places = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(3))
    ends = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    made = Groups(ends[:num_experts], sources, order, places)
    if slots <= _MOST_AT_ONCE and num_experts <= _MOST_EXPERTS:
        _sort(flat, ends, made, first_expert, num_experts, top_k)
        return made
    chunks = tiles(slots, CHUNK)
    counts = torch.empty(chunks, block, dtype=torch.int32, device=device)
    ranks = torch.empty(slots, dtype=torch.int32, device=device)
    _count_kernel[(chunks,)](
        flat,
        ranks,
        counts,
        slots,
        first_expert,
        EXPERTS=num_experts,
        BLOCK=block,
        SLOTS=CHUNK,
        num_warps=8,
    )
    _prefix_kernel[(1,)](
        counts,
        ends,
        chunks,
        EXPERTS=num_experts,
        BLOCK=block,
        STEP=max(min(8192 // block, 64), 1),
        num_warps=8,
    )
    _place_kernel[(chunks,)](
        flat,
        ranks,
        counts,
        ends,
        order,
        sources,
        places,
        slots,
        first_expert,
        EXPERTS=num_experts,
        BLOCK=block,
        SLOTS=CHUNK,
        TOP=top_k,
        num_warps=4,
    )
    return made


def _group_twin(flat: Tensor, num_experts: int, first_expert: int, top_k: int) -> Groups:
    local = flat.long() - first_expert
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    order = torch.sort(local, stable=True).indices.int()
    counts = torch.bincount(local, minlength=num_experts + 1)[:num_experts]
    places = torch.empty_like(order)
    places[order.long()] = torch.arange(len(flat), dtype=torch.int32, device=order.device)
    return Groups(counts.cumsum(0).int(), order // top_k, order, places)


def _sort(flat: Tensor, ends: Tensor, made: Groups, first_expert: int, num_experts: int, top_k: int) -> None:
    """Write groups by one program."""
    slots = len(flat)
    _sort_kernel[(1,)](
        flat,
        ends,
        made.targets,
        made.sources,
        made.places,
        slots,
        first_expert,
        EXPERTS=num_experts,
        BLOCK=max(power_of_two(num_experts + 1), 4),
        SLOTS=power_of_two(slots),
        TOP=top_k,
        num_warps=16,
    )


def combine(
    by_slot: Tensor,
    shared: Tensor | None,
    experts: Tensor | None = None,
    *,
    top_k: int,
    places: Tensor | None = None,
) -> Tensor:
    """A token's experts added in the order of its slots, then the shared expert.

    by_slot: [tokens * top_k, hidden] bf16.  shared: [tokens, hidden] bf16, or None.  experts: [tokens, top_k] int32;
    slots below 0 have no row.  places: [tokens * top_k] int32, the row of each slot; None = in order.  Returns
    [tokens, hidden] bf16.
    """
    tokens, hidden = len(by_slot) // top_k, by_slot.shape[1]
    check(by_slot.dtype == torch.bfloat16 and by_slot.is_contiguous(), "rows are bf16, end to end")
    if not runs_kernels(by_slot):
        in_order = by_slot if places is None else by_slot[places.long()]
        slots = in_order.float().view(tokens, top_k, hidden)
        if experts is not None:
            slots = slots.masked_fill((experts < 0)[:, :, None], 0.0)
        total = slots[:, 0].clone()
        for slot in range(1, top_k):
            total.add_(slots[:, slot])
        return (total if shared is None else total.add_(shared.float())).bfloat16()
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=by_slot.device)
    block = min(power_of_two(hidden), 1024)
    _combine_kernel[(tokens, tiles(hidden, block))](
        by_slot,
        by_slot if shared is None else shared,
        out,
        out if experts is None else experts,
        out if places is None else places,
        HIDDEN=hidden,
        TOP=top_k,
        SHARED=shared is not None,
        MASKED=experts is not None,
        PLACED=places is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _local(flat: tl.tensor, slot: tl.tensor, slots: tl.tensor, first: tl.tensor, EXPERTS: tl.constexpr) -> tl.tensor:
    expert = tl.load(flat + slot, mask=slot < slots, other=-1) - first
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit
def _count_kernel(
    flat: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    slot = chunk * SLOTS + tl.arange(0, SLOTS)
    local = _local(flat, slot, slots, first, EXPERTS)
    is_real = slot < slots
    # A slot's rank is how many slots of its expert stand before it in the chunk.
    step = tl.arange(0, SLOTS)
    same = (local[:, None] == local[None, :]) & (step[None, :] < step[:, None]) & is_real[None, :]
    tl.store(ranks + slot, tl.sum(same.to(tl.int32), axis=1), mask=is_real)
    index = tl.arange(0, BLOCK)
    hits = (local[:, None] == index[None, :]) & is_real[:, None]
    tl.store(counts + chunk * BLOCK + index, tl.sum(hits.to(tl.int32), axis=0))


@triton.jit
def _prefix_kernel(
    counts: tl.tensor,
    ends: tl.tensor,
    chunks: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Counts become how many slots of an expert stand in earlier chunks."""
    index = tl.arange(0, BLOCK)
    step = tl.arange(0, STEP)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, chunks, STEP):
        place = (first + step)[:, None] * BLOCK + index[None, :]
        mine = (first + step < chunks)[:, None]
        own = tl.load(counts + place, mask=mine, other=0)
        before = tl.cumsum(own, axis=0) - own + total[None, :]
        tl.store(counts + place, before, mask=mine)
        total += tl.sum(own, axis=0)
    tl.store(ends + index, tl.cumsum(total, axis=0), mask=index <= EXPERTS)


@triton.jit
def _place_kernel(
    flat: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    slot = chunk * SLOTS + tl.arange(0, SLOTS)
    is_real = slot < slots
    local = _local(flat, slot, slots, first, EXPERTS)
    place = tl.load(ranks + slot, mask=is_real, other=0) + tl.load(
        counts + chunk * BLOCK + local, mask=is_real, other=0
    )
    place += tl.load(ends + local - 1, mask=is_real & (local > 0), other=0)
    tl.store(order + place, slot, mask=is_real)
    tl.store(sources + place, slot // TOP, mask=is_real)
    tl.store(places + slot, place, mask=is_real)


@triton.jit
def _sort_kernel(
    flat: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """All of it by one program, which counts four experts in each 64 bits: a quarter of the sums to run through."""
    slot, index, word = tl.arange(0, SLOTS), tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
    is_real = slot < slots
    local = _local(flat, slot, slots, first, EXPERTS)
    mine = (local // 4)[:, None] == word[None, :]
    shift = local % 4 * 16
    hits = tl.where(mine & is_real[:, None], (shift * 0 + 1).to(tl.int64)[:, None] << shift[:, None], 0)
    counted = tl.sum(tl.where(mine, tl.cumsum(hits, axis=0), 0), axis=1) >> shift
    packed = tl.where((index // 4)[:, None] == word[None, :], tl.sum(hits, axis=0)[None, :], 0)
    total = ((tl.sum(packed, axis=1) >> (index % 4 * 16)) & 0xFFFF).to(tl.int32)
    end = tl.cumsum(total, axis=0)
    begin = tl.sum(tl.where(local[:, None] == index[None, :], (end - total)[None, :], 0), axis=1)
    place = begin + (counted & 0xFFFF).to(tl.int32) - 1
    tl.store(ends + index, end, mask=index <= EXPERTS)
    tl.store(order + place, slot, mask=is_real)
    tl.store(sources + place, slot // TOP, mask=is_real)
    tl.store(places + slot, place, mask=is_real)


@triton.jit
def _combine_kernel(
    by_slot: tl.tensor,
    shared: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    places: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        is_here = mine
        if MASKED:
            is_here = mine & (tl.load(experts + token * TOP + slot) >= 0)
        row = token * TOP + slot
        if PLACED:
            row = tl.load(places + row).to(tl.int64)
        total += tl.load(by_slot + row * HIDDEN + column, mask=is_here, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * HIDDEN + column, mask=mine, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, bf16(total).to(tl.bfloat16), mask=mine)

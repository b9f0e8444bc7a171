"""How does a decode step's one kernel attend: rotation, new key and value, cached ones, shares of them joined?"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.ops.gpu_layer_units import COLUMNS, HALF, LINES, PARTS, ROOM, SHARED, SUMS, used, wait_unit


@gluon.jit
def _new_token(
    qkv_sums: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    position: gl.tensor,
    place_at: gl.tensor,
    row: gl.tensor,
    kv_head: gl.tensor,
    is_kept: gl.tensor,
    CUT: gl.constexpr,
) -> gl.tensor:
    """Rotate this sequence's queries and new key.

    Returns [8, 128] bf16: the queries of the group, the key, the value, zeros; owners of the newest keys store both.
    """
    GROUP: gl.constexpr = CUT.group
    HEADS: gl.constexpr = CUT.inner // HALF
    member = gl.arange(0, ROOM, gl.SliceLayout(1, LINES))
    dim = gl.arange(0, HALF, gl.SliceLayout(0, LINES))
    head = gl.where(member < GROUP, kv_head * GROUP + member, HEADS + kv_head)
    head = gl.where(member > GROUP, HEADS + CUT.kv_heads + kv_head, head)
    inside = (member < GROUP + 2)[:, None] & (dim >= 0)[None, :]
    at = qkv_sums + row * CUT.rows_qkv + head[:, None] * HALF
    straight = gl.load(at + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    other = gl.load(at + (dim ^ 64)[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    for part in gl.static_range(1, PARTS):
        more = at + part * (ROOM * CUT.rows_qkv)
        straight += gl.load(more + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        other += gl.load(more + (dim ^ 64)[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    angle = position * 64 + dim % 64
    c = gl.load(cos + angle)[None, :]
    s = gl.where(dim < 64, -1.0, 1.0)[None, :] * gl.load(sin + angle)[None, :]
    turned = straight * c + other * s
    made = gl.where((member <= GROUP)[:, None], turned, straight).to(gl.bfloat16)
    stored = ((member == GROUP) | (member == GROUP + 1))[:, None] & inside & is_kept
    # K and V of a block are one after the other.
    kind = gl.where(member == GROUP, 0, CUT.block_tokens * CUT.kv_heads * HALF)
    gl.store(place_at + kind[:, None] + kv_head * HALF + dim[None, :], made, mask=stored)
    return made


@gluon.jit
def _weigh(scores: gl.tensor, top: gl.tensor, position: gl.tensor, tile: gl.tensor, scale: gl.tensor) -> gl.tuple:
    """Scores of a tile's keys x heads; returns the new maximum, weights, and by how much older sums shrink."""
    key = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
    scores = gl.where((key < position)[:, None], scores * scale, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 0))
    return new, gl.exp2(scores - new[None, :]), gl.exp2(top - new)


@gluon.jit
def _join(
    slot_at: gl.tensor,
    sums_at: gl.tensor,
    share: gl.tensor,
    SPLITS: gl.constexpr,
    is_head: gl.tensor,
    top: gl.tensor,
    total: gl.tensor,
    acc: gl.tensor,
) -> gl.tuple:
    """One more share of the keys joins those before it."""
    inside = share < SPLITS
    at = gl.minimum(share, SPLITS - 1)
    other_top = gl.where(inside, gl.load(sums_at + at * (2 * ROOM), cache_modifier=".cg"), float("-inf"))
    other_total = gl.load(sums_at + at * (2 * ROOM) + ROOM, cache_modifier=".cg")
    other_acc = gl.load(slot_at + at * (ROOM * HALF), mask=is_head, other=0.0, cache_modifier=".cg")
    new = gl.maximum(top, other_top)
    old_scale, other_scale = gl.exp2(top - new), gl.exp2(other_top - new)
    total = total * old_scale + other_total * other_scale
    acc = acc * old_scale[None, :] + other_acc * other_scale[None, :]
    return new, total, acc


@gluon.jit
def whose(table_rows: gl.tensor, positions: gl.tensor, num_rows: gl.tensor, CUT: gl.constexpr) -> gl.tuple:
    """Of this program: table row (0: of no sequence), position, first of its tiles of keys, and how many it has."""
    SPLITS: gl.constexpr = CUT.splits
    program = gl.program_id(0)
    sequence = program // SPLITS // CUT.kv_heads
    split = program % SPLITS
    is_real = sequence < num_rows
    table_row = gl.load(table_rows + sequence, mask=is_real, other=0)
    position = gl.load(positions + sequence, mask=is_real, other=0)
    tiles = (position + COLUMNS - 1) // COLUMNS
    share = (tiles + SPLITS - 1) // SPLITS
    first = gl.minimum(split * share, gl.maximum(tiles - 1, 0))
    keys = gl.minimum(gl.maximum(tiles - split * share, 0), share)
    return table_row, position, first, keys


@gluon.jit
def attention(  # noqa: PLR0915 - a kernel's phase
    x: gl.tensor,
    layer: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    cache_data: gl.tensor,
    newest: gl.tensor,
    table_row: gl.tensor,
    position: gl.tensor,
    num_rows: gl.tensor,
    counters: gl.tensor,
    qkv_sums: gl.tensor,
    attended: gl.tensor,
    shared_out: gl.tensor,
    shared_sums: gl.tensor,
    scale: gl.tensor,
    place: gl.tensor,
    fetched: gl.tensor,
    unit: gl.tensor,
    block: gl.tensor,
    feed: gl.tuple,
    CUT: gl.constexpr,
) -> gl.tuple:
    """This program's share of a sequence's keys of one KV head; the last of those who share joins the shares.

    newest: the block of the new token.  Returns what `narrow` returns.
    """
    GROUP: gl.constexpr = CUT.group
    SPLITS: gl.constexpr = CUT.splits
    AHEAD: gl.constexpr = min(SPLITS, 8)
    LAYERS: gl.constexpr = CUT.layers
    BLOCK: gl.constexpr = CUT.block_tokens
    PROGRAMS: gl.constexpr = CUT.programs
    GROUPS: gl.constexpr = PROGRAMS // PARTS
    ring = feed[5]
    program = feed[9]
    first = feed[10]
    keys = feed[11]
    pair = program // SPLITS
    sequence = pair // CUT.kv_heads
    kv_head = pair % CUT.kv_heads
    split = program % SPLITS
    is_real = sequence < num_rows
    # The program with the first keys also has the newest one, which no tile holds yet.
    owns = split == 0
    # Attention needs no product's input: its queries and weights lie there.
    weighed = x.index(1)._reinterpret(gl.bfloat16, [ROOM, COLUMNS], SHARED)  # noqa: SLF001 - no public name
    own_place = cache_data + ((newest * LAYERS + layer) * (2 * BLOCK) + position % BLOCK) * (CUT.kv_heads * HALF)
    is_kept = is_real & owns & (table_row > 0)
    made = _new_token(qkv_sums, cos, sin, position, own_place, sequence, kv_head, is_kept, CUT)
    x.index(0).store(made)
    fence_async_shared()
    gl.thread_barrier()
    member = gl.arange(0, ROOM, gl.SliceLayout(1, LINES))
    key = gl.sum(gl.where((member == GROUP)[:, None], made.to(gl.float32), 0.0), 0)
    value = gl.sum(gl.where((member == GROUP + 1)[:, None], made.to(gl.float32), 0.0), 0)
    value = gl.convert_layout(value, gl.SliceLayout(1, SUMS))
    own_score = gl.sum(made.to(gl.float32) * key[None, :], 1) * scale
    top = gl.convert_layout(own_score, gl.SliceLayout(0, SUMS))
    # Without keys of its own a program's share has no weight.
    top = gl.where(owns, top, float("-inf"))
    one = gl.where(owns, 1.0, 0.0)
    head = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
    key_row = gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
    sums = gl.where((key_row == 0)[:, None] & (head >= 0)[None, :], one, 0.0)
    acc = value[:, None] * (head * 0 + 1).to(gl.float32)[None, :] * one
    for index in range(keys):
        wait_unit(unit, feed, CUT)
        slot = unit % CUT.stages
        scores = gl.zeros([COLUMNS, ROOM], gl.float32, SUMS)
        scores = warpgroup_mma(ring.index(2 * slot), x.index(0).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        top, weights, shrink = _weigh(scores, top, position, first + index, scale)
        rounded = weights.to(gl.bfloat16)
        sums = sums * shrink[None, :] + rounded.to(gl.float32)
        weighed.permute([1, 0]).store(rounded)
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * shrink[None, :]
        values = ring.index(2 * slot + 1).permute([1, 0])
        acc = warpgroup_mma(values, weighed.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        place, fetched, block = used(place, fetched, unit, block, feed, CUT)
        unit += 1
    total = gl.sum(sums, 0)
    dim = gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
    is_head = (head < GROUP)[None, :] & (dim >= 0)[:, None]
    attended_at = attended + sequence * CUT.inner + (kv_head * GROUP + head)[None, :] * HALF + dim[:, None]
    if SPLITS == 1:
        gl.store(attended_at, (acc / total[None, :]).to(gl.bfloat16), mask=is_head & is_real)
    else:
        slot_at = shared_out + pair * (SPLITS * ROOM * HALF) + head[None, :] * HALF + dim[:, None]
        sums_at = shared_sums + pair * (SPLITS * 2 * ROOM) + head
        gl.store(slot_at + split * (ROOM * HALF), acc, mask=is_head)
        gl.store(sums_at + split * (2 * ROOM), top)
        gl.store(sums_at + split * (2 * ROOM) + ROOM, total)
        gl.thread_barrier()
        pairs_at = 1 + LAYERS * (2 * GROUPS) + layer * (PROGRAMS // SPLITS) + pair
        before = gl.atomic_add(counters + pairs_at, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            top = gl.load(sums_at, cache_modifier=".cg")
            total = gl.load(sums_at + ROOM, cache_modifier=".cg")
            acc = gl.load(slot_at, mask=is_head, other=0.0, cache_modifier=".cg")
            for index in range(0, SPLITS - 1, AHEAD):
                for step in gl.static_range(AHEAD):  # their loads do not wait for each other
                    top, total, acc = _join(slot_at, sums_at, 1 + index + step, SPLITS, is_head, top, total, acc)
            gl.store(attended_at, (acc / total[None, :]).to(gl.bfloat16), mask=is_head & is_real)
    return place, fetched, unit, block

"""How are index keys scored on Hopper, without touching shared memory on their way to the fp8 units?

The scores of `kernels.ops.gpu_index` in Gluon, Triton's language of explicit layouts, for index keys of 128 values, as
e4m3 under one power of two each: e2m1 times powers of two are e4m3 values, exactly where a key's four powers are at
most 11 binades apart; of a group farther below, values are nothing. A key's nibbles choose among eight bytes, four in
two instructions. Its 64 bytes are read by four lanes, 16 each, which is how the matrix units want their first operand
in registers once the order of a key's values is turned; the queries, in shared memory, are laid down in that order.
Keys are fetched two turns ahead.

The units add with about 14 bits, so a score may differ from the twin's in the last bit of its bf16; it depends on its
own query and key alone. Triton's interpreter does not run Gluon: there, and on other GPUs, the kernel in Triton does
the same in bf16.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.ops.gpu_formats import e4m3_bits, exponents, power
from kernels.ops.gpu_launch import tiles
from kernels.ops.gpu_words import e2m1_bytes

HEADS, SIZE, ENTRIES = 32, 128, 64
"""Heads and their size that the kernel is made for, and keys a turn."""
_ROWS = 32
"""Queries of a program that restates them."""
_BLOCKS = 1024
"""Of entries, that a program looks at."""
_HALVED = 2.0**-7
"""Keys are multiplied under 2^6, so that their largest value is 6 * 2^6, and products come twice."""
MOST_BINADES = gl.constexpr(11)
QUERY_FLOOR = tl.constexpr(2.0**-60)


def restated_queries(queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel reads: e4m3 like the queries, in the order of its operand, and what their products are worth.

    queries: [tokens, HEADS, SIZE] bf16.  weights: [tokens, HEADS] fp32.
    """
    data, factors = torch.empty(queries.shape, dtype=torch.uint8, device=queries.device), torch.empty_like(weights)
    rows = weights.numel()
    if rows:
        _restate_kernel[(tiles(rows, _ROWS),)](
            queries, weights, data, factors, rows, SIZE=SIZE, ROWS=_ROWS, HALVED=_HALVED, num_warps=4
        )
    return data.view(torch.float8_e4m3fn), factors


@triton.jit
def _restate_kernel(
    queries: tl.tensor,
    weights: tl.tensor,
    data: tl.tensor,
    factors: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HALVED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = (row < rows)[:, None]
    column = tl.arange(0, SIZE)
    values = tl.load(queries + row[:, None] * SIZE + column[None, :], mask=mine, other=0.0).to(tl.float32)
    exponent = exponents(tl.max(tl.abs(values), axis=1), QUERY_FLOOR, 448.0)
    bits = e4m3_bits(values * power(254 - exponent)[:, None])
    place = (column // 8 % 4) * 32 + (column // 4 % 2) * 16 + column // 32 * 4 + column % 4
    tl.store(data + row[:, None] * SIZE + place[None, :], bits, mask=mine)
    own = tl.load(weights + row, mask=row < rows, other=0.0)
    tl.store(factors + row, own * power(exponent) * HALVED, mask=row < rows)


def best_of_blocks(scores: Tensor, seen: Tensor, *, block_size: int) -> Tensor:
    """The highest score of each block of entries, [tokens, width / block_size] bf16; of the last one seen, infinity.

    scores: [tokens, width] bf16, width of whole blocks.  seen: [tokens] int32.  Blocks that are not seen are garbage.
    """
    tokens, width = scores.shape
    out = scores.new_empty(tokens, width // block_size)
    if tokens:
        _blocks_kernel[(tokens, tiles(width // block_size, _BLOCKS))](
            scores, seen, out, width // block_size, SIZE=block_size, BLOCKS=_BLOCKS, num_warps=4
        )
    return out


@triton.jit
def _blocks_kernel(
    scores: tl.tensor, seen: tl.tensor, out: tl.tensor, blocks: tl.tensor, SIZE: tl.constexpr, BLOCKS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    sees = tl.load(seen + row)
    first = tl.program_id(1) * BLOCKS
    if first * SIZE < sees:
        block = first + tl.arange(0, BLOCKS)
        # Whole blocks, so that they are loaded at once: what is not seen of the last one makes no difference.
        mine = (block < blocks) & (block * SIZE < sees)
        entry = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        values = tl.load(scores + row * blocks * SIZE + entry, mask=mine[:, None], other=float("-inf")).to(tl.float32)
        highest = tl.minimum(tl.max(values, axis=1), 3.3895313892515355e38)
        highest = tl.where(block == (sees - 1) // SIZE, float("inf"), highest)
        tl.store(out + row * blocks + block, highest.to(tl.bfloat16), mask=mine)


@gluon.jit
def _power(exponent: gl.tensor) -> gl.tensor:
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _tables(exponent: gl.tensor) -> gl.tuple:
    """Of each key its largest power, [keys] fp32; of each of its groups the e4m3 bytes of e2m1's magnitudes.

    exponent: [keys, groups], biased.  Bytes: two int32 like it, a power of two more adding 8 to each but zero's.
    """
    wide = exponent.to(gl.int32)
    largest = gl.max(wide, axis=1)
    below = largest[:, None] - wide
    is_near = below <= MOST_BINADES
    low = gl.where(is_near, 0x3C383000 + (6 - below) * 0x08080800, 0)
    high = gl.where(is_near, 0x4C484440 + (6 - below) * 0x08080808, 0)
    return _power(largest), low, high


@gluon.jit
def _spread(each: gl.tensor, WORDS: gl.constexpr) -> gl.tensor:
    """[keys, 4] -> [keys, 16] in the layout of the words."""
    wide = gl.expand_dims(each, 2).broadcast_to([each.shape[0], 4, 4])
    return gl.convert_layout(wide.reshape([each.shape[0], 16]), WORDS)


@gluon.jit
def _operand(first: gl.tensor, last: gl.tensor, operand: gl.constexpr) -> gl.tensor:
    """Values 0 to 3 and 4 to 7 of each word, [keys, 16] int32 -> [keys, 128] e4m3 as lanes hold them."""
    keys: gl.constexpr = first.shape[0]
    words = gl.join(first, last)
    even = gl.join(words.to(gl.uint8), (words >> 16).to(gl.uint8))
    odd = gl.join((words >> 8).to(gl.uint8), (words >> 24).to(gl.uint8))
    # [keys, lane, word, half, byte's high bit, its low bit] -> word, half, lane, byte.
    parts = gl.join(even, odd).reshape([keys, 4, 4, 2, 2, 2]).permute((0, 2, 3, 1, 4, 5))
    return gl.convert_layout(parts.reshape([keys, 128]).to(gl.float8e4nv, bitcast=True), operand)


@gluon.jit
def _entries(
    candidates: gl.tensor,
    place: gl.tensor,
    width: gl.tensor,
    CANDIDATES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> gl.tensor:
    """Which entries stand at some places; one that nobody sees where there is no candidate."""
    if CANDIDATES > 0:
        block = gl.load(candidates + place // BLOCK_SIZE, mask=place < width, other=-1)
        return gl.where(block >= 0, block * BLOCK_SIZE + place % BLOCK_SIZE, 0x7FFFFFFF)
    return place


@gluon.jit
def _blocks(table: gl.tensor, entry: gl.tensor, most: gl.tensor, PER_BLOCK: gl.constexpr) -> gl.tensor:
    """The cache's blocks that hold them, -1 of those that no token sees."""
    return gl.load(table + entry // PER_BLOCK, mask=entry < most, other=-1)


@gluon.jit
def _fetch(
    pool: gl.tensor,
    entry: gl.tensor,
    block: gl.tensor,
    stride: gl.tensor,
    data_offset: gl.tensor,
    scale_offset: gl.tensor,
    PER_BLOCK: gl.constexpr,
    WORDS: gl.constexpr,
    GROUPS: gl.constexpr,
) -> gl.tuple:
    """Bytes and exponents of some entries; zeros of those that no token sees."""
    seen = block >= 0
    slot = block.to(gl.int64) * stride
    inside = entry % PER_BLOCK
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    record = (pool + (slot + data_offset + inside * 64)).to(gl.pointer_type(gl.int32))
    four = gl.load(record[:, None] + word[None, :], mask=seen[:, None], other=0)
    of_scale = gl.convert_layout(slot + scale_offset + inside * 4, gl.SliceLayout(1, GROUPS))
    seen = gl.convert_layout(seen, gl.SliceLayout(1, GROUPS))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    exponent = gl.load(pool + of_scale[:, None] + group[None, :], mask=seen[:, None], other=0)
    return four, exponent


@gluon.jit
def _keep(
    summed: gl.tensor,
    sees: gl.tensor,
    chosen: gl.tensor,
    out: gl.tensor,
    first: gl.tensor,
    num: gl.tensor,
    start: gl.tensor,
    unit: gl.tensor,
    width: gl.tensor,
    QUERIES: gl.constexpr,
    ENTRIES: gl.constexpr,
    CANDIDATES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """Store the scores of a turn's entries."""
    MADE: gl.constexpr = summed.type.layout
    made_query = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, MADE))
    made_sees = gl.convert_layout(sees, gl.SliceLayout(0, MADE))
    place = start + unit * ENTRIES + gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, MADE))
    entry = _entries(chosen, place, width, CANDIDATES, BLOCK_SIZE)
    summed = gl.where(entry[:, None] < made_sees[None, :], summed, float("-inf"))
    target = (first + made_query)[None, :] * width + place[:, None]
    # A padding row's candidates are none: its scores are written, all of them -inf.
    wanted = (made_query < (1 if CANDIDATES > 0 else num))[None, :] & (place < width)[:, None]
    gl.store(out + target, summed.to(gl.bfloat16), mask=wanted)


@gluon.jit
def score_kernel(  # noqa: PLR0915 - one kernel is one function
    queries: gl.tensor,
    weights: gl.tensor,
    pool: gl.tensor,
    tables: gl.tensor,
    tile_table: gl.tensor,
    seen: gl.tensor,
    candidates: gl.tensor,
    out: gl.tensor,
    width: gl.tensor,
    stride: gl.tensor,
    data_offset: gl.tensor,
    scale_offset: gl.tensor,
    table_stride: gl.tensor,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    QUERIES: gl.constexpr,
    ENTRIES: gl.constexpr,
    UNITS: gl.constexpr,
    CANDIDATES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    gl.static_assert(SIZE == 128 and ENTRIES == 64)
    ROWS: gl.constexpr = QUERIES * HEADS
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    GROUPS: gl.constexpr = gl.SliceLayout(2, SPREAD)
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 4)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LAID: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])

    if CANDIDATES > 0:
        first = gl.program_id(0).to(gl.int64)
        span = gl.load(tile_table + first)
        num = gl.where(span >= 0, 1, 0)
    else:
        first = gl.load(tile_table + gl.program_id(0) * 3).to(gl.int64)
        num = gl.load(tile_table + gl.program_id(0) * 3 + 1)
        span = gl.load(tile_table + gl.program_id(0) * 3 + 2)
    OF_QUERY: gl.constexpr = gl.BlockedLayout([1, QUERIES], [32, 1], [4, 1], [1, 0])
    query = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, OF_QUERY))
    sees = gl.load(seen + first + query, mask=query < num, other=0)
    most = gl.max(sees, axis=0)
    start = gl.program_id(1) * (ENTRIES * UNITS)
    if CANDIDATES > 0 or start < most:
        smem = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, SIZE], SHARED)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAID))
        column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAID))
        is_row = row // HEADS < num
        place = (first * HEADS + row[:, None]) * SIZE + column[None, :]
        smem.store(gl.load(queries + place, mask=is_row[:, None], other=0.0))
        fence_async_shared()
        of_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCTS))
        factor = gl.load(weights + first * HEADS + of_row, mask=of_row // HEADS < num, other=0.0)[None, :]
        table = tables + gl.maximum(span, 0).to(gl.int64) * table_stride
        key = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, WORDS))
        none = gl.zeros([ENTRIES, ROWS], gl.float32, PRODUCTS)
        chosen = candidates + first * CANDIDATES
        # Where keys lie is asked for a turn before they are, and which they are another turn before.
        entry = _entries(chosen, start + key, width, CANDIDATES, BLOCK_SIZE)
        block = _blocks(table, entry, most, PER_BLOCK)
        next_entry = _entries(chosen, start + ENTRIES + key, width, CANDIDATES, BLOCK_SIZE)
        next_block = _blocks(table, next_entry, most, PER_BLOCK)
        four, exponent = _fetch(pool, entry, block, stride, data_offset, scale_offset, PER_BLOCK, WORDS, GROUPS)
        entry = _entries(chosen, start + 2 * ENTRIES + key, width, CANDIDATES, BLOCK_SIZE)
        block = _blocks(table, entry, most, PER_BLOCK)
        next_four, next_exponent = _fetch(
            pool, next_entry, next_block, stride, data_offset, scale_offset, PER_BLOCK, WORDS, GROUPS
        )
        next_entry = _entries(chosen, start + 3 * ENTRIES + key, width, CANDIDATES, BLOCK_SIZE)
        for unit in range(UNITS):
            scale, low, high = _tables(exponent)
            first_four, last_four = e2m1_bytes(four, _spread(low, WORDS), _spread(high, WORDS))
            keys = _operand(first_four, last_four, OPERAND)
            products = warpgroup_mma(keys, smem.permute((1, 0)), none, use_acc=False, is_async=True)
            four, exponent = next_four, next_exponent
            next_four, next_exponent = _fetch(
                pool, entry, block, stride, data_offset, scale_offset, PER_BLOCK, WORDS, GROUPS
            )
            entry, block = next_entry, _blocks(table, next_entry, most, PER_BLOCK)
            next_entry = _entries(chosen, start + (unit + 4) * ENTRIES + key, width, CANDIDATES, BLOCK_SIZE)
            # The operand's registers are these words'; a wait takes no values of eight bits.
            products, first_four, last_four = warpgroup_mma_wait(0, deps=[products, first_four, last_four])
            # Twice what is above zero, by units that are twice as many as those for a maximum.
            products = (products + gl.abs(products)) * factor
            summed = gl.sum(products.reshape([ENTRIES, QUERIES, HEADS]), axis=2)
            summed *= gl.convert_layout(scale, gl.SliceLayout(1, summed.type.layout))[:, None]
            summed = summed.to(gl.bfloat16).to(gl.float32)
            _keep(summed, sees, chosen, out, first, num, start, unit, width, QUERIES, ENTRIES, CANDIDATES, BLOCK_SIZE)

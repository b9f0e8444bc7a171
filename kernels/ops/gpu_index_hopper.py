"""How are index keys scored on Hopper without touching shared memory on their way to the matrix units?

The scores of `kernels.ops.gpu_index` in Gluon, Triton's language of explicit layouts, for index keys of 128 values. A
key's 64 bytes are read by four lanes, 16 each, which is how the matrix units want their first operand in registers once
the order of a key's values is turned; the queries, in shared memory, are laid down in that order. Keys are fetched two
turns ahead. Triton's interpreter does not run Gluon: there, and on other GPUs, the kernel in Triton does the same.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.ops.gpu_words import e2m1_words

HEADS, SIZE, ENTRIES = 32, 128, 64
"""Heads and their size that the kernel is made for, and keys a turn."""


@gluon.jit
def _operand(first: gl.tensor, then: gl.tensor, operand: gl.constexpr) -> gl.tensor:
    """Two bf16 in an int32, [keys, 16] of bytes 0, 1 and 2, 3 of a word -> [keys, 64] as lanes hold them."""
    keys: gl.constexpr = first.shape[0]
    words = gl.join(first, then)
    low = words.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    parts = gl.join(low, high).reshape([keys, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(parts.reshape([keys, 64]), operand)


@gluon.jit
def _fetch(
    pool: gl.tensor,
    table: gl.tensor,
    candidates: gl.tensor,
    place: gl.tensor,
    most: gl.tensor,
    width: gl.tensor,
    stride: gl.tensor,
    data_offset: gl.tensor,
    scale_offset: gl.tensor,
    PER_BLOCK: gl.constexpr,
    CANDIDATES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WORDS: gl.constexpr,
    GROUPS: gl.constexpr,
) -> gl.tuple:
    """Bytes and exponents of some entries; zeros of those that no token sees."""
    if CANDIDATES > 0:
        block = gl.load(candidates + place // BLOCK_SIZE, mask=place < width, other=-1)
        entry = gl.where(block >= 0, block * BLOCK_SIZE + place % BLOCK_SIZE, 0x7FFFFFFF)
    else:
        entry = place
    seen = entry < most
    slot = gl.load(table + entry // PER_BLOCK, mask=seen, other=0).to(gl.int64) * stride
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
    blocks: gl.tensor,
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
    """Store the scores of a turn's entries, and the highest of each block of them."""
    MADE: gl.constexpr = summed.type.layout
    made_query = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, MADE))
    made_sees = gl.convert_layout(sees, gl.SliceLayout(0, MADE))
    place = start + unit * ENTRIES + gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, MADE))
    if CANDIDATES > 0:
        block = gl.load(chosen + place // BLOCK_SIZE, mask=place < width, other=-1)
        entry = gl.where(block >= 0, block * BLOCK_SIZE + place % BLOCK_SIZE, 0x7FFFFFFF)
    else:
        entry = place
    summed = gl.where(entry[:, None] < made_sees[None, :], summed, float("-inf"))
    target = (first + made_query)[None, :] * width + place[:, None]
    # A padding row's candidates are none: its scores are written, all of them -inf.
    wanted = (made_query < (1 if CANDIDATES > 0 else num))[None, :] & (place < width)[:, None]
    gl.store(out + target, summed.to(gl.bfloat16), mask=wanted)
    if CANDIDATES == 0 and BLOCK_SIZE > 0:
        highest = gl.max(summed.reshape([ENTRIES // BLOCK_SIZE, BLOCK_SIZE, QUERIES]), axis=1)
        highest = gl.minimum(highest, 3.3895313892515355e38)
        BEST: gl.constexpr = highest.type.layout
        best_query = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, BEST))
        best_sees = gl.convert_layout(sees, gl.SliceLayout(0, BEST))
        block = start // BLOCK_SIZE + unit * (ENTRIES // BLOCK_SIZE)
        block += gl.arange(0, ENTRIES // BLOCK_SIZE, layout=gl.SliceLayout(1, BEST))
        highest = gl.where(block[:, None] == ((best_sees - 1) // BLOCK_SIZE)[None, :], float("inf"), highest)
        there = (first + best_query)[None, :] * (width // BLOCK_SIZE) + block[:, None]
        real = (best_query < num)[None, :] & (block < width // BLOCK_SIZE)[:, None]
        gl.store(blocks + there, highest.to(gl.bfloat16), mask=real)


@gluon.jit
def score_kernel(  # noqa: PLR0915 - one pass over the keys
    queries: gl.tensor,
    weights: gl.tensor,
    pool: gl.tensor,
    tables: gl.tensor,
    tile_table: gl.tensor,
    seen: gl.tensor,
    candidates: gl.tensor,
    out: gl.tensor,
    blocks: gl.tensor,
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
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LAID: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

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
        even_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, 64], SHARED)
        odd_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, 64], SHARED)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAID))
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAID))
        pair = ((column >> 1) & 3) * 16 + (column >> 4) * 4 + ((column >> 3) & 1) * 2 + (column & 1)
        is_row = row // HEADS < num
        pairs = gl.load(queries + (first * HEADS + row[:, None]) * 64 + pair[None, :], mask=is_row[:, None], other=0)
        even_smem.store((pairs << 16).to(gl.float32, bitcast=True).to(gl.bfloat16))
        odd_smem.store((pairs & -65536).to(gl.float32, bitcast=True).to(gl.bfloat16))
        fence_async_shared()
        of_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PRODUCTS))
        factor = gl.load(weights + first * HEADS + of_row, mask=of_row // HEADS < num, other=0.0)[None, :]
        table = tables + gl.maximum(span, 0).to(gl.int64) * table_stride
        key = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, WORDS))
        none = gl.zeros([ENTRIES, ROWS], gl.float32, PRODUCTS)
        chosen = candidates + first * CANDIDATES
        four, exponent = _fetch(
            pool,
            table,
            chosen,
            start + key,
            most,
            width,
            stride,
            data_offset,
            scale_offset,
            PER_BLOCK,
            CANDIDATES,
            BLOCK_SIZE,
            WORDS,
            GROUPS,
        )
        next_four, next_exponent = _fetch(
            pool,
            table,
            chosen,
            start + ENTRIES + key,
            most,
            width,
            stride,
            data_offset,
            scale_offset,
            PER_BLOCK,
            CANDIDATES,
            BLOCK_SIZE,
            WORDS,
            GROUPS,
        )
        for unit in range(UNITS):
            scale = exponent.to(gl.int32) << 7
            scale = gl.expand_dims(scale | (scale << 16), 2).broadcast_to([ENTRIES, 4, 4])
            scale = gl.convert_layout(scale.reshape([ENTRIES, 16]), WORDS)
            low_first, low_then, high_first, high_then = e2m1_words(four, scale)
            low, high = _operand(low_first, low_then, OPERAND), _operand(high_first, high_then, OPERAND)
            products = warpgroup_mma(low, even_smem.permute((1, 0)), none, use_acc=False, is_async=True)
            products = warpgroup_mma(high, odd_smem.permute((1, 0)), products, is_async=True)
            four, exponent = next_four, next_exponent
            next_four, next_exponent = _fetch(
                pool,
                table,
                chosen,
                start + (unit + 2) * ENTRIES + key,
                most,
                width,
                stride,
                data_offset,
                scale_offset,
                PER_BLOCK,
                CANDIDATES,
                BLOCK_SIZE,
                WORDS,
                GROUPS,
            )
            products, low, high = warpgroup_mma_wait(0, deps=[products, low, high])
            products = gl.maximum(products, 0.0) * factor
            summed = gl.sum(products.reshape([ENTRIES, QUERIES, HEADS]), axis=2).to(gl.bfloat16).to(gl.float32)
            _keep(
                summed,
                sees,
                chosen,
                out,
                blocks,
                first,
                num,
                start,
                unit,
                width,
                QUERIES,
                ENTRIES,
                CANDIDATES,
                BLOCK_SIZE,
            )

"""How does one Hopper program attend for one token with its matrix units fed from shared memory alone?

The kernel of `kernels.ops.gpu_sparse` in Gluon, Triton's language of explicit layouts, for 64 heads of 512. Queries lie
in shared memory, 64 keys are unpacked at a time into one of two buffers while the matrix units multiply the other, and
each of two warpgroups sums half of the values. Even elements of a head come first there, odd ones behind them.
Triton's interpreter does not run Gluon: there, and on other GPUs, the kernel in Triton does the same.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.ops.gpu_words import as_e4m3, e2m1_words, e4m3_words

ROWS, SIZE, KEYS, WARPS = 64, 512, 64, 8
"""Heads and their size that the kernel is made for, keys a turn, and its warps."""
SPAN = 256
"""Columns of what it leaves restated under one scale: two chunks of pairs."""
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _power(exponent: gl.tensor) -> gl.tensor:
    return (exponent.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _e4m3_value(bits: gl.tensor) -> gl.tensor:
    wide = bits.to(gl.uint32)
    small = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(gl.float32, bitcast=True)
    return small * 1.329227995784916e36


@gluon.jit
def _bf16(x: gl.tensor) -> gl.tensor:
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _spread(scale: gl.tensor, WORDS: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """[keys, groups] fp32 -> [keys, groups * WORDS] int32, two bf16 of each, in the layout of the words."""
    high = scale.to(gl.uint32, bitcast=True)
    both = (high | (high >> 16)).to(gl.int32, bitcast=True)
    wide = gl.expand_dims(both, 2).broadcast_to([scale.shape[0], scale.shape[1], WORDS])
    return gl.convert_layout(wide.reshape([scale.shape[0], scale.shape[1] * WORDS]), layout, assert_trivial=True)


@gluon.jit
def _fetch_window(
    own: gl.tensor,
    ring: gl.tensor,
    position: gl.tensor,
    oldest: gl.tensor,
    begin: gl.tensor,
    own_row: gl.tensor,
    slot: gl.tensor,
    first: gl.tensor,
    ring_stride: gl.tensor,
    ring_offset: gl.tensor,
    KEYS: gl.constexpr,
    SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    RING: gl.constexpr,
    RECORD: gl.constexpr,
    RAW: gl.constexpr,
    SCALES: gl.constexpr,
) -> gl.tuple:
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, RAW))
    at = position - (WINDOW - 1) + first + key
    seen = (at >= oldest) & (slot >= 0) & (at <= position)
    ring_record = ring + slot * ring_stride + ring_offset + (at % RING) * RECORD
    record = gl.where(at >= begin, own + (own_row + at).to(gl.int64) * RECORD, ring_record)
    word = gl.arange(0, SIZE // 4, layout=gl.SliceLayout(0, RAW))
    both = gl.load(record[:, None].to(gl.pointer_type(gl.int32)) + word[None, :], mask=seen[:, None], other=0)
    record2 = gl.convert_layout(record, gl.SliceLayout(1, SCALES), assert_trivial=True)
    seen2 = gl.convert_layout(seen, gl.SliceLayout(1, SCALES), assert_trivial=True)
    group = gl.arange(0, SIZE // 32, layout=gl.SliceLayout(0, SCALES))
    exponent = gl.load(record2[:, None] + SIZE + group[None, :], mask=seen2[:, None], other=0)
    return both, exponent


@gluon.jit
def _fetch_places(
    where: gl.tensor, first: gl.tensor, count: gl.tensor, KEYS: gl.constexpr, RAW: gl.constexpr
) -> gl.tensor:
    key = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, RAW))
    return gl.load(where + key, mask=key < count, other=-1)


@gluon.jit
def _fetch_entries(
    main: gl.tensor,
    flat: gl.tensor,
    main_stride: gl.tensor,
    main_offset: gl.tensor,
    PER_BLOCK: gl.constexpr,
    RECORD: gl.constexpr,
    SIZE: gl.constexpr,
    RAW: gl.constexpr,
    SCALES: gl.constexpr,
) -> gl.tuple:
    HALF: gl.constexpr = SIZE // 2
    seen = flat >= 0
    record = main + (flat // PER_BLOCK).to(gl.int64) * main_stride + main_offset + (flat % PER_BLOCK) * RECORD
    word = gl.arange(0, SIZE // 8, layout=gl.SliceLayout(0, RAW))
    both = gl.load(record[:, None].to(gl.pointer_type(gl.int32)) + word[None, :], mask=seen[:, None], other=0)
    record2 = gl.convert_layout(record, gl.SliceLayout(1, SCALES), assert_trivial=True)
    seen2 = gl.convert_layout(seen, gl.SliceLayout(1, SCALES), assert_trivial=True)
    group = gl.arange(0, SIZE // 16, layout=gl.SliceLayout(0, SCALES))
    bits = gl.load(record2[:, None] + HALF + group[None, :], mask=seen2[:, None], other=0)
    return both, bits


@gluon.jit
def _as_words(buffer: gl.shared_memory_descriptor, WORDS: gl.constexpr) -> gl.shared_memory_descriptor:
    """A buffer of keys as pairs of values, each an int32."""
    return buffer._reinterpret(gl.int32, [buffer.shape[0], buffer.shape[1] // 2], WORDS)  # noqa: SLF001 - its only name


@gluon.jit
def _window_words(both: gl.tensor, exponent: gl.tensor, RAW: gl.constexpr) -> gl.tensor:
    """Window records as words of a buffer: even values, then odd ones."""
    even, odd = e4m3_words(both, _spread(_power(exponent), 8, RAW))
    return gl.join(even, odd).permute((0, 2, 1)).reshape([both.shape[0], both.shape[1] * 2])


@gluon.jit
def _entry_words(both: gl.tensor, bits: gl.tensor, RAW: gl.constexpr) -> gl.tensor:
    """Entries' records likewise."""
    low_first, low_then, high_first, high_then = e2m1_words(both, _spread(_e4m3_value(bits), 2, RAW))
    even = gl.join(low_first, low_then).reshape([both.shape[0], both.shape[1] * 2])
    odd = gl.join(high_first, high_then).reshape([both.shape[0], both.shape[1] * 2])
    return gl.join(even, odd).permute((0, 2, 1)).reshape([both.shape[0], both.shape[1] * 4])


@gluon.jit
def _sums(p: gl.tensor) -> gl.tensor:
    return gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), axis=2)


@gluon.jit
def _weigh(
    scores: gl.tensor,
    seen: gl.tensor,
    weights: gl.shared_memory_descriptor,
    acc: gl.tensor,
    largest: gl.tensor,
    total: gl.tensor,
    scale: gl.tensor,
    ROWS_ACC: gl.constexpr,
) -> gl.tuple:
    """Scores of some keys into the running softmax: their weights into shared memory, everything before them shrunk."""
    scores = gl.where(seen[None, :], scores * scale, float("-inf"))
    higher = gl.maximum(largest, gl.max(scores, axis=1))
    shrink = gl.exp2(largest - higher)
    p = gl.exp2(scores - higher[:, None])
    parts = _sums(p)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, parts.type.layout))[:, None] + parts
    weights.store(p.to(gl.bfloat16))
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, ROWS_ACC)[:, None]
    return acc, higher, total


@gluon.jit
def _ratio(largest: gl.tensor) -> gl.tensor:
    return gl.div_rn(gl.maximum(largest, 1e-4), gl.full_like(largest, 448.0))


@gluon.jit
def _largest(low: gl.tensor, high: gl.tensor) -> gl.tensor:
    return gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=1)


@gluon.jit
def _left(
    summed: gl.shared_memory_descriptor,
    cos: gl.tensor,
    sin: gl.tensor,
    token: gl.tensor,
    chunk: gl.constexpr,
    ROWS: gl.constexpr,
    HALF: gl.constexpr,
    PAIRS: gl.constexpr,
    CHUNK: gl.constexpr,
    TURN: gl.constexpr,
) -> gl.tuple:
    """Some columns of the outcome, turned back and rounded to fp8: even and odd ones, fp32."""
    pair = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN))
    even = summed.slice(chunk * CHUNK, CHUNK, dim=1).load(TURN).to(gl.float32)
    odd = summed.slice(HALF + chunk * CHUNK, CHUNK, dim=1).load(TURN).to(gl.float32)
    if (chunk + 1) * CHUNK > HALF - PAIRS:
        turns = pair >= HALF - PAIRS
        c = gl.load(cos + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=1.0)[None, :]
        s = gl.load(sin + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=0.0)[None, :]
        back_even = _bf16(even * c + odd * s)
        back_odd = _bf16(odd * c - even * s)
    else:
        back_even, back_odd = even, odd
    highest = gl.maximum(gl.abs(back_even), gl.abs(back_odd)).reshape([ROWS, CHUNK // 16, 16])
    ratio = _ratio(gl.max(highest, axis=2))
    factor = _power((ratio.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23)
    factor = gl.expand_dims(factor, 2).broadcast_to([ROWS, CHUNK // 16, 16]).reshape([ROWS, CHUNK])
    factor = gl.convert_layout(factor, TURN)
    inverse = (0x7F000000 - factor.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    low = (back_even * inverse).to(gl.float8e4nv).to(gl.float32) * factor
    high = (back_odd * inverse).to(gl.float8e4nv).to(gl.float32) * factor
    return low, high


@gluon.jit
def attend_kernel(  # noqa: C901, PLR0912, PLR0915 - one pass over the keys
    queries: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    own: gl.tensor,
    ring: gl.tensor,
    positions: gl.tensor,
    lowest: gl.tensor,
    begins: gl.tensor,
    starts: gl.tensor,
    slots: gl.tensor,
    where: gl.tensor,
    counts: gl.tensor,
    main: gl.tensor,
    sinks: gl.tensor,
    out: gl.tensor,
    scale: gl.tensor,
    ring_stride: gl.tensor,
    ring_offset: gl.tensor,
    main_stride: gl.tensor,
    main_offset: gl.tensor,
    spans: gl.tensor,
    rows: gl.tensor,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    SIZE: gl.constexpr,
    PAIRS: gl.constexpr,
    WINDOW: gl.constexpr,
    RING: gl.constexpr,
    WINDOW_RECORD: gl.constexpr,
    MOST: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    MAIN_RECORD: gl.constexpr,
    KEYS: gl.constexpr,
    PER_GROUP: gl.constexpr,
) -> None:
    """PER_GROUP: 0, or heads of a group: `out` is then e4m3, group after group, under a scale for 256 columns."""
    gl.static_assert(KEYS == 64 and ROWS == 64 and HEADS == ROWS)
    gl.static_assert(WINDOW % KEYS == 0 and WINDOW >= 2 * KEYS)
    HALF: gl.constexpr = SIZE // 2
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])
    RAW8: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
    EXPONENTS: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, 8], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
    SCALES: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 2, 2], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    TURN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS_ACC: gl.constexpr = gl.SliceLayout(1, VALUES)
    CHUNK: gl.constexpr = 64

    token = gl.program_id(0).to(gl.int64)
    slot = gl.load(slots + token)
    position, begin = gl.load(positions + token).to(gl.int32), gl.load(begins + token).to(gl.int32)
    oldest = gl.maximum(gl.load(lowest + token), 0).to(gl.int32)
    own_row = gl.load(starts + token).to(gl.int32) - begin
    if MOST > 0:
        count = gl.where(slot >= 0, gl.load(counts + token), 0)
        places = _fetch_places(where + token * MOST, 0, count, KEYS, RAW)
    both8, exponent = _fetch_window(
        own,
        ring,
        position,
        oldest,
        begin,
        own_row,
        slot,
        0,
        ring_stride,
        ring_offset,
        KEYS,
        SIZE,
        WINDOW,
        RING,
        WINDOW_RECORD,
        RAW8,
        EXPONENTS,
    )

    q_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, SIZE], WIDE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, SIZE], WIDE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, KEYS], WIDE)

    head = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TURN))
    for chunk in gl.static_range(HALF // CHUNK):
        pair = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN))
        pairs = gl.load(queries + (token * HEADS + head[:, None]) * HALF + pair[None, :])
        even = (pairs << 16).to(gl.float32, bitcast=True)
        odd = (pairs & -65536).to(gl.float32, bitcast=True)
        if (chunk + 1) * CHUNK > HALF - PAIRS:
            turns = pair >= HALF - PAIRS
            c = gl.load(cos + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=1.0)[None, :]
            s = gl.load(sin + token * PAIRS + pair - (HALF - PAIRS), mask=turns, other=0.0)[None, :]
            q_smem.slice(chunk * CHUNK, CHUNK, dim=1).store((even * c - odd * s).to(gl.bfloat16))
            q_smem.slice(HALF + chunk * CHUNK, CHUNK, dim=1).store((odd * c + even * s).to(gl.bfloat16))
        else:
            q_smem.slice(chunk * CHUNK, CHUNK, dim=1).store(even.to(gl.bfloat16))
            q_smem.slice(HALF + chunk * CHUNK, CHUNK, dim=1).store(odd.to(gl.bfloat16))

    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    largest = gl.load(sinks + row) * LOG2E
    # One sum for each half of the keys, which different warps add up; the sink is in the first.
    total = _sums(gl.where((row[:, None] >= 0) & (column[None, :] == 0), 1.0, 0.0))
    acc = gl.zeros([ROWS, SIZE], gl.float32, VALUES)
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scale = scale * LOG2E

    TILES: gl.constexpr = WINDOW // KEYS
    _as_words(k_smem.index(0), WORDS).store(_window_words(both8, exponent, RAW8))
    both8, exponent = _fetch_window(
        own,
        ring,
        position,
        oldest,
        begin,
        own_row,
        slot,
        KEYS,
        ring_stride,
        ring_offset,
        KEYS,
        SIZE,
        WINDOW,
        RING,
        WINDOW_RECORD,
        RAW8,
        EXPONENTS,
    )
    fence_async_shared()
    for tile in gl.static_range(TILES):
        here = k_smem.index(tile % 2)
        there = k_smem.index((tile + 1) % 2)
        scores = warpgroup_mma(q_smem, here.permute((1, 0)), none, use_acc=False, is_async=True)
        if tile + 1 < TILES:
            _as_words(there, WORDS).store(_window_words(both8, exponent, RAW8))
        elif MOST > 0:
            _as_words(there, WORDS).store(_entry_words(both, bits, RAW))  # noqa: F821 - fetched in the turn before
        fence_async_shared()
        scores = warpgroup_mma_wait(0, deps=[scores])
        at = position - (WINDOW - 1) + tile * KEYS + column
        seen = (at >= oldest) & (slot >= 0) & (at <= position)
        acc, largest, total = _weigh(scores, seen, p_smem, acc, largest, total, scale, ROWS_ACC)
        acc = warpgroup_mma(p_smem, here, acc, is_async=True)
        if tile + 2 < TILES:
            both8, exponent = _fetch_window(
                own,
                ring,
                position,
                oldest,
                begin,
                own_row,
                slot,
                (tile + 2) * KEYS,
                ring_stride,
                ring_offset,
                KEYS,
                SIZE,
                WINDOW,
                RING,
                WINDOW_RECORD,
                RAW8,
                EXPONENTS,
            )
        elif MOST > 0:
            both, bits = _fetch_entries(
                main, places, main_stride, main_offset, PER_BLOCK, MAIN_RECORD, SIZE, RAW, SCALES
            )
            places = _fetch_places(where + token * MOST, (tile + 3 - TILES) * KEYS, count, KEYS, RAW)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if MOST > 0:
        buffer = TILES % 2
        for first in range(0, count, KEYS):
            here = k_smem.index(buffer)
            there = k_smem.index(1 - buffer)
            scores = warpgroup_mma(q_smem, here.permute((1, 0)), none, use_acc=False, is_async=True)
            _as_words(there, WORDS).store(_entry_words(both, bits, RAW))
            fence_async_shared()
            scores = warpgroup_mma_wait(0, deps=[scores])
            seen = first + column < count
            acc, largest, total = _weigh(scores, seen, p_smem, acc, largest, total, scale, ROWS_ACC)
            acc = warpgroup_mma(p_smem, here, acc, is_async=True)
            # Behind the turn's last fence, which may wait for loads that are under way.
            both, bits = _fetch_entries(
                main, places, main_stride, main_offset, PER_BLOCK, MAIN_RECORD, SIZE, RAW, SCALES
            )
            places = _fetch_places(where + token * MOST, first + 3 * KEYS, count, KEYS, RAW)
            acc = warpgroup_mma_wait(0, deps=[acc])
            buffer = 1 - buffer

    q_smem.store((acc / gl.convert_layout(gl.sum(total, axis=1), ROWS_ACC)[:, None]).to(gl.bfloat16))
    for chunk in gl.static_range(HALF // CHUNK):
        pair = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TURN))
        low, high = _left(q_smem, cos, sin, token, chunk, ROWS, HALF, PAIRS, CHUNK, TURN)
        if PER_GROUP == 0:
            packed = (low.to(gl.uint32, bitcast=True) >> 16) | (high.to(gl.uint32, bitcast=True) & 0xFFFF0000)
            gl.store(out + (token * HEADS + head[:, None]) * HALF + pair[None, :], packed.to(gl.int32, bitcast=True))
        elif chunk % 2 == 0:
            low_before, high_before = low, high
        else:
            largest = gl.maximum(_largest(low_before, high_before), _largest(low, high))
            exponent = (_ratio(largest).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
            inverse = _power(254 - exponent)[:, None]
            row = head // PER_GROUP * (rows // (HEADS // PER_GROUP)) + token
            inside = head % PER_GROUP
            place = out + row.to(gl.int64)[:, None] * (PER_GROUP * HALF) + inside[:, None] * HALF + pair[None, :]
            gl.store(place - CHUNK, as_e4m3(low_before * inverse, high_before * inverse))
            gl.store(place, as_e4m3(low * inverse, high * inverse))
            span = inside * (HALF // (2 * CHUNK)) + chunk // 2
            gl.store(spans + span * rows + row, _power(exponent))

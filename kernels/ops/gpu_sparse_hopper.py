"""How does one Hopper program attend for one token with its matrix units fed from shared memory alone?

The kernel of `kernels.ops.gpu_sparse` in Gluon, Triton's language of explicit layouts, for 64 heads of 512. Even
elements of a head come first there, odd ones behind them. Queries lie in shared memory, and 64 keys at a time in one of
two buffers. A buffer goes round three kinds of warps: four unpack keys into it (it is full then), four score them and
find their weights (weighed), and eight sum their values (empty). Weights, and what shrinks the sums before them, have
the buffer's index and are free when it is. Records come as they are into room of their own, ahead of those who unpack:
asked for when the ones before them have been read, before these are unpacked.
Triton's interpreter does not run Gluon: there, and on other GPUs, the kernel in Triton does the same.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.ops.gpu_bring import bring_share
from kernels.ops.gpu_sparse_heads import angles, fetch_queries, leave, plain_words, power_of, turned_words
from kernels.ops.gpu_words import e2m1_pairs, e4m3_pairs

ROWS, SIZE, KEYS, WARPS = 64, 512, 64, 8
"""Heads and their size that the kernel is made for, keys a turn, and its warps that sum: 16 in all."""
SPAN = 256
"""Columns of what it leaves restated under one scale: two chunks of pairs."""
LOG2E = gl.constexpr(1.4426950408889634)
BRINGING = 256
_SUMMING = gl.constexpr(BRINGING)
"""Threads of a program that ask for what comes after it: those that sum, for which nothing is told by shared memory."""
_LAST_TURNS = gl.constexpr(2)
"""Before so many they ask: what has been asked for then comes while nothing else is read."""
_SCORING = gl.constexpr(80)
_UNPACKING = gl.constexpr(80)
"""Registers of a thread; those that sum have 176."""
_LESS = gl.constexpr(256.0)
"""Keys lie in shared memory divided by this: no scale times 2 ** 126 of a format is beyond fp32."""
_FLAGS = gl.constexpr(mbarrier.MBarrierLayout())
_FULL = gl.constexpr(0)
_EMPTY = gl.constexpr(2)
_WEIGHED = gl.constexpr(4)
_TOLD = gl.constexpr(6)
_ASKED = gl.constexpr(7)
_READ = gl.constexpr(8)
"""Where flags are: of each buffer, then that queries are there and that sums of weights are; and, where those who sum
ask for entries' records, that these are there, and that their room is free."""
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_RAW = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 2, [1, 0]))
"""Of raw words: eight keys' lines are read at once, without conflicts of banks."""
_ASK_RAW = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
_ASK_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [8, 1], [1, 0]))
"""Which thread of those that sum asks for which words."""
_CHUNK = gl.constexpr(64)
"""Pairs of a head that a warp turns together."""


@gluon.jit
def _spread(scale: gl.tensor, WORDS: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """[keys, groups] fp32 -> [keys, groups * WORDS] int32, two bf16 of each, in the layout of the words."""
    high = scale.to(gl.uint32, bitcast=True)
    both = (high | (high >> 16)).to(gl.int32, bitcast=True)
    wide = gl.expand_dims(both, 2).broadcast_to([scale.shape[0], scale.shape[1], WORDS])
    return gl.convert_layout(wide.reshape([scale.shape[0], scale.shape[1] * WORDS]), layout, assert_trivial=True)


@gluon.jit
def _window_records(
    records: gl.tuple,
    reach: gl.tuple,
    key: gl.tensor,
    WINDOW: gl.constexpr,
    RING: gl.constexpr,
    RECORD: gl.constexpr,
) -> gl.tuple:
    """Where some of a window's records are, and which are seen."""
    own, ring, begin = records
    position, oldest = reach
    at = position - (WINDOW - 1) + key
    record = gl.where(at >= begin, own + at.to(gl.int64) * RECORD, ring + (at % RING) * RECORD)
    return record, (at >= oldest) & (at <= position)


@gluon.jit
def _ask_window(
    raw: gl.shared_memory_descriptor,
    records: gl.tuple,
    reach: gl.tuple,
    first: gl.constexpr,
    word: gl.constexpr,
    WINDOW: gl.constexpr,
    RING: gl.constexpr,
    RECORD: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Words of a window's records from the first key and word on go to `raw`; zeros where none is seen."""
    key = first + gl.arange(0, raw.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    record, seen = _window_records(records, reach, key, WINDOW, RING, RECORD)
    column = word + gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    words = record[:, None].to(gl.pointer_type(gl.int32)) + column[None, :]
    async_copy.async_copy_global_to_shared(raw, words, mask=seen[:, None])


@gluon.jit
def _fetch_places(
    where: gl.tensor, first: gl.tensor, count: gl.tensor, KEYS: gl.constexpr, RAW: gl.constexpr
) -> gl.tensor:
    key = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, RAW))
    return gl.load(where + key, mask=key < count, other=-1)


@gluon.jit
def _ask_entries(
    raw: gl.shared_memory_descriptor,
    place: gl.tensor,
    entries: gl.tuple,
    first: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    RECORD: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Words of entries' records from the first on go to `raw`; zeros where there is no entry."""
    main, main_stride, _, _ = entries
    record = main + (place // PER_BLOCK).to(gl.int64) * main_stride + (place % PER_BLOCK) * RECORD
    word = first + gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    words = record[:, None].to(gl.pointer_type(gl.int32)) + word[None, :]
    async_copy.async_copy_global_to_shared(raw, words, mask=(place >= 0)[:, None])


@gluon.jit
def _as_words(buffer: gl.shared_memory_descriptor) -> gl.shared_memory_descriptor:
    """A buffer of bf16 as pairs of them, each an int32."""
    return buffer._reinterpret(gl.int32, [buffer.shape[0], buffer.shape[1] // 2], _WORDS)  # noqa: SLF001 - its only name


@gluon.jit
def _as_bytes(buffer: gl.shared_memory_descriptor) -> gl.shared_memory_descriptor:
    """A buffer of int32 as their bytes."""
    return buffer._reinterpret(gl.uint8, [buffer.shape[0], buffer.shape[1] * 4], _LINES)  # noqa: SLF001 - its only name


@gluon.jit
def _beside(left: gl.tensor, right: gl.tensor) -> gl.tensor:
    """[rows, n] twice -> [rows, 2 n]."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], left.shape[1] * 2])


@gluon.jit
def _window_words(both: gl.tensor, exponent: gl.tensor, RAW: gl.constexpr) -> gl.tensor:
    """Window records as words of a buffer: even values, then odd ones; the format's 2 ** 120 is in the scale."""
    scale = power_of(gl.minimum(exponent.to(gl.int32) + 112, 254))
    even, odd = e4m3_pairs(both, _spread(scale, 8, RAW))
    return _beside(even, odd)


@gluon.jit
def _entry_words(both: gl.tensor, bits: gl.tensor, RAW: gl.constexpr) -> gl.tensor:
    """Entries' records likewise: e4m3 scales times 2 ** 118."""
    wide = bits.to(gl.uint32)
    small = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(gl.float32, bitcast=True)
    scale = (small * 1.7014118346046923e38) * 2.596148429267414e33
    low_first, low_then, high_first, high_then = e2m1_pairs(both, _spread(scale, 2, RAW))
    even = gl.join(low_first, low_then).reshape([both.shape[0], both.shape[1] * 2])
    odd = gl.join(high_first, high_then).reshape([both.shape[0], both.shape[1] * 2])
    return _beside(even, odd)


@gluon.jit
def _seen(
    column: gl.tensor, turn: gl.tensor, reach: gl.tuple, count: gl.tensor, WINDOW: gl.constexpr, KEYS: gl.constexpr
) -> gl.tensor:
    """Which of a turn's keys are the token's: of its window, or entries."""
    position, oldest = reach
    TILES: gl.constexpr = WINDOW // KEYS
    base = position - (WINDOW - 1) + turn * KEYS
    inside = turn < TILES
    low = gl.where(inside, oldest - base, 0)
    high = gl.where(inside, position - base + 1, count - (turn - TILES) * KEYS)
    return (column >= low) & (column < high)


@gluon.jit
def _sums(p: gl.tensor) -> gl.tensor:
    """Of each half of the keys."""
    return gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), axis=2)


@gluon.jit
def _unpack(  # noqa: C901, PLR0912, PLR0915 - keys of two kinds, one stream of copies, asked for here or elsewhere
    records: gl.tuple,
    reach: gl.tuple,
    entries: gl.tuple,
    k_smem: gl.shared_memory_descriptor,
    raws: gl.tuple,
    flags: gl.shared_memory_descriptor,
    KEYS: gl.constexpr,
    SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    RING: gl.constexpr,
    WINDOW_RECORD: gl.constexpr,
    MOST: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    MAIN_RECORD: gl.constexpr,
    SUMS_ASK: gl.constexpr,
) -> None:
    """Keys, by four warps: the window's 32 at a time, then entries.

    SUMS_ASK: those who sum ask for entries' records while the units multiply, and these warps have more time to unpack.
    """
    _, _, where, count = entries
    RAW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    RAW_SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 2, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0]))
    EIGHTS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    EXPONENTS: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, 4], [4, 4, 2], [4, 1, 1], [2, 1, 0]))
    RAW_EXPONENTS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    TILES: gl.constexpr = WINDOW // KEYS
    HALF: gl.constexpr = KEYS // 2
    raw, raw_scales = raws
    raw8 = raw._reinterpret(gl.int32, [HALF, SIZE // 4], _LINES)  # noqa: SLF001 - its only name
    exponents = raw_scales._reinterpret(gl.int32, [2 * KEYS, SIZE // 128], _LINES)  # noqa: SLF001 - as above
    _ask_window(raw8, records, reach, 0, 0, WINDOW, RING, WINDOW_RECORD, EIGHTS)
    _ask_window(exponents, records, reach, 0, SIZE // 4, WINDOW, RING, WINDOW_RECORD, RAW_EXPONENTS)
    async_copy.commit_group()
    ASKS: gl.constexpr = MOST > 0 and not SUMS_ASK
    if ASKS:
        places = _fetch_places(where, 0, count, KEYS, RAW)
        places2 = _fetch_places(where, 0, count, KEYS, RAW_SCALES)
    for half in gl.static_range(2 * TILES):
        async_copy.wait_group(0)
        both8 = raw8.load(EIGHTS)
        exponent = _as_bytes(exponents).slice(half % 4 * HALF, HALF, dim=0).load(EXPONENTS)
        # The next ones are under way while these are unpacked.
        if half + 1 < 2 * TILES:
            _ask_window(raw8, records, reach, (half + 1) * HALF, 0, WINDOW, RING, WINDOW_RECORD, EIGHTS)
            if half % 4 == 3:
                _ask_window(
                    exponents, records, reach, (half + 1) * HALF, SIZE // 4, WINDOW, RING, WINDOW_RECORD, RAW_EXPONENTS
                )
            async_copy.commit_group()
        elif ASKS:
            _ask_entries(raw, places, entries, 0, PER_BLOCK, MAIN_RECORD, RAW)
            _ask_entries(raw_scales, places2, entries, SIZE // 8, PER_BLOCK, MAIN_RECORD, RAW_SCALES)
            async_copy.commit_group()
        elif SUMS_ASK:
            _say_read(flags)
        if half >= 4 and half % 2 == 0:
            mbarrier.wait(flags.index(_EMPTY + half // 2 % 2), (half // 4 - 1) & 1)
        words = _as_words(k_smem.index(half // 2 % 2)).slice(half % 2 * HALF, HALF, dim=0)
        words.store(_window_words(both8, exponent, EIGHTS))
        if half % 2 == 1:
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(flags.index(_FULL + half // 2 % 2), count=1)
    if MOST > 0:
        if ASKS:
            places = _fetch_places(where, KEYS, count, KEYS, RAW)
            places2 = _fetch_places(where, KEYS, count, KEYS, RAW_SCALES)
        turn = count * 0 + TILES
        for first in range(0, count, KEYS):
            if SUMS_ASK:
                mbarrier.wait(flags.index(_ASKED), turn & 1)
            else:
                async_copy.wait_group(0)
            both, bits = raw.load(RAW), _as_bytes(raw_scales).load(SCALES)
            # The next ones are under way while these are unpacked.
            if SUMS_ASK:
                _say_read(flags)
            else:
                _ask_entries(raw, places, entries, 0, PER_BLOCK, MAIN_RECORD, RAW)
                _ask_entries(raw_scales, places2, entries, SIZE // 8, PER_BLOCK, MAIN_RECORD, RAW_SCALES)
                async_copy.commit_group()
                places = _fetch_places(where, first + 2 * KEYS, count, KEYS, RAW)
                places2 = _fetch_places(where, first + 2 * KEYS, count, KEYS, RAW_SCALES)
            mbarrier.wait(flags.index(_EMPTY + (turn & 1)), (turn // 2 - 1) & 1)
            _as_words(k_smem.index(turn & 1)).store(_entry_words(both, bits, RAW))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(flags.index(_FULL + (turn & 1)), count=1)
            turn += 1
        if ASKS:
            async_copy.wait_group(0)


@gluon.jit
def _say_read(flags: gl.shared_memory_descriptor) -> None:
    """All of what was asked for is in registers."""
    gl.thread_barrier()
    mbarrier.arrive(flags.index(_READ), count=1)


@gluon.jit
def _places(entries: gl.tuple, first: gl.tensor, KEYS: gl.constexpr) -> gl.tuple:
    """Of a turn's entries, for each thread that asks for their words and for their scales."""
    _, _, where, count = entries
    return _fetch_places(where, first, count, KEYS, _ASK_RAW), _fetch_places(where, first, count, KEYS, _ASK_SCALES)


@gluon.jit
def _ask(
    raws: gl.tuple,
    places: gl.tuple,
    entries: gl.tuple,
    flags: gl.shared_memory_descriptor,
    turn: gl.tensor,
    KEYS: gl.constexpr,
    SIZE: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    RECORD: gl.constexpr,
) -> gl.tuple:
    """A turn's entries, by eight warps, where the ones before them have been read.  Returns places of the next."""
    raw, raw_scales = raws
    mbarrier.wait(flags.index(_READ), turn & 1)
    _ask_entries(raw, places[0], entries, 0, PER_BLOCK, RECORD, _ASK_RAW)
    _ask_entries(raw_scales, places[1], entries, SIZE // 8, PER_BLOCK, RECORD, _ASK_SCALES)
    async_copy.mbarrier_arrive(flags.index(_ASKED), increment_count=False)
    return _places(entries, (turn + 1) * KEYS, KEYS)


@gluon.jit
def _weigh(
    room: gl.tuple,
    flags: gl.shared_memory_descriptor,
    sinks: gl.tensor,
    scale: gl.tensor,
    reach: gl.tuple,
    count: gl.tensor,
    ROWS: gl.constexpr,
    WINDOW: gl.constexpr,
    KEYS: gl.constexpr,
) -> None:
    """Scores and their weights in the running softmax, by four warps; rows' sums at the end."""
    q_smem, k_smem, p_smem, shrinks = room
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    largest = gl.load(sinks + row) * LOG2E
    # One sum for each half of the keys; the sink is in the first.
    total = _sums(gl.where((row[:, None] >= 0) & (column[None, :] == 0), 1.0, 0.0))
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scale = scale * (LOG2E * _LESS)
    mbarrier.wait(flags.index(_TOLD), 0)
    for turn in range(WINDOW // KEYS + (count + KEYS - 1) // KEYS):
        mbarrier.wait(flags.index(_FULL + (turn & 1)), (turn // 2) & 1)
        scores = warpgroup_mma(q_smem, k_smem.index(turn & 1).permute((1, 0)), none, use_acc=False, is_async=True)
        seen = _seen(column, turn, reach, count, WINDOW, KEYS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(seen[None, :], scores * scale, float("-inf"))
        higher = gl.maximum(largest, gl.max(scores, axis=1))
        shrink = gl.exp2(largest - higher)
        p = gl.exp2(scores - higher[:, None])
        p_smem.index(turn & 1).store(p.to(gl.bfloat16))
        shrinks.index(turn & 1).store(shrink)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(flags.index(_WEIGHED + (turn & 1)), count=1)
        parts = _sums(p)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, parts.type.layout))[:, None] + parts
        largest = higher
    shrinks.index(2).store(gl.convert_layout(_LESS / gl.sum(total, axis=1), gl.SliceLayout(1, SCORES)))
    gl.thread_barrier()
    mbarrier.arrive(flags.index(_TOLD), count=1)


@gluon.jit
def _sum(
    queries: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    left: gl.tuple,
    room: gl.tuple,
    flags: gl.shared_memory_descriptor,
    token: gl.tensor,
    count: gl.tensor,
    brought: gl.tuple,
    raws: gl.tuple,
    entries: gl.tuple,
    ROWS: gl.constexpr,
    SIZE: gl.constexpr,
    PAIRS: gl.constexpr,
    WINDOW: gl.constexpr,
    KEYS: gl.constexpr,
    PER_GROUP: gl.constexpr,
    BRINGS: gl.constexpr,
    SUMS_ASK: gl.constexpr,
    PER_BLOCK: gl.constexpr,
    RECORD: gl.constexpr,
) -> None:
    """Queries, weighted values, and what is left, by eight warps."""
    q_smem, k_smem, p_smem, shrinks = room
    out, spans, rows = left
    HALF: gl.constexpr = SIZE // 2
    LAST: gl.constexpr = HALF // _CHUNK - 1
    TURN: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    ROWS_ACC: gl.constexpr = gl.SliceLayout(1, VALUES)
    # All that needs no other load is asked for before anything waits.
    heads = queries + (token * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TURN))) * HALF
    pairs0 = fetch_queries(heads, 0, _CHUNK, TURN)
    if LAST == 3:
        pairs1 = fetch_queries(heads, 1, _CHUNK, TURN)
        pairs2 = fetch_queries(heads, 2, _CHUNK, TURN)
    pairs3 = fetch_queries(heads, LAST, _CHUNK, TURN)
    c = angles(cos, token, 1.0, PAIRS, _CHUNK, TURN)
    s = angles(sin, token, 0.0, PAIRS, _CHUNK, TURN)
    even0, odd0 = plain_words(pairs0)
    even3, odd3 = turned_words(pairs3, c, s)
    if LAST == 3:
        even1, odd1 = plain_words(pairs1)
        even2, odd2 = plain_words(pairs2)
        even0, odd0 = _beside(even0, even1), _beside(odd0, odd1)
        even3, odd3 = _beside(even2, even3), _beside(odd2, odd3)
    # In one go: between stores into slices of a buffer all warps wait for each other.
    _as_words(q_smem).store(_beside(_beside(even0, even3), _beside(odd0, odd3)))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(flags.index(_TOLD), count=1)

    if SUMS_ASK:
        places = _places(entries, 0, KEYS)
        if count > 0:
            places = _ask(raws, places, entries, flags, count * 0, KEYS, SIZE, PER_BLOCK, RECORD)
    acc = gl.zeros([ROWS, SIZE], gl.float32, VALUES)
    turns = WINDOW // KEYS + (count + KEYS - 1) // KEYS
    for turn in range(turns):
        if BRINGS:
            data, size, piece_bytes, first = brought
            share = gl.where(turn == turns - _LAST_TURNS, gl.program_id(0) - first, -1)
            bring_share(data, size, piece_bytes, share, _SUMMING)
        mbarrier.wait(flags.index(_WEIGHED + (turn & 1)), (turn // 2) & 1)
        acc = acc * shrinks.index(turn & 1).load(ROWS_ACC)[:, None]
        acc = warpgroup_mma(p_smem.index(turn & 1), k_smem.index(turn & 1), acc, is_async=True)
        # Two turns' entries have been read by now, or will be before this turn's values are asked for.
        if SUMS_ASK and (turn + 1) * KEYS < count:
            places = _ask(raws, places, entries, flags, turn + 1, KEYS, SIZE, PER_BLOCK, RECORD)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(flags.index(_EMPTY + (turn & 1)), count=1)

    c = angles(cos, token, 1.0, PAIRS, _CHUNK, TURN)
    s = angles(sin, token, 0.0, PAIRS, _CHUNK, TURN)
    mbarrier.wait(flags.index(_TOLD), 1)
    # A product with a row's reciprocal has the bits of a division of each element.
    q_smem.store((acc * shrinks.index(2).load(ROWS_ACC)[:, None]).to(gl.bfloat16))
    leave(q_smem, c, s, out, spans, rows, token, PER_GROUP, HALF, _CHUNK, TURN)


@gluon.jit
def attend_kernel(
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
    brought: gl.tensor,
    brought_size: gl.tensor,
    piece_bytes: gl.tensor,
    first_bringing: gl.tensor,
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
    BRINGS: gl.constexpr,
    SUMS_ASK: gl.constexpr,
) -> None:
    """PER_GROUP: 0, or heads of a group: `out` is then e4m3, group after group, under a scale for 256 columns.

    BRINGS: programs from `first_bringing` on ask for the bytes of `brought` (`gpu_bring.Share`).  SUMS_ASK: those who
    sum ask for entries' records, which is for windows of two turns.
    """
    gl.static_assert(KEYS == 64 and ROWS == 64 and HEADS == ROWS)
    gl.static_assert(WINDOW % KEYS == 0 and WINDOW >= 2 * KEYS)
    gl.static_assert(not SUMS_ASK or (MOST > 0 and WINDOW == 2 * KEYS))
    gl.static_assert(PAIRS <= _CHUNK)
    token = gl.program_id(0).to(gl.int64)
    slot = gl.load(slots + token)
    position, begin = gl.load(positions + token).to(gl.int32), gl.load(begins + token).to(gl.int32)
    oldest = gl.maximum(gl.load(lowest + token), 0).to(gl.int32)
    own_row = gl.load(starts + token).to(gl.int32) - begin
    count = position * 0
    if MOST > 0:
        count = gl.where(slot >= 0, gl.load(counts + token), 0)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, SIZE], _WIDE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, SIZE], _WIDE)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, KEYS], _WIDE)
    # Entries' records as they are, and their scales; or records of the window, half as many.
    raw = gl.allocate_shared_memory(gl.int32, [KEYS, SIZE // 8], _RAW)
    raws = (raw, gl.allocate_shared_memory(gl.int32, [KEYS, SIZE // 64], _LINES))
    # Of each buffer, and what the sums are multiplied with at the end.
    shrinks = gl.allocate_shared_memory(gl.float32, [3, ROWS], _PLAIN)
    flags = gl.allocate_shared_memory(gl.int64, [9 if SUMS_ASK else 7, 1], _FLAGS)
    for flag in gl.static_range(9 if SUMS_ASK else 7):
        mbarrier.init(flags.index(flag), count=_SUMMING if flag == _ASKED else 1)
    gl.thread_barrier()
    # Other warps get their values by shared memory, in which little room is left.
    own = own + own_row.to(gl.int64) * WINDOW_RECORD
    ring = ring + slot * ring_stride + ring_offset
    reach = (position, gl.where(slot >= 0, oldest, position + 1))
    records = (own, ring, begin)
    entries = (main + main_offset, main_stride, where + token * MOST, count)
    room, left = (q_smem, k_smem, p_smem, shrinks), (out, spans, rows)
    gl.warp_specialize(
        [
            (_sum, (
                queries, cos, sin, left, room, flags, token, count,
                (brought, brought_size, piece_bytes, first_bringing), raws, entries,
                ROWS, SIZE, PAIRS, WINDOW, KEYS, PER_GROUP, BRINGS, SUMS_ASK, PER_BLOCK, MAIN_RECORD,
            )),
            (_weigh, (room, flags, sinks, scale, reach, count, ROWS, WINDOW, KEYS)),
            (_unpack, (
                records, reach, entries, k_smem, raws, flags, KEYS, SIZE, WINDOW, RING, WINDOW_RECORD, MOST, PER_BLOCK,
                MAIN_RECORD, SUMS_ASK,
            )),
        ],
        [4, 4],
        [_SCORING, _UNPACKING],
    )  # fmt: skip

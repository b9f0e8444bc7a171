"""How do the programs of a decode step's one kernel get their weights and keys, and how do they meet?

A program's work is a list of units, 32 KiB each, that the tensor engine brings into a ring in shared memory. Nothing of
the list depends on what is computed, so units of the next phases are on their way while programs meet.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

COLUMNS = gl.constexpr(64)
"""Of a product that a unit is of."""
DEPTH = gl.constexpr(256)
"""Of a unit: two halves."""
HALF = gl.constexpr(128)
"""Of a unit's depth; a head's dims."""
PARTS = gl.constexpr(4)
"""Into which the depth of qkv, output and down is cut."""
ROOM = gl.constexpr(8)
"""Rows of every buffer: what the matrix unit takes at least."""
UNIT_BYTES = gl.constexpr(32768)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
"""Of an accumulator: columns (or keys, or dims) x rows (or heads)."""
LINES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
"""Of eight rows of 128 numbers."""
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
FLAGS = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def fence() -> None:
    """What this thread wrote, or has seen others write, is there for copies by the tensor engine too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def until(counter: gl.tensor, target: gl.tensor) -> None:
    """Wait until a counter in device memory has got there; what others wrote before they counted is then seen.

    One thread asks (all of them would keep the counter's place in memory busy); a barrier must follow. A step takes
    milliseconds: after seconds the kernel gives up.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred enough, never, other;
        .reg .b32 seen, tries, thread;
        mov.u32 seen, 0;
        mov.u32 thread, %tid.x;
        setp.ne.u32 other, thread, 0;
        @other bra done;
        mov.u32 tries, 0;
        again:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.ge.s32 enough, seen, $2;
        @enough bra done;
        add.u32 tries, tries, 1;
        setp.gt.u32 never, tries, 10000000;
        @never trap;
        bra again;
        done:
        mov.b32 $0, seen;
        }""",
        "=r,l,r",
        [counter, target],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def meet(counter: gl.tensor, met: gl.tensor, PROGRAMS: gl.constexpr) -> gl.tensor:
    """All programs get here before any goes on."""
    fence()
    gl.thread_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    met += PROGRAMS
    until(counter, met)
    fence_async_shared()
    gl.thread_barrier()
    fence()
    return met


@gluon.jit
def fetch(  # noqa: PLR0915 - the one list of units
    place: gl.tensor, layer: gl.tensor, unit: gl.tensor, block: gl.tensor, feed: gl.tuple, CUT: gl.constexpr
) -> gl.tuple:
    """Begin to copy a program's next unit to where the unit numbered `unit` was; return what comes after it.

    place: in the layer's list.  block: of keys, looked up one unit before it is needed.
    """
    qkv, output, gate_up, down, cache, ring, full, _, table, program, first, keys = feed
    ROWS: gl.constexpr = CUT.rows_qkv
    HIDDEN: gl.constexpr = CUT.hidden
    INNER: gl.constexpr = CUT.inner
    FFN: gl.constexpr = CUT.ffn
    STAGES: gl.constexpr = CUT.stages
    BLOCK: gl.constexpr = CUT.block_tokens
    LAYERS: gl.constexpr = CUT.layers
    GROUPS: gl.constexpr = CUT.programs // PARTS
    QKV_TILES: gl.constexpr = ROWS // COLUMNS // GROUPS
    OUT_TILES: gl.constexpr = HIDDEN // COLUMNS // GROUPS
    QKV_STEPS: gl.constexpr = HIDDEN // PARTS // DEPTH
    OUT_STEPS: gl.constexpr = INNER // PARTS // DEPTH
    GATE_STEPS: gl.constexpr = HIDDEN // DEPTH
    DOWN_STEPS: gl.constexpr = FFN // PARTS // DEPTH
    AT_KEYS: gl.constexpr = QKV_TILES * QKV_STEPS
    gated = gl.where(program < CUT.gating, CUT.pairs * 2 * GATE_STEPS, 0)
    at_output = AT_KEYS + keys
    at_gate = at_output + OUT_TILES * OUT_STEPS
    at_down = at_gate + gated
    end = at_down + OUT_TILES * DOWN_STEPS
    part = program % PARTS
    group = program // PARTS
    if layer < LAYERS:
        slot = unit % STAGES
        flag = full.index(slot)
        low = ring.index(2 * slot)
        high = ring.index(2 * slot + 1)
        mbarrier.expect(flag, UNIT_BYTES)
        if place < AT_KEYS:
            row = layer * ROWS + (group * QKV_TILES + place // QKV_STEPS) * COLUMNS
            at = part * (QKV_STEPS * DEPTH) + (place % QKV_STEPS) * DEPTH
            tma.async_copy_global_to_shared(qkv, [row, at], flag, low)
            tma.async_copy_global_to_shared(qkv, [row, at + HALF], flag, high)
        elif place < at_output:
            tile = first + place - AT_KEYS
            row = (block * LAYERS + layer) * (2 * BLOCK) + (tile % (BLOCK // COLUMNS)) * COLUMNS
            at = (program // CUT.splits) % CUT.kv_heads * HALF
            tma.async_copy_global_to_shared(cache, [row, at], flag, low)
            tma.async_copy_global_to_shared(cache, [row + BLOCK, at], flag, high)
        elif place < at_gate:
            index = place - at_output
            row = layer * HIDDEN + (group * OUT_TILES + index // OUT_STEPS) * COLUMNS
            at = part * (OUT_STEPS * DEPTH) + (index % OUT_STEPS) * DEPTH
            tma.async_copy_global_to_shared(output, [row, at], flag, low)
            tma.async_copy_global_to_shared(output, [row, at + HALF], flag, high)
        elif place < at_down:
            index = place - at_gate
            pair = program * CUT.pairs + index // (2 * GATE_STEPS)
            row = layer * (2 * FFN) + (index % 2) * FFN + pair * COLUMNS
            at = (index // 2) % GATE_STEPS * DEPTH
            tma.async_copy_global_to_shared(gate_up, [row, at], flag, low)
            tma.async_copy_global_to_shared(gate_up, [row, at + HALF], flag, high)
        else:
            index = place - at_down
            row = layer * HIDDEN + (group * OUT_TILES + index // DOWN_STEPS) * COLUMNS
            at = part * (DOWN_STEPS * DEPTH) + (index % DOWN_STEPS) * DEPTH
            tma.async_copy_global_to_shared(down, [row, at], flag, low)
            tma.async_copy_global_to_shared(down, [row, at + HALF], flag, high)
    is_last = place + 1 == end
    place = gl.where(is_last, 0, place + 1)
    layer = gl.where(is_last, layer + 1, layer)
    ahead = gl.minimum(gl.maximum(place - AT_KEYS, 0), gl.maximum(keys - 1, 0))
    block = gl.load(table + (first + ahead) // (BLOCK // COLUMNS))
    return place, layer, block


@gluon.jit
def feed_all(
    qkv: gl.tensor,
    output: gl.tensor,
    gate_up: gl.tensor,
    down: gl.tensor,
    cache: gl.tensor,
    ring: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    table: gl.tensor,
    program: gl.tensor,
    first: gl.tensor,
    keys: gl.tensor,
    CUT: gl.constexpr,
) -> None:
    """A warp of its own fetches all units: each when its place is free, and at most `near` of them are on their way.

    More on their way only wait longer, and what programs tell each other waits behind them.
    """
    STAGES: gl.constexpr = CUT.stages
    NEAR: gl.constexpr = CUT.near
    BLOCK_TILES: gl.constexpr = CUT.block_tokens // COLUMNS
    GATED: gl.constexpr = CUT.pairs * 2 * (CUT.hidden // DEPTH)
    OTHERS: gl.constexpr = CUT.other_units
    feed = (qkv, output, gate_up, down, cache, ring, full, empty, table, program, first, keys)
    place = program * 0
    layer = program * 0
    block = gl.load(table + first // BLOCK_TILES)
    units = OTHERS + keys + gl.where(program < CUT.gating, GATED, 0)
    for unit in range(units * CUT.layers):
        if unit >= STAGES:
            mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES - 1) & 1)
        if unit >= NEAR:
            mbarrier.wait(full.index((unit - NEAR) % STAGES), ((unit - NEAR) // STAGES) & 1)
        place, layer, block = fetch(place, layer, unit, block, feed, CUT)


@gluon.jit
def used(
    place: gl.tensor, layer: gl.tensor, unit: gl.tensor, block: gl.tensor, feed: gl.tuple, CUT: gl.constexpr
) -> gl.tuple:
    """All threads are done with a unit: another may come to where it is. Arguments and results as of `fetch`."""
    HAS_FEEDER: gl.constexpr = CUT.has_feeder
    STAGES: gl.constexpr = CUT.stages
    gl.thread_barrier()
    if HAS_FEEDER:
        mbarrier.arrive(feed[7].index(unit % STAGES), count=1)
    else:
        place, layer, block = fetch(place, layer, unit, block, feed, CUT)
    return place, layer, block


@gluon.jit
def wait_unit(unit: gl.tensor, feed: gl.tuple, CUT: gl.constexpr) -> None:
    full = feed[6]
    STAGES: gl.constexpr = CUT.stages
    mbarrier.wait(full.index(unit % STAGES), (unit // STAGES) & 1)


@gluon.jit
def times(
    x: gl.tensor, chunk: gl.tensor, unit: gl.tensor, acc: gl.tensor, feed: gl.tuple, CUT: gl.constexpr
) -> gl.tensor:
    """The sums of the unit that has come, added to `acc`: columns of it x rows of x."""
    ring = feed[5]
    STAGES: gl.constexpr = CUT.stages
    slot = unit % STAGES
    acc = warpgroup_mma(ring.index(2 * slot), x.index(chunk).permute([1, 0]), acc, is_async=True)
    acc = warpgroup_mma(ring.index(2 * slot + 1), x.index(chunk + 1).permute([1, 0]), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def ask(source: gl.tensor, at: gl.tensor, CHUNKS: gl.constexpr, x: gl.tensor, arrived: gl.tensor) -> None:
    """Begin to copy eight rows of the next product's input into shared memory."""
    mbarrier.expect(arrived, CHUNKS * ROOM * HALF * 2)
    for chunk in range(CHUNKS):
        tma.async_copy_global_to_shared(source, [0, at + chunk * HALF], arrived, x.index(chunk))

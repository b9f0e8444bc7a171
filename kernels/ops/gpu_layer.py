"""How do a few decode tokens pass through all layers in one kernel, so that the memory never idles between products?

A kernel for each product leaves the memory idle for some 3 us at each border. Here 128 programs stay on their
multiprocessors for the whole step. Each walks one list of *units*, 32 KiB of weights or of cached keys and values, and
keeps the next `stages` of them in flight into its shared memory: also across the borders, since weights do not depend
on what is being computed. Between phases the programs meet at a barrier in device memory.

A layer has five phases: qkv (depth in four parts), attention (rotation, new key and value, merge), output (four parts),
gate and up with SwiGLU, down (four parts). Whoever finishes last of those that share an output adds up their parts in
order, adds the residual and leaves the next product's input with its sum of squares: the norm is the next epilogue's
factor. Sums are fp32 and in a fixed order, so a step gives the same bits each time; but a row's bits depend on how many
rows the step has room for (keys of more sequences are shared by fewer programs): this serves the fastest mode only.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.ops.gpu_layer_attention import attention, whose
from kernels.ops.gpu_layer_units import (
    COLUMNS,
    DEPTH,
    FLAGS,
    HALF,
    PARTS,
    ROOM,
    SHARED,
    SUMS,
    ask,
    feed_all,
    fetch,
    meet,
    times,
    used,
    wait_unit,
)


@gluon.jit
def _row_scale(squares: gl.tensor, eps: gl.tensor, CUT: gl.constexpr) -> gl.tensor:
    """Of each of eight rows: one over the root of its mean square.  squares: [hidden / 64, 8], summed in order."""
    TILES: gl.constexpr = CUT.hidden // COLUMNS
    tile = gl.arange(0, TILES, gl.SliceLayout(1, SUMS))
    row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
    each = gl.load(squares + tile[:, None] * ROOM + row[None, :], cache_modifier=".cg")
    return gl.rsqrt(gl.sum(each, 0) / CUT.hidden + eps)


@gluon.jit
def _keep(
    total: gl.tensor,
    tile: gl.tensor,
    weight: gl.tensor,
    residual: gl.tensor,
    x_next: gl.tensor,
    squares: gl.tensor,
    CUT: gl.constexpr,
) -> None:
    """A tile of the residual stream, [64 columns, 8 rows] fp32: kept, and made the next product's input."""
    column = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
    row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
    rounded = total.to(gl.bfloat16)
    gl.store(residual + column[:, None] * ROOM + row[None, :], rounded)
    total = rounded.to(gl.float32)
    factor = gl.load(weight + column).to(gl.float32)
    gl.store(x_next + row[None, :] * CUT.hidden + column[:, None], (total * factor[:, None]).to(gl.bfloat16))
    gl.store(squares + tile * ROOM + row, gl.sum(total * total, 0))


@gluon.jit
def _add_parts(
    partial: gl.tensor,
    counter: gl.tensor,
    weight: gl.tensor,
    residual: gl.tensor,
    x_next: gl.tensor,
    squares: gl.tensor,
    group: gl.tensor,
    CUT: gl.constexpr,
) -> None:
    """Of the four programs that made parts of the same columns, the last one adds them to the residual."""
    TILES: gl.constexpr = CUT.hidden // COLUMNS // (CUT.programs // PARTS)
    gl.thread_barrier()
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == PARTS - 1:
        for index in gl.static_range(TILES):
            tile = group * TILES + index
            column = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
            at = column[:, None] * ROOM + gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))[None, :]
            old = gl.load(residual + at, cache_modifier=".cg").to(gl.float32)
            total = gl.load(partial + at, cache_modifier=".cg")
            for part in gl.static_range(1, PARTS):
                total += gl.load(partial + part * (CUT.hidden * ROOM) + at, cache_modifier=".cg")
            _keep(old + total, tile, weight, residual, x_next, squares, CUT)


@gluon.jit
def _narrow(
    x: gl.tensor,
    partial: gl.tensor,
    tiles_at: gl.tensor,
    steps_chunk: gl.tensor,
    place: gl.tensor,
    layer: gl.tensor,
    unit: gl.tensor,
    block: gl.tensor,
    feed: gl.tuple,
    STEPS: gl.constexpr,
    CUT: gl.constexpr,
) -> gl.tuple:
    """This program's part of `output` or `down`: its depth of every tile of its group."""
    TILES: gl.constexpr = CUT.hidden // COLUMNS // (CUT.programs // PARTS)
    for index in range(TILES):
        acc = gl.zeros([COLUMNS, ROOM], gl.float32, SUMS)
        for step in range(STEPS):
            wait_unit(unit, feed, CUT)
            acc = times(x, 2 * step, unit, acc, feed, CUT)
            place, layer, block = used(place, layer, unit, block, feed, CUT)
            unit += 1
        column = (tiles_at + index) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
        row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
        gl.store(partial + steps_chunk * (CUT.hidden * ROOM) + column[:, None] * ROOM + row[None, :], acc)
    return place, layer, unit, block


@gluon.jit
def _walk(  # noqa: C901, PLR0915 - all layers
    x_tiles: gl.tensor,
    attended_tiles: gl.tensor,
    hidden_tiles: gl.tensor,
    embedding: gl.tensor,
    norms: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    cache_data: gl.tensor,
    newest: gl.tensor,
    table_row: gl.tensor,
    position: gl.tensor,
    token_ids: gl.tensor,
    counters: gl.tensor,
    residual: gl.tensor,
    x_next: gl.tensor,
    squares: gl.tensor,
    qkv_sums: gl.tensor,
    attended: gl.tensor,
    hidden: gl.tensor,
    partial: gl.tensor,
    shared_out: gl.tensor,
    shared_sums: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    eps: gl.tensor,
    scale: gl.tensor,
    x: gl.tensor,
    arrived: gl.tensor,
    place: gl.tensor,
    fetched: gl.tensor,
    block: gl.tensor,
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
    """From tokens to the head's input.  newest, table_row, position: of this program's sequence."""
    HIDDEN: gl.constexpr = CUT.hidden
    FFN: gl.constexpr = CUT.ffn
    PROGRAMS: gl.constexpr = CUT.programs
    GROUPS: gl.constexpr = PROGRAMS // PARTS
    LAYERS: gl.constexpr = CUT.layers
    TILES: gl.constexpr = HIDDEN // COLUMNS
    QKV_TILES: gl.constexpr = CUT.rows_qkv // COLUMNS // GROUPS
    OUT_TILES: gl.constexpr = TILES // GROUPS
    QKV_STEPS: gl.constexpr = HIDDEN // PARTS // DEPTH
    OUT_STEPS: gl.constexpr = CUT.inner // PARTS // DEPTH
    GATE_STEPS: gl.constexpr = HIDDEN // DEPTH
    DOWN_STEPS: gl.constexpr = FFN // PARTS // DEPTH
    part = program % PARTS
    group = program // PARTS
    feed = (qkv, output, gate_up, down, cache, ring, full, empty, table, program, first, keys)
    unit = program * 0
    taken = program * 0
    met = program * 0

    if program < TILES:
        for index in range((TILES + PROGRAMS - 1) // PROGRAMS):
            tile = index * PROGRAMS + program
            if tile < TILES:
                column = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
                row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
                token = gl.load(token_ids + row, mask=row < num_rows, other=0)
                at = embedding + token[None, :] * HIDDEN + column[:, None]
                is_row = (row < num_rows)[None, :] & (column >= 0)[:, None]
                total = gl.load(at, mask=is_row, other=0.0).to(gl.float32)
                _keep(total, tile, norms, residual, x_next, squares, CUT)
    met = meet(counters, met, PROGRAMS)

    for layer in range(LAYERS):
        # qkv
        ask(x_tiles, part * (QKV_STEPS * DEPTH), 2 * QKV_STEPS, x, arrived)
        row_scale = _row_scale(squares, eps, CUT)
        mbarrier.wait(arrived, taken & 1)
        taken += 1
        for index in range(QKV_TILES):
            acc = gl.zeros([COLUMNS, ROOM], gl.float32, SUMS)
            for step in range(QKV_STEPS):
                wait_unit(unit, feed, CUT)
                acc = times(x, 2 * step, unit, acc, feed, CUT)
                place, fetched, block = used(place, fetched, unit, block, feed, CUT)
                unit += 1
            column = (group * QKV_TILES + index) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
            row = part * ROOM + gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
            gl.store(qkv_sums + row[None, :] * CUT.rows_qkv + column[:, None], acc * row_scale[None, :])
        met = meet(counters, met, PROGRAMS)

        # attention
        place, fetched, unit, block = attention(
            x,
            layer,
            cos,
            sin,
            cache_data,
            newest,
            table_row,
            position,
            num_rows,
            counters,
            qkv_sums,
            attended,
            shared_out,
            shared_sums,
            scale,
            place,
            fetched,
            unit,
            block,
            feed,
            CUT,
        )
        met = meet(counters, met, PROGRAMS)

        # output
        ask(attended_tiles, part * (OUT_STEPS * DEPTH), 2 * OUT_STEPS, x, arrived)
        mbarrier.wait(arrived, taken & 1)
        taken += 1
        place, fetched, unit, block = _narrow(
            x, partial, group * OUT_TILES, part, place, fetched, unit, block, feed, OUT_STEPS, CUT
        )
        ffn_norm = norms + (2 * layer + 1) * HIDDEN
        counter = counters + 1 + layer * (2 * GROUPS) + group
        _add_parts(partial, counter, ffn_norm, residual, x_next, squares, group, CUT)
        met = meet(counters, met, PROGRAMS)

        # gate and up
        if program < CUT.gating:
            ask(x_tiles, 0, 2 * GATE_STEPS, x, arrived)
            row_scale = _row_scale(squares, eps, CUT)
            mbarrier.wait(arrived, taken & 1)
            taken += 1
            for index in range(CUT.pairs):
                gate = gl.zeros([COLUMNS, ROOM], gl.float32, SUMS)
                up = gl.zeros([COLUMNS, ROOM], gl.float32, SUMS)
                for step in range(GATE_STEPS):
                    wait_unit(unit, feed, CUT)
                    gate = times(x, 2 * step, unit, gate, feed, CUT)
                    place, fetched, block = used(place, fetched, unit, block, feed, CUT)
                    unit += 1
                    wait_unit(unit, feed, CUT)
                    up = times(x, 2 * step, unit, up, feed, CUT)
                    place, fetched, block = used(place, fetched, unit, block, feed, CUT)
                    unit += 1
                gate = (gate * row_scale[None, :]).to(gl.bfloat16).to(gl.float32)
                up = (up * row_scale[None, :]).to(gl.bfloat16).to(gl.float32)
                column = (program * CUT.pairs + index) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
                row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
                active = gate / (1.0 + gl.exp(-gate)) * up
                gl.store(hidden + row[None, :] * FFN + column[:, None], active.to(gl.bfloat16))
        met = meet(counters, met, PROGRAMS)

        # down
        ask(hidden_tiles, part * (DOWN_STEPS * DEPTH), 2 * DOWN_STEPS, x, arrived)
        mbarrier.wait(arrived, taken & 1)
        taken += 1
        place, fetched, unit, block = _narrow(
            x, partial, group * OUT_TILES, part, place, fetched, unit, block, feed, DOWN_STEPS, CUT
        )
        next_norm = norms + (2 * layer + 2) * HIDDEN
        counter = counters + 1 + layer * (2 * GROUPS) + GROUPS + group
        _add_parts(partial, counter, next_norm, residual, x_next, squares, group, CUT)
        met = meet(counters, met, PROGRAMS)

    # The head's input, normalised.
    if program < TILES:
        row_scale = _row_scale(squares, eps, CUT)
        for index in range((TILES + PROGRAMS - 1) // PROGRAMS):
            tile = index * PROGRAMS + program
            if tile < TILES:
                column = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))
                row = gl.arange(0, ROOM, gl.SliceLayout(0, SUMS))
                kept = gl.load(residual + column[:, None] * ROOM + row[None, :], cache_modifier=".cg").to(gl.float32)
                factor = gl.load(norms + 2 * LAYERS * HIDDEN + column).to(gl.float32)
                is_row = (row < num_rows)[None, :] & (column >= 0)[:, None]
                made = kept * row_scale[None, :] * factor[:, None]
                gl.store(out + row[None, :] * HIDDEN + column[:, None], made.to(gl.bfloat16), mask=is_row)


@gluon.jit
def layers_kernel(
    qkv: gl.tensor,
    output: gl.tensor,
    gate_up: gl.tensor,
    down: gl.tensor,
    cache: gl.tensor,
    x_tiles: gl.tensor,
    attended_tiles: gl.tensor,
    hidden_tiles: gl.tensor,
    embedding: gl.tensor,
    norms: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    cache_data: gl.tensor,
    tables: gl.tensor,
    table_stride: gl.tensor,
    token_ids: gl.tensor,
    table_rows: gl.tensor,
    positions: gl.tensor,
    counters: gl.tensor,
    residual: gl.tensor,
    x_next: gl.tensor,
    squares: gl.tensor,
    qkv_sums: gl.tensor,
    attended: gl.tensor,
    hidden: gl.tensor,
    partial: gl.tensor,
    shared_out: gl.tensor,
    shared_sums: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    eps: gl.tensor,
    scale: gl.tensor,
    CUT: gl.constexpr,
) -> None:
    """See `gpu_layers.run_layers`.  counters: zeros, [1 + layers * (2 * groups + kv pairs)] int32."""
    BLOCK: gl.constexpr = CUT.block_tokens
    STAGES: gl.constexpr = CUT.stages
    HAS_FEEDER: gl.constexpr = CUT.has_feeder
    program = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, COLUMNS, HALF], SHARED)
    x = gl.allocate_shared_memory(gl.bfloat16, [CUT.chunks, ROOM, HALF], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAGS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], FLAGS)
    arrived = gl.allocate_shared_memory(gl.int64, [1], FLAGS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()

    table_row, position, first, keys = whose(table_rows, positions, num_rows, CUT)
    table = tables + table_row.to(gl.int64) * table_stride
    newest = gl.load(table + position // BLOCK).to(gl.int64)
    place = program * 0
    fetched = program * 0
    block = gl.load(table + first // (BLOCK // COLUMNS))
    # Gluon has no way to write these lists once.
    if HAS_FEEDER:
        gl.warp_specialize(
            [
                (_walk, (
                    x_tiles, attended_tiles, hidden_tiles, embedding, norms, cos, sin, cache_data,
                    newest, table_row, position, token_ids, counters, residual, x_next, squares,
                    qkv_sums, attended, hidden, partial, shared_out, shared_sums, out, num_rows,
                    eps, scale, x, arrived, place, fetched, block, qkv, output, gate_up, down,
                    cache, ring, full, empty, table, program, first, keys, CUT,
                )),
                (feed_all, (
                    qkv, output, gate_up, down, cache, ring, full, empty, table, program, first,
                    keys, CUT,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        feed = (qkv, output, gate_up, down, cache, ring, full, empty, table, program, first, keys)
        for stage in range(STAGES):
            place, fetched, block = fetch(place, fetched, stage, block, feed, CUT)
        _walk(
            x_tiles, attended_tiles, hidden_tiles, embedding, norms, cos, sin, cache_data, newest,
            table_row, position, token_ids, counters, residual, x_next, squares, qkv_sums, attended,
            hidden, partial, shared_out, shared_sums, out, num_rows, eps, scale, x, arrived, place,
            fetched, block, qkv, output, gate_up, down, cache, ring, full, empty, table, program, first,
            keys, CUT,
        )  # fmt: skip

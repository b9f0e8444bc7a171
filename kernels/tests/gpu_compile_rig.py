"""What does each GPU kernel become when it is compiled for SM90, launched as its wrapper launches it, without a GPU?

Wrappers are called on meta tensors that say they are on a GPU; what they would launch is caught, and compiled down to
machine code by the compiler and the assembler in Triton's wheel. Signatures, constants and options are thus the
wrappers' own, at the dimensions of the models that are served.

Run in a process of its own: `torch.cuda` must say that there is an SM90 before any kernel is decorated.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.ops import gpu_dense_fp8, gpu_grouped_fp8, gpu_grouped_packed, gpu_sparse
from kernels.ops.engram import hash_tables
from kernels.ops.gpu_attention import CHUNK, LONG_PART_TOKENS, SINGLE
from kernels.ops.gpu_attention import attend as attend_dense
from kernels.ops.gpu_engram import HashNumbers, add_memory, read_rows, table_rows
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, gathered, norm_rows, span_rows, swiglu_rows
from kernels.ops.gpu_grouped import Format, Groups, Weights, multiply, multiply_gated
from kernels.ops.gpu_grouped_unpack import Powers, unpack
from kernels.ops.gpu_index import Keys, locate, score, score_candidates, select
from kernels.ops.gpu_linear import linear, linear_parts, linear_swiglu
from kernels.ops.gpu_matmul import fp8_product
from kernels.ops.gpu_norm import add_rms_norm
from kernels.ops.gpu_quant import norm_fp8, quantise_rows, round_fp8, swiglu_fp8
from kernels.ops.gpu_records import (
    Section,
    compress_entries,
    index_queries,
    store_index,
    store_main,
    store_ring,
    window_records,
)
from kernels.ops.gpu_rope_cache import Heads, Paging, Turning, rope_and_store
from kernels.ops.gpu_sampler import NUM_ASKED, Adjustments, Features, adjust, draw
from kernels.ops.gpu_sparse import Chosen, Windows, attend
from kernels.ops.gpu_step import fill_tokens, update_tables
from kernels.ops.gpu_swiglu import swiglu
from kernels.tests import gpu_v41_launches as launches
from kernels.tests import gpu_v41_sublayers as sublayers
from kernels.tests import gpu_v41_ways as ways
from kernels.tests.gpu_layer_launches import one_kernel

SM90 = GPUTarget("cuda", 90, 32)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
U8, I32, I64 = torch.uint8, torch.int32, torch.int64

# DeepSeek-V4.1's dimensions, as in bench/gpu_v41_cases.py.
HIDDEN, HEADS, HEAD, PAIRS, WIDTH = 5120, 64, 512, 32, 2304
EXPERTS, TOP_K, INDEX_HEADS, INDEX_DIM = 384, 6, 32, 128
EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Launch:
    """What a wrapper asks of Triton."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler says of one specialisation."""

    kernel: str
    case: str
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread, written to local memory because registers ran out."""
    stack_bytes: int
    shared_bytes: int
    """Of a program."""
    cpu_seconds: float
    """Of the compiler and the assembler."""


class OnGpu(Tensor):
    """A tensor without values that says it is on a GPU."""

    is_cuda = True


class Pointer:
    """A tensor as a kernel sees it: a type, and an address whose alignment is the view's in a 256-byte allocation."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


class AllOnGpu(TorchFunctionMode):
    """Every tensor made is an OnGpu."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, tuple | list):
            return type(made)(each.as_subclass(OnGpu) if isinstance(each, Tensor) else each for each in made)
        return made.as_subclass(OnGpu) if isinstance(made, Tensor) else made


def caught(case: Callable[[], None]) -> list[Launch]:
    """What a case launches."""
    launches: list[Launch] = []

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append(Launch(kernel, args, named))

    before, JITFunction.run = JITFunction.run, note
    try:
        with torch.device("meta"), AllOnGpu():
            case()
    finally:
        JITFunction.run = before
    return launches


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles for a launch, with its options: as in JITFunction.run."""
    kernel, backend = launch.kernel, make_backend(SM90)
    args = [Pointer(each) if isinstance(each, Tensor) else each for each in launch.args]
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, named = bind(*args, **launch.named, debug=False)
    options, signature, constants, attributes = kernel._pack_args(
        backend, launch.named | named, bound, specialisation, named
    )
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, attributes), options.__dict__


def compiled(source: ASTSource, options: dict[str, Any], case: str) -> Compiled:
    """Down to machine code; raises what the compiler or the assembler says."""
    name, start, said = f"{source.fn.module.rpartition('.')[2]}.{source.fn.__name__}", os.times(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            made = triton.compile(source, target=SM90, options=options)
    except Exception as error:
        error.add_note(f"{name}, as launched by the case {case!r}, with {source.signature} and {source.constants}")
        raise
    assert made.asm["cubin"]
    words = said.getvalue()
    return Compiled(
        name,
        case,
        registers=_number(r"Used (\d+) registers", words),
        spilled_bytes=_number(r"(\d+) bytes spill stores", words),
        stack_bytes=_number(r"(\d+) bytes stack frame", words),
        shared_bytes=made.metadata.shared,
        cpu_seconds=round(sum(os.times()[:4]) - sum(start[:4]), 2),
    )


def _number(pattern: str, words: str) -> int:
    found = re.search(pattern, words)
    assert found, f"the assembler said nothing like {pattern!r}: {words!r}"
    return int(found[1])


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def fp32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=FP32)


def u8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=U8)


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=I32)


def i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=I64)


def dense_rows(heads: Heads, *, extras: bool) -> None:
    """Norms, rotations and feed-forward halves of a dense model."""
    hidden, tokens, half = heads.num_heads * heads.head_dim, 40, heads.head_dim // 2
    add_rms_norm(None, bf16(tokens, hidden), bf16(hidden), eps=1e-5)
    add_rms_norm(bf16(tokens, hidden), bf16(tokens, hidden), bf16(hidden), eps=1e-5)
    add_rms_norm(fp32(4, tokens, hidden), bf16(tokens, hidden), bf16(hidden), eps=1e-5, bias=bf16(hidden))
    swiglu(bf16(tokens, 7 * hidden))
    turning = Turning(fp32(8192, half), fp32(8192, half))
    if extras:
        turning = Turning(turning.cos, turning.sin, bf16(heads.row_size), bf16(2, heads.head_dim), 1e-6)
    for qkv in (bf16(tokens, heads.row_size), fp32(4, tokens, heads.row_size)):
        rope_and_store(qkv, i32(tokens), i32(tokens), heads, turning, dense_paging(heads))
    fill_tokens(i32(4, 512), i32(64), i64(tokens), i32(tokens), i32(tokens))
    fill_tokens(i32(4, 512), i32(64), i64(tokens), i32(tokens), i32(tokens), i32(tokens, 4))
    update_tables(i32(65, 1024), i32(17, 2))


def dense_paging(heads: Heads) -> Paging:
    """One layer of 32, strided as the cache is."""
    return Paging(bf16(100, 32, 2, 128, heads.num_kv_heads * heads.head_dim)[:, 3], i32(65, 1024))


def dense_attention(heads: Heads, splits: int) -> None:
    """Chunks and single tokens, whole or with their keys shared out."""
    queries = bf16(40, heads.num_heads * heads.head_dim)
    if splits == 1:
        attend_dense(queries, i32(17, 4), heads, dense_paging(heads), shape=CHUNK)
    attend_dense(queries, i32(40, 4), heads, dense_paging(heads), splits=splits, shape=SINGLE)
    forms = partial(attend_dense, window=128, sinks=fp32(heads.num_heads))
    if splits == 1:
        forms(queries, i32(17, 4), heads, dense_paging(heads), shape=CHUNK)
    forms(queries, i32(40, 4), heads, dense_paging(heads), splits=splits, shape=SINGLE, part=LONG_PART_TOKENS)


def dense_products(rows: int, columns: int, depth: int) -> None:
    """By every frozen tile, for the next kernel or for the sampler, with the gate."""
    x, weight = bf16(rows, depth), bf16(columns, depth)
    linear(x, weight)
    linear(x, weight, wide=True)
    if rows <= 256:
        linear_swiglu(x, weight)
    if rows <= 64:
        linear_parts(x, weight, parts=4)


def sampler(features: Features, *, adjusts: bool = False) -> None:
    """A draw over Llama's vocabulary."""
    rows, vocabulary = 8, 128_256
    logits = fp32(rows, vocabulary)
    if adjusts:
        penalties, bias = torch.empty(rows, 3, dtype=FP64), torch.empty(99, dtype=FP64)
        changes = Adjustments(i32(rows + 1), i32(99), bias, i32(99), penalties, i32(rows), i32(rows), u8(3, 16_032))
        adjust(logits, i32(64), changes)
    draw(logits, i64(NUM_ASKED, rows), features)


def v41_rows(size: int) -> None:
    """Norms, roundings and activations."""
    x = bf16(37, size)
    round_fp8(x)
    norm_fp8(x, fp32(size), eps=EPS)
    quantise_rows(x)
    for factors in (fp32(37), None):
        swiglu_fp8(bf16(37, 2 * size), factors, limit=10.0)
    span_rows(x)
    span_rows(fp32(37, size), rounds=True)
    norm_rows(x, fp32(size), eps=EPS)
    swiglu_rows(bf16(37, 2 * size), limit=10.0)


def v41_block(source: int) -> tuple[Keys, Section]:
    """Blocks of 113,920 bytes: a source's index keys, and its main records."""
    pool, per_block = u8(1026, 113_920), 128 if source == 3 else 64
    start = source * 64 * 356
    keys = Keys(Section(pool, start, 64), Section(pool, start + per_block * 64, 4), i32(2, 1024), per_block)
    return keys, Section(pool, start + per_block * 68, 288)


def v41_ring() -> Section:
    return Section(u8(5, 134 * 528 + 64), 64, 528)


def v41_records() -> None:
    """Window keys, entries and index keys on their way into the cache."""
    count, turn = 61, (fp32(61, PAIRS), fp32(61, PAIRS))
    keys, main = v41_block(3)
    window_records(bf16(count, HEAD), fp32(HEAD), *turn, eps=EPS)
    store_ring(u8(count, 528), v41_ring(), i64(50), i64(50), i64(50))
    store_main(bf16(count, HEAD), *turn, main, i64(count), i64(count))
    store_index(bf16(count, INDEX_DIM), fp32(INDEX_DIM), *turn, keys.data, keys.scale, i64(count), i64(count), eps=EPS)
    index_queries(bf16(count, INDEX_HEADS, INDEX_DIM), *turn)
    pairs = Section(u8(5, 32_768), 64, 2 * HEAD * 4)
    compress_entries(fp32(count, 2 * HEAD), pairs, i64(30, 2), i64(2), i64(2), fp32(HEAD), eps=EPS)
    compress_entries(fp32(count, HEAD), None, i64(60, 1), i64(2), i64(2), fp32(HEAD), eps=EPS)


def v41_attention(*, entries: bool, window: int = 128) -> None:
    """A token's window, with and without chosen entries."""
    count, main = 20, v41_block(3)[1]
    windows = Windows(i64(count), i64(count), i64(count), i64(count), i64(count), window, 134)
    chosen = Chosen(i32(count, 512), i32(count), main, 128) if entries else None
    turn = fp32(count, PAIRS), fp32(count, PAIRS)
    attend(bf16(count, HEADS, HEAD), *turn, u8(count, 528), v41_ring(), windows, chosen, fp32(HEADS), scale=HEAD**-0.5)


def v41_attention_elsewhere(*, entries: bool) -> None:
    """The same where the kernel for Hopper does not fit."""
    before = gpu_sparse._fits_hopper
    gpu_sparse._fits_hopper = lambda *_: False
    v41_attention(entries=entries)
    gpu_sparse._fits_hopper = before


def v41_index(source: int, *, heads: int = INDEX_HEADS) -> None:
    """Scores and choices of entries, of blocks, and of entries in blocks; Hopper's own kernel is for 32 heads."""
    (keys, _), tokens = v41_block(source), 8
    queries, weights, seen = bf16(tokens, heads, INDEX_DIM), fp32(tokens, heads), i32(tokens)
    score(queries, weights, keys, i32(3, 3), seen, width=4096)
    score(queries, weights, keys, i32(3, 3), seen, width=131_072, block_size=8)
    select(bf16(tokens, 16_384), seen, count=2048)
    score_candidates(queries, weights, keys, i32(tokens), seen, i32(tokens, 2048), block_size=8)
    select(bf16(tokens, 131_072), seen, count=512)
    locate(i32(tokens, 512), keys, i32(tokens), i32(tokens, 2048), block_size=8)
    locate(i32(tokens, 512), keys, i32(tokens))


def v41_experts(kind: Format, rows: int) -> None:
    """A rank's experts with so many rows each: gate and up, then down."""
    experts, slots = 7, 7 * rows
    groups = Groups(i32(experts), i32(slots), i32(slots))

    def weights(out: int, size: int) -> Weights:
        wide, block = (bf16(experts, out, size), u8(0)), (u8(experts, out, size), u8(experts, out // 32, size // 32))
        packed = u8(experts, out, size // 2), u8(experts, out, size // 32)
        return Weights(kind, *{"bf16": wide, "fp8": block, "fp4": packed}[kind], size)

    for factors in (fp32(slots), None):
        multiply_gated(bf16(slots, HIDDEN), weights(2 * WIDTH, HIDDEN), groups, factors, limit=10.0, num_out=slots)
    multiply(bf16(slots, WIDTH), weights(HIDDEN, WIDTH), groups, num_out=slots)


def v41_units(rows: int) -> None:
    """A rank's experts on the fp8 units: unpacked, rows restated, gate and up, then down."""
    experts, slots, kind = 7, 7 * rows, torch.float8_e4m3fn
    groups = Groups(i32(experts), i32(slots), i32(slots))
    packed = Weights("fp4", u8(experts, 2 * WIDTH, HIDDEN // 2), u8(experts, 2 * WIDTH, HIDDEN // 32), HIDDEN)
    powers = Powers(u8(experts, 2 * WIDTH), fp32(experts, 2 * WIDTH), i32(64, 2), spread_binades=2)
    unpack(packed, powers)
    turned = gathered(SpanRows(torch.empty(rows, HIDDEN, dtype=kind), fp32(1, rows)), groups.sources, turns=True)
    gpu_grouped_packed.multiply(turned, packed, powers, groups.ends)
    swiglu_rows(bf16(slots, 2 * WIDTH), groups.targets, fp32(slots), limit=10.0, turns=True)
    up = RowScaled(torch.empty(experts, 2 * WIDTH, HIDDEN, dtype=kind), fp32(experts, 2 * WIDTH))
    down = RowScaled(torch.empty(experts, HIDDEN, WIDTH, dtype=kind), fp32(experts, HIDDEN))
    x = span_rows(bf16(rows, HIDDEN), groups.sources, span=256)
    gpu_grouped_fp8.multiply_gated(x, up, groups, fp32(slots), limit=10.0)
    for wide in (False, True):
        gpu_grouped_fp8.multiply(span_rows(bf16(slots, WIDTH), span=256), down, groups, num_out=slots, wide=wide)
    gathered(SpanRows(torch.empty(rows, HIDDEN, dtype=kind), fp32(1, rows)), groups.sources)
    swiglu_rows(bf16(slots, 2 * WIDTH), groups.targets, fp32(slots), limit=10.0)


def v41_packed(widths: tuple[int, ...]) -> None:
    """A decode step's experts and a prefill's as fp4 in registers: gate and up, then down."""
    cut, kind = replace(gpu_grouped_packed.CUT, widths=widths), torch.float8_e4m3fn
    if widths[-1] > 256:
        cut = replace(cut, stages=3)
    for experts, slots in ((7, 1536), (EXPERTS, 98_304)):
        for out, size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
            packed = Weights("fp4", u8(experts, out, size // 2), u8(experts, out, size // 32), size)
            powers = Powers(u8(experts, out), fp32(experts, out), i32(64, 2), spread_binades=2)
            rows = SpanRows(torch.empty(slots, size, dtype=kind), fp32(1, slots), is_turned=True)
            gpu_grouped_packed.multiply(rows, packed, powers, i32(experts), cut=cut)


def v41_fp8(tokens: int) -> None:
    """A dense matrix on the fp8 units."""
    weights = Weights("fp8", u8(1, 1280, HIDDEN), u8(1, 40, HIDDEN // 32), HIDDEN)
    fp8_product(torch.empty(tokens, HIDDEN, dtype=torch.float8_e4m3fn), u8(tokens, HIDDEN // 32), weights)


def v41_dense() -> None:
    """A decode step's wide product by our own kernel."""
    x, matrix = (torch.empty(rows, 1280, dtype=torch.float8_e4m3fn) for rows in (256, 32_768))
    gpu_dense_fp8.multiply(x, fp32(256), matrix, fp32(32_768))


def v41_memory() -> None:
    """Rows of a table found, read and let in."""
    tokens = 53
    numbers = HashNumbers.of(
        hash_tables([1], vocab_size=4000, heads=8, max_ngram=4, compressed_vocab_size=99_092)[1], torch.device("meta")
    )
    read_rows(table_rows(i64(tokens, 4), numbers), u8(90_000, 256), u8(90_000, 8))
    for images in (None, torch.empty(tokens, dtype=torch.bool)):
        add_memory(bf16(tokens, 4, HIDDEN), bf16(tokens, 5 * HIDDEN), fp32(4, HIDDEN), images, eps=EPS)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """By name; where it costs nothing, what compiles fastest comes first."""
    llama, smol = Heads(32, 8, 128), Heads(9, 3, 64)
    for name, heads in (("smol", smol), ("llama", llama)):
        yield f"dense rows {name}", partial(dense_rows, heads, extras=heads is llama)
        for splits in (1, 7):
            yield f"dense attention {name} {splits}", partial(dense_attention, heads, splits)
    for rows, columns, depth in (
        (1, 6144, 4096), (1, 960, 576), (64, 6144, 4096), (64, 4096, 4096), (200, 6144, 4096), (200, 4096, 4096),
        (900, 6144, 4096), (900, 960, 576),
    ):  # fmt: skip
        yield f"dense products {rows} {columns}", partial(dense_products, rows, columns, depth)
    yield "dense one kernel 1", partial(one_kernel, 1)
    yield "dense one kernel 8", partial(one_kernel, 8)
    yield "sampler greedy", partial(sampler, Features())
    yield "sampler noise", partial(sampler, Features(noise=True, min_p=True))
    yield "sampler all", partial(sampler, Features(True, True, True, True, 20), adjusts=True)
    for size in (HIDDEN, 4096, 1280, WIDTH):
        yield f"v41 rows {size}", partial(v41_rows, size)
    yield "v41 records", v41_records
    for entries in (True, False):
        yield f"v41 attention {entries}", partial(v41_attention, entries=entries)
        yield f"v41 attention {entries} elsewhere", partial(v41_attention_elsewhere, entries=entries)
    yield "v41 attention of drafts", partial(v41_attention, entries=False, window=131)
    for source in (3, 0):
        yield f"v41 index {source}", partial(v41_index, source)
        yield f"v41 index {source} elsewhere", partial(v41_index, source, heads=16)
    yield "v41 layout", launches.layouts
    for here in (7, EXPERTS):
        yield f"v41 routes {here}", partial(sublayers.routes, here)
    for tokens, experts in ((16, EXPERTS), (64, EXPERTS), (256, EXPERTS), (256, 128), (16_384, EXPERTS)):
        yield f"v41 router {tokens} {experts}", partial(sublayers.routed_rows, tokens, experts)
    kinds: tuple[Format, ...] = ("fp4", "fp8", "bf16")
    for kind in kinds:
        for rows in (4, 40, 400):
            yield f"v41 experts {kind} {rows}", partial(v41_experts, kind, rows)
    yield from ((f"v41 units {rows}", partial(v41_units, rows)) for rows in (40, 400))
    for tokens in (1, 300):
        yield f"v41 fp8 {tokens}", partial(v41_fp8, tokens)
    for tokens, is_invariant in ((8, False), (8, True), (4000, False)):
        yield f"v41 streams {tokens} {is_invariant}", partial(sublayers.streams, tokens, is_invariant=is_invariant)
    yield "v41 dense", v41_dense
    yield "v41 memory", v41_memory
    yield "v41 ways", ways.launched
    yield "v41 ways at once", ways.at_once
    yield "v41 drafts", partial(launches.drafts, launches.real("fp4"), 64)
    yield from whole_steps()


def whole_steps() -> Iterator[tuple[str, Callable[[], None]]]:
    """V4.1's steps as the model launches them, at the published dimensions and at the tiny model's."""
    for name, model in (("real", launches.real), ("tiny", launches.tiny)):
        wide, packed = model("bf16"), model("fp4")
        for tokens in (1, 64, 256):
            for context in (512, 131_072):
                yield f"v41 step {name} {tokens} {context}", partial(launches.captured_step, wide, tokens, context)
        yield f"v41 step {name} fp4", partial(launches.brought_step, packed, 16, 4096)
        yield f"v41 step {name} chunk", partial(launches.chunk, packed, 2000, kept=140)


def distinct() -> Iterator[tuple[ASTSource, dict[str, Any], str]]:
    """What all cases launch, once each: source, options and the first case that has it."""
    found: set[tuple[str, str]] = set()
    for name, case in cases():
        for launch in caught(case):
            source, options = source_of(launch)
            if (key := (source.hash(), repr(options))) not in found:
                found.add(key)
                yield source, options, name


def compile_matching(wanted: str) -> None:
    """Print a JSON line for each specialisation whose first case matches."""
    triton.knobs.nvidia.dump_ptxas_log = True
    for source, options, case in distinct():
        if re.match(wanted, case):
            print(json.dumps(asdict(compiled(source, options, case))), flush=True)  # noqa: T201 - its product


TOLD_STEPS = ("real 1 131072", "real 64 512", "real fp4", "real chunk", "tiny 64 131072", "tiny chunk")
"""Of the whole steps: both lengths, both kinds of weights, both models. `compile_matching` walks through the others."""


def tell_all() -> None:
    """Print a JSON line for each told step, how much it launches and what; and one for each kernel as first launched."""
    triton.knobs.nvidia.dump_ptxas_log = True
    steps, told, met = {name for name, _ in whole_steps()}, {f"v41 step {name}" for name in TOLD_STEPS}, set()
    assert told <= steps
    for name, case in cases():
        if name in steps - told:
            continue
        launches = caught(case)
        if name in told:
            kernels = sorted({f"{each.kernel.module.rpartition('.')[2]}.{each.kernel.__name__}" for each in launches})
            print(json.dumps({"step": name, "launches": len(launches), "kernels": kernels}))  # noqa: T201 - as above
        for launch in launches:
            if launch.kernel not in met:
                met.add(launch.kernel)
                print(json.dumps(asdict(compiled(*source_of(launch), name))), flush=True)  # noqa: T201 - as above

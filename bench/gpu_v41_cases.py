"""What is each V4.1 kernel asked at the model's real dimensions, where its twin can still answer on a CPU?

Every case draws fresh inputs; groups are uneven, one is empty, windows wrap, rows of padding and of zeros are among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.ops import gpu_fp8, gpu_grouped_fp8, gpu_grouped_packed
from kernels.ops.engram import hash_tables
from kernels.ops.gpu_engram import HashNumbers, add_memory, read_rows, table_rows
from kernels.ops.gpu_fp8 import gathered, grouped_product, norm_rows, row_scaled, span_rows
from kernels.ops.gpu_grouped import (
    Groups,
    Weights,
    bf16_weights,
    fp4_weights,
    fp8_weights,
    multiply,
    multiply_gated,
)
from kernels.ops.gpu_grouped_unpack import Packed, powers_of, unpack
from kernels.ops.gpu_hyper import MixingWeights, enter, leave, split_weight
from kernels.ops.gpu_index import Keys, locate, score, score_candidates, select
from kernels.ops.gpu_matmul import Matrix, every_row, fp8_product, product
from kernels.ops.gpu_moe import combine, group
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
from kernels.ops.gpu_router import Placed, choose
from kernels.ops.gpu_sparse import Chosen, Windows, attend
from kernels.ops.gpu_swiglu_rows import swiglu_rows, weigh_rows
from kernels.ops.gpu_varlen import lay_out
from kernels.ops.hyper import Coefficients
from kernels.ops.quant import (
    WindowFp8,
    dequantise_fp8_weight,
    fp8_round_trip,
    quantise_fp4_weight,
    quantise_fp8_weight,
)

HIDDEN, HEADS, HEAD, PAIRS, Q_LORA, O_LORA, WIDTH = 5120, 64, 512, 32, 1280, 1024, 2304
EXPERTS, TOP_K, LOCAL_EXPERTS = 384, 6, 7
INDEX_HEADS, INDEX_DIM, TOP_ENTRIES, CANDIDATE_BLOCKS, BLOCK_ENTRIES = 32, 128, 512, 2048, 8
WINDOW, RING, BLOCK_TOKENS, BLOCK_BYTES = 128, 134, 128, 113_920
EPS, LIMIT = 1e-20, 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """One op and its arguments, on the CPU."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    tolerance: float
    """Relative L2 error at most; 0 asks for equal bits."""
    writes: int | None = None
    """Index of the argument (a Section) that is the result."""
    rows: Tensor | None = None
    """Rows of the result that count; None = all."""


def moved(value: Any, device: torch.device | str, known: dict[int, Tensor] | None = None) -> Any:
    """Arguments with copies of their tensors on another device; what was one tensor is one tensor there."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value.to(device, copy=True)
        return known[id(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device, known) for each in fields(value)})
    if isinstance(value, tuple):
        return tuple(moved(each, device, known) for each in value)
    return value


class Draw:
    """Random inputs of the shapes that occur."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def rows(self, count: int, size: int) -> Tensor:
        """bf16 rows of different magnitudes, one of zeros."""
        x = self.normal(count, size) * torch.logspace(-2, 1, count)[:, None]
        x[count // 2] = 0.0
        return x.bfloat16()

    def rounded(self, count: int, size: int) -> Tensor:
        return fp8_round_trip(self.normal(count, size)).bfloat16()

    def turn(self, count: int) -> tuple[Tensor, Tensor]:
        angles = self.uniform(count, PAIRS) * 6.28
        return angles.cos(), angles.sin()

    def weights(self, kind: str, experts: int, out: int, size: int) -> Weights:
        wide = [self.normal(out, size) * 0.02 for _ in range(experts)]
        if kind == "fp8":
            parts = [quantise_fp8_weight(each) for each in wide]
            return fp8_weights(torch.stack([data for data, _ in parts]), torch.stack([scale for _, scale in parts]))
        parts = [quantise_fp4_weight(each) for each in wide]
        packed = fp4_weights(torch.stack([data for data, _ in parts]), torch.stack([scale for _, scale in parts]))
        return packed if kind == "fp4" else bf16_weights(packed)


def blocks_of(draw: Draw, count: int, source: int) -> tuple[Keys, Section]:
    """Random blocks, the index keys of one of the four sources in them (no tables yet) and its main records."""
    pool = draw.whole(0, 256, count, BLOCK_BYTES).to(torch.uint8)
    per_block = 128 if source == 3 else 64
    start = sum(64 * (64 + 4 + 288) for _ in range(source))
    scale, main = start + per_block * 64, start + per_block * 68
    pool[:, scale:main] = draw.whole(124, 129, count, per_block * 4).to(torch.uint8)
    records = pool[:, main : main + per_block * 288].view(count, per_block, 288)
    records[:, :, 256:] = draw.whole(0x28, 0x40, count, per_block, 32).to(torch.uint8)
    keys = Keys(Section(pool, start, 64), Section(pool, scale, 4), torch.zeros(1, 1, dtype=torch.int32), per_block)
    return keys, Section(pool, main, 288)


def row_cases(draw: Draw) -> Iterator[Case]:
    for size in (HIDDEN, Q_LORA, 4096):
        x = draw.rows(37, size)
        yield Case(f"round_fp8 {size}", round_fp8, (x,), {}, 0.0)
        weight = draw.uniform(size) + 0.5
        yield Case(f"norm_fp8 {size}", norm_fp8, (x, weight), {"eps": EPS}, 2e-3)
        yield Case(f"quantise_rows {size}", quantise_rows, (x,), {}, 0.0)
        yield Case(f"span_rows {size}", span_rows, (x.float(),), {"rounds": True}, 0.0)
        yield Case(f"norm_rows {size}", norm_rows, (x, weight), {"eps": EPS}, 1e-2)
    both = draw.rows(37, 2 * WIDTH)
    yield Case("swiglu_fp8", swiglu_fp8, (both, draw.uniform(37)), {"limit": LIMIT}, 5e-3)
    yield Case("swiglu_fp8 unweighed", swiglu_fp8, (both, None), {"limit": LIMIT}, 5e-3)
    placed = (both, draw.whole(0, 37, 37).int(), draw.uniform(37))
    yield Case("swiglu_rows", swiglu_rows, placed, {"limit": LIMIT}, 1e-2)
    yield Case("swiglu_rows, turned", swiglu_rows, placed, {"limit": LIMIT, "turns": True}, 1e-2)
    yield Case("swiglu_rows, any length", gpu_fp8.swiglu_rows, placed, {"limit": LIMIT}, 1e-2)
    weighed = (both[:, :WIDTH].contiguous(), *placed[1:])
    for turns in (False, True):
        yield Case("weigh_rows" + ", turned" * turns, weigh_rows, weighed, {"turns": turns}, 0.0)


def record_cases(draw: Draw) -> Iterator[Case]:
    x, weight, turn = draw.rows(61, HEAD), draw.uniform(HEAD) + 0.5, draw.turn(61)
    yield Case("window_records", window_records, (x, weight, *turn), {"eps": EPS}, 5e-3)
    keys, main = blocks_of(draw, 9, 3)
    blocks, places = draw.whole(0, 9, 61), torch.arange(61)
    blocks[5] = -1
    yield Case("store_main", store_main, (x, *turn, main, blocks, places), {}, 1e-4, writes=3)
    rows, weight_index = draw.rows(61, INDEX_DIM), draw.uniform(INDEX_DIM) + 0.5
    index = (rows, weight_index, *turn, keys.data, replace(keys.scale), blocks, places)
    yield Case("store_index", store_index, index, {"eps": EPS}, 1e-4, writes=4)
    queries = draw.normal(19, INDEX_HEADS, INDEX_DIM).bfloat16()
    yield Case("index_queries", index_queries, (queries, *draw.turn(19)), {}, 2e-2)
    ring = Section(draw.normal(5, 8192).view(torch.uint8), 64, 2 * HEAD * 4)
    pairs = torch.tensor([[0, 2], [3, 4], [5, 6], [1, 7], [9, 10]])
    slots, at = torch.tensor([1, 2]), torch.tensor([0, 3])
    both = draw.normal(61, 2 * HEAD)
    yield Case("compress_entries 2", compress_entries, (both, ring, pairs, slots, at, weight), {"eps": EPS}, 2e-3)
    ones = torch.arange(61)[:, None]
    alone = (both[:, :HEAD].contiguous(), None, ones, slots, at, weight)
    yield Case("compress_entries 1", compress_entries, alone, {"eps": EPS}, 2e-3)
    records = WindowFp8(HEAD).encode(draw.normal(61, HEAD))
    window_ring = Section(torch.zeros(4, RING * 528 + 64, dtype=torch.uint8), 64, 528)
    stored, where = torch.arange(10, 61), torch.cat([torch.full((50,), 2), torch.tensor([-1])])
    yield Case("store_ring", store_ring, (records, window_ring, stored, where, stored % RING), {}, 0.0, writes=1)


def attention_case(draw: Draw, spans: list[tuple[int, int]], *, entries: bool, name: str) -> Case:
    """spans: (position of the first token, tokens); a padding row follows the last."""
    codec, count = WindowFp8(HEAD), sum(tokens for _, tokens in spans) + 1
    ring = Section(torch.zeros(len(spans) + 1, RING * 528 + 64, dtype=torch.uint8), 64, 528)
    for slot in range(1, len(spans) + 1):
        ring.pool[slot, 64:] = codec.encode(draw.normal(RING, HEAD)).flatten()
    positions: list[int] = []
    begins: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    start = 0
    for slot, (position, tokens) in enumerate(spans, start=1):
        positions += range(position, position + tokens)
        begins += [position] * tokens
        starts += [start] * tokens
        slots += [slot] * tokens
        start += tokens
    at = torch.tensor([*positions, 0])
    windows = Windows(
        at,
        at - WINDOW + 1,
        torch.tensor([*begins, 0]),
        torch.tensor([*starts, start]),
        torch.tensor([*slots, -1]),
        WINDOW,
        RING,
    )
    keys, main = blocks_of(draw, 40, 3)
    counts = torch.minimum(at, torch.tensor(TOP_ENTRIES)).int()
    where = torch.where(torch.arange(TOP_ENTRIES) < counts[:, None], draw.whole(128, 40 * 128, count, TOP_ENTRIES), -1)
    chosen = Chosen(where.int(), counts, main, keys.entries_per_block) if entries else None
    queries = (draw.normal(count, HEADS, HEAD) * 2).bfloat16()
    own = codec.encode(draw.normal(count, HEAD))
    args = (queries, *draw.turn(count), own, ring, windows, chosen, draw.normal(HEADS))
    return Case(name, attend, args, {"scale": HEAD**-0.5}, 2e-2)


def attention_cases(draw: Draw) -> Iterator[Case]:
    decode = [(131_068, 4), (700, 1), (133, 6), (0, 1), (127, 2), (268, 5)]
    yield attention_case(draw, decode, entries=True, name="attend decode")
    yield attention_case(draw, decode, entries=False, name="attend decode, window only")
    yield attention_case(draw, [(0, 150), (1000, 141), (5, 1)], entries=True, name="attend prefill")


def expert_cases(draw: Draw) -> Iterator[Case]:
    tokens = 160
    logits = draw.normal(tokens, EXPERTS) * 3
    logits[3] = 0.0
    bias, image_bias = draw.normal(EXPERTS) * 0.1, draw.normal(EXPERTS) * 0.1
    images = torch.arange(tokens) % 7 == 0
    lines = torch.arange(tokens).int()
    lines[7] = -1
    arguments = (logits[None], bias, image_bias, images, Placed(None, lines))
    yield Case("choose", choose, arguments, {"top_k": TOP_K, "scaling": 1.5}, 1e-5)
    elsewhere = torch.where(torch.arange(EXPERTS) % 3 == 0, torch.arange(EXPERTS) // 3, -1).int()
    of_rank = (logits[None], bias, None, None, Placed(elsewhere, lines))
    yield Case("choose of a rank", choose, of_rank, {"top_k": TOP_K, "scaling": 1.5}, 1e-5)
    spread = choose(*arguments, top_k=TOP_K, scaling=1.5).experts
    yield Case("group 384", group, (spread,), {"num_experts": EXPERTS}, 0.0)
    local = draw.whole(0, 9, tokens, TOP_K).int()
    local = torch.where(local == 2, 4, local) + 40  # one expert gets nothing
    yield Case("group 7", group, (local,), {"num_experts": LOCAL_EXPERTS, "first_expert": 40}, 0.0)
    groups = group(local, num_experts=LOCAL_EXPERTS, first_expert=40)
    here = groups.targets[: int(groups.ends[-1])].long()
    slots = tokens * TOP_K
    x, factors = draw.rounded(tokens, HIDDEN), draw.uniform(slots)
    by_row = replace(groups, sources=groups.targets)
    hidden = draw.rounded(slots, WIDTH)
    for kind in ("fp4", "fp8", "bf16"):
        up = draw.weights(kind, LOCAL_EXPERTS, 2 * WIDTH, HIDDEN)
        named = {"limit": LIMIT, "num_out": slots}
        yield Case(f"multiply_gated {kind}", multiply_gated, (x, up, groups, factors), named, 1e-2, rows=here)
        down = draw.weights(kind, LOCAL_EXPERTS, HIDDEN, WIDTH)
        yield Case(f"multiply {kind}", multiply, (hidden, down, by_row), {"num_out": slots}, 3e-3, rows=here)
        if kind == "fp4":
            yield from _unit_cases(x, hidden, up, down, groups, factors)
    by_slot, shared = draw.normal(slots, HIDDEN).bfloat16(), draw.normal(tokens, HIDDEN).bfloat16()
    yield Case("combine", combine, (by_slot, shared, spread), {"top_k": TOP_K}, 1e-4)


def _unit_cases(
    x: Tensor, hidden: Tensor, up: Weights, down: Weights, groups: Groups, factors: Tensor
) -> Iterator[Case]:
    """The same experts on the fp8 units, by the library and by our own kernels."""
    wide_up, wide_down = unpack(up, powers_of(up)), unpack(down, powers_of(down))
    yield Case("unpack", unpack, (up, powers_of(up)), {}, 0.0)
    end, here = int(groups.ends[-1]), groups.targets[: int(groups.ends[-1])].long()
    rows = gathered(span_rows(x), groups.sources)
    yield Case("gathered", gathered, (span_rows(x), groups.sources), {}, 0.0)
    yield Case("grouped_product", grouped_product, (rows, wide_up, groups.ends), {}, 3e-3, rows=torch.arange(end))
    turned = gathered(span_rows(x), groups.sources, turns=True)
    yield Case("gathered, turned", gathered, (span_rows(x), groups.sources), {"turns": True}, 0.0)
    arguments = (turned, up, powers_of(up), groups.ends)
    yield Case("packed up", gpu_grouped_packed.multiply, arguments, {}, 4e-3, rows=torch.arange(end))
    mixed, limit = Packed(up, powers_of(up), None).interleaved(), {"limit": LIMIT}
    gated = (turned, mixed, groups.ends)
    yield Case("packed up, gated", gpu_grouped_packed.multiply_gated, gated, limit, 8e-3, rows=torch.arange(end))
    turned = gathered(span_rows(hidden), groups.targets, turns=True)
    arguments = (turned, down, powers_of(down), groups.ends)
    yield Case("packed down", gpu_grouped_packed.multiply, arguments, {}, 4e-3, rows=torch.arange(end))
    spans = span_rows(x, groups.sources, span=256), wide_up, groups, factors
    yield Case("multiply_gated units", gpu_grouped_fp8.multiply_gated, spans, limit, 1.2e-2, rows=torch.arange(end))
    ours = (span_rows(hidden, groups.targets, span=256), wide_down, groups)
    named = {"num_out": len(hidden)}
    yield Case("multiply units", gpu_grouped_fp8.multiply, ours, named, 3e-3, rows=here)


def dense_cases(draw: Draw) -> Iterator[Case]:
    shared, _ = row_scaled([dequantise_fp8_weight(*quantise_fp8_weight(draw.normal(2 * WIDTH, HIDDEN) * 0.02))])
    for tokens in (1, 3, 37, 256, 1000):
        restated = span_rows(draw.rounded(tokens, HIDDEN))
        yield Case(f"product, e4m3 {tokens}", gpu_fp8.product, (restated, shared), {}, 3e-3)
    matrix = Matrix.of(*quantise_fp8_weight(draw.normal(Q_LORA, HIDDEN) * 0.02), wide=True)
    for tokens in (1, 37, 130):
        x = draw.rounded(tokens, HIDDEN)
        yield Case(f"product {tokens}", product, (x, matrix, every_row(tokens, x.device)), {}, 3e-3)
        yield Case(f"fp8_product {tokens}", fp8_product, (*quantise_rows(x), matrix.fp8), {}, 3e-3)


def stream_cases(draw: Draw) -> Iterator[Case]:
    for tokens in (1, 70):
        streams, output = draw.normal(tokens, 4, HIDDEN).bfloat16(), draw.normal(tokens, HIDDEN).bfloat16()
        if tokens > 1:
            streams[9], output[9] = 0.0, 0.0
        before = Coefficients(draw.uniform(tokens, 4), draw.uniform(tokens, 4), draw.uniform(tokens, 4, 4))
        weights = MixingWeights(
            split_weight(draw.normal(24, 4 * HIDDEN) * 0.02),
            torch.tensor([0.5, 1.0, 0.8]),
            draw.normal(24),
            draw.uniform(HIDDEN) + 0.5,
            EPS,
            1e-6,
            20,
        )
        yield Case(f"enter {tokens}", enter, (streams, output, before, weights), {"restates": True}, 3e-3)
        yield Case(
            f"enter {tokens}, invariant", enter, (streams, output, before, weights), {"is_invariant": True}, 3e-3
        )
        yield Case(f"enter {tokens}, first", enter, (streams, None, before, weights), {}, 3e-3)
        yield Case(f"leave {tokens}", leave, (streams, output, before), {}, 3e-3)
    tables = hash_tables([1], vocab_size=4000, heads=8, max_ngram=4, compressed_vocab_size=99_092)[1]
    windows = draw.whole(0, 99_092, 53, 4)
    numbers = HashNumbers.of(tables, torch.device("cpu"))
    yield Case("table_rows", table_rows, (windows, numbers), {}, 0.0)
    data = draw.whole(0, 0x7F, tables.num_rows, 256).to(torch.uint8)
    scale = draw.whole(110, 125, tables.num_rows, 8).to(torch.uint8)
    yield Case("read_rows", read_rows, (table_rows(windows, numbers), data, scale), {}, 0.0)
    streams, read = draw.normal(53, 4, HIDDEN).bfloat16(), draw.normal(53, 5 * HIDDEN).bfloat16()
    images = torch.arange(53) % 9 == 0
    yield Case("add_memory", add_memory, (streams, read, draw.normal(4, HIDDEN), images), {"eps": EPS}, 3e-3)


def index_cases(draw: Draw) -> Iterator[Case]:
    for source, context in ((3, 131_072), (0, 5_000)):
        keys, _ = blocks_of(draw, 1026, source)
        ratio = BLOCK_TOKENS // keys.entries_per_block
        keys = replace(keys, tables=torch.randperm(1025)[None, :1024].add(1).expand(2, 1024).contiguous().int())
        queries = index_queries(draw.normal(8, INDEX_HEADS, INDEX_DIM).bfloat16(), *draw.turn(8))
        weights = draw.normal(8, INDEX_HEADS)
        tile_table = torch.tensor([[0, 4, 0], [4, 3, 1], [0, 0, 0]], dtype=torch.int32)
        seen = torch.tensor([context - 3, context - 2, context - 1, context, 3, 900, 901, 0]).int() // ratio
        spans = torch.tensor([0, 0, 0, 0, 1, 1, 1, -1], dtype=torch.int32)
        named = {"width": -(-context // ratio // 128) * 128, "block_size": BLOCK_ENTRIES}
        yield Case(f"score {context}", score, (queries, weights, keys, tile_table, seen), named, 5e-3)
        made = score(queries, weights, keys, tile_table, seen, **named)
        yield Case(f"select {context}", select, (made.scores, seen), {"count": TOP_ENTRIES}, 0.0)
        assert made.blocks is not None
        valid = (seen + BLOCK_ENTRIES - 1) // BLOCK_ENTRIES
        yield Case(f"select blocks {context}", select, (made.blocks, valid), {"count": CANDIDATE_BLOCKS}, 0.0)
        candidates = select(made.blocks, valid, count=CANDIDATE_BLOCKS)
        of_candidates = (queries, weights, keys, spans, seen, candidates)
        block: dict[str, Any] = {"block_size": BLOCK_ENTRIES}
        yield Case(f"score_candidates {context}", score_candidates, of_candidates, block, 5e-3)
        places = select(score_candidates(*of_candidates, **block), torch.full((8,), 16_384).int(), count=TOP_ENTRIES)
        yield Case(f"locate {context}", locate, (places, keys, spans, candidates), block, 0.0)
    flat = (draw.normal(3, 131_072) * 2).round().bfloat16()
    yield Case("select ties", select, (flat, torch.tensor([131_072, 131_000, 1]).int()), {"count": TOP_ENTRIES}, 0.0)
    counts = draw.whole(0, 7, 64).int()
    ends = draw.whole(100, 1000, 64).int()
    yield Case("lay_out", lay_out, (counts, ends), {"num_tokens": 400, "tile_tokens": 4}, 0.0)


FAMILIES: dict[str, Callable[[Draw], Iterator[Case]]] = {
    "rows": row_cases,
    "records": record_cases,
    "attention": attention_cases,
    "experts": expert_cases,
    "dense": dense_cases,
    "streams": stream_cases,
    "index": index_cases,
}

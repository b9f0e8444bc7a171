"""What does a V4.1 step ask of one GPU, kernel by kernel, and how many bytes and operations must each move at least?

Real dimensions, random weights, kernels of the fastest mode. Decode: one rank of 64 that share the experts (7 experts
a layer here, each step's rows of all ranks emulated), `requests` sequences of 1 + 3 rows. Prefill: one chunk of one
sequence, all experts here. Bytes: inputs once, outputs once, both counted in bf16, weights once in their stored format.
The drafter and the exchange between ranks are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_v41_cases import (
    BLOCK_BYTES,
    BLOCK_ENTRIES,
    CANDIDATE_BLOCKS,
    EPS,
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    LIMIT,
    LOCAL_EXPERTS,
    O_LORA,
    PAIRS,
    Q_LORA,
    RING,
    TOP_ENTRIES,
    TOP_K,
    WIDTH,
    WINDOW,
)
from bench.gpu_v41_expert_work import CUDA, noise, plain_experts, random_e4m3, restated_experts
from kernels.models.gpu.v41.step import Products
from kernels.ops.gpu_engram import add_memory, read_rows
from kernels.ops.gpu_fp8 import RowScaled, norm_rows, product, span_rows
from kernels.ops.gpu_grouped import Format, Tile, interleaved
from kernels.ops.gpu_hyper import MixingWeights, enter, leave, split_weight
from kernels.ops.gpu_index import QUERIES, Keys, locate, score, score_candidates, select
from kernels.ops.gpu_moe import combine, group
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
from kernels.ops.gpu_swiglu_rows import swiglu_rows
from kernels.ops.hyper import Coefficients

GROUPS = 8
ENGRAM_ROWS, ENGRAM_PARTS, ENGRAM_DIM = 1 << 20, 24, 256
VOCABULARY = 129_280


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel (or library call) of a step."""

    name: str
    count: int
    """Times a step."""
    calls: list[Callable[[], object]]
    """The same work on different weights, so that none is in the cache from the call before."""
    num_bytes: float
    flops: float = 0.0
    is_fp8: bool = False
    """Its operations may run on the fp8 units; the floor takes their rate."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a step."""

    tokens: int
    requests: int
    context: int
    experts: int
    """On this GPU."""
    rows: int
    """That its experts get, of all ranks."""
    layers: int
    is_prefill: bool
    copies: int = 3


def decode_shape() -> Shape:
    return Shape(256, 64, 131_072, LOCAL_EXPERTS, 256 * TOP_K, 40, is_prefill=False)


def prefill_shape(experts: int = EXPERTS) -> Shape:
    return Shape(16_384, 1, 16_384, experts, 16_384 * TOP_K, 20, is_prefill=True, copies=1)


class Builder:
    """Makes the work of one shape; tensors of earlier kernels' sizes are random."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.turn = (torch.rand(shape.tokens, PAIRS, device=CUDA), torch.rand(shape.tokens, PAIRS, device=CUDA))
        self.work: list[Work] = []

    def add(
        self,
        name: str,
        count: int,
        call: Callable[[], object] | list[Callable[[], object]],
        num_bytes: float,
        flops: float = 0.0,
        *,
        is_fp8: bool = False,
    ) -> None:
        calls = call if isinstance(call, list) else [call]
        self.work.append(Work(name, count, calls, num_bytes, flops, is_fp8))

    def dense(
        self,
        name: str,
        count: int,
        out: int,
        size: int,
        *,
        fp8: bool = True,
        fp32_out: bool = False,
        is_restated: bool = True,
    ) -> None:
        """A library product; the floor counts fp8 weights once where they are stored so.

        is_restated: fp8 weights are multiplied in fp8; else they are bf16 copies.
        """
        tokens = self.shape.tokens
        x = noise(tokens, size)
        copies = max(min(200_000_000 // (out * size * 2), 8), 1)
        weights: list[Tensor | RowScaled] = [
            random_e4m3(1, out, size) if fp8 and is_restated else noise(out, size, scale=0.02) for _ in range(copies)
        ]
        rows = span_rows(x)

        def call(weight: Tensor | RowScaled) -> Callable[[], object]:
            if isinstance(weight, RowScaled):
                return lambda: product(rows, weight)
            if fp32_out:
                return lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)
            return lambda: torch.mm(x, weight.t())

        stored = out * size * (1 if fp8 else 2)
        moved = stored + 2 * tokens * size + (4 if fp32_out else 2) * tokens * out
        self.add(name, count, [call(weight) for weight in weights], moved, 2.0 * tokens * out * size, is_fp8=fp8)

    def streams(self) -> None:
        tokens, layers = self.shape.tokens, self.shape.layers
        weights = MixingWeights(
            split_weight(torch.randn(24, 4 * HIDDEN, device=CUDA) * 0.02),
            torch.rand(3, device=CUDA),
            torch.randn(24, device=CUDA),
            torch.rand(HIDDEN, device=CUDA),
            EPS,
            1e-6,
            20,
        )
        made = Coefficients(*(torch.rand(tokens, *size, device=CUDA) for size in ((4,), (4,), (4, 4))))
        streams, output = [noise(tokens, 4, HIDDEN) for _ in range(4)], noise(tokens, HIDDEN)

        def call(each: Tensor, *, restates: bool) -> Callable[[], object]:
            return lambda: enter(each, output, made, weights, restates=restates)

        once = 2 * tokens * HIDDEN
        flops = 2.0 * tokens * 24 * 4 * HIDDEN
        calls = [call(each, restates=restates) for each in streams for restates in (False, True)]
        self.add("mhc", 2 * layers, calls, once * 11 + 24 * 16 * HIDDEN, flops)
        self.add("mhc leave", 2, lambda: leave(streams[0], output, made), once * 9)

    def attention(self) -> None:
        shape, layers = self.shape, self.shape.layers
        tokens, each = shape.tokens, shape.tokens // shape.requests
        self.dense("wq_a, wkv", layers, Q_LORA + HEAD, HIDDEN, is_restated=False)
        latent, weight = noise(tokens, Q_LORA + HEAD)[:, :Q_LORA], torch.rand(Q_LORA, device=CUDA)
        self.add("q norm", layers, lambda: norm_rows(latent, weight, eps=EPS), 2 * tokens * Q_LORA * 3)
        self.dense("wq_b", layers, HEADS * HEAD, Q_LORA)
        keys, norm = noise(tokens, HEAD), torch.rand(HEAD, device=CUDA)
        self.add("window records", layers, lambda: window_records(keys, norm, *self.turn, eps=EPS), tokens * 1552)
        own = window_records(keys, norm, *self.turn, eps=EPS)
        pool = torch.zeros(shape.requests + 1, RING * 528, dtype=torch.uint8, device=CUDA)
        pool.copy_(own[torch.arange(RING, device=CUDA) % len(own)].flatten())
        ring = Section(pool, 0, 528)
        request = torch.arange(shape.requests, device=CUDA).repeat_interleave(each)
        inside = torch.arange(tokens, device=CUDA) % each
        begins = (shape.context - each if not shape.is_prefill else 0) + torch.zeros_like(inside)
        at = begins + inside
        windows = Windows(at, at - WINDOW + 1, begins, request * each, request + 1, WINDOW, RING)
        kept = torch.arange(max(tokens - RING, 0) if shape.is_prefill else 0, tokens, device=CUDA)
        kept_slots, kept_places = request[kept] + 1, at[kept] % RING
        self.add(
            "store ring",
            layers,
            lambda: store_ring(own, ring, kept, kept_slots, kept_places),
            len(kept) * 1056,
        )
        blocks = torch.randint(0, 256, (2048, BLOCK_BYTES), dtype=torch.uint8, device=CUDA)
        start = 3 * 64 * 356 + 128 * 68
        records = blocks[:, start : start + 128 * 288].view(2048, 128, 288)
        records[:, :, 256:] = torch.randint(0x28, 0x40, (2048, 128, 32), dtype=torch.uint8, device=CUDA)
        counts = (at + 1).clamp_max(TOP_ENTRIES).int()
        places = torch.randint(128, 2048 * 128, (tokens, TOP_ENTRIES), device=CUDA).int()
        chosen = Chosen(places, counts, Section(blocks, start, 288), 128)
        sinks, queries = torch.randn(HEADS, device=CUDA), noise(tokens, HEADS, HEAD)

        def run(entries: Chosen | None) -> Callable[[], object]:
            return lambda: attend(queries, *self.turn, own, ring, windows, entries, sinks, scale=HEAD**-0.5)

        seen = float(counts.sum() + tokens * WINDOW)
        moved = 4.0 * tokens * HEADS * HEAD + float(counts.sum()) * 288
        moved += (shape.requests * WINDOW if not shape.is_prefill else tokens) * 528
        flops = 4.0 * HEADS * HEAD * seen
        self.add("attention", layers - 2, run(chosen), moved, flops)
        self.add("attention, window", 2, run(None), 4.0 * tokens * HEADS * HEAD, 4.0 * HEADS * HEAD * tokens * WINDOW)
        attended = noise(tokens, GROUPS, HEADS // GROUPS * HEAD)
        down = [random_e4m3(GROUPS, O_LORA, HEADS // GROUPS * HEAD) for _ in range(shape.copies)]
        by_group = interleaved(tokens, GROUPS, CUDA)

        def grouped(matrix: RowScaled) -> Callable[[], object]:
            return lambda: Products(is_invariant=False).grouped(attended, matrix, by_group)

        size = HEADS * HEAD
        flops = 2.0 * tokens * size * O_LORA
        moved = size * O_LORA + 2.0 * tokens * (size + GROUPS * O_LORA)
        self.add("wo_a", layers, [grouped(matrix) for matrix in down], moved, flops, is_fp8=True)
        middle = torch.randn(tokens, GROUPS * O_LORA, device=CUDA)
        self.add("wo_a round", layers, lambda: span_rows(middle, rounds=True), 4 * tokens * GROUPS * O_LORA)
        self.dense("wo_b", layers, HIDDEN, GROUPS * O_LORA)

    def experts(self, kind: Format | None = None, tiles: tuple[Tile | None, ...] = (None,)) -> None:
        """kind: by our own kernel, in these formats and tiles; None = as the product does in such a step."""
        shape, layers = self.shape, self.shape.layers
        tokens, rows = shape.tokens, shape.rows
        self.dense("router", layers, EXPERTS, HIDDEN, fp8=False, fp32_out=True)
        logits, bias = torch.randn(tokens, EXPERTS, device=CUDA), torch.randn(EXPERTS, device=CUDA) * 0.01
        chosen_by = logits[None], bias, None, None, Placed(None, torch.zeros(tokens, dtype=torch.int32, device=CUDA))
        self.add("route", layers, lambda: choose(*chosen_by, top_k=TOP_K, scaling=1.5), tokens * (1536 + 48))
        # Of a rank's experts a token mostly wants one; of all experts, six.
        wanted = TOP_K if shape.is_prefill else 1
        experts = torch.rand(rows // wanted, shape.experts, device=CUDA).topk(wanted, dim=1).indices.int()
        self.add("group", layers, lambda: group(experts, num_experts=shape.experts), rows * 12)
        groups = group(experts, num_experts=shape.experts)
        x, factors = noise(rows // wanted, HIDDEN), torch.rand(rows, device=CUDA)
        by_slot = noise(rows, HIDDEN)
        if kind is None:
            restated_experts(self, groups, x, factors)
        else:
            plain_experts(self, kind, tiles, groups, x, factors)
        shared, places = noise(tokens, HIDDEN), groups.places
        assert places is not None
        self.add(
            "combine",
            layers,
            lambda: combine(by_slot[: tokens * TOP_K], shared, top_k=TOP_K, places=places),
            2.0 * tokens * HIDDEN * (TOP_K + 2),
        )
        self.dense("shared up", layers, 2 * WIDTH, HIDDEN)
        both = noise(tokens, 2 * WIDTH)
        self.add("shared swiglu", layers, lambda: swiglu_rows(both, limit=LIMIT), 6 * tokens * WIDTH)
        self.dense("shared down", layers, HIDDEN, WIDTH)

    def compressor(self) -> None:
        shape = self.shape
        tokens, both = shape.tokens, torch.randn(shape.tokens, 2 * HEAD, device=CUDA)
        sources = 3 if shape.is_prefill else 4
        self.dense("compressor 2", 3, 2 * HEAD, HIDDEN, fp8=False, fp32_out=True)
        if not shape.is_prefill:
            self.dense("compressor 1", 1, HEAD, HIDDEN, fp8=False, fp32_out=True)
        entries, norm = tokens // 2, torch.rand(HEAD, device=CUDA)
        ring = Section(torch.zeros(shape.requests + 1, 128 * 4096, dtype=torch.uint8, device=CUDA), 0, 4096)
        slots = torch.arange(shape.requests, device=CUDA) + 1
        pairs = torch.arange(tokens, device=CUDA).view(-1, 2) + shape.requests
        self.add(
            "compress entries",
            sources,
            lambda: compress_entries(both, ring, pairs, slots, slots, norm, eps=EPS),
            tokens * 4096 + entries * 1024,
        )
        latents, at = noise(entries, HEAD), (self.turn[0][:entries], self.turn[1][:entries])
        pool = torch.zeros(max(tokens // 128, 64) + 1, BLOCK_BYTES, dtype=torch.uint8, device=CUDA)
        blocks = torch.arange(entries, device=CUDA) // 64 + 1
        places = torch.arange(entries, device=CUDA) % 64
        main, data, scale = Section(pool, 64 * 68, 288), Section(pool, 0, 64), Section(pool, 64 * 64, 4)
        self.add("store main", sources, lambda: store_main(latents, *at, main, blocks, places), entries * 1312)
        index, index_norm = noise(entries, INDEX_DIM), torch.rand(INDEX_DIM, device=CUDA)
        self.add(
            "store index",
            sources,
            lambda: store_index(index, index_norm, *at, data, scale, blocks, places, eps=EPS),
            entries * 324,
        )

    def indexer(self) -> None:
        shape = self.shape
        tokens, requests, context = shape.tokens, shape.requests, shape.context
        sources = 3 if shape.is_prefill else 8
        self.dense("index wq_b", sources, INDEX_HEADS * INDEX_DIM, Q_LORA)
        self.dense("index weights", sources, INDEX_HEADS, HIDDEN, fp8=False)
        raw = noise(tokens, INDEX_HEADS, INDEX_DIM)
        self.add("index queries", sources, lambda: index_queries(raw, *self.turn), tokens * INDEX_HEADS * 512)
        queries, weights = index_queries(raw, *self.turn), torch.rand(tokens, INDEX_HEADS, device=CUDA) * 0.01
        num_blocks = context // 128
        pool = torch.randint(0, 256, (requests * num_blocks + 1, BLOCK_BYTES), dtype=torch.uint8, device=CUDA)
        for source in range(4):
            start, per_block = source * 64 * 356, 128 if source == 3 else 64
            exponents = pool[:, start + per_block * 64 : start + per_block * 68]
            exponents.copy_(torch.randint(124, 129, exponents.shape, dtype=torch.uint8, device=CUDA))
        tables = torch.randperm(requests * num_blocks, device=CUDA).add(1).view(requests, -1).int()
        each = tokens // requests
        first = torch.arange(0, tokens, QUERIES, device=CUDA).int()
        tile_table = torch.stack([first, torch.full_like(first, QUERIES), first // each], dim=1).contiguous()
        at = torch.arange(tokens, device=CUDA) % each + (0 if shape.is_prefill else context - each)
        spans = (torch.arange(tokens, device=CUDA) // each).int()

        def keys_of(source: int) -> Keys:
            per_block = 128 if source == 3 else 64
            start = source * 64 * 356
            return Keys(Section(pool, start, 64), Section(pool, start + per_block * 64, 4), tables, per_block)

        def add_scores(name: str, count: int, keys: Keys, ratio: int, block_size: int) -> tuple[Tensor, Tensor | None]:
            seen, width = ((at + 1) // ratio).int(), context // ratio
            run: Callable[[], object] = lambda: score(  # noqa: E731 - named by the work
                queries, weights, keys, tile_table, seen, width=width, block_size=block_size
            )
            pairs = float(seen.sum())
            self.add(name, count, run, requests * width * 68.0 + 2 * pairs, 2.0 * INDEX_HEADS * INDEX_DIM * pairs)
            made = score(queries, weights, keys, tile_table, seen, width=width, block_size=block_size)
            self.add(f"{name}, select", count, lambda: select(made.scores, seen, count=TOP_ENTRIES), 2 * pairs)
            return made.scores, made.blocks

        add_scores("index scores 2", 3, keys_of(0), 2, 0)
        chosen = torch.randint(0, context // 2, (tokens, TOP_ENTRIES), device=CUDA).int()
        self.add("locate", sources, lambda: locate(chosen, keys_of(0), spans), tokens * TOP_ENTRIES * 12)
        if shape.is_prefill:
            return
        _, blocks = add_scores("index scores 1", 1, keys_of(3), 1, BLOCK_ENTRIES)
        assert blocks is not None
        seen = (at + 1).int()
        valid = (seen + BLOCK_ENTRIES - 1) // BLOCK_ENTRIES
        self.add("select blocks", 1, lambda: select(blocks, valid, count=CANDIDATE_BLOCKS), 2.0 * float(valid.sum()))
        candidates = select(blocks, valid, count=CANDIDATE_BLOCKS)
        keys, width = keys_of(3), CANDIDATE_BLOCKS * BLOCK_ENTRIES
        self.add(
            "candidate scores",
            4,
            lambda: score_candidates(queries, weights, keys, spans, seen, candidates, block_size=BLOCK_ENTRIES),
            tokens * width * 70.0,
            2.0 * INDEX_HEADS * INDEX_DIM * tokens * width,
        )
        scored = score_candidates(queries, weights, keys, spans, seen, candidates, block_size=BLOCK_ENTRIES)
        full = torch.full_like(seen, width)
        self.add("candidate select", 4, lambda: select(scored, full, count=TOP_ENTRIES), tokens * width * 2.0)

    def memory(self) -> None:
        tokens = self.shape.tokens
        data = torch.randint(0, 0x78, (ENGRAM_ROWS, ENGRAM_DIM), dtype=torch.uint8).pin_memory()
        scale = torch.randint(110, 125, (ENGRAM_ROWS, ENGRAM_DIM // 32), dtype=torch.uint8).pin_memory()
        rows = torch.randint(0, ENGRAM_ROWS, (tokens, ENGRAM_PARTS), device=CUDA)
        self.add("engram rows, host", 2, lambda: read_rows(rows, data, scale), tokens * ENGRAM_PARTS * 776.0)
        self.dense("engram wkv", 2, 5 * HIDDEN, ENGRAM_PARTS * ENGRAM_DIM)
        streams, read, weight = noise(tokens, 4, HIDDEN), noise(tokens, 5 * HIDDEN), torch.randn(4, HIDDEN, device=CUDA)
        self.add("engram gate", 2, lambda: add_memory(streams, read, weight, None, eps=EPS), tokens * HIDDEN * 26.0)

    def head(self) -> None:
        self.dense("head", 1, VOCABULARY, HIDDEN, fp8=False, fp32_out=True)

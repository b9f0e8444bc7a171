"""How many bytes and operations must each kernel of a V4.1 step cost at least, counted from shapes?

The same counts as bench/gpu_v41_work.py makes beside its tensors, without a tensor: inputs once, outputs once, weights
once in their stored format (fp8 with a byte, fp4 with half of one, and a scale for 32 or 32 x 32 values).
"""

from __future__ import annotations

from dataclasses import replace

from bench.gpu_v41_cases import (
    BLOCK_ENTRIES,
    CANDIDATE_BLOCKS,
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    O_LORA,
    Q_LORA,
    RING,
    TOP_ENTRIES,
    TOP_K,
    WIDTH,
    WINDOW,
)
from bench.gpu_v41_work import ENGRAM_DIM, ENGRAM_PARTS, GROUPS, VOCABULARY, Shape
from bench.roofline import Kernel, Work

_WINDOW_BYTES, _MAIN_BYTES, _INDEX_BYTES = 528, 288, 68
"""Of one record."""
_PAIR_BYTES = 4 * 2 * HEAD
"""What the compressor makes of a token, fp32."""


def v41_work(shape: Shape) -> Work:
    """Every kernel of a step, in the order in which the benchmark times them."""
    kernels = [*_streams(shape), *_attention(shape), *_experts(shape), *_compressor(shape), *_indexer(shape)]
    kernels += _memory(shape)
    if not shape.is_prefill:
        kernels.append(_dense(shape, "head", 1, VOCABULARY, HIDDEN, fp8=False, fp32_out=True))
    return Work(tuple(kernels))


def _call(name: str, count: int, num_bytes: float, flops: float = 0.0, *, is_fp8: bool = False) -> Kernel:
    """num_bytes and flops of one call."""
    return Kernel(name, count * float(num_bytes), count * flops, count, is_fp8)


def _dense(
    shape: Shape, name: str, count: int, out: int, size: int, *, fp8: bool = True, fp32_out: bool = False
) -> Kernel:
    tokens = shape.tokens
    moved = out * size * (1 if fp8 else 2) + 2 * tokens * size + (4 if fp32_out else 2) * tokens * out
    return _call(name, count, moved, 2.0 * tokens * out * size, is_fp8=fp8)


def _streams(shape: Shape) -> list[Kernel]:
    once = 2 * shape.tokens * HIDDEN
    flops = 2.0 * shape.tokens * 24 * 4 * HIDDEN
    return [
        _call("mhc", 2 * shape.layers, once * 11 + 24 * 16 * HIDDEN, flops),
        _call("mhc leave", 2, once * 9),
    ]


def _attention(shape: Shape) -> list[Kernel]:
    tokens, layers, size = shape.tokens, shape.layers, HEADS * HEAD
    each = tokens // shape.requests
    begin = 0 if shape.is_prefill else shape.context - each
    # Entries a token chooses: all that there are, up to the most.
    chosen = float(shape.requests * sum(min(begin + at + 1, TOP_ENTRIES) for at in range(each)))
    own = tokens if shape.is_prefill else shape.requests * WINDOW
    kept = min(tokens, RING) if shape.is_prefill else tokens
    return [
        _dense(shape, "wq_a", layers, Q_LORA, HIDDEN),
        _call("q norm", layers, 2 * tokens * Q_LORA * 3),
        _dense(shape, "wq_b", layers, size, Q_LORA),
        _dense(shape, "wkv", layers, HEAD, HIDDEN),
        _call("window records", layers, tokens * (2 * HEAD + _WINDOW_BYTES)),
        _call("store ring", layers, kept * 2 * _WINDOW_BYTES),
        _call(
            "attention",
            layers - 2,
            4.0 * tokens * size + chosen * _MAIN_BYTES + own * _WINDOW_BYTES,
            4.0 * size * (chosen + tokens * WINDOW),
        ),
        _call("attention, window", 2, 4.0 * tokens * size, 4.0 * size * tokens * WINDOW),
        _call(
            "wo_a",
            layers,
            size * O_LORA + 2.0 * tokens * (size + GROUPS * O_LORA),
            2.0 * tokens * size * O_LORA,
            is_fp8=True,
        ),
        _call("wo_a round", layers, 4 * tokens * GROUPS * O_LORA),
        _dense(shape, "wo_b", layers, HIDDEN, GROUPS * O_LORA),
    ]


def _experts(shape: Shape) -> list[Kernel]:
    """Of the formats that are served: bf16 copies in a decode step, fp4 in a prefill."""
    tokens, rows, layers = shape.tokens, shape.rows, shape.layers
    kind = "fp4" if shape.is_prefill else "bf16"
    stored = shape.experts * 2 * WIDTH * HIDDEN * 17 // 32
    moved, flops = 2.0 * rows * (HIDDEN + WIDTH), 4.0 * rows * WIDTH * HIDDEN
    return [
        _dense(shape, "router", layers, EXPERTS, HIDDEN, fp8=False, fp32_out=True),
        _call("route", layers, tokens * (4 * EXPERTS + 8 * TOP_K)),
        _call("group", layers, rows * 12),
        _call(f"experts up {kind}", layers, stored + moved, flops, is_fp8=True),
        _call(f"experts down {kind}", layers, stored / 2 + moved, flops / 2, is_fp8=True),
        _call("combine", layers, 2.0 * tokens * HIDDEN * (TOP_K + 2)),
        _dense(shape, "shared up", layers, 2 * WIDTH, HIDDEN),
        _call("shared swiglu", layers, 6 * tokens * WIDTH),
        _dense(shape, "shared down", layers, HIDDEN, WIDTH),
    ]


def _compressor(shape: Shape) -> list[Kernel]:
    tokens, entries = shape.tokens, shape.tokens // 2
    sources = 3 if shape.is_prefill else 4
    kernels = [_dense(shape, "compressor 2", 3, 2 * HEAD, HIDDEN, fp8=False, fp32_out=True)]
    if not shape.is_prefill:
        kernels.append(_dense(shape, "compressor 1", 1, HEAD, HIDDEN, fp8=False, fp32_out=True))
    return [
        *kernels,
        _call("compress entries", sources, tokens * _PAIR_BYTES + entries * 2 * HEAD),
        _call("store main", sources, entries * (2 * HEAD + _MAIN_BYTES)),
        _call("store index", sources, entries * (2 * INDEX_DIM + _INDEX_BYTES)),
    ]


def _indexer(shape: Shape) -> list[Kernel]:
    tokens, context = shape.tokens, shape.context
    sources = 3 if shape.is_prefill else 8
    each = tokens // shape.requests
    begin = 0 if shape.is_prefill else context - each
    per_pair = 2.0 * INDEX_HEADS * INDEX_DIM

    def scores(name: str, count: int, ratio: int) -> list[Kernel]:
        pairs = float(shape.requests * sum((begin + at + 1) // ratio for at in range(each)))
        moved = shape.requests * (context // ratio) * float(_INDEX_BYTES) + 2 * pairs
        return [_call(name, count, moved, per_pair * pairs), _call(f"{name}, select", count, 2 * pairs)]

    kernels = [
        _dense(shape, "index wq_b", sources, INDEX_HEADS * INDEX_DIM, Q_LORA),
        _dense(shape, "index weights", sources, INDEX_HEADS, HIDDEN, fp8=False),
        _call("index queries", sources, tokens * INDEX_HEADS * 4 * INDEX_DIM),
        *scores("index scores 2", 3, 2),
        _call("locate", sources, tokens * TOP_ENTRIES * 12),
    ]
    if shape.is_prefill:
        return kernels
    width = CANDIDATE_BLOCKS * BLOCK_ENTRIES
    blocks = shape.requests * sum(-(-(begin + at + 1) // BLOCK_ENTRIES) for at in range(each))
    return [
        *kernels,
        *scores("index scores 1", 1, 1),
        _call("select blocks", 1, 2.0 * blocks),
        _call("candidate scores", 4, tokens * width * (_INDEX_BYTES + 2.0), per_pair * tokens * width),
        _call("candidate select", 4, tokens * width * 2.0),
    ]


def _memory(shape: Shape) -> list[Kernel]:
    num_rows, stored = shape.tokens * ENGRAM_PARTS, ENGRAM_DIM + ENGRAM_DIM // 32
    fetched = _call("engram rows, host", 2, num_rows * (stored + 2 * ENGRAM_DIM))
    return [
        replace(fetched, host_bytes=2.0 * num_rows * stored),
        _dense(shape, "engram wkv", 2, 5 * HIDDEN, ENGRAM_PARTS * ENGRAM_DIM),
        _call("engram gate", 2, shape.tokens * HIDDEN * 26.0),
    ]

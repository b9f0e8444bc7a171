"""What does V4.1 launch where whole rows are restated, moved, gated or chosen from at once? Over tensors without values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import gpu_hyper_rows, gpu_sparse
from kernels.ops.gpu_bring import bring
from kernels.ops.gpu_choice import select_by_words
from kernels.ops.gpu_fp8 import SpanRows, as_rows, empty_rows
from kernels.ops.gpu_grouped import Weights, interleaved
from kernels.ops.gpu_grouped_packed import multiply_gated
from kernels.ops.gpu_grouped_unpack import Packed, Powers
from kernels.ops.gpu_placed_rows import place_rows
from kernels.ops.gpu_records import Section
from kernels.ops.gpu_sparse import Chosen, Windows, attend_groups
from kernels.ops.gpu_swiglu_rows import gate_rows, weigh_rows
from kernels.ops.hyper import Coefficients

META = torch.device("meta")
BF16, FP32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
TOKENS, HEADS, HEAD, PAIRS = 256, 64, 512, 32
HIDDEN, WIDTH, TOP_K, EPS = 5120, 2304, 6, 1e-20


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launched() -> None:
    """Attention that leaves its outcome restated, and what comes after it asked for."""
    at = _of(I64, TOKENS)
    windows = Windows(at, at, at, at, at, 128, 134)
    turn, ring = (_of(FP32, TOKENS, PAIRS), _of(FP32, TOKENS, PAIRS)), Section(_of(U8, 5, 134 * 528 + 64), 64, 528)
    main = Section(_of(U8, 1026, 113_920), 64 * 68, 288)
    for chosen in (Chosen(_of(I32, TOKENS, 512), _of(I32, TOKENS), main, 64), None):
        given = _of(BF16, TOKENS, HEADS, HEAD), *turn, _of(U8, TOKENS, 528), ring, windows, chosen, _of(FP32, HEADS)
        for brings in (None, _of(U8, 8 * 1024 * 4096)):
            for gpu_sparse.SUMS_ASK in (False, True):
                attend_groups(*given, interleaved(TOKENS, 8, META), scale=HEAD**-0.5, span=256, brings=brings)
    gpu_sparse.SUMS_ASK = False
    bring(_of(U8, 5120 * 8192))


def at_once() -> None:
    """Whole rows moved, gated and chosen from at once."""
    for width in (8192, 131_072):
        select_by_words(_of(BF16, TOKENS, width), _of(I32, TOKENS), count=512)
    before = Coefficients(*(_of(FP32, TOKENS, *size) for size in ((4,), (4,), (4, 4))))
    streams, x = _of(BF16, TOKENS, 4, HIDDEN), _of(BF16, TOKENS, HIDDEN)
    for output in (None, x):
        for restated in (None, as_rows(empty_rows(x))):
            gpu_hyper_rows.go_on(
                streams, output, before, before.pre, _of(FP32, HIDDEN),
                eps=EPS, after=streams, x=x, rounded=x, restated=restated,
            )  # fmt: skip
    rows, slots = SpanRows(_of(torch.float8_e4m3fn, TOKENS, HIDDEN), _of(FP32, 1, TOKENS)), TOKENS * TOP_K
    for here in (7, 384):
        place_rows(_of(I32, TOKENS, TOP_K), rows, num_experts=here, turns=here == 7)
    gate_rows(_of(BF16, slots, 2 * WIDTH), _of(I32, slots), _of(FP32, slots), limit=10.0, turns=True)
    gate_rows(_of(BF16, TOKENS, 2 * WIDTH), None, None, limit=10.0, turns=False)
    weigh_rows(_of(BF16, slots, WIDTH), _of(I32, slots), _of(FP32, slots), turns=True)
    gates, rows_scale = (7, 2 * WIDTH), _of(FP32, 1, slots)
    both = Weights("fp4", _of(U8, *gates, HIDDEN // 2), _of(U8, *gates, HIDDEN // 32), HIDDEN)
    mixed = Packed(both, Powers(_of(U8, *gates), _of(FP32, *gates), _of(I32, 64, 2), 2), None, is_interleaved=True)
    turned = SpanRows(_of(torch.float8_e4m3fn, slots, HIDDEN), rows_scale, is_turned=True)
    multiply_gated(turned, mixed, _of(I32, 7), limit=10.0)

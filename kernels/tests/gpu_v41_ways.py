"""What do V4.1's ways launch that are switched off until a GPU has timed them? Over tensors without values.

`gpu_overlap.V41_STARTS_EARLY` is none of them: it adds two instructions to every kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.models.gpu.v41.step import interleaved
from kernels.ops import gpu_index, gpu_moe
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_unpack import Powers, unpack
from kernels.ops.gpu_hyper import MixingWeights, enter
from kernels.ops.gpu_moe import Placed, group, route
from kernels.ops.gpu_records import Section
from kernels.ops.gpu_sparse import Chosen, Windows, attend_groups
from kernels.ops.hyper import Coefficients

META = torch.device("meta")
BF16, FP32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
TOKENS, HIDDEN, HEADS, HEAD, PAIRS, WIDTH, EXPERTS = 256, 5120, 64, 512, 32, 2304, 384


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launched() -> None:
    """Coefficients beside a sublayer, restated attention, experts unpacked by few programs, slots sorted by one."""
    before = Coefficients(_of(FP32, TOKENS, 4), _of(FP32, TOKENS, 4), _of(FP32, TOKENS, 4, 4))
    parts, norm = _of(BF16, 3, 32, 4 * HIDDEN), _of(FP32, HIDDEN)
    mixing = MixingWeights(parts, _of(FP32, 3), _of(FP32, 24), norm, 1e-20, 1e-6, 20)
    for restates in (False, True):
        streams, output = _of(BF16, TOKENS, 4, HIDDEN), _of(BF16, TOKENS, HIDDEN)
        enter(streams, output, before, mixing, restates=restates, beside=Beside(META))
    packed = Weights("fp4", _of(U8, 7, 2 * WIDTH, HIDDEN // 2), _of(U8, 7, 2 * WIDTH, HIDDEN // 32), HIDDEN)
    powers = Powers(_of(U8, 7, 2 * WIDTH), _of(FP32, 7, 2 * WIDTH), _of(I32, 64, 2), is_exact=True)
    unpack(packed, powers, _of(torch.float8_e4m3fn, 7, 2 * WIDTH, HIDDEN), is_beside=True)
    _attention()
    gpu_moe.FEWER_LAUNCHES = True
    for rows in (_of(I32, EXPERTS), None):
        placed = Placed(rows, _of(I32, TOKENS))
        route(_of(FP32, TOKENS, EXPERTS), _of(FP32, EXPERTS), None, None, top_k=6, scaling=1.5, placed=placed)
    group(_of(I32, TOKENS, 6), num_experts=7)
    gpu_moe.FEWER_LAUNCHES = False


def _attention() -> None:
    at = _of(I64, TOKENS)
    windows = Windows(at, at, at, at, at, 128, 134)
    turn, ring = (_of(FP32, TOKENS, PAIRS), _of(FP32, TOKENS, PAIRS)), Section(_of(U8, 5, 134 * 528 + 64), 64, 528)
    main = Section(_of(U8, 1026, 113_920), 64 * 68, 288)
    for chosen in (Chosen(_of(I32, TOKENS, 512), _of(I32, TOKENS), main, 64), None):
        given = _of(BF16, TOKENS, HEADS, HEAD), *turn, _of(U8, TOKENS, 528), ring, windows, chosen, _of(FP32, HEADS)
        attend_groups(*given, interleaved(TOKENS, 8, META), scale=HEAD**-0.5, span=256)


def with_index(index: Callable[[], None]) -> None:
    """Scores on the fp8 units."""
    gpu_index.ON_UNITS = True
    index()
    gpu_index.ON_UNITS = False

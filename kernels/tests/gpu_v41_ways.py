"""What does V4.1 launch in a way that is switched off until a GPU has timed it? Over tensors without values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.models.gpu.v41.step import interleaved
from kernels.ops.gpu_records import Section
from kernels.ops.gpu_sparse import Chosen, Windows, attend_groups

META = torch.device("meta")
BF16, FP32, U8, I32, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int32, torch.int64
TOKENS, HEADS, HEAD, PAIRS = 256, 64, 512, 32


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launched() -> None:
    """Attention that leaves its outcome restated."""
    at = _of(I64, TOKENS)
    windows = Windows(at, at, at, at, at, 128, 134)
    turn, ring = (_of(FP32, TOKENS, PAIRS), _of(FP32, TOKENS, PAIRS)), Section(_of(U8, 5, 134 * 528 + 64), 64, 528)
    main = Section(_of(U8, 1026, 113_920), 64 * 68, 288)
    for chosen in (Chosen(_of(I32, TOKENS, 512), _of(I32, TOKENS), main, 64), None):
        given = _of(BF16, TOKENS, HEADS, HEAD), *turn, _of(U8, TOKENS, 528), ring, windows, chosen, _of(FP32, HEADS)
        attend_groups(*given, interleaved(TOKENS, 8, META), scale=HEAD**-0.5, span=256)

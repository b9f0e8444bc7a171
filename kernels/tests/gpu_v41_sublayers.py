"""What do V4.1's routing, and its streams between two sublayers, launch? Over tensors without values."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_hyper import MixingWeights, enter, leave
from kernels.ops.gpu_moe import combine, group
from kernels.ops.gpu_router import Placed, choose, route_rows
from kernels.ops.hyper import Coefficients

META = torch.device("meta")
HIDDEN, EXPERTS, TOP_K = 5120, 384, 6


def _of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype)


_bf16, _fp32, _i32 = (partial(_of, dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32))


def routes(here: int) -> None:
    """Experts chosen, sorted (all of them, or a rank's) and added up."""
    tokens, images, lines = 160, _of(torch.bool, 160), _i32(160)
    logits, chosen = (_fp32(1, tokens, EXPERTS), _fp32(EXPERTS)), partial(choose, top_k=TOP_K, scaling=1.5)
    chosen(*logits, None, None, Placed(None, lines))
    chosen(*logits, _fp32(EXPERTS), images, Placed(_i32(EXPERTS), lines))
    group(_i32(tokens, TOP_K), num_experts=here, first_expert=EXPERTS - here)
    slots = _bf16(tokens * TOP_K, HIDDEN)
    combine(slots, None, top_k=TOP_K)
    for places in (None, _i32(len(slots))):
        combine(slots, _bf16(tokens, HIDDEN), _i32(tokens, TOP_K), top_k=TOP_K, places=places)


def routed_rows(tokens: int, experts: int) -> None:
    """Rows to their experts, in shares where they are few; with images and without."""
    given, placed = (_bf16(tokens, HIDDEN), _bf16(experts, HIDDEN), _fp32(experts)), Placed(_i32(experts), _i32(tokens))
    routed = partial(route_rows, top_k=TOP_K if experts == EXPERTS else 3, scaling=1.5)
    routed(*given, None, None, placed)
    routed(*given, _fp32(experts), _of(torch.bool, tokens), placed)


def streams(tokens: int, *, is_invariant: bool) -> None:
    """Into a sublayer, in its turn and in two parts, with and without an output of the one before, and out of it."""
    before = Coefficients(_fp32(tokens, 4), _fp32(tokens, 4), _fp32(tokens, 4, 4))
    weights = MixingWeights(_bf16(3, 32, 4 * HIDDEN), _fp32(3), _fp32(24), _fp32(HIDDEN), 1e-20, 1e-6, 20)
    rows, output = _bf16(tokens, 4, HIDDEN), _bf16(tokens, HIDDEN)
    for given in (None, output):
        for beside in (None, Beside(META)):
            enter(rows, given, before, weights, is_invariant=is_invariant, restates=not is_invariant, beside=beside)
    leave(rows, output, before)

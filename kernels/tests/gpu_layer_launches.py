"""Which tensors does the one kernel of a dense model's decode step get, at the real dimensions?"""

from __future__ import annotations

from functools import partial

import torch

from kernels.ops.gpu_layer_cut import cut_for
from kernels.ops.gpu_layers import Scratch, Stacks, run_layers
from kernels.ops.gpu_rope_cache import Heads, Paging, Turning

LAYERS, HIDDEN, FFN, HEADS = 2, 4096, 14_336, Heads(32, 8, 128)


def one_kernel(rows: int) -> None:
    """Two of Llama-8B's layers, on whatever device tensors are made."""
    bf16 = partial(torch.empty, dtype=torch.bfloat16)
    int32 = partial(torch.empty, dtype=torch.int32)
    cut = cut_for(
        rows,
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS.num_heads,
        kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        ffn=FFN,
        block_tokens=128,
    )
    assert cut is not None
    stacks = Stacks(
        bf16(LAYERS * HEADS.row_size, HIDDEN),
        bf16(LAYERS * HIDDEN, HIDDEN),
        bf16(LAYERS * 2 * FFN, HIDDEN),
        bf16(LAYERS * HIDDEN, FFN),
        bf16(2 * LAYERS + 1, HIDDEN),
        bf16(128_256, HIDDEN),
    )
    cache, tables = bf16(100, LAYERS, 2, 128, 1024), int32(65, 1024)
    paging = [Paging(cache[:, at], tables) for at in range(LAYERS)]
    turning, scratch = Turning(torch.empty(8192, 64), torch.empty(8192, 64)), Scratch.of(cut, cache.device)
    ids = torch.empty(rows, dtype=torch.int64)
    run_layers(ids, int32(rows), int32(rows), stacks, turning, paging, scratch, cut, eps=1e-5)

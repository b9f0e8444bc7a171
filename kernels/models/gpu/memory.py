"""How much device memory does a dense model take beside its KV blocks, and how is it held from the start on?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

from kernels.kv.layout import KvLayout
from kernels.memory_plan import STEP_TOKENS, MemoryPlan, Need, NoRoom
from kernels.models.config import ModelConfig
from kernels.models.layers import expected_shapes
from kernels.ops.gpu_attention import PART_TOKENS

_SCORED_ROWS = 2048
"""Rows of logits beside those of decode steps: a step's scored prompt tokens, and adjusted copies of sampled rows."""
_BF16, _FP32, _INT32 = 2, 4, 4
_SHARED_ROWS = 32
"""Largest decode step whose attention shares keys among programs, and keeps their parts."""


def dense_need(
    config: ModelConfig,
    layout: KvLayout,
    *,
    step_tokens: int = STEP_TOKENS,
    graph_sizes: Sequence[int] = (),
    num_sequences: int = 0,
) -> Need:
    """Bytes of a dense model.  graph_sizes: decode steps that are captured.  num_sequences: with tables on the device.

    A step at its peak holds two residual rows, the fused products and their inputs; a captured one keeps its logits.
    """
    turned = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row_bytes = _BF16 * (3 * config.ffn_size + 4 * config.hidden_size + 2 * turned)
    logit_bytes = _FP32 * config.vocab_size
    parts = -(-config.max_position_tokens // PART_TOKENS)
    part_bytes = _SHARED_ROWS * config.num_heads * parts * _FP32 * (config.head_dim + 2)
    tables = (num_sequences + 1) * -(-config.max_position_tokens // layout.block_tokens) * _INT32
    turns = config.max_position_tokens * config.head_dim * _FP32
    return Need(
        weights=_BF16 * sum(map(prod, expected_shapes(config).values())) + turns + tables,
        workspace=step_tokens * row_bytes + _SCORED_ROWS * logit_bytes,
        graphs=sum(graph_sizes) * logit_bytes + max(graph_sizes, default=0) * row_bytes + part_bytes,
    )


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate there: what nobody has, and what torch keeps for it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def reserve(device: torch.device, num_bytes: int) -> None:
    """Make this process own so many bytes more, for steps to come: torch keeps what was allocated once."""
    if device.type == "cuda":
        held = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        del held


@contextmanager
def as_planned(plan: MemoryPlan) -> Iterator[None]:
    """Turn an allocation that fails although it was planned into NoRoom: someone else took the memory meanwhile."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoRoom(
            f"{plan.describe()}, but while it was allocated others took some of it: end them, or set kv_bytes so that"
            f" less is taken ({error})"
        ) from error

"""How much memory does V4.1 take on a GPU beside its KV blocks, and in which format do its experts fit?"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from kernels.kv.layout import KvLayout
from kernels.memory_plan import MemoryPlan, Need, NoRoom, plan_blocks
from kernels.models.gpu.v41.weights import ExpertFormat
from kernels.models.v41.config import V41Config
from kernels.models.v41.tensors import E8M0, FP4, expected_tensors, is_engram_table, is_vision

_SLAB_BYTES = 256 << 20
"""Index scores held at a time."""
_BF16, _FP32, _INT32 = 2, 4, 4
_KEPT_SHARE = 0.5
"""bf16 experts may take this share of the room that KV blocks would have beside fp4 ones."""


def weight_bytes(config: V41Config, experts: ExpertFormat, *, experts_here: int) -> int:
    """Of all tensors on the device: the drafter's own layers and the n-gram tables are not there."""
    total = 0
    for name, spec in expected_tensors(config).items():
        if is_vision(name) or is_engram_table(name) or (name.startswith("mtp.") and not _is_draft_window(name)):
            continue
        if ".ffn.experts." in name:
            if int(name.split(".")[4]) < experts_here:
                total += _expert_bytes(spec.shape, experts, is_scale=spec.dtype == E8M0, is_fp4=spec.dtype == FP4)
        elif spec.dtype != E8M0:
            # A mixing weight becomes three bf16 parts, padded from 24 rows to 32.
            size = 3 * 32 * _BF16 / 24 if "hc_" in name and name.endswith("_fn") else _BF16
            size = _FP32 if len(spec.shape) == 1 else size
            total += int(prod(spec.shape) * size)
    return total


def _is_draft_window(name: str) -> bool:
    return name.startswith(("mtp.0.main_", "mtp.")) and ("main_" in name or ".attn.wkv" in name or ".kv_norm" in name)


def _expert_bytes(shape: Sequence[int], experts: ExpertFormat, *, is_scale: bool, is_fp4: bool) -> int:
    if experts == "fp4":
        return prod(shape)
    return 0 if is_scale else prod(shape) * (2 if is_fp4 else 1) * _BF16


def v41_need(
    config: V41Config,
    layout: KvLayout,
    experts: ExpertFormat,
    *,
    step_tokens: int,
    num_windows: int,
    num_sequences: int,
    graph_sizes: Sequence[int] = (),
    graph_contexts: Sequence[int] = (),
    experts_here: int | None = None,
) -> Need:
    """Bytes of a model.  num_windows: the null window included.  graph_*: what steps are captured for.

    A step at its peak holds streams before and after a sublayer, and either queries and attended values or every
    token's experts' rows; a captured one keeps its logits.
    """
    hidden, heads, moe = config.hidden_size, config.num_heads * config.head_dim, config.moe
    attention = 3 * heads + 4 * hidden
    experts_rows = moe.top_k * (hidden + moe.width) + 3 * moe.width + 4 * hidden
    row_bytes = _BF16 * (2 * config.hc_mult * hidden + max(attention, experts_rows))
    blocks = -(-config.max_position_tokens // layout.block_tokens)
    turns = 2 * config.max_position_tokens * config.rope_dims * _FP32
    tables = (num_sequences + 1) * blocks * _INT32
    logit_bytes = _FP32 * config.vocab_size
    scores = _BF16 * max(graph_sizes, default=0) * max(graph_contexts, default=0)
    here = moe.num_experts if experts_here is None else experts_here
    return Need(
        weights=weight_bytes(config, experts, experts_here=here) + turns + tables,
        workspace=step_tokens * row_bytes + 2 * _SLAB_BYTES + max(graph_sizes, default=1) * logit_bytes,
        graphs=sum(graph_sizes) * len(graph_contexts) * logit_bytes + max(graph_sizes, default=0) * row_bytes + scores,
        windows=num_windows * layout.window_bytes,
    )


def choose_experts(
    needs: dict[ExpertFormat, Need], *, free: int, block_bytes: int, num_blocks: int | None
) -> tuple[ExpertFormat, MemoryPlan]:
    """bf16 experts where they leave enough for KV blocks, else fp4.  Raises NoRoom."""
    small = plan_blocks(needs["fp4"], free=free, block_bytes=block_bytes, num_blocks=num_blocks)
    try:
        large = plan_blocks(needs["bf16"], free=free, block_bytes=block_bytes, num_blocks=num_blocks)
    except NoRoom:
        return "fp4", small
    return ("bf16", large) if large.num_blocks >= _KEPT_SHARE * small.num_blocks else ("fp4", small)

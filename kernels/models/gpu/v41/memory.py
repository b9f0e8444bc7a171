"""How much memory does V4.1 take on a GPU beside its KV blocks, and in which format do its experts fit?"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from kernels.kv.layout import KvLayout
from kernels.memory_plan import MemoryPlan, Need, NoRoom, plan_blocks
from kernels.models.gpu.v41.expert_weights import ExpertFormat, room_bytes
from kernels.models.v41.config import V41Config
from kernels.models.v41.tensors import E4M3, E8M0, FP4, expected_tensors, is_engram_table, is_vision
from kernels.ops.gpu_grouped_unpack import MOST_PACKED_ROWS
from kernels.ops.quant import GROUP

_SLAB_BYTES = 256 << 20
"""Index scores held at a time."""
_BF16, _FP32, _INT32 = 2, 4, 4
_WKV = ".attn.wkv.weight"
_TILE = 128
"""Of a matrix, both ways, that the product in fp8 whose bits do not depend on the batch takes."""
_LOGIT_ROWS = 1280
"""Of a step that is not captured: sampled and scored tokens, and the copies of a group that are adjusted."""
_KEPT_SHARE = 0.5
"""Unpacked experts may take this share of the room that KV blocks would have beside fp4 ones."""


def weight_bytes(
    config: V41Config,
    experts: ExpertFormat,
    *,
    experts_here: int,
    has_drafter: bool = False,
    is_invariant: bool = True,
    dense_in_fp8: bool = False,
) -> int:
    """Of all tensors on the device: n-gram tables are not there, nor the drafter's own layers unless it drafts.

    dense_in_fp8: as many dense matrices as the mode's product takes.
    """
    total = 0
    for name, spec in expected_tensors(config).items():
        is_drafters = name.startswith("mtp.")
        if is_vision(name) or is_engram_table(name) or (is_drafters and not (has_drafter or _is_draft_window(name))):
            continue
        if ".ffn.experts." in name:
            if is_drafters or int(name.split(".")[4]) < experts_here:
                total += _expert_bytes(spec.shape, experts, is_scale=spec.dtype == E8M0, is_fp4=spec.dtype == FP4)
        elif spec.dtype != E8M0:
            # A mixing weight becomes three bf16 parts, padded from 24 rows to 32.
            size = 3 * 32 * _BF16 / 24 if "hc_" in name and name.endswith("_fn") else _BF16
            size = _FP32 if len(spec.shape) == 1 else size
            if spec.dtype == E4M3 and dense_in_fp8 and _takes(config, name, spec.shape, is_invariant=is_invariant):
                size = 1 + _FP32 / spec.shape[1]
            if is_drafters and name.endswith(_WKV):  # once more in bf16, for the windows that the main model writes
                size = _BF16 + (size if has_drafter else 0)
            total += int(prod(spec.shape) * size)
    return total


def _takes(config: V41Config, name: str, shape: Sequence[int], *, is_invariant: bool) -> bool:
    """Whether the mode's product in fp8 takes this matrix: the library any that is worth it, our own whole tiles."""
    if not is_invariant:
        return not name.endswith((".attn.wq_a.weight", _WKV))
    out = shape[0] // config.o_groups if name.endswith(".attn.wo_a.weight") else shape[0]
    return out % _TILE == 0 and shape[1] % _TILE == 0


def unpacks(
    config: V41Config,
    experts: ExpertFormat,
    *,
    step_tokens: int,
    experts_here: int,
    is_invariant: bool,
    in_registers: bool = False,
) -> bool:
    """Whether the largest step gives so many rows to each expert that room to unpack them in is worth its bytes.

    Not where a row's bits must not depend on how many there are, nor where they become e4m3 in registers.
    """
    rows = step_tokens * config.moe.top_k
    return experts == "fp4" and not is_invariant and not in_registers and rows > MOST_PACKED_ROWS * experts_here


def table_bytes(config: V41Config) -> int:
    """Of all n-gram tables, in the host's memory: fp8 values and a scale for every 32."""
    engram = config.engram
    return sum(engram.num_rows) * (engram.head_dim + engram.head_dim // GROUP)


def _is_draft_window(name: str) -> bool:
    return name.startswith(("mtp.0.main_", "mtp.")) and ("main_" in name or ".attn.wkv" in name or ".kv_norm" in name)


def _expert_bytes(shape: Sequence[int], experts: ExpertFormat, *, is_scale: bool, is_fp4: bool) -> int:
    if experts == "fp4":
        return prod(shape)
    if is_scale:
        return 0 if experts == "bf16" else shape[0] * _FP32
    return prod(shape) * (2 if is_fp4 else 1) * (_BF16 if experts == "bf16" else 1)


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
    has_drafter: bool = False,
    is_invariant: bool = True,
    dense_in_fp8: bool = False,
    in_registers: bool = False,
) -> Need:
    """Bytes of a model.  num_windows: the null window included.  graph_*: what steps are captured for.

    has_drafter: with the drafter's layers; its few rows fit where a step's do.  is_invariant: else fp4 experts of large
    steps have room to become e4m3 in, one layer's at a time, unless `in_registers`.  dense_in_fp8: so dense matrices
    take half.

    A step at its peak holds streams before and after a sublayer, and either queries and attended values or every
    token's experts' rows, beside the embeddings of its images; captured ones share the place of their logits. What the
    shared expert's stream has had stays its own.
    """
    hidden, heads, moe = config.hidden_size, config.num_heads * config.head_dim, config.moe
    attention = 3 * heads + 4 * hidden
    experts_rows = moe.top_k * (hidden + moe.width) + 3 * hidden
    beside = 3 * moe.width + hidden
    if in_registers or not is_invariant:  # a position's row in e4m3 and what the gate and up projections make of it
        experts_rows += moe.top_k * (hidden // 2 + 2 * moe.width)
    row_bytes = _BF16 * (2 * config.hc_mult * hidden + max(attention, experts_rows) + beside)
    blocks = -(-config.max_position_tokens // layout.block_tokens)
    turns = 2 * config.max_position_tokens * config.rope_dims * _FP32
    tables = (num_sequences + 1) * blocks * _INT32
    logit_bytes, most = _FP32 * config.vocab_size, max(graph_sizes, default=0)
    scores = _BF16 * most * max(graph_contexts, default=0)
    here = moe.num_experts if experts_here is None else experts_here
    named = {"has_drafter": has_drafter, "is_invariant": is_invariant, "dense_in_fp8": dense_in_fp8}
    weights = weight_bytes(config, experts, experts_here=here, **named)
    if in_registers:  # a row's largest power, and the scale that it stands for
        rows = config.num_layers * here * (2 * moe.width + hidden)
        if has_drafter:
            drafter = config.drafter
            rows += drafter.num_layers * drafter.moe.num_experts * (2 * drafter.moe.width + hidden)
        weights += rows * (1 + _FP32)
    modes = {"is_invariant": is_invariant, "in_registers": in_registers}
    if unpacks(config, experts, step_tokens=step_tokens, experts_here=here, **modes):
        weights += room_bytes(config, here)
    return Need(
        weights=weights + turns + tables,
        workspace=step_tokens * (row_bytes + _BF16 * hidden) + 2 * _SLAB_BYTES + _LOGIT_ROWS * logit_bytes,
        graphs=most * (2 * logit_bytes + row_bytes) + scores,
        windows=num_windows * layout.window_bytes,
    )


def choose_experts(
    needs: dict[ExpertFormat, Need], *, free: int, block_bytes: int, num_blocks: int | None
) -> tuple[ExpertFormat, MemoryPlan]:
    """Unpacked experts, if they are asked for, where they leave enough for KV blocks; else fp4.  Raises NoRoom."""
    small = plan_blocks(needs["fp4"], free=free, block_bytes=block_bytes, num_blocks=num_blocks)
    if "fp8" not in needs:
        return "fp4", small
    try:
        large = plan_blocks(needs["fp8"], free=free, block_bytes=block_bytes, num_blocks=num_blocks)
    except NoRoom:
        return "fp4", small
    return ("fp8", large) if large.num_blocks >= _KEPT_SHARE * small.num_blocks else ("fp4", small)

"""How much device memory does a dense model take beside its KV blocks, and how is it held from the start on?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

from kernels.kv.layout import KvLayout
from kernels.memory_plan import STEP_TOKENS, MemoryPlan, Need, NoRoom, check_host
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


def available_host_bytes(root: Path = Path("/")) -> int:
    """What this process can still take of the host's memory: the least that the kernel and its control groups leave.

    root: of the file system whose proc and sys tell.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    top = root / "sys/fs/cgroup"
    group = top / _own_group(root)
    for folder in (group, *group.parents):
        available = min(available, _left_in(folder, available))
        if folder == top:
            break
    return available


def _own_group(root: Path) -> str:
    file = root / "proc/self/cgroup"
    entries = file.read_text().splitlines() if file.is_file() else []
    return next((entry[4:].strip("/") for entry in entries if entry.startswith("0::/")), "")


def _left_in(folder: Path, otherwise: int) -> int:
    """What one control group leaves; cached files give way."""
    limit, current, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.is_file() and current.is_file()) or (most := limit.read_text().strip()) == "max":
        return otherwise
    lines = stat.read_text().splitlines() if stat.is_file() else []
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    return max(int(most) - int(current.read_text()) + cached, 0)


@contextmanager
def as_pinned(num_bytes: int, what: str) -> Iterator[None]:
    """Turn the library's refusal to pin host memory into NoRoom.  what: the things to be pinned, in the plural."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of the device
    except RuntimeError as error:
        if num_bytes and "out of memory" in str(error).lower():
            check_host(num_bytes, available=min(available_host_bytes(), num_bytes - 1), what=what)
        raise


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

"""How does the model get ready, and how does this replica describe it?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.executor import Executor
from proto.common_pb2 import ModelCard
from services.prefill.admission import Limits

if TYPE_CHECKING:
    from services.prefill.config import PrefillSettings

Progress = Callable[[str, int, int], None]


def load_model(settings: PrefillSettings, progress: Progress) -> Executor:
    """Read the weights and compute a first batch. Takes seconds; run it in the engine thread, which owns the device."""
    executor = Executor.load(
        settings.model,
        dtype=settings.dtype,
        kv_bytes=settings.kv_bytes,
        threads=settings.threads,
        progress=progress,
    )
    executor.warm_up(progress)
    return executor


def limits_of(executor: Executor) -> Limits:
    """Return what requests are checked against."""
    layout = executor.layout
    pool_tokens = (executor.num_blocks - 1) * layout.block_tokens  # block 0 is never given out
    return Limits(
        fingerprint=executor.fingerprint,
        vocab_tokens=executor.config.vocab_size,
        context_tokens=min(executor.config.max_position_tokens, pool_tokens),
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
    )


def card_of(executor: Executor, folder: Path) -> ModelCard:
    """Return what peers must know of the model."""
    limits = limits_of(executor)
    return ModelCard(
        name=_name_of(folder),
        fingerprint=limits.fingerprint,
        context_tokens=limits.context_tokens,
        block_tokens=limits.block_tokens,
        block_bytes=limits.block_bytes,
        window_bytes=executor.layout.window_bytes,
        vocab_tokens=limits.vocab_tokens,
        takes_images=False,
        eos_token_ids=executor.config.eos_token_ids,
    )


def _name_of(folder: Path) -> str:
    """Return the name in the folder's fathom.json, or the folder's own: the recipe goes by the same rule."""
    described = folder / "fathom.json"
    named = json.loads(described.read_text(encoding="utf-8")).get("name") if described.is_file() else None
    return str(named or folder.resolve().name)

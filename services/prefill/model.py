"""How does the model get ready, and how does this replica describe it?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kernels.executor import Executor
from kernels.grammar import KIND, GrammarFactory
from kernels.kv.replay import Mode
from kernels.memory_plan import NoRoom
from kernels.models.config import ModelNotSupported
from kernels.models.weights import BadWeights
from proto.common_pb2 import ModelCard
from services.chassis.config import BadSettings
from services.prefill.admission import Limits

if TYPE_CHECKING:
    from services.prefill.config import PrefillSettings

Progress = Callable[[str, int, int], None]

MAX_WINDOWS = 32
"""Prompts that hold blocks at once, where the model has windows: those computed, and those being handed over."""
_LEAST_STEP_TOKENS = 2048
"""That a GPU keeps memory for: proofs at start are steps too."""
_EMBEDDING_ITEM_BYTES = 4  # fp32


def load_model(settings: PrefillSettings, progress: Progress) -> Executor:
    """Read the weights and compute a first batch. Takes seconds; run it in the engine thread, which owns the device.

    How a GPU's memory is used is told to `progress` before anything is loaded.  Raises BadSettings where there is
    too little, which says what helps, and for a folder that is no model: starting again would change nothing.
    """
    try:
        return _load(settings, progress)
    except (NoRoom, BadWeights, ModelNotSupported) as error:
        raise BadSettings(str(error)) from error


def _load(settings: PrefillSettings, progress: Progress) -> Executor:
    executor = Executor.load(
        settings.model,
        dtype=settings.dtype,
        kv_bytes=settings.kv_bytes or None,
        num_windows=MAX_WINDOWS,
        replay=replay_of(settings.model),
        threads=settings.threads,
        step_tokens=max(settings.chunk_tokens, _LEAST_STEP_TOKENS),
        progress=progress,
    )
    executor.warm_up(progress)
    return executor


def open_grammars(executor: Executor, folder: Path) -> GrammarFactory | None:
    """Begin to read the folder's tokenizer, without which no grammar can be obeyed; None when it has none."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    config = executor.config
    return GrammarFactory(tokenizer, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)


def limits_of(executor: Executor, *, obeys_grammars: bool = False) -> Limits:
    """Return what requests are checked against."""
    layout = executor.layout
    pool_tokens = (executor.num_blocks - 1) * layout.block_tokens  # block 0 is never given out
    return Limits(
        fingerprint=executor.fingerprint,
        vocab_tokens=executor.config.vocab_size,
        context_tokens=min(executor.config.max_position_tokens, pool_tokens),
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        window_bytes=layout.window_bytes,
        embedding_bytes=_EMBEDDING_ITEM_BYTES * executor.config.hidden_size,
        grammar_kind=KIND if obeys_grammars else "",
        scores_prompts=executor.replay == "off",
        image_token_ids=frozenset(executor.config.image_token_ids),
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
        takes_images=bool(limits.image_token_ids),
        eos_token_ids=executor.config.eos_token_ids,
        window_tokens=executor.window.window_tokens if executor.window is not None else 0,
    )


def replay_of(folder: Path) -> Mode:
    """Return the replay mode that the folder's fathom.json names: how windows are rebuilt after a prefix hit."""
    named = _described(folder).get("replay", "off")
    modes: tuple[Mode, ...] = get_args(Mode)
    for mode in modes:
        if mode == named:
            return mode
    raise ValueError(f"{folder / 'fathom.json'} names replay {named!r}; there is {', '.join(modes)}")


def _name_of(folder: Path) -> str:
    """Return the name in the folder's fathom.json, or the folder's own: the recipe goes by the same rule."""
    return str(_described(folder).get("name") or folder.resolve().name)


def _described(folder: Path) -> dict[str, Any]:
    file = folder / "fathom.json"
    if not file.is_file():
        return {}
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{file} is not a JSON object")  # noqa: TRY004 - what a file says is a value
    return described

"""Would the KV store have room for this model's blocks?"""

from pathlib import Path
from typing import get_args

from services.kvstore.directory import CLASSES
from services.kvstore.format import MAX_RECORD_OVERHEAD_BYTES
from services.local.plan import Dtype, Options
from services.local.sizes import in_words

MIB = 1 << 20
LONGEST_BYTES = 64 * MIB
"""No store takes a longer block, so a store with room for these has room for any: nobody need look at the model."""
BLOCKS_HELD = len(CLASSES) + 2
"""A block in the open segment of each class, which is not evicted; the one being written; and the room that segments
are given ahead. With less a store takes a first block, and then no other."""


def check_room(options: Options) -> None:
    """Raise ValueError when a store would silently keep nothing of this model: what was typed, and the least there is.

    options: of a model that is there.
    """
    typed = {field: value for owner, field, value in options.settings if owner == "kvstore"}
    max_bytes = int(float(typed.get("max_bytes", options.kv_bytes // options.num_kvstore)))  # 2000000.0 is taken too
    if max_bytes >= least_bytes(LONGEST_BYTES):
        return
    block_bytes = block_bytes_of(options.model, _dtype_of(options))
    if block_bytes is None or max_bytes >= least_bytes(block_bytes):
        return
    least = -(-least_bytes(block_bytes) // MIB)
    if "max_bytes" in typed:
        option, advice = f"--set kvstore.max_bytes={typed['max_bytes']}", f"at least {least * MIB}"
    else:
        option, advice = f"--kv-bytes ({in_words(options.kv_bytes)})", f"at least {least * options.num_kvstore}M"
    stores = f"each of {options.num_kvstore} stores" if options.num_kvstore > 1 else "a store"
    raise ValueError(
        f"{option}: {advice}; a block of this model takes {in_words(block_bytes)}, and {stores} needs room for "
        f"{BLOCKS_HELD} to keep any"
    )


def _dtype_of(options: Options) -> Dtype:
    typed = {value for owner, field, value in options.settings if (owner, field) == ("prefill", "dtype")}
    return next((dtype for dtype in get_args(Dtype) if dtype in typed), options.dtype)


def least_bytes(block_bytes: int) -> int:
    """Return the smallest cap with which one store goes on storing blocks of that length, whatever their classes."""
    return BLOCKS_HELD * (block_bytes + MAX_RECORD_OVERHEAD_BYTES)


def block_bytes_of(model: Path, dtype: Dtype) -> int | None:
    """Return the length of the model's blocks; None for a folder that the engines refuse, which say why themselves.

    Takes seconds: it imports torch.
    """
    import torch

    from kernels.models.load import open_model
    from kernels.models.weights import BadWeights

    def quiet(_stage: str, _done: int, _total: int) -> None: ...

    try:
        opened = open_model(
            model, dtype=dtype, block_tokens=None, replay="off", device=torch.device("cpu"), progress=quiet
        )
    except (BadWeights, ValueError):
        return None
    return opened.layout.block_bytes

"""Which model is in this folder? The architecture in its config.json decides, here and nowhere else."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.kv.replay import Mode
from kernels.models.config import ModelNotSupported
from kernels.models.dense import OpenedDense
from kernels.models.model import Dtype, OpenedModel, Progress


def open_model(
    model_dir: Path,
    *,
    dtype: Dtype,
    block_tokens: int | None,
    replay: Mode,
    device: torch.device,
    progress: Progress,
) -> OpenedModel:
    """Read a folder's config.  block_tokens: None takes the model's own.  replay: other than off needs windows.

    Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be.
    """
    if replay != "off":
        raise ModelNotSupported(f"replay {replay!r} rebuilds sliding windows; this model has none: leave it off")
    return OpenedDense(model_dir, dtype=dtype, block_tokens=block_tokens, device=device, progress=progress)

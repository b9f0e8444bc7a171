"""Which model is in this folder? The architecture in its config.json decides, here and nowhere else."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.kv.replay import Mode
from kernels.models.config import ModelNotSupported
from kernels.models.deepseek_v41 import OpenedV41, numerics_of
from kernels.models.dense import OpenedDense
from kernels.models.model import Dtype, OpenedModel, Progress
from kernels.models.v41.config import is_v41
from kernels.models.v41.config_fields import read_json


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
    config = model_dir / "config.json"
    if config.is_file() and is_v41(read_json(config)):
        return OpenedV41(
            model_dir, numerics=numerics_of(dtype), block_tokens=block_tokens, device=device, progress=progress
        )
    if replay != "off":
        raise ModelNotSupported(f"replay {replay!r} rebuilds sliding windows; this model has none: leave it off")
    return OpenedDense(model_dir, dtype=dtype, block_tokens=block_tokens, device=device, progress=progress)

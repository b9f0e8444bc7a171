"""Which model is in this folder? The architecture in its config.json decides, here and nowhere else."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from kernels.kv.replay import Mode
from kernels.memory_plan import STEP_TOKENS
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
    invariant: bool = True,
    step_tokens: int = STEP_TOKENS,
    drafts: bool = False,
) -> OpenedModel:
    """Read a folder's config.  block_tokens: None takes the model's own.  replay: other than off needs windows.

    step_tokens: most of a step, for which a GPU keeps memory.  drafts: load the drafter of a model that has one.

    Raises ModelNotSupported, BadWeights, or ValueError for a setting that cannot be.
    """
    config = model_dir / "config.json"
    has_windows = config.is_file() and is_v41(read_json(config))
    if replay != "off" and not has_windows:
        raise ModelNotSupported(f"replay {replay!r} rebuilds sliding windows; this model has none: leave it off")
    if _has_gpu_kernels(device, dtype):
        from kernels.models.gpu.dense import OpenedGpuDense  # both need Triton
        from kernels.models.gpu.v41.opened import OpenedGpuV41

        if not has_windows:
            return OpenedGpuDense(
                model_dir,
                block_tokens=block_tokens,
                device=device,
                invariant=invariant,
                progress=progress,
                step_tokens=step_tokens,
            )
        return OpenedGpuV41(
            model_dir,
            block_tokens=block_tokens,
            device=device,
            invariant=invariant,
            progress=progress,
            step_tokens=step_tokens,
            drafts=drafts,
        )
    if has_windows:
        return OpenedV41(
            model_dir,
            numerics=numerics_of(dtype),
            block_tokens=block_tokens,
            device=device,
            progress=progress,
            drafts=drafts,
        )
    return OpenedDense(model_dir, dtype=dtype, block_tokens=block_tokens, device=device, progress=progress)


def choose_device(model_dir: Path, dtype: Dtype) -> torch.device:
    """The GPU where there is one whose kernels this model and dtype have; the CPU otherwise."""
    gpu = torch.device("cuda")
    config = model_dir / "config.json"
    if not torch.cuda.is_available() or not _has_gpu_kernels(gpu, dtype) or not config.is_file():
        return torch.device("cpu")
    return gpu


def _has_gpu_kernels(device: torch.device, dtype: Dtype) -> bool:
    """fp32 stays with plain torch on every device: it is what others are compared with."""
    return device.type == "cuda" and dtype == "bf16" and find_spec("triton") is not None

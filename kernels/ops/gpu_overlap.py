"""How does a kernel begin while the one before it still runs?

With programmatic dependent launch (SM90) a kernel's programs start when all programs of the kernel before have said so,
and wait until it is complete. Every program of a kernel launched this way waits, so "the one before" is "all before".
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.ops import gpu_launch  # noqa: F401 - it turns Triton to the interpreter where there is no GPU


def overlaps(x: Tensor) -> bool:
    """Whether kernels on x's device can be launched so: what OVERLAP and launch_pdl are given."""
    return x.is_cuda and _has_dependent_launch(x.device.index or 0)


def early(overlap: bool) -> dict[str, bool]:  # noqa: FBT001 - what OVERLAP is given
    """Options of such a launch, or none."""
    return {"launch_pdl": True} if overlap else {}


@cache
def _has_dependent_launch(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel's programs start; go on when everything before is complete."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_alone(OVERLAP: tl.constexpr) -> None:
    """Go on when everything before is complete; the next kernel starts when this one says so."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr) -> None:
    """Said near the end of a long kernel: the next one's programs then take no room from its own."""
    if OVERLAP:
        gdc_launch_dependents()

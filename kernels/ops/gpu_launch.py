"""Where do the GPU kernels run: on a GPU, in Triton's interpreter, or not at all?

Modules named `gpu_*` need Triton and are imported only where there is a GPU, or by tests. Without a GPU their kernels
are made for the interpreter; a wrapper that is given CPU tensors then calls its twin, unless `interpreted` is in force.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction


def _interpret_all() -> None:
    """Turn to the interpreter, with what Triton itself has decorated since it was imported."""
    triton.knobs.runtime.interpret = True
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    for module in (tl.standard, tl):
        for name, made in list(vars(module).items()):
            if isinstance(made, JITFunction):
                setattr(module, name, InterpretedFunction(made.fn))
    patch = interpreter._patch_lang_tensor  # noqa: SLF001 - no public name

    def with_loops(tensor: object, scope: Any) -> None:
        """Bounds of loops are arrays of one element, which numpy 2.5 no longer takes for numbers."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_loops  # noqa: SLF001 - no public name


if not torch.cuda.is_available():
    _interpret_all()
INTERPRETED = bool(triton.knobs.runtime.interpret)
_FORCED = [False]


def runs_kernels(x: Tensor) -> bool:
    """Is an op on x a kernel's work, and not its twin's?"""
    return x.is_cuda or _FORCED[0]


def is_hopper(device: torch.device | None = None) -> bool:
    """Are kernels in Gluon, which are made for SM90, compiled for this GPU?  device: None = the current one."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a whole multiprocessor each run at once."""
    if device.type != "cuda":
        return 132  # an H200's, where there is none
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def interpreted() -> Iterator[None]:
    """Let kernels work on CPU tensors, element by element in Python. For tests: a million times slower."""
    before, _FORCED[0] = _FORCED[0], INTERPRETED
    try:
        yield
    finally:
        _FORCED[0] = before


def check(holds: bool, rule: str) -> None:  # noqa: FBT001 - reads like the assert that it is
    """ValueError naming a rule that arguments of a kernel break: a kernel itself would read beyond them."""
    if not holds:
        raise ValueError(rule)


def power_of_two(number: int) -> int:
    """The least power of two that is at least this number: what a block of a kernel may be long."""
    return 1 << max(number - 1, 0).bit_length()


def tiles(number: int, size: int) -> int:
    """How many pieces of `size` cover a number of things."""
    return -(-number // size)

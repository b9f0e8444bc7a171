"""Which part of a step is a profiler looking at? Named ranges for Nsight (NVTX) and torch's profiler.

Nobody looks unless `profiled` is in force: a range is then one that does nothing, and costs some 0.2 us of the host.
What a captured graph replays has the range of its launch; ranges inside are those of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")

LAYERS = 8
"""Layers in a range: enough to tell them apart, too few to fill the timeline."""
_NOTHING: AbstractContextManager[object] = nullcontext()
_MAKERS: list[Callable[[str], AbstractContextManager[object]]] = []


@contextmanager
def profiled() -> Iterator[None]:
    """Let ranges be seen: by NVTX where there is a GPU, by torch's profiler elsewhere."""
    _MAKERS.append(torch.cuda.nvtx.range if torch.cuda.is_available() else torch.profiler.record_function)
    try:
        yield
    finally:
        _MAKERS.pop()


def named(name: str) -> AbstractContextManager[object]:
    """A range around what is done inside."""
    return _MAKERS[-1](name) if _MAKERS else _NOTHING


def grouped(items: Iterable[Item], name: str, size: int = LAYERS) -> Iterator[Item]:
    """The items, with a range `name first..last` around what is done with each `size` of them."""
    if not _MAKERS:
        yield from items
        return
    listed = list(items)
    for first in range(0, len(listed), size):
        group = listed[first : first + size]
        with named(f"{name} {first}..{first + len(group) - 1}"):
            yield from group

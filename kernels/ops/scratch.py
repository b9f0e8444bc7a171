"""Where do a step's intermediate results live? In buffers that are kept from step to step.

A fresh allocation of a few MB costs more in page faults than the arithmetic that fills it (measured: RMSNorm of 516 x
576 values takes 1.1 ms into new memory, 0.1 ms into old).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

_MOST_SHAPES = 256


class Scratch:
    """Named buffers of one device that only grow. A name holds one tensor at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype], dict[tuple[int, ...], Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised contiguous tensor; what the name held before is overwritten."""
        views = self._views.setdefault((name, dtype), {})
        view = views.get(shape)
        if view is None:
            size = prod(shape)
            flat = self._flat.get((name, dtype))
            if flat is None or flat.numel() < size:
                # Zeros, not empty: padding that nobody wrote must be finite.
                flat = self._flat[name, dtype] = torch.zeros(size, dtype=dtype, device=self.device)
                views.clear()  # they would keep the outgrown buffer alive
            if len(views) == _MOST_SHAPES:
                views.clear()
            view = views[shape] = flat[:size].view(shape)
        return view

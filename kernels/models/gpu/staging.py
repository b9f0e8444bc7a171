"""How does the host hand small arrays to the device, and get small results back, without either waiting?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops.gpu_step import update_tables

_RING = 4
"""Buffers that may be on their way at a time: one step runs, one is launched, one is being planned."""
_ALIGN_BYTES = 64
_CHANGES = 1 << 16
"""Of block tables, sent at a time."""

TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}


class Staging:
    """Arrays of one step, in one copy through pinned memory. What was sent stays until the next send."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._ring: list[Tensor] = []
        self._events: list[torch.cuda.Event | None] = []
        self._turn = 0
        self._resize(num_bytes)

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as views of device memory, which grows (and moves) only if they do not fit."""
        ends = np.cumsum([-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays]).tolist()
        if ends[-1] > len(self.on_device):
            self._resize(2 * ends[-1])
        self._turn = (self._turn + 1) % len(self._ring)
        pinned, event = self._ring[self._turn], self._events[self._turn]
        if event is not None:
            event.synchronize()  # its last copy, three sends ago
        host = pinned.numpy()
        starts = [0, *ends[:-1]]
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.on_device[: ends[-1]].copy_(pinned[: ends[-1]], non_blocking=True)
        if self._device.type == "cuda":
            event = self._events[self._turn] = event or torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's stub
            event.record()
        return [
            self.on_device[start : start + array.nbytes].view(TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _resize(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._ring = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_RING)]
        self._events = [None] * _RING
        self.on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class TableUpdates:
    """Tells the device's block tables what changed, however much it is, in pieces of a fixed size."""

    def __init__(self, tables: Tensor) -> None:
        """tables: [lines, blocks] int32."""
        self._tables = tables
        self._staging = Staging(tables.device, _CHANGES * 8)

    def tell(self, changes: NDArray[np.int32]) -> None:
        """changes: [n, 2], flat index and value."""
        for first in range(0, len(changes), _CHANGES):
            (sent,) = self._staging.send([changes[first : first + _CHANGES]])
            update_tables(self._tables, sent)


class Returning:
    """A result on its way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """The copies are enqueued now, behind what computes the tensors."""
        on_gpu = bool(tensors) and tensors[0].is_cuda
        self._host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=on_gpu) for each in tensors]
        for there, here in zip(tensors, self._host, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call] # torch's stub
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors, once they have arrived: waits for this step and no later one."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

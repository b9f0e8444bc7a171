"""What runs beside a stream's own work, and where is it waited for?

Kernels of a few programs leave most of a GPU idle, and some results are wanted late: other streams make these
meanwhile. In a captured step they become branches of one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


class Beside:
    """Another stream of one GPU; on a CPU everything is done in its turn.

    What is made in here may be let go at any time: its memory goes to what comes later on the same stream, which waits
    for all that was launched before. What the current stream made and this one reads must be kept until `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # torch's stub
        self._kept: list[Tensor] = []
        self._is_open = False

    @contextmanager
    def begun(self, *reads: Tensor) -> Iterator[None]:
        """Launch what follows on this stream, behind all that was launched so far.

        reads: what nobody else keeps until `join`.
        """
        self._kept.extend(reads)
        self._is_open = True
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on when everything here is done; the host does not wait."""
        if self._is_open and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._is_open = False
        self._kept.clear()

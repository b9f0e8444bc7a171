"""In which order do steps, and copies between the device and the host, see each other?

Copies run on a stream of their own, so that none waits for a step that was launched ahead. Two rules make that look as
if everything were done in the order in which it was asked for:

- a copy waits for the newest launched step that writes the same block or window, and for no other;
- a step waits for all copies before it, which are short.

The caller's part: a block that is written from the host is in no table of a step that is still running.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

_MOST_WRITERS = 4096


class Streams(Protocol):
    """A device that runs steps and copies side by side."""

    def mark(self) -> Any:
        """A point behind all steps so far."""

    def is_past(self, mark: Any) -> bool:
        """Whether the device has got there."""

    def aside(self, after: Any | None) -> AbstractContextManager[None]:
        """Copies begun in this context run beside steps, behind a point if one is given."""

    def join(self) -> None:
        """Steps launched from now on run behind all copies so far."""


class CudaStreams:
    """A GPU's current stream, and another one."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's stub
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call] # torch's stub

    @contextmanager
    def aside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        if after is not None:
            self._side.wait_event(after)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)


class Crossing:
    """The two rules, for one cache. Without streams (a CPU computes at once) there is nothing to order."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._writers: dict[Hashable, Any] = {}
        """What launched steps write, with a point behind the newest one that does."""
        self._has_copied = False

    @classmethod
    def of(cls, device: torch.device) -> Crossing:
        return cls(CudaStreams(device) if device.type == "cuda" else None)

    def before_step(self) -> None:
        """To be called before anything of a step is launched."""
        if self._streams is not None and self._has_copied:
            self._streams.join()
            self._has_copied = False

    def after_step(self, written: Iterable[Hashable]) -> None:
        """To be called when a step is launched.  written: names of the blocks and windows that it writes."""
        if self._streams is None:
            return
        if len(self._writers) > _MOST_WRITERS:
            self._writers = {name: mark for name, mark in self._writers.items() if not self._streams.is_past(mark)}
        self._writers.update(dict.fromkeys(written, self._streams.mark()))

    @contextmanager
    def copying(self, name: Hashable) -> Iterator[None]:
        """Copies of that block or window belong in this context."""
        if self._streams is None:
            yield
            return
        mark = self._writers.get(name)
        self._has_copied = True
        with self._streams.aside(None if mark is None or self._streams.is_past(mark) else mark):
            yield


def window_name(slot: int) -> Hashable:
    """A window's among the names of blocks, which are their numbers."""
    return ("window", slot)

"""How do blocks and the window get to decode past gRPC: into its file, or over a plain socket?

In a thread of its own, which the engine answers directly: a run is copied off the device between two steps, summed here
while the engine copies the next one, and then sent or told of, so that decode takes it while others are still copied.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.chassis.errors import DeadlinePassed, PeerLost
from services.chassis.handoff import PeerStaging, block_xxh3
from services.chassis.handoff_lane import blocks_per_run, end_runs, hang_up, make_buffer, send_run

if TYPE_CHECKING:
    import socket

    from services.prefill.pushing import Blocks

MAX_SENDING = 16
"""Handoffs at a time that copy, a thread each; later ones wait in line."""
SENDERS = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="handoff send")
_RUNS_AHEAD = 4
"""Asked of the engine at a time: it need not wait for us between them, and its pause stays a few milliseconds."""


@dataclass(slots=True)
class Way:
    """Where the bytes go: both, in the file while the connection tells of it; one of them; or neither, then `Push`."""

    staging: PeerStaging | None = None
    lane: socket.socket | None = None
    buffers: list[memoryview] = field(default_factory=list)
    """For runs that travel: made early, while the last chunk is computed."""

    @property
    def backend(self) -> str:
        if self.staging is not None:
            return "shm"
        return "tcp" if self.lane is not None else "grpc"

    def make_buffers(self, num_blocks: int, *, block_bytes: int, window_bytes: int) -> None:
        """Blocks the calling thread for as long as mapping the pages takes."""
        size = max(min(num_blocks, blocks_per_run(block_bytes)) * block_bytes, window_bytes)
        self.buffers = [make_buffer(size) for _ in range(_RUNS_AHEAD + 1)]

    def stop(self) -> None:
        """Wake up whoever sends, who then ends with an error."""
        if self.lane is not None:
            hang_up(self.lane)

    def close(self) -> None:
        """Let go of everything. Blocks the calling thread for milliseconds when many pages are mapped."""
        if self.lane is not None:
            self.lane.close()
        if self.staging is not None:
            self.staging.close()


@dataclass(slots=True)
class _Run:
    blocks: range
    """Of the prompt's table; empty for the window state."""
    places: list[memoryview]
    buffer: memoryview | None
    """That the places lie in; None in the file."""


class Sender:
    """One handoff's bytes on their way. `send` runs in a thread of `SENDERS`; `stop` may be called from anywhere."""

    def __init__(self, way: Way, wanted: range, blocks: Blocks, *, block_bytes: int, window_bytes: int) -> None:
        """wanted: of the prompt's table, what decode lacks."""
        self._way = way
        self._wanted = wanted
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._window_bytes = window_bytes
        self._copied: queue.SimpleQueue[_Run | Exception] = queue.SimpleQueue()
        self._free = list(way.buffers)

    def stop(self) -> None:
        self._copied.put(PeerLost("the handoff was given up"))
        self._way.stop()

    def send(self, deadline_unix_seconds: float) -> list[int]:
        """Send all, end the connection, and return the checksums, the window's last.

        Raises BlocksLost once the prompt was released, PeerLost when the connection breaks, DeadlinePassed.
        """
        checksums = []
        waiting = self._runs()
        num_copying = sum(self._copy_next(waiting) for _ in range(_RUNS_AHEAD))
        while num_copying:
            run = self._next_copied(deadline_unix_seconds)
            num_copying += self._copy_next(waiting) - 1
            checksums += [block_xxh3(place) for place in run.places]
            self._tell(run)
            if run.buffer is not None:
                self._free.append(run.buffer)
        if self._way.lane is not None:
            end_runs(self._way.lane)
        return checksums

    def _runs(self) -> Iterator[range]:
        size = blocks_per_run(self._block_bytes)
        for start in range(0, len(self._wanted), size):
            yield self._wanted[start : start + size]
        if self._window_bytes:
            yield range(0)

    def _copy_next(self, waiting: Iterator[range]) -> int:
        """Have the engine copy the next run; return how many that are, one or none."""
        blocks = next(waiting, None)
        if blocks is None:
            return 0
        run = self._placed(blocks)

        def copied(error: Exception | None) -> None:
            self._copied.put(run if error is None else error)

        if blocks:
            self._blocks.post_copy(blocks, run.places, copied)
        else:
            self._blocks.post_copy_window(run.places[0], copied)
        return 1

    def _placed(self, blocks: range) -> _Run:
        staging = self._way.staging
        if staging is not None:
            places = [staging.block(block - self._wanted.start) for block in blocks] or [staging.window()]
            return _Run(blocks, places, None)
        buffer = self._free.pop()
        size = self._block_bytes if blocks else self._window_bytes
        count = len(blocks) or 1
        return _Run(blocks, [buffer[place * size : (place + 1) * size] for place in range(count)], buffer)

    def _next_copied(self, deadline_unix_seconds: float) -> _Run:
        try:
            copied = self._copied.get(timeout=max(deadline_unix_seconds - time.time(), 0.0))
        except queue.Empty:
            raise DeadlinePassed("the handoff's deadline passed") from None
        if isinstance(copied, Exception):
            raise copied
        return copied

    def _tell(self, run: _Run) -> None:
        if self._way.lane is None:
            return
        payloads: Sequence[memoryview] = run.places if run.buffer is not None else ()
        first = run.blocks.start - self._wanted.start if run.blocks else None
        try:
            send_run(self._way.lane, first, len(run.blocks), payloads)
        except OSError as error:
            raise PeerLost(f"the handoff's connection broke: {error}") from error

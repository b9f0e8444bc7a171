"""How do blocks and the window get to decode past gRPC: into its file, or over a plain socket?

In a thread of its own: it copies a run itself, where any thread can read the blocks, or the engine does between two
steps, and answers it directly. The run is then sent or told of, and summed here while decode takes it and, if it is the
engine that copies, that copies the next one.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.chassis.errors import DeadlinePassed, PeerLost
from services.chassis.handoff import MAX_MARKS, PeerStaging, block_xxh3
from services.chassis.handoff_lane import QUEUED_BYTES, blocks_per_run, end_runs, hang_up, make_buffer, send_run

if TYPE_CHECKING:
    import socket

    from services.prefill.pushing import Blocks

MAX_SENDING = 16
"""Handoffs at a time that copy, a thread each; later ones wait in line."""
SENDERS = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="handoff send")
_HOT_BYTES = 18 << 20
"""Copied, or asked for, and not yet taken, as long as decode keeps up: what a CPU's cache holds of both sides."""
_PATIENCE_SECONDS_PER_BYTE = 0.25e-9
"""As long as copying takes. Nothing was taken for longer: an engine is in a long step, and more is asked for."""
_LOOK_SECONDS = 0.0002


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
        run_blocks = blocks_per_run(block_bytes)
        size = max(min(num_blocks, run_blocks) * block_bytes, window_bytes)
        num_runs = -(-num_blocks // run_blocks) + (window_bytes > 0)
        self.buffers = [make_buffer(size) for _ in range(min(num_runs, max(2, QUEUED_BYTES // size)))]

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
    area: int
    """Number of the room that the places are in: of the file, or of a buffer."""


class _FileRoom:
    """The room in decode's file, cut into areas of a run each; what decode emptied last is filled first.

    Without a lane decode is told of nothing and empties nothing: then each run lies in its own place.
    """

    def __init__(self, staging: PeerStaging, run_blocks: int) -> None:
        self._staging = staging
        self._run_blocks = run_blocks
        self._num_used = 0
        self._told: deque[int] = deque()
        self._empty: list[int] = []

    @property
    def num_held(self) -> int:
        """Areas that decode has been told of, and has not emptied."""
        while self._told and self._staging.is_empty(self._told[0]):  # it takes them in order
            self._empty.append(self._told.popleft())
        return len(self._told)

    @property
    def has_place(self) -> bool:
        return True  # there is one for every run, if none is ever emptied

    def place(self, blocks: range) -> _Run:
        if not blocks:
            return _Run(blocks, [self._staging.window()], -1)
        if self._empty:
            area = self._empty.pop()
        else:
            area, self._num_used = self._num_used, self._num_used + 1
        if area < MAX_MARKS:
            self._staging.fill(area)
        first = area * self._run_blocks
        return _Run(blocks, [self._staging.block(first + place) for place in range(len(blocks))], area)

    def tell(self, lane: socket.socket, run: _Run, first: int | None) -> None:
        send_run(lane, first, len(run.blocks), at=max(run.area, 0) * self._run_blocks)
        if 0 <= run.area < MAX_MARKS:
            self._told.append(run.area)


class _BufferRoom:
    """Memory of our own, for runs that travel; what was sent last is filled first."""

    def __init__(self, buffers: Sequence[memoryview], block_bytes: int, window_bytes: int) -> None:
        self.num_held = 0
        self._buffers = buffers
        self._free = list(range(len(buffers)))
        self._block_bytes = block_bytes
        self._window_bytes = window_bytes

    @property
    def has_place(self) -> bool:
        return bool(self._free)

    def place(self, blocks: range) -> _Run:
        number = self._free.pop()
        buffer = self._buffers[number]
        size = self._block_bytes if blocks else self._window_bytes
        count = len(blocks) or 1
        return _Run(blocks, [buffer[place * size : (place + 1) * size] for place in range(count)], number)

    def tell(self, lane: socket.socket, run: _Run, first: int | None) -> None:
        send_run(lane, first, len(run.blocks), run.places)
        self._free.append(run.area)


class Sender:
    """One handoff's bytes on their way. `send` runs in a thread of `SENDERS`; `stop` may be called from anywhere."""

    def __init__(self, way: Way, wanted: range, blocks: Blocks, *, block_bytes: int, window_bytes: int) -> None:
        """wanted: of the prompt's table, what decode lacks."""
        self._way = way
        self._wanted = wanted
        self._blocks = blocks
        run_blocks = blocks_per_run(block_bytes)
        self._waiting = deque(_runs(wanted, run_blocks, has_window=window_bytes > 0))
        self._num_copying = 0
        self._copied: queue.SimpleQueue[_Run | Exception] = queue.SimpleQueue()
        self._room: _FileRoom | _BufferRoom
        if way.staging is not None:
            self._room = _FileRoom(way.staging, run_blocks)
        else:
            self._room = _BufferRoom(way.buffers, block_bytes, window_bytes)
        run_bytes = run_blocks * block_bytes
        self._most_copying = 1 if blocks.copies_beside else max(2, QUEUED_BYTES // run_bytes)
        self._most_hot = max(2, _HOT_BYTES // run_bytes)
        self._patience_seconds = _PATIENCE_SECONDS_PER_BYTE * run_bytes
        self._patient_until = 0.0

    def stop(self) -> None:
        self._copied.put(PeerLost("the handoff was given up"))
        self._way.stop()

    def send(self, deadline_unix_seconds: float) -> list[int]:
        """Send all, end the connection, and return the checksums, the window's last.

        Raises BlocksLost once the prompt was released, PeerLost when the connection breaks, DeadlinePassed.
        """
        checksums = []
        while self._waiting or self._num_copying:
            self._ask()
            run = self._next_copied(deadline_unix_seconds)
            if run is not None:
                if not self._blocks.copies_beside:
                    self._ask()
                # Told of first, for decode copies it meanwhile; nothing else comes to its place before the next ask.
                self._tell(run)
                checksums += [block_xxh3(place) for place in run.places]
        if self._way.lane is not None:
            end_runs(self._way.lane)
        return checksums

    def _ask(self) -> None:
        """Have the engine copy what comes next: little more than decode takes, or it would come out of the cache."""
        while self._may_ask():
            self._patient_until = time.monotonic() + self._patience_seconds
            run = self._room.place(self._waiting.popleft())
            self._num_copying += 1

            def copied(error: Exception | None, run: _Run = run) -> None:
                self._copied.put(run if error is None else error)

            if run.blocks:
                self._blocks.post_copy(run.blocks, run.places, copied)
            else:
                self._blocks.post_copy_window(run.places[0], copied)

    def _may_ask(self) -> bool:
        if not self._waiting or self._num_copying >= self._most_copying or not self._room.has_place:
            return False
        return self._num_copying + self._room.num_held < self._most_hot or time.monotonic() >= self._patient_until

    def _next_copied(self, deadline_unix_seconds: float) -> _Run | None:
        """Wait for what the engine copied; None when it is time to see whether to ask for more."""
        left_seconds = max(deadline_unix_seconds - time.time(), 0.0)
        may_soon_ask = self._waiting and self._num_copying < self._most_copying and self._room.has_place
        try:
            copied = self._copied.get(timeout=min(_LOOK_SECONDS, left_seconds) if may_soon_ask else left_seconds)
        except queue.Empty:
            if deadline_unix_seconds <= time.time():
                raise DeadlinePassed("the handoff's deadline passed") from None
            return None
        if isinstance(copied, Exception):
            raise copied
        self._num_copying -= 1
        return copied

    def _tell(self, run: _Run) -> None:
        if self._way.lane is None:
            return
        first = run.blocks.start - self._wanted.start if run.blocks else None
        try:
            self._room.tell(self._way.lane, run, first)
        except OSError as error:
            raise PeerLost(f"the handoff's connection broke: {error}") from error


def _runs(wanted: range, run_blocks: int, *, has_window: bool) -> Iterator[range]:
    for start in range(0, len(wanted), run_blocks):
        yield wanted[start : start + run_blocks]
    if has_window:
        yield range(0)

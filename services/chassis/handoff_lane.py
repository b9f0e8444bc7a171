"""What does the plain socket beside a held handoff carry?

One connection a handoff, blocking, between two threads. It begins with the epoch and the nonce of the ticket; the
receiver answers with one byte or closes. Then come runs of blocks: their places, and their bytes or, where both sides
map the same file, where in that they lie. It ends before the commit, which brings the checksums of all blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proto.common_pb2 import Ticket
from services.chassis.handoff import NONCE_BYTES, populate

RUN_BYTES = 1 << 20
"""Both sides work at the same time, and what one has copied is still in the CPU's cache when the other copies it: on a
machine whose memory one core can keep busy, that is half of the time. Below it, waking each other up costs more."""
QUEUED_BYTES = 64 << 20
"""Most that waits for an engine's next pause: in a long step it must not run dry, and its pause stays milliseconds."""
CONNECT_SECONDS = 0.5
"""Connecting, and being let in; without that the bytes go by `Push`."""
AGAIN_SECONDS = 30.0
"""A port that cannot be reached, as behind a firewall, is not tried again at every handoff."""
STALL_SECONDS = 10.0
"""Longest time in which a receiver takes nothing: it may be in a long step."""
ACCEPTED = b"\x01"
_MAGIC = b"FHL2"
_HELLO = struct.Struct(f"<4s?Q{NONCE_BYTES}s")
_RUN = struct.Struct("<IIIQ")
_WINDOW = 0xFFFFFFFF
HELLO_BYTES = _HELLO.size
_MAX_UNREACHABLE = 1024
_unreachable: dict[tuple[str, int], float] = {}
"""Until when."""


class LaneUnavailableError(Exception):
    """There is no such socket, it cannot be reached from here, or this ticket is not let in."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks among those that travel, or the window state."""

    first: int
    num_blocks: int
    """0 for the window state."""
    at: int
    """Where in the file they lie, in blocks; 0 when they travel, and for the window state, which has its place."""
    num_bytes: int
    """That follow; 0 when they lie in the file."""

    @property
    def is_window(self) -> bool:
        return self.num_blocks == 0


def blocks_per_run(block_bytes: int) -> int:
    """Return how many blocks a run has at most; one, if longer."""
    return max(1, RUN_BYTES // block_bytes)


def make_buffer(num_bytes: int) -> memoryview:
    """Return memory for a run, its pages in place."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    populate(mapped)
    return memoryview(mapped)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a sender begins with."""

    epoch: int
    nonce: bytes
    shares_file: bool
    """No bytes travel: all runs lie in the file."""


def parse_hello(data: bytes) -> Hello:
    """Raises ValueError for what is no hello."""
    magic, shares_file, epoch, nonce = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise ValueError("this is no handoff")
    return Hello(epoch, nonce, shares_file)


def path_beside(file: Path) -> Path:
    """Where the receiver listens, too, for those who share its files: half of a handoff's wake-ups go past TCP."""
    return file.with_name("lane")


def connect_beside(file: Path, ticket: Ticket) -> socket.socket:
    """As `connect`, through the receiver's folder in shared memory; the runs lie in that file of it."""
    lane = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lane.settimeout(CONNECT_SECONDS)
    try:
        lane.connect(str(path_beside(file)))
    except OSError as error:
        lane.close()
        raise LaneUnavailableError(f"{path_beside(file)}: {error}") from error
    return _let_in(lane, ticket, shares_file=True)


def connect(host: str, port: int, ticket: Ticket, *, shares_file: bool) -> socket.socket:
    """Return a connection that the ticket was let in on. Blocks for a second at most; raises LaneUnavailableError."""
    if _unreachable.get((host, port), 0.0) > time.monotonic():
        raise LaneUnavailableError(f"{host}:{port} could not be reached a moment ago")
    try:
        lane = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        if len(_unreachable) >= _MAX_UNREACHABLE:
            _unreachable.clear()
        _unreachable[host, port] = time.monotonic() + AGAIN_SECONDS
        raise LaneUnavailableError(f"{host}:{port}: {error}") from error
    lane.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _let_in(lane, ticket, shares_file=shares_file)


def _let_in(lane: socket.socket, ticket: Ticket, *, shares_file: bool) -> socket.socket:
    try:
        lane.sendall(_HELLO.pack(_MAGIC, shares_file, ticket.epoch, ticket.nonce))
        answer = lane.recv(1)
    except (OSError, struct.error) as error:
        lane.close()
        raise LaneUnavailableError(f"the lane broke: {error}") from error
    if answer != ACCEPTED:
        lane.close()
        raise LaneUnavailableError("decode does not know the ticket")
    lane.settimeout(STALL_SECONDS)
    return lane


def send_run(
    lane: socket.socket, first: int | None, num_blocks: int, payloads: Sequence[memoryview] = (), *, at: int = 0
) -> None:
    """Send a run of blocks, or with None the window state.  payloads: none when they lie in the file, at that place."""
    place = _WINDOW if first is None else first
    header = _RUN.pack(place, num_blocks, at, sum(len(payload) for payload in payloads))
    lane.sendall(header, socket.MSG_MORE if payloads else 0)
    for payload in payloads:
        lane.sendall(payload)


def receive_run(lane: socket.socket) -> Run | None:
    """Wait for the next run; None after the last. Raises OSError when the sender is gone, ValueError for nonsense."""
    header = memoryview(bytearray(_RUN.size))
    got = lane.recv_into(header)
    if not got:
        return None
    if got < len(header):
        receive_into(lane, header[got:])
    place, num_blocks, at, num_bytes = _RUN.unpack(header)
    if (place == _WINDOW) != (num_blocks == 0):
        raise ValueError("a run has blocks, or is the window state")
    return Run(0 if place == _WINDOW else place, num_blocks, at, num_bytes)


def receive_into(lane: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises OSError when the sender is gone."""
    got = 0
    while got < len(view):
        num_bytes = lane.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not num_bytes:
            raise ConnectionResetError("the sender went away in the middle of a run")
        got += num_bytes


def end_runs(lane: socket.socket) -> None:
    """Say that no more runs come. A connection that broke meanwhile has said it, too."""
    with contextlib.suppress(OSError):
        lane.shutdown(socket.SHUT_WR)


def hang_up(lane: socket.socket) -> None:
    """End a connection that another thread may be waiting on; that thread closes it."""
    with contextlib.suppress(OSError):  # it has ended already
        lane.shutdown(socket.SHUT_RDWR)

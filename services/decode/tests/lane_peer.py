"""What does a peer do on a lane? Sends blocks, or says which ones lie in the file."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from proto.decode_pb2 import ReserveReply
from services.chassis.handoff_lane import LaneUnavailableError, connect, connect_beside, end_runs, send_run


async def open_lane(reply: ReserveReply, *, shares_file: bool) -> socket.socket:
    """Connect as prefill does."""
    if shares_file:
        with contextlib.suppress(LaneUnavailableError):  # a folder of tests may have too long a name
            return await asyncio.to_thread(connect_beside, Path(reply.shm_path), reply.ticket)
    return await asyncio.to_thread(connect, "127.0.0.1", reply.lane_port, reply.ticket, shares_file=shares_file)


def send(lane: socket.socket, blocks: Sequence[bytes], window: bytes = b"") -> None:
    """Send blocks, two at a time, and the window, and end."""
    with lane:
        for first in range(0, len(blocks), 2):
            run = blocks[first : first + 2]
            send_run(lane, first, len(run), [memoryview(block) for block in run])
        if window:
            send_run(lane, None, 0, [memoryview(window)])
        end_runs(lane)


def tell(lane: socket.socket, num_blocks: int, *, has_window: bool = False) -> None:
    """Say of each block that it lies in the file, but not of the first one: the commit finds that by itself."""
    with lane:
        for first in range(1, num_blocks):
            send_run(lane, first, 1, at=first)
        if has_window:
            send_run(lane, None, 0)
        end_runs(lane)

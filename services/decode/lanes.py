"""Who listens for blocks that come past gRPC, and how do they reach the engine?

The event loop lets connections in; a thread each then receives. A run in shared memory is copied from there by the
engine, which marks its room as empty. One that travelled is received into memory of this thread's own and copied from
that; what was emptied last is filled first, for it is still in the CPU's cache.
"""

from __future__ import annotations

import asyncio
import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from services.chassis.errors import BlocksLost, FathomError, InvalidRequest, PeerLost
from services.chassis.handoff import MAX_MARKS
from services.chassis.handoff_lane import (
    ACCEPTED,
    CONNECT_SECONDS,
    HELLO_BYTES,
    QUEUED_BYTES,
    Run,
    blocks_per_run,
    hang_up,
    make_buffer,
    parse_hello,
    path_beside,
    receive_into,
    receive_run,
)
from services.chassis.tasks import end_tasks
from services.chassis.telemetry import log
from services.decode.landing import LAND_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.chassis.handoff import Staging
    from services.decode.intake import Intake
    from services.decode.landing import Landing

MAX_LANES = 32
"""At a time, a thread each; whoever comes later uses `Push`."""
_REST_SECONDS = 0.1


class Lane:
    """One connection that was let in. It belongs to one reservation, and ends with it at the latest."""

    def __init__(self, connection: socket.socket, landing: Landing, staging: Staging, *, shares_file: bool) -> None:
        self.shares_file = shares_file
        self.ended: asyncio.Future[FathomError | None] = asyncio.get_running_loop().create_future()
        """None when the sender has said all that it had to say."""
        self._connection = connection
        self._landing = landing
        self._staging = staging

    def close(self) -> None:
        """Receive no more."""
        hang_up(self._connection)

    def receive(self) -> FathomError | None:
        """Take runs until the sender ends, and return what went wrong. Blocks: it has a thread of its own."""
        try:
            with self._connection:
                self._connection.sendall(ACCEPTED)
                self._receive()
        except OSError as error:
            return PeerLost(f"the handoff's connection broke: {error}")
        except (ValueError, InvalidRequest) as error:
            return InvalidRequest(f"the handoff's connection carried nonsense: {error}")
        except queue.Empty:
            return BlocksLost("the engine did not take the blocks in time")
        return None

    def _receive(self) -> None:
        """One run is received, one is copied, others wait for the engine's next pause: as many as there are slots."""
        landing = self._landing
        most_blocks = blocks_per_run(landing.block_bytes)
        size = max(min(landing.num_blocks, most_blocks) * landing.block_bytes, landing.window_bytes)
        if not size:
            raise InvalidRequest("this reservation waits for no bytes")
        slots: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for _ in range(min(max(QUEUED_BYTES // size, 2), -(-landing.num_blocks // most_blocks) + 1)):
            slots.put(memoryview(b"") if self.shares_file else make_buffer(size))
        while (run := receive_run(self._connection)) is not None:
            landing.check(run, shares_file=self.shares_file)
            slot = slots.get(timeout=LAND_SECONDS)
            then = partial(slots.put, slot)
            if self.shares_file:
                self._land_from_file(run, then)
            else:
                receive_into(self._connection, slot[: run.num_bytes])
                self._land(run, slot, then)

    def _land_from_file(self, run: Run, then: Callable[[], None]) -> None:
        staging, landing = self._staging, self._landing
        if run.is_window:
            landing.land_window(staging.window(), then)
            return
        if run.at + run.num_blocks > landing.num_blocks:
            raise InvalidRequest(f"blocks {run.at} to {run.at + run.num_blocks} lie outside the file")
        area = run.at // blocks_per_run(landing.block_bytes)

        def emptied() -> None:
            if area < MAX_MARKS:
                staging.mark_empty(area)
            then()

        landing.land(run.first, [staging.block(run.at + place) for place in range(run.num_blocks)], emptied)

    def _land(self, run: Run, slot: memoryview, then: Callable[[], None]) -> None:
        if run.is_window:
            self._landing.land_window(slot[: run.num_bytes], then)
            return
        size = self._landing.block_bytes
        places = range(0, run.num_bytes, size)
        self._landing.land(run.first, [slot[place : place + size] for place in places], then)


class Lanes:
    """The listening sockets of one replica: at a port, and in its folder in shared memory for whoever finds that."""

    def __init__(self, intake: Intake, listeners: Sequence[socket.socket]) -> None:
        """The first one is at a port."""
        self.port: int = listeners[0].getsockname()[1]
        self._intake = intake
        self._listeners = listeners
        self._threads = ThreadPoolExecutor(MAX_LANES, thread_name_prefix="handoff lane")
        self._callers: set[asyncio.Task[None]] = set()
        self._open: set[Lane] = set()
        self._accepting = tuple(asyncio.create_task(self._accept(each), name="handoff lanes") for each in listeners)

    @classmethod
    def open(cls, intake: Intake, host: str, port: int) -> Lanes:
        """Listen, and have the intake say so in its answers. Raises OSError when the port is taken."""
        listeners = [socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)]
        if intake.folder is not None:
            try:
                listeners.append(_listen_beside(intake.folder))
            except OSError as error:  # a long path, say
                log.info("decode.lanes.not_in_folder", reason=str(error))
        for listener in listeners:
            listener.setblocking(False)
        lanes = cls(intake, listeners)
        intake.lane_port = lanes.port
        return lanes

    async def close(self) -> None:
        """Listen no more, and hang up on whoever still sends."""
        self._intake.lane_port = 0
        await end_tasks(self._accepting)
        for listener in self._listeners:
            _stop_listening(listener)
        for lane in self._open:
            lane.close()
        self._threads.shutdown(wait=False)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many files are open, say
                log.warning("decode.lanes.cannot_accept", reason=str(error))
                await asyncio.sleep(_REST_SECONDS)
                continue
            task = asyncio.create_task(self._serve(connection), name="handoff lane")
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            lane = await self._let_in(connection)
        except (OSError, ValueError, TimeoutError, FathomError) as error:
            log.info("decode.lane.refused", reason=str(error))
            connection.close()
            return
        self._open.add(lane)
        try:
            problem = await asyncio.get_running_loop().run_in_executor(self._threads, lane.receive)
        finally:
            self._open.discard(lane)
        lane.ended.set_result(problem)
        if problem is not None:
            self._intake.lane_failed(lane, problem)

    async def _let_in(self, connection: socket.socket) -> Lane:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        data = bytearray()
        async with asyncio.timeout(CONNECT_SECONDS):
            while len(data) < HELLO_BYTES:
                piece = await loop.sock_recv(connection, HELLO_BYTES - len(data))
                if not piece:
                    raise ConnectionResetError("the caller went away")
                data += piece
        if len(self._open) >= MAX_LANES:
            raise BlocksLost(f"{MAX_LANES} handoffs use lanes already")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)  # from here on a thread waits; the reservation's end wakes it up
        return self._intake.open_lane(parse_hello(bytes(data)), connection)


def _listen_beside(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path_beside(folder / "any")))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _stop_listening(listener: socket.socket) -> None:
    if listener.family == socket.AF_UNIX:
        Path(listener.getsockname()).unlink(missing_ok=True)
    listener.close()

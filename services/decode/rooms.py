"""Which blocks and which window belong to which handoff, from reservation to start?

A part of the engine: runs in its thread only. They are written only while the handoff's epoch holds them, so a late
job of a handoff that ended can never touch what was given to others; and others can find them only after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.kv.window import NULL_WINDOW
from services.chassis.errors import BlocksLost, Overloaded
from services.chassis.handoff import block_xxh3
from services.decode.scheduler import has_room

if TYPE_CHECKING:
    from kernels.executor import Executor
    from kernels.kv.pool import BlockPool
    from kernels.kv.window import WindowPool
    from services.chassis.engine_thread import Reply

MAX_WAITING = 64


@dataclass(slots=True)
class _Room:
    keys: tuple[bytes, ...]
    """Of the full blocks."""
    num_blocks: int
    reply: Reply[int]
    """Owed to the intake: how many leading blocks are here already."""
    block_table: list[int] = field(default_factory=list)
    """Empty while it waits."""
    window: int = NULL_WINDOW


class Rooms:
    """Blocks and windows held by tickets; waiting ones get theirs in order of arrival."""

    def __init__(self, executor: Executor, pool: BlockPool, windows: WindowPool) -> None:
        self._executor = executor
        self._pool = pool
        self._windows = windows
        self._rooms: dict[int, _Room] = {}  # by epoch, so in order of arrival

    @property
    def num_waiting(self) -> int:
        return sum(1 for room in self._rooms.values() if not room.block_table)

    def ask(self, reply: Reply[int], epoch: int, keys: Sequence[bytes], num_blocks: int) -> None:
        """Queue for `num_blocks` blocks and a window; the reply comes with them, or Overloaded at once."""
        if self.num_waiting >= MAX_WAITING:
            reply.fail(Overloaded(f"{MAX_WAITING} handoffs wait for blocks already"))
            return
        self._rooms[epoch] = _Room(tuple(keys), num_blocks, reply)

    def grant(self, *, num_holders: int) -> None:
        """Give waiting rooms what they asked for while there is enough; the first that does not fit stops the line."""
        num_holders += len(self._rooms) - self.num_waiting
        for room in [r for r in self._rooms.values() if not r.block_table]:
            fits = has_room(room.num_blocks, free_blocks=self._pool.free_blocks, num_holders=num_holders)
            if not (fits and self._windows.has_free):
                return
            found = self._pool.acquire(room.keys)
            room.block_table = found + self._pool.allocate(room.num_blocks - len(found))
            room.window = self._windows.allocate()
            num_holders += 1
            room.reply.set(len(found))

    def land(self, epoch: int, first_block: int, payloads: Sequence[memoryview]) -> list[int]:
        """Copy payloads into the room's blocks; return the checksums of the copies, which nobody else can change.

        Raises BlocksLost when the epoch holds none. Whatever else goes wrong ends the room: its sequence must not find
        half of its blocks.
        """
        table = self._held(epoch).block_table
        with self._lost_on_error(epoch):
            return [
                self._executor.take_block(table[block], payload) for block, payload in enumerate(payloads, first_block)
            ]

    def land_window(self, epoch: int, payload: memoryview) -> int:
        """As `land`, for the window state."""
        window = self._held(epoch).window
        with self._lost_on_error(epoch):
            taken = bytes(payload)
            self._executor.write_window(window, taken)
            return block_xxh3(taken)

    def take(self, epoch: int, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Name the room's full blocks; pass blocks and window on: afterwards the caller holds them, not the epoch.

        Raises BlocksLost when the epoch holds none, or holds those of another prompt than the one that `keys` begins.
        """
        room = self._held(epoch)
        if tuple(keys[: len(room.keys)]) != room.keys:
            raise BlocksLost("the blocks that were handed over belong to another prompt")
        del self._rooms[epoch]
        for block, key in zip(room.block_table, room.keys, strict=False):
            self._pool.publish(block, key)
        return room.block_table, room.window

    def release(self, epoch: int) -> None:
        """Give up a room, waiting or held. Harmless when repeated, and after `take`."""
        room = self._rooms.pop(epoch, None)
        if room is not None:
            self._pool.release(room.block_table)
            self._windows.release(room.window)

    @contextmanager
    def _lost_on_error(self, epoch: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release(epoch)
            raise

    def _held(self, epoch: int) -> _Room:
        room = self._rooms.get(epoch)
        if room is None or not room.block_table:
            raise BlocksLost("the reservation is gone")
        return room

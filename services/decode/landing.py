"""How do a handoff's bytes get into the pool, and how is it known that they are right?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from services.chassis.errors import BlocksLost, InvalidRequest
from services.chassis.handoff_lane import QUEUED_BYTES, Run, blocks_per_run

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread
    from services.chassis.handoff import Staging
    from services.decode.rooms import Rooms

_WINDOW = -1
_GROUP_BYTES = 16 << 20
"""Of what nobody told of: copied between two steps, in a few milliseconds."""
LAND_SECONDS = 10.0
"""Longest wait for what was written before a commit: the engine may be in a long step."""


class Landing:
    """One handoff's way into the blocks and the window that its epoch holds, which nobody reads before its commit.

    Bytes are copied there as they come and the copy is summed, so whatever a sender still writes afterwards changes
    nothing. The commit compares the sums. `land` and `land_window` may be called from any thread, the rest from the
    event loop; everything is counted among the blocks that travel.
    """

    def __init__(
        self,
        thread: EngineThread,
        rooms: Rooms,
        epoch: int,
        *,
        first_block: int,
        num_blocks: int,
        block_bytes: int,
        window_bytes: int,
        on_late: Callable[[], None],
    ) -> None:
        """first_block: where they begin in the sequence's table.  on_late: hears of bytes for room that is gone."""
        self.block_bytes = block_bytes
        self.window_bytes = window_bytes
        self.num_blocks = num_blocks
        self._thread = thread
        self._rooms = rooms
        self._epoch = epoch
        self._first_block = first_block
        self._on_late = on_late
        self._begun: set[int] = set()
        """Places of blocks that the engine was given; -1 for the window state."""
        self._checksums: dict[int, int] = {}
        """By place. The engine's thread fills it, and the event loop reads it once it is whole."""
        self._given_bytes = 0
        """Of messages for the engine, all together. Only the event loop counts these."""
        self._taken_bytes = 0
        """Those of them that it has copied. Only its thread counts these."""
        self._has_room: asyncio.Future[None] | None = None
        """There while somebody waits for it."""
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def check(self, run: Run, *, shares_file: bool) -> None:
        """Raise InvalidRequest for a run that lies outside the reservation, or has another size than that."""
        end = run.first + run.num_blocks
        num_bytes = self.window_bytes if run.is_window else run.num_blocks * self.block_bytes
        if end > self.num_blocks or run.num_blocks > blocks_per_run(self.block_bytes) or not num_bytes:
            raise InvalidRequest(f"blocks {run.first} to {end} lie outside the reservation")
        if run.num_bytes != (0 if shares_file else num_bytes):
            raise InvalidRequest(f"a run of {num_bytes} bytes came with {run.num_bytes}")
        # The copies of a second one could follow the comparison of the first one's sums.
        if not self._begun.isdisjoint([_WINDOW] if run.is_window else range(run.first, end)):
            raise InvalidRequest(
                "the window state came twice" if run.is_window else f"blocks {run.first} to {end} came twice"
            )

    def _check_first(self, places: Iterable[int]) -> None:
        """A second copy could follow the comparison of the first one's sums."""
        if not self._begun.isdisjoint(places):
            raise InvalidRequest(f"something came twice: blocks {[*places]}, where {_WINDOW} is the window state")

    def land(self, first: int, payloads: Sequence[memoryview], then: Callable[[], None]) -> None:
        """Have blocks copied into the pool; `then` is called, in the engine's thread, when they are."""
        self._begun.update(range(first, first + len(payloads)))
        self._thread.post(self._land, first, payloads, then)

    def land_window(self, payload: memoryview, then: Callable[[], None]) -> None:
        """As `land`, for the window state."""
        self._begun.add(_WINDOW)
        self._thread.post(self._land_window, payload, then)

    async def take(self, place: int | None, payload: memoryview) -> None:
        """Have a block, or with None the window state, copied from memory that nobody writes any more.

        Waits while much of that is there.  Raises InvalidRequest for a place outside or one that was taken before,
        BlocksLost when the engine takes nothing for too long.
        """
        if not (self.window_bytes if place is None else 0 <= place < self.num_blocks):
            raise InvalidRequest(f"block {place}, or for None the window state, is not one that has to travel")
        self._check_first([_WINDOW if place is None else place])
        self._given_bytes += len(payload)
        then = partial(self._count_taken, len(payload))
        if place is None:
            self.land_window(payload, then)
        else:
            self.land(place, [payload], then)
        if self._queued_bytes > QUEUED_BYTES:
            await self._wait_for_room()

    @property
    def _queued_bytes(self) -> int:
        return self._given_bytes - self._taken_bytes

    async def _wait_for_room(self) -> None:
        self._has_room = asyncio.get_running_loop().create_future()
        try:
            if self._queued_bytes > QUEUED_BYTES:  # again: so far the engine saw nobody to tell
                await _in_time(self._has_room)
        finally:
            self._has_room = None

    async def confirm(self, staging: Staging, block_checksums: Sequence[int], window_checksum: int) -> None:
        """Take what has not come yet from the staging area, and compare all. Raises BlocksLost when something is wrong.

        Nothing else may call `land` from here on.
        """
        await self._take_rest(staging)
        await _in_time(asyncio.shield(self._whole))
        for place, checksum in enumerate(block_checksums):
            if self._checksums[place] != checksum:
                raise BlocksLost(f"block {self._first_block + place} arrived damaged")
        if self.window_bytes and self._checksums[_WINDOW] != window_checksum:
            raise BlocksLost("the window state arrived damaged")

    async def _take_rest(self, staging: Staging) -> None:
        """Give the engine what nobody gave it yet; between the groups it may compute a step."""
        size = max(1, _GROUP_BYTES // self.block_bytes)
        rest = [place for place in range(self.num_blocks) if place not in self._begun]
        for start in range(0, len(rest), size):
            group = rest[start : start + size]
            taken = self._thread.reply()
            for place in group[:-1]:
                self.land(place, [staging.block(place)], _nothing)
            self.land(group[-1], [staging.block(group[-1])], lambda taken=taken: taken.set(None))  # type: ignore[misc]
            await _in_time(taken)
        if self.window_bytes and _WINDOW not in self._begun:
            self.land_window(staging.window(), _nothing)

    # In the engine's thread.

    def _count_taken(self, num_bytes: int) -> None:
        """Wake the event loop only if it waits."""
        self._taken_bytes += num_bytes
        has_room = self._has_room
        if has_room is not None and self._queued_bytes <= QUEUED_BYTES:
            self._thread.tell(_say, has_room)

    def _land(self, first: int, payloads: Sequence[memoryview], then: Callable[[], None]) -> None:
        try:
            checksums = self._rooms.land(self._epoch, self._first_block + first, payloads)
        except Exception as error:  # noqa: BLE001 - raised again by `confirm`
            self._thread.tell(self._fail, error)
        else:
            self._note(first, checksums)
        finally:
            then()

    def _land_window(self, payload: memoryview, then: Callable[[], None]) -> None:
        try:
            checksum = self._rooms.land_window(self._epoch, payload)
        except Exception as error:  # noqa: BLE001 - raised again by `confirm`
            self._thread.tell(self._fail, error)
        else:
            self._note(_WINDOW, [checksum])
        finally:
            then()

    def _note(self, first: int, checksums: Sequence[int]) -> None:
        """Wake the event loop only when all are there: it waits for nothing less."""
        self._checksums.update(enumerate(checksums, start=first))
        if len(self._checksums) == self.num_blocks + (self.window_bytes > 0):
            self._thread.tell(self._succeed)

    # On the event loop.

    def _succeed(self) -> None:
        if not self._whole.done():
            self._whole.set_result(None)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, BlocksLost):
            self._on_late()
        if not self._whole.done():
            self._whole.set_exception(error)
            self._whole.exception()  # there may never be a commit to raise it


async def _in_time(taken: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(LAND_SECONDS):
            await taken
    except TimeoutError:
        raise BlocksLost("the engine did not take the blocks in time") from None


def _say(has_room: asyncio.Future[None]) -> None:
    if not has_room.done():
        has_room.set_result(None)


def _nothing() -> None:
    """Nobody waits for this one alone."""

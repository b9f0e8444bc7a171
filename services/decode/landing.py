"""How do staged bytes get into the pool, and how is it known that they are right?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.chassis.errors import BlocksLost
from services.chassis.handoff import Staging, block_crc32

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread, Reply
    from services.decode.rooms import Rooms

_GROUP_BYTES = 16 << 20
"""Verified, then written between two steps: milliseconds. The next group is verified meanwhile."""


class Landing:
    """One committed handoff's way from its staging area into the blocks that its epoch holds.

    Everything is verified where it lies and then copied once. That is safe because the sender has unmapped the area
    before its commit: nobody can change it any more.
    """

    def __init__(
        self, thread: EngineThread, rooms: Rooms, epoch: int, staging: Staging, *, is_wanted: Callable[[], bool]
    ) -> None:
        """is_wanted: asked before each write; False ends the landing with BlocksLost."""
        self._thread = thread
        self._rooms = rooms
        self._epoch = epoch
        self._staging = staging
        self._is_wanted = is_wanted
        self._writing: Reply[None] | None = None

    async def blocks(self, crcs: Sequence[int], *, first_block: int, block_bytes: int) -> None:
        """Verify and write all that travelled.  first_block: where they begin in the sequence's table."""
        size = max(1, _GROUP_BYTES // block_bytes)
        for start in range(0, self._staging.num_blocks, size):
            group = range(start, min(start + size, self._staging.num_blocks))
            payloads = await asyncio.to_thread(_verified, self._staging, group, crcs, first_block)
            await self._write(self._rooms.write, self._epoch, first_block + start, payloads)

    async def window(self, crc: int) -> None:
        """Verify and write the window state."""
        state = await asyncio.to_thread(_verified_window, self._staging, crc)
        await self._write(self._rooms.write_window, self._epoch, state)

    async def written(self) -> None:
        """Wait for the last write, which the engine does before anything that is posted after this call."""
        if self._writing is not None:
            await self._writing

    async def _write(self, job: Callable[..., None], *arguments: object) -> None:
        await self.written()
        if not self._is_wanted():
            raise BlocksLost("the reservation ended during its commit")
        self._writing = self._thread.call(job, *arguments)


def _verified(staging: Staging, blocks: range, crcs: Sequence[int], first_block: int) -> list[memoryview]:
    payloads = [staging.block(block) for block in blocks]
    for block, payload in zip(blocks, payloads, strict=True):
        if block_crc32(payload) != crcs[block]:
            raise BlocksLost(f"block {first_block + block} arrived damaged")
    return payloads


def _verified_window(staging: Staging, crc: int) -> memoryview:
    """As `_verified`, for the window state."""
    payload = staging.window()
    if block_crc32(payload) != crc:
        raise BlocksLost("the window state arrived damaged")
    return payload

"""How do blocks and the window leave the device: once copied, summed meanwhile, never more than a group at a time?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proto.common_pb2 import Ticket
from proto.decode_pb2 import PushChunk
from services.chassis.errors import InternalError
from services.chassis.handoff import PeerStaging, block_crc32, chunks_of

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread
    from services.prefill.engine import PrefillEngine
    from services.prefill.prompt import Prompt

_GROUP_BYTES = 16 << 20
"""Copied off the device between two steps: milliseconds, and the bound on host memory where it is not shared."""
_GROUPS_AHEAD = 2
"""Asked of the engine at a time: it need not wait for us between them, and its pause stays short."""


class Blocks(Protocol):
    """A prompt's KV on the device."""

    async def copy(self, blocks: range, places: Sequence[memoryview]) -> None:
        """Copy blocks of the prompt's table to host memory, one to each place."""

    async def copy_window(self, place: memoryview) -> None:
        """Copy the prompt's window state to host memory."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The KV of a prompt in the engine. Both methods raise BlocksLost once the prompt was released."""

    thread: EngineThread
    engine: PrefillEngine
    prompt: Prompt

    async def copy(self, blocks: range, places: Sequence[memoryview]) -> None:
        await self.thread.call(self.engine.copy_blocks, self.prompt, blocks, places)

    async def copy_window(self, place: memoryview) -> None:
        await self.thread.call(self.engine.copy_window, self.prompt, place)


async def fill(staging: PeerStaging, wanted: range, blocks: Blocks, *, has_window: bool) -> list[int]:
    """Copy blocks and window straight into a peer's file and let go of it; return the checksums, the window's last.

    Groups are summed in other threads while the engine copies the next ones.
    """
    ahead = asyncio.Semaphore(_GROUPS_AHEAD)

    async def move(group: range) -> list[int]:
        async with ahead:
            places = [staging.block(block - wanted.start) for block in group]
            await blocks.copy(group, places)
        return await asyncio.to_thread(_sum, places)

    async def move_window() -> list[int]:
        async with ahead:
            place = staging.window()
            await blocks.copy_window(place)
        return await asyncio.to_thread(_sum, [place])

    moves = [move(group) for group in _groups(wanted, len(staging.block(0)) if wanted else 1)]
    moving = [asyncio.create_task(work) for work in (*moves, *((move_window(),) if has_window else ()))]
    try:
        crcs = [crc for each in await asyncio.gather(*moving) for crc in each]
    finally:
        for each in moving:
            each.cancel()
    if not staging.close():
        raise InternalError("somebody still writes into the staging area that is to be committed")
    return crcs


async def pieces(
    ticket: Ticket, wanted: range, blocks: Blocks, *, block_bytes: int, window_bytes: int, crcs: list[int]
) -> AsyncIterator[PushChunk]:
    """Yield blocks and window in pieces for Push; append the checksums to `crcs`, the window's last."""
    first: Ticket | None = ticket
    for group in _groups(wanted, block_bytes):
        places = [memoryview(bytearray(block_bytes)) for _ in group]
        await blocks.copy(group, places)
        for block, place in zip(group, places, strict=True):
            # In a thread: the checksums of a block take milliseconds that belong to other requests.
            chunks, crc = await asyncio.to_thread(_cut, place, block, first)
            crcs.append(crc)
            first = None
            for chunk in chunks:
                yield chunk
    if window_bytes:
        place = memoryview(bytearray(window_bytes))
        await blocks.copy_window(place)
        chunks, crc = await asyncio.to_thread(_cut, place, None, first)
        crcs.append(crc)
        for chunk in chunks:
            yield chunk


def _groups(wanted: range, block_bytes: int) -> Iterator[range]:
    size = max(1, _GROUP_BYTES // block_bytes)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def _sum(places: Sequence[memoryview]) -> list[int]:
    """Return the checksums, and let go of the places."""
    crcs = [block_crc32(place) for place in places]
    for place in places:
        place.release()
    return crcs


def _cut(payload: memoryview, block: int | None, ticket: Ticket | None) -> tuple[list[PushChunk], int]:
    """Cut a block, or with None the window state."""
    chunks = chunks_of(payload, block_index=block or 0, ticket=ticket, is_window=block is None)
    return list(chunks), block_crc32(payload)

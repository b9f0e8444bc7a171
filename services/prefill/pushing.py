"""How do blocks and the window leave the device, and how do they become messages where only gRPC gets through?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proto.common_pb2 import Ticket
from proto.decode_pb2 import PushChunk
from services.chassis.handoff import block_xxh3, chunks_of

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread
    from services.prefill.engine import PrefillEngine
    from services.prefill.prompt import Prompt

_GROUP_BYTES = 16 << 20
"""Copied off the device between two steps: milliseconds, and the bound on host memory."""


Copied = Callable[[Exception | None], None]
"""Is told, in the engine's thread, when a copy is done, or what kept it from being done."""


class Blocks(Protocol):
    """A prompt's KV on the device. The copies fail with BlocksLost once the prompt was released."""

    def post_copy(self, blocks: range, places: Sequence[memoryview], then: Copied) -> None:
        """Have blocks of the prompt's table copied to host memory, one to each place. May be called from any thread."""

    def post_copy_window(self, place: memoryview, then: Copied) -> None:
        """Have the prompt's window state copied to host memory. May be called from any thread."""

    async def copy(self, blocks: range, places: Sequence[memoryview]) -> None:
        """As `post_copy`, and wait."""

    async def copy_window(self, place: memoryview) -> None:
        """As `post_copy_window`, and wait."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The KV of a prompt in the engine."""

    thread: EngineThread
    engine: PrefillEngine
    prompt: Prompt

    def post_copy(self, blocks: range, places: Sequence[memoryview], then: Copied) -> None:
        self.thread.post(_and_tell, then, self.engine.copy_blocks, self.prompt, blocks, places)

    def post_copy_window(self, place: memoryview, then: Copied) -> None:
        self.thread.post(_and_tell, then, self.engine.copy_window, self.prompt, place)

    async def copy(self, blocks: range, places: Sequence[memoryview]) -> None:
        await self.thread.call(self.engine.copy_blocks, self.prompt, blocks, places)

    async def copy_window(self, place: memoryview) -> None:
        await self.thread.call(self.engine.copy_window, self.prompt, place)


async def pieces(
    ticket: Ticket, wanted: range, blocks: Blocks, *, block_bytes: int, window_bytes: int, checksums: list[int]
) -> AsyncIterator[PushChunk]:
    """Yield blocks and window in pieces for Push; append the checksums to `checksums`, the window's last."""
    first: Ticket | None = ticket
    for group in _groups(wanted, block_bytes):
        places = [memoryview(bytearray(block_bytes)) for _ in group]
        await blocks.copy(group, places)
        for block, place in zip(group, places, strict=True):
            # In a thread: the checksums of a block take milliseconds that belong to other requests.
            chunks, checksum = await asyncio.to_thread(_cut, place, block, first)
            checksums.append(checksum)
            first = None
            for chunk in chunks:
                yield chunk
    if window_bytes:
        place = memoryview(bytearray(window_bytes))
        await blocks.copy_window(place)
        chunks, checksum = await asyncio.to_thread(_cut, place, None, first)
        checksums.append(checksum)
        for chunk in chunks:
            yield chunk


def _groups(wanted: range, block_bytes: int) -> Iterator[range]:
    size = max(1, _GROUP_BYTES // block_bytes)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def _cut(payload: memoryview, block: int | None, ticket: Ticket | None) -> tuple[list[PushChunk], int]:
    """Cut a block, or with None the window state."""
    chunks = chunks_of(payload, block_index=block or 0, ticket=ticket, is_window=block is None)
    return list(chunks), block_xxh3(payload)


def _and_tell(then: Copied, copy: Callable[..., None], *arguments: object) -> None:
    try:
        copy(*arguments)
    except Exception as error:  # noqa: BLE001 - raised again by whoever asked
        then(error)
    else:
        then(None)

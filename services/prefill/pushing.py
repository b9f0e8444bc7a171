"""How do blocks and the window leave the device, and how do they become messages where only gRPC gets through?"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from proto.common_pb2 import Ticket
from services.chassis.errors import DeadlinePassed
from services.chassis.handoff import block_xxh3
from services.chassis.handoff_push import PIECE_BYTES, BlankPiece, encode_pieces
from services.prefill.sending import SENDERS

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread
    from services.prefill.engine import PrefillEngine
    from services.prefill.prompt import Prompt

_AHEAD = 2
"""Runs that the engine copies while another is sent: with gRPC's copies, four of 4 MiB or one block at most."""
Copied = Callable[[Exception | None], None]
"""Is told, in the thread that copied, when a copy is done, or what kept it from being done."""


class Blocks(Protocol):
    """A prompt's KV on the device. The copies fail with BlocksLost once the prompt was released."""

    @property
    def copies_beside(self) -> bool:
        """Whether the thread that asks for a copy makes it, at once; else the engine's does, between two steps."""

    def post_copy(self, blocks: range, places: Sequence[memoryview], then: Copied) -> None:
        """Have blocks of the prompt's table copied to host memory, one to each place. May be called from any thread."""

    def post_copy_window(self, place: memoryview, then: Copied) -> None:
        """Have the prompt's window state copied to host memory. May be called from any thread."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The KV of a prompt in the engine."""

    thread: EngineThread
    engine: PrefillEngine
    prompt: Prompt

    @property
    def copies_beside(self) -> bool:
        return self.engine.copies_beside

    def post_copy(self, blocks: range, places: Sequence[memoryview], then: Copied) -> None:
        self._post(then, self.engine.copy_blocks, self.prompt, blocks, places)

    def post_copy_window(self, place: memoryview, then: Copied) -> None:
        self._post(then, self.engine.copy_window, self.prompt, place)

    def _post(self, then: Copied, copy: Callable[..., None], *arguments: object) -> None:
        if self.engine.copies_beside:
            _and_tell(then, copy, *arguments)
        else:
            self.thread.post(_and_tell, then, copy, *arguments)


async def pieces(
    ticket: Ticket,
    wanted: range,
    blocks: Blocks,
    *,
    block_bytes: int,
    window_bytes: int,
    checksums: list[int],
    deadline_unix_seconds: float,
) -> AsyncIterator[bytes]:
    """Yield blocks and window as messages for Push; append the checksums to `checksums`, the window's last.

    Blocks that any thread can copy are copied and summed here, a run at a time, 4 MiB at most: less than a millisecond
    of the event loop, and threads would wait for the interpreter lock, which gRPC holds while it sends. Else, while
    one run's messages are sent, threads wait for the engine to copy the next ones.  Raises as the copies do, and
    DeadlinePassed.
    """
    runs = [*_runs(wanted, block_bytes), *([range(0)] if window_bytes else [])]
    make = partial(
        _pack,
        blocks,
        block_bytes=block_bytes,
        window_bytes=window_bytes,
        deadline_unix_seconds=deadline_unix_seconds,
    )
    tickets = itertools.chain([ticket], itertools.repeat(None))
    makes = [partial(make, run, ticket) for run, ticket in zip(runs, tickets, strict=False)]
    is_short = blocks.copies_beside and max(block_bytes, window_bytes) <= PIECE_BYTES
    async with aclosing(_packed_here(makes) if is_short else _packed_ahead(makes)) as packing:
        async for packed in packing:
            checksums += packed.checksums
            for message in packed.messages:
                yield message


async def _packed_here(makes: Sequence[Callable[[], _Packed]]) -> AsyncGenerator[_Packed]:
    for make in makes:
        yield make()


async def _packed_ahead(makes: Sequence[Callable[[], _Packed]]) -> AsyncGenerator[_Packed]:
    loop = asyncio.get_running_loop()
    waiting = deque(makes)
    packing: deque[asyncio.Future[_Packed]] = deque()

    def ask() -> None:
        while waiting and len(packing) < _AHEAD:
            packing.append(loop.run_in_executor(SENDERS, waiting.popleft()))

    ask()
    try:
        while packing:
            packed = await packing[0]
            packing.popleft()
            ask()
            yield packed
    finally:
        for each in packing:
            each.add_done_callback(_take_note)
            each.cancel()


def _runs(wanted: range, block_bytes: int) -> Iterator[range]:
    size = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A run, ready to be sent."""

    messages: list[bytes]
    checksums: list[int]


def _pack(
    blocks: Blocks,
    run: range,
    ticket: Ticket | None,
    *,
    block_bytes: int,
    window_bytes: int,
    deadline_unix_seconds: float,
) -> _Packed:
    """Blocks the calling thread, until the engine has copied the run at least.  run: empty for the window state."""
    size = block_bytes if run else window_bytes
    heads: list[dict[str, Any]] = [{"block_index": block} for block in run] or [{"is_window": True}]
    heads[0]["ticket"] = ticket
    if size > PIECE_BYTES:  # so it is a run of one
        place = memoryview(bytearray(size))
        _copy(blocks, run, [place], deadline_unix_seconds)
        return _Packed(encode_pieces(place, **heads[0]), [block_xxh3(place)])
    pieces = [BlankPiece(size, **head) for head in heads]
    _copy(blocks, run, [piece.place for piece in pieces], deadline_unix_seconds)
    return _Packed([piece.seal() for piece in pieces], [block_xxh3(piece.place) for piece in pieces])


def _copy(blocks: Blocks, run: range, places: Sequence[memoryview], deadline_unix_seconds: float) -> None:
    copied: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    if run:
        blocks.post_copy(run, places, copied.put)
    else:
        blocks.post_copy_window(places[0], copied.put)
    try:
        error = copied.get(timeout=max(deadline_unix_seconds - time.time(), 0.0))
    except queue.Empty:
        raise DeadlinePassed("the handoff's deadline passed") from None
    if error is not None:
        raise error


def _take_note(packing: asyncio.Future[_Packed]) -> None:
    """Whoever was to send what it made has stopped."""
    if not packing.cancelled():
        packing.exception()


def _and_tell(then: Copied, copy: Callable[..., None], *arguments: object) -> None:
    try:
        copy(*arguments)
    except Exception as error:  # noqa: BLE001 - raised again by whoever asked
        then(error)
    else:
        then(None)

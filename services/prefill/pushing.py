"""How do blocks and the window leave the device, and how do they become messages where only gRPC gets through?"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from proto.common_pb2 import Ticket
from services.chassis.errors import DeadlinePassed
from services.chassis.handoff import block_xxh3
from services.chassis.handoff_push import PIECE_BYTES, encode_pieces
from services.prefill.sending import SENDERS

if TYPE_CHECKING:
    from services.chassis.engine_thread import EngineThread
    from services.prefill.engine import PrefillEngine
    from services.prefill.prompt import Prompt

_AHEAD = 2
"""Runs that are made ready while others are sent: the bound on host memory."""
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

    While one run's messages are sent, threads have the next ones copied, sum and cut them.  Raises as the copies do,
    and DeadlinePassed.
    """
    runs = [*_runs(wanted, block_bytes), *([range(0)] if window_bytes else [])]
    size = max(max((len(run) for run in runs), default=0) * block_bytes, window_bytes)
    buffers = [memoryview(bytearray(size)) for _ in range(min(_AHEAD, len(runs)))]
    loop = asyncio.get_running_loop()
    packing: deque[asyncio.Future[_Packed]] = deque()

    def pack_next() -> None:
        if not waiting:
            return
        number, run = waiting.popleft()
        size, buffer = block_bytes if run else window_bytes, buffers[number % len(buffers)]
        places = [buffer[n * size : (n + 1) * size] for n in range(len(run) or 1)]
        work = partial(_pack, blocks, run, places, None if number else ticket, deadline_unix_seconds)
        packing.append(loop.run_in_executor(SENDERS, work))

    waiting = deque(enumerate(runs))
    for _ in buffers:
        pack_next()
    try:
        while packing:
            packed = await packing[0]
            packing.popleft()
            pack_next()  # into the same buffer: messages are copies
            checksums += packed.checksums
            for message in packed.messages:
                yield message
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
    blocks: Blocks, run: range, places: Sequence[memoryview], ticket: Ticket | None, deadline_unix_seconds: float
) -> _Packed:
    """Blocks the calling thread, until the engine has copied the run at least.  run: empty for the window state."""
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
    messages = []
    for number, place in enumerate(places):
        index = run[number] if run else 0
        messages += encode_pieces(place, block_index=index, ticket=None if number else ticket, is_window=not run)
    return _Packed(messages, [block_xxh3(place) for place in places])


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

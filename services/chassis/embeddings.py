"""How do an image's embeddings get from vision to an engine, and how few are held at a time?

An image takes tens of megabytes while its tokens are computed, and nothing before or after. So a request holds one
image at a time, all requests of a replica share a bounded room, and whoever must wait computes the text before it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from proto.common_pb2 import ImageRef, Request
from proto.vision_pb2 import EncodeChunk, EncodeRequest
from proto.vision_pb2_grpc import VisionStub
from services.chassis.errors import BlocksLost, DeadlinePassed, PeerLost

ROOM_BYTES = 256 << 20
"""Embeddings on one replica: a dozen of the largest images."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """An image with its embeddings, [num_tokens, hidden] row-major fp32; position and length in tokens."""

    position: int
    num_tokens: int
    embeddings: bytes | memoryview


class ImageFeed:
    """Which image of one sequence is needed now? Engine thread only."""

    def __init__(self, images: Sequence[ImageRef] = ()) -> None:
        """images: in prompt order, without overlap."""
        self._images = tuple(images)
        self._embeddings: bytes | memoryview | None = None
        self.current: ImageRef | None = None
        """The one to hold: the first whose last token is not computed yet."""

    def move_to(self, computed_tokens: int) -> bool:
        """Say whether `current` became another image, or none; the embeddings of the one before are then let go."""
        current = next((i for i in self._images if i.position + i.num_tokens > computed_tokens), None)
        if current is self.current:
            return False
        self.current, self._embeddings = current, None
        return True

    def put(self, image: ImageRef, embeddings: bytes | memoryview) -> None:
        """Take embeddings in; ignored when the image is no longer the current one."""
        if image is self.current:
            self._embeddings = embeddings

    def held_back(self, computed_tokens: int, num_tokens: int) -> int:
        """How many of the tokens up to `num_tokens` must wait for embeddings: a chunk has those of one image."""
        if self.current is None:
            return 0
        first = self.current.position
        if self._embeddings is not None:
            end = first + self.current.num_tokens
            first = next((i.position for i in self._images if i.position >= end), num_tokens)
        return max(0, num_tokens - max(first, computed_tokens))

    def within(self, start: int, end: int) -> tuple[Embedded, ...]:
        """Return the image, with its embeddings, that overlaps the tokens [start, end), if one does."""
        image = self.current
        if image is None or self._embeddings is None or image.position >= end:
            return ()
        assert image.position + image.num_tokens > start, "the current image is not computed yet"
        return (Embedded(image.position, image.num_tokens, self._embeddings),)


class EmbeddingsRoom:
    """Bytes that all requests of a replica may hold; first come, first served. Event loop only."""

    def __init__(self, max_bytes: int = ROOM_BYTES) -> None:
        """One image is let in whatever its size."""
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self._line: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room and keep it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, num_bytes)
        self._line.append(place)
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._line.remove(place)
            else:
                self.held_bytes -= num_bytes
            self._let_in()

    def _let_in(self) -> None:
        while self._line:
            turn, num_bytes = self._line[0]
            if turn.cancelled() or (self.held_bytes and self.held_bytes + num_bytes > self._max_bytes):
                return
            self._line.popleft()
            self.held_bytes += num_bytes
            turn.set_result(None)


@dataclass(frozen=True, slots=True)
class EmbeddingsSource:
    """What all requests on a replica fetch with."""

    channel: Callable[[str], grpc.aio.Channel]
    """The cached channel to an address."""
    room: EmbeddingsRoom
    row_bytes: int
    """Of one token's embedding."""


class EmbeddingsFetch:
    """One request's way to its embeddings, one image after the other. Event loop only."""

    def __init__(
        self,
        request: Request,
        source: EmbeddingsSource,
        *,
        deliver: Callable[[ImageRef, memoryview], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._request = request
        self._source = source
        self._deliver = deliver
        self._on_error = on_error
        self._holding: asyncio.Task[None] | None = None

    def want(self, image: ImageRef | None) -> None:
        """Fetch an image in the place of the one before; None needs no more. Errors go to `on_error`."""
        self.close()
        if image is not None:
            self._holding = asyncio.create_task(self._hold(image), name="fetch embeddings")

    def close(self) -> None:
        """Give the room back."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None

    async def _hold(self, image: ImageRef) -> None:
        source = self._source
        async with source.room.hold(image.num_tokens * source.row_bytes):
            try:
                seconds = self._request.deadline_unix_seconds - time.time()
                self._deliver(image, await fetch_embeddings(self._request, image, source, timeout_seconds=seconds))
            except Exception as error:  # noqa: BLE001 - the request's own story raises it again
                self._on_error(error)
                return
            await asyncio.get_running_loop().create_future()  # the engine has them: keep the room until cancelled


async def fetch_embeddings(
    request: Request, image: ImageRef, source: EmbeddingsSource, *, timeout_seconds: float
) -> memoryview:
    """Return the embeddings of an image, [num_tokens, hidden] row-major fp32, verified.

    Raises BlocksLost when they are not where the image says, or arrive damaged: whoever has the image encodes it again.
    """
    if timeout_seconds <= 0:
        raise DeadlinePassed("the request's deadline passed before its image was fetched")
    asked = EncodeRequest(
        request_id=request.request_id,
        model=request.model,
        images=[ImageRef(content_hash=image.content_hash, position=image.position, num_tokens=image.num_tokens)],
        fingerprint=image.vision_fingerprint,
    )
    payload = bytearray(image.num_tokens * source.row_bytes)
    received = 0
    call = VisionStub(source.channel(image.vision_address)).Encode(asked, timeout=timeout_seconds)
    try:
        async for chunk in call:
            # In a thread: a checksum of megabytes would hold up every other request's event for milliseconds.
            if not await asyncio.to_thread(_fits, chunk, image, received, len(payload)):
                raise BlocksLost("embeddings of an image arrived damaged")
            payload[received : received + len(chunk.data)] = chunk.data
            received += len(chunk.data)
    except PeerLost as error:
        raise BlocksLost(f"the vision replica that held an image's embeddings is gone: {error.message}") from error
    finally:
        call.cancel()
    if received != len(payload):
        raise BlocksLost(f"{received} of {len(payload)} bytes of an image's embeddings arrived")
    return memoryview(payload).toreadonly()


def _fits(chunk: EncodeChunk, image: ImageRef, received: int, num_bytes: int) -> bool:
    is_next = chunk.image_index == 0 and chunk.offset_bytes == received and received + len(chunk.data) <= num_bytes
    return is_next and chunk.num_tokens == image.num_tokens and zlib.crc32(chunk.data) == chunk.crc32

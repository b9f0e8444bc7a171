"""How does each image get encoded once, whoever asks, and never more of them than there is room for?

An image's own task decodes it in a worker thread and encodes it on the engine thread. Callers wait for the task: equal
images share one, and a caller that gives up does not take the work from the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING

from services.chassis.errors import BadImage, BlocksLost, FathomError, Overloaded
from services.chassis.images import ImageLayout, check_encoded, layout_of
from services.chassis.telemetry import SpanKind, span
from services.vision.embeddings import EmbeddingCache, Embeddings
from services.vision.pictures import pixels_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proto.common_pb2 import ImageRef
    from services.chassis.engine_thread import EngineThread
    from services.chassis.image_headers import ImageHeader
    from services.vision.metrics import VisionMetrics
    from services.vision.model import Sight

CACHE_BYTES = 1 << 30
"""Of embeddings: 51 of the largest images of a model as wide as 5,120. They are needed again until prefill has them."""

MAX_WAITING = 64
"""Images in line. They hold their encoded bytes, a message's at most, and the last one's caller waits for all."""

NUM_DECODERS = 2
"""Images decoded at once: each may hold a few hundred MB meanwhile."""

RETRY_SECONDS = 2.0


class ImageDesk:
    """Takes images in, gives embeddings out. Lives on the event loop."""

    def __init__(
        self,
        sight: Sight,
        thread: EngineThread,
        metrics: VisionMetrics,
        *,
        cache_bytes: int = CACHE_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._sight = sight
        self._thread = thread
        self._metrics = metrics
        self._cache = EmbeddingCache(cache_bytes)
        self._max_request_bytes = cache_bytes // 2
        self._max_waiting = max_waiting
        self._tasks: dict[bytes, asyncio.Task[Embeddings]] = {}
        self._decoders = asyncio.Semaphore(NUM_DECODERS)

    @property
    def fingerprint(self) -> bytes:
        """Of the tower. 32 bytes."""
        return self._sight.tower.fingerprint

    def check_together(self, images: Sequence[ImageRef]) -> None:
        """Raise BadImage for images that can never be encoded, or not kept together until prefill has them all."""
        num_tokens = sum(self._layout(image.data)[1].num_tokens for image in images if image.data)
        if num_tokens * self._sight.tower.hidden_size * 4 > self._max_request_bytes:
            raise BadImage(
                f"the images fill {num_tokens} tokens together: send fewer, or smaller ones", field="messages"
            )

    async def embeddings_of(self, image: ImageRef) -> Embeddings:
        """Return an image's embeddings, encoding it first if need be.

        Raises BadImage, Overloaded when too many are in line, BlocksLost for an image without data that is not here.
        """
        try:
            embeddings, outcome = await self._find(image)
        except FathomError as error:
            self._metrics.images.labels(error.kind).inc()
            raise
        self._metrics.images.labels(outcome).inc()
        return embeddings

    async def _find(self, image: ImageRef) -> tuple[Embeddings, str]:
        content_hash = image.content_hash
        if image.data:
            content_hash = (await asyncio.to_thread(hashlib.sha256, image.data)).digest()
            if image.content_hash not in {b"", content_hash}:
                raise BadImage("content_hash is not the SHA-256 of the image", field="messages")
        kept = self._cache.get(content_hash)
        if kept is not None:
            return kept, "cached"
        outcome = "shared"
        if content_hash not in self._tasks:
            if not image.data:
                raise BlocksLost("the embeddings of an image are not here any more")
            self._begin(content_hash, image.data)
            outcome = "encoded"
        return await asyncio.shield(self._tasks[content_hash]), outcome

    def _begin(self, content_hash: bytes, data: bytes) -> None:
        header, layout = self._layout(data)
        if len(self._tasks) >= self._max_waiting:
            raise Overloaded(f"{len(self._tasks)} images are in line, the limit", retry_after=RETRY_SECONDS)
        task = asyncio.create_task(self._encode(content_hash, data, header, layout), name="encode image")
        self._tasks[content_hash] = task
        self._metrics.waiting.set(len(self._tasks))
        task.add_done_callback(lambda done: self._end(content_hash, done))

    def _end(self, content_hash: bytes, done: asyncio.Task[Embeddings]) -> None:
        del self._tasks[content_hash]
        self._metrics.waiting.set(len(self._tasks))
        # Asking for the exception marks it as seen: all callers may have gone. Those who wait get it as well.
        if not done.cancelled() and done.exception() is None:
            self._cache.put(done.result())
            self._metrics.kept_bytes.set(self._cache.num_bytes)

    async def _encode(self, content_hash: bytes, data: bytes, header: ImageHeader, layout: ImageLayout) -> Embeddings:
        began = time.monotonic()
        async with self._decoders:
            with span("vision.decode", kind=SpanKind.INTERNAL):
                pixels = await asyncio.to_thread(pixels_of, data, header, layout)
        decoded = time.monotonic()
        self._metrics.decode_seconds.observe(decoded - began)
        with span("vision.encode", kind=SpanKind.INTERNAL):
            encoded = await self._thread.call(self._run_tower, pixels, layout)
        self._metrics.encode_seconds.observe(time.monotonic() - decoded)
        return Embeddings(content_hash, layout.num_tokens, encoded)

    def _run_tower(self, pixels: bytes, layout: ImageLayout) -> bytes:
        """Run in the engine thread."""
        encoded = self._sight.tower.encode(pixels, width=layout.width, height=layout.height)
        assert len(encoded) == layout.num_tokens * self._sight.tower.hidden_size * 4, "tower and layout disagree"
        return encoded

    def _layout(self, data: bytes) -> tuple[ImageHeader, ImageLayout]:
        header = check_encoded(data)
        return header, layout_of(header.width, header.height, self._sight.rules)

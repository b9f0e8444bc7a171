"""How do gRPC calls reach the image desk?"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator, Sequence

from proto.common_pb2 import ImageRef
from proto.vision_pb2 import EncodeChunk, EncodedImage, EncodeRequest, PrepareReply
from proto.vision_pb2_grpc import VisionServicer, add_VisionServicer_to_server
from services.chassis.engine_thread import EngineThread
from services.chassis.errors import BadImage, BlocksLost, Overloaded
from services.chassis.service import Service
from services.vision.config import VisionSettings
from services.vision.embeddings import Embeddings
from services.vision.encoding import ImageDesk
from services.vision.metrics import VisionMetrics
from services.vision.model import load_sight

CHUNK_BYTES = 2 << 20
MAX_IMAGES = 64
"""Of one request."""
MAX_STREAMS = 64
"""Encode calls at once: a stream keeps its embeddings in memory even when the cache has let go of them."""


class Servicer(VisionServicer):
    """Prepare and Encode over one tower."""

    def __init__(self, desk: ImageDesk, metrics: VisionMetrics, address: str) -> None:
        self._desk = desk
        self._metrics = metrics
        self._address = address
        self._num_streams = 0

    async def Prepare(self, request: EncodeRequest, _context: object) -> PrepareReply:
        self._check(request)
        self._desk.check_together(request.images)
        encoded = [await self._desk.embeddings_of(image) for image in request.images]  # one request, one place in line
        return PrepareReply(
            images=[EncodedImage(content_hash=each.content_hash, num_tokens=each.num_tokens) for each in encoded],
            address=self._address,
            fingerprint=self._desk.fingerprint,
        )

    async def Encode(self, request: EncodeRequest, _context: object) -> AsyncIterator[EncodeChunk]:
        self._check(request)
        if self._num_streams >= MAX_STREAMS:
            raise Overloaded(f"{self._num_streams} streams of embeddings are open, the limit")
        self._num_streams += 1
        try:
            for index, image in enumerate(request.images):
                for chunk in _pieces(index, await self._desk.embeddings_of(image)):
                    yield chunk
                    self._metrics.sent_bytes.inc(len(chunk.data))
        finally:
            self._num_streams -= 1

    def _check(self, request: EncodeRequest) -> None:
        if request.fingerprint and request.fingerprint != self._desk.fingerprint:
            raise BlocksLost("the embeddings were made by another vision model than the one here")
        _check_count(request.images)


class Refusal(VisionServicer):
    """Prepare and Encode of a model that takes no images."""

    async def Prepare(self, request: EncodeRequest, _context: object) -> PrepareReply:
        _refuse(request)
        return PrepareReply()

    async def Encode(self, request: EncodeRequest, _context: object) -> AsyncIterator[EncodeChunk]:
        _refuse(request)
        return
        yield EncodeChunk()  # never reached; makes this a stream, an empty one without images


def _refuse(request: EncodeRequest) -> None:
    if request.images:
        raise BadImage(f"model {request.model!r} takes no images: send text only", field="messages")


def _check_count(images: Sequence[ImageRef]) -> None:
    if len(images) > MAX_IMAGES:
        raise BadImage(f"{len(images)} images; a request may have {MAX_IMAGES}", field="messages")


def _pieces(index: int, embeddings: Embeddings) -> Iterator[EncodeChunk]:
    whole = memoryview(embeddings.data)
    for start in range(0, len(whole), CHUNK_BYTES):
        piece = bytes(whole[start : start + CHUNK_BYTES])
        yield EncodeChunk(
            image_index=index,
            data=piece,
            offset_bytes=start,
            num_tokens=embeddings.num_tokens,
            crc32=zlib.crc32(piece),
        )


async def build(service: Service) -> None:
    """Load the tower in the engine thread, if the model has one, then serve it."""
    settings = service.settings
    assert isinstance(settings, VisionSettings)
    thread = EngineThread("vision engine")
    thread.start()
    service.on_stop(thread.stop)
    service.spawn(thread.run(), "vision engine")
    sight = await thread.call(load_sight, settings, service.progress)
    if sight is None:
        add_VisionServicer_to_server(Refusal(), service.server)
        return
    metrics = VisionMetrics(service.metrics)
    desk = ImageDesk(sight, thread, metrics)
    add_VisionServicer_to_server(Servicer(desk, metrics, service.address), service.server)

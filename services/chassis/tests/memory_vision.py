"""A vision replica that keeps embeddings in memory: real on the wire, with switches for trouble."""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from proto.common_pb2 import ImageRef
from proto.vision_pb2 import EncodeChunk, EncodeRequest, PrepareReply
from proto.vision_pb2_grpc import VisionServicer, add_VisionServicer_to_server
from services.chassis.errors import BlocksLost
from services.chassis.testing import serve

FINGERPRINT = b"v" * 32


class MemoryVision(VisionServicer):
    """Keeps embeddings by content hash. `gate` holds calls up while cleared; `damage` changes each piece."""

    def __init__(self, *, hidden_size: int, chunk_bytes: int = 2 << 20) -> None:
        self.hidden_size = hidden_size
        self.chunk_bytes = chunk_bytes
        self.embeddings: dict[bytes, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.damage = lambda chunk: None
        self.address = ""
        self.fetched: list[bytes] = []
        """Content hashes asked for, in order."""

    def image(self, name: str, *, position: int, num_tokens: int) -> ImageRef:
        """Make an image whose embeddings depend on its name only, and keep them."""
        content_hash = sha256(name.encode()).digest()
        size = num_tokens * self.hidden_size
        seed = content_hash[0] + 1
        values = [((index * 37 * seed) % 101 - 50) / 50 for index in range(size)]
        self.embeddings[content_hash] = struct.pack(f"<{size}f", *values)
        return ImageRef(
            content_hash=content_hash,
            position=position,
            num_tokens=num_tokens,
            vision_address=self.address,
            vision_fingerprint=FINGERPRINT,
        )

    async def Prepare(self, request: EncodeRequest, context: Any) -> PrepareReply:
        return PrepareReply(address=self.address, fingerprint=FINGERPRINT)

    async def Encode(self, request: EncodeRequest, context: Any) -> AsyncIterator[EncodeChunk]:
        (image,) = request.images
        self.fetched.append(image.content_hash)
        await self.gate.wait()
        embeddings = self.embeddings.get(image.content_hash)
        if embeddings is None or request.fingerprint != FINGERPRINT:
            raise BlocksLost("not here")
        for offset in range(0, len(embeddings), self.chunk_bytes):
            data = embeddings[offset : offset + self.chunk_bytes]
            num_tokens = len(embeddings) // self.hidden_size // 4
            chunk = EncodeChunk(data=data, offset_bytes=offset, num_tokens=num_tokens, crc32=zlib.crc32(data))
            self.damage(chunk)
            yield chunk


@asynccontextmanager
async def memory_vision(*, hidden_size: int, chunk_bytes: int = 2 << 20) -> AsyncIterator[MemoryVision]:
    """Serve one under its `address`; at the end nobody is held up any more."""
    vision = MemoryVision(hidden_size=hidden_size, chunk_bytes=chunk_bytes)
    async with serve(lambda server: add_VisionServicer_to_server(vision, server)) as address:
        vision.address = address
        try:
            yield vision
        finally:
            vision.gate.set()

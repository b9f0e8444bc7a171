"""How do tests run the whole service on a folder, and write to it as its peers do?"""

import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest

from proto.kvstore_pb2 import BlockChunk, LookupRequest, ReadRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.channel import open_channel
from services.chassis.service import Service
from services.chassis.testing import running
from services.kvstore import server as server_module
from services.kvstore.config import KvstoreSettings
from services.kvstore.tests.blocks import FINGERPRINT, key, payload

if TYPE_CHECKING:
    from proto.kvstore_pb2_grpc import KvstoreAsyncStub

PIECE = 2 << 20
SERVICES: dict[Path, Service] = {}


def settings_for(folder: Path, max_bytes: int = 64 << 20, **more: Any) -> KvstoreSettings:
    return KvstoreSettings(path=folder, max_bytes=max_bytes, segment_bytes=16 << 20, drain_seconds=1, **more)


@asynccontextmanager
async def kvstore(folder: Path, max_bytes: int = 64 << 20, **more: Any) -> AsyncIterator["KvstoreAsyncStub"]:
    """A whole service on the folder, and a stub that talks to it as its peers do."""
    async with (
        running(settings_for(folder, max_bytes, **more), server_module.build) as service,
        open_channel(service.address, peer="kvstore") as channel,
    ):
        SERVICES[folder] = service
        yield KvstoreStub(channel)
    del SERVICES[folder]


def metrics(folder: Path) -> dict[str, float]:
    """What /metrics of the service on this folder shows of the store, without its prefix."""
    lines = generate_latest(SERVICES[folder].metrics).decode().splitlines()
    pairs = (line.removeprefix("fathom_kvstore_").split(" ") for line in lines if line.startswith("fathom_kvstore_"))
    return {name: float(value) for name, value in pairs}


def chunks(number: int, num_bytes: int = 5000, **changes: Any) -> Iterator[BlockChunk]:
    """One block as a writer sends it."""
    data = payload(number, num_bytes)
    for offset in range(0, num_bytes, PIECE):
        piece = data[offset : offset + PIECE]
        is_last = offset + len(piece) == num_bytes
        fields = {
            "block_key": key(number),
            "fingerprint": FINGERPRINT if offset == 0 else b"",
            "block_bytes": num_bytes,
            "offset_bytes": offset,
            "data": piece,
            "block_crc32": zlib.crc32(data) if is_last else 0,
            "retention": 1,
        }
        yield BlockChunk(**{**fields, **changes})


async def write(stub: "KvstoreAsyncStub", *blocks: Iterator[BlockChunk]) -> tuple[int, int]:
    reply = await stub.Write((chunk for one in blocks for chunk in one), timeout=60)
    return reply.num_stored, reply.num_duplicate


async def lookup(stub: "KvstoreAsyncStub", numbers: range, fingerprint: bytes = FINGERPRINT) -> int:
    request = LookupRequest(block_keys=[key(n) for n in numbers], fingerprint=fingerprint)
    return (await stub.Lookup(request, timeout=30)).num_blocks


async def read(
    stub: "KvstoreAsyncStub", numbers: range, fingerprint: bytes = FINGERPRINT, **more: Any
) -> list[BlockChunk]:
    request = ReadRequest(block_keys=[key(n) for n in numbers], fingerprint=fingerprint, **more)
    return [chunk async for chunk in stub.Read(request, timeout=30)]

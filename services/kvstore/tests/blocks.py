"""What blocks do the tests write, and how do they find the bytes on disk?"""

import random
import zlib
from pathlib import Path
from typing import Any

from services.kvstore.segments import Block
from services.kvstore.store import Store

FINGERPRINT = b"f" * 32
OTHER_FINGERPRINT = b"g" * 32
MEBIBYTE = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int, num_bytes: int = 5000) -> bytes:
    """Bytes that belong to this number and to no other."""
    return random.Random(number).randbytes(num_bytes)


def block(
    number: int,
    num_bytes: int = 5000,
    *,
    fingerprint: bytes = FINGERPRINT,
    retention: int = 0,
    tenant: str = "",
) -> Block:
    data = payload(number, num_bytes)
    return Block(key(number), fingerprint, data, zlib.crc32(data), retention, tenant)


async def open_store(
    folder: Path, *, max_bytes: int = 64 * MEBIBYTE, segment_bytes: int = MEBIBYTE, **options: Any
) -> Store:
    return await Store.open(folder, max_bytes=max_bytes, segment_bytes=segment_bytes, **options)


async def read_all(store: Store, numbers: list[int], fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    """The payloads a reader gets for these keys, in order."""
    return [bytes(b.payload) async for b in store.read(fingerprint, [key(n) for n in numbers])]


async def served(store: Store, numbers: list[int]) -> dict[int, bytes]:
    """Every block that can be read on its own."""
    found = {}
    for number in numbers:
        for data in await read_all(store, [number]):
            found[number] = data
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def flip(path: Path, offset: int) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0x40]))

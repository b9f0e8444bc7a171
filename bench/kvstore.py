"""How fast is the KV store beside plain files and an empty RPC? `python -m bench.kvstore`, at most about 30 s.

Every figure is printed with its yardstick from the same run. Reads are cold as far as the kernel obeys: the page cache
is told to forget the files first. The gRPC rows use a real `python -m services.kvstore` process on loopback.
"""

import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from proto.kvstore_pb2 import BlockChunk, GetStatsRequest, LookupRequest, ReadRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.channel import MAX_CHUNK_BYTES, open_channel
from services.chassis.config import child_environment
from services.chassis.errors import FathomError
from services.kvstore.segments import Block
from services.kvstore.store import Store

if TYPE_CHECKING:
    from proto.kvstore_pb2_grpc import KvstoreAsyncStub

BLOCK_BYTES = 30 * 2 * 128 * 3 * 64 * 2  # SmolLM2-135M in bf16: layers, K and V, tokens, heads, width, bytes
NUM_BLOCKS = 48
ROUNDS = 3
LOOKUP_KEYS = 400
INDEXED_BLOCKS = 10_000
FINGERPRINT = b"f" * 32
MEBIBYTE = 1 << 20


def main() -> None:
    """Print one JSON line per figure."""
    asyncio.run(_run())


async def _run() -> None:
    blocks = _make_blocks()
    with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-") as folder:
        await _bytes_in_process(Path(folder), blocks)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-") as folder:
        await _over_grpc(Path(folder), blocks)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-") as folder:
        await _lookup_and_start(Path(folder))


async def _bytes_in_process(folder: Path, blocks: list[Block]) -> None:
    seconds: dict[str, list[float]] = {"write": [], "plain_write": [], "read": [], "plain_read": []}
    for round_number in range(ROUNDS):
        plain = folder / f"plain{round_number}"
        seconds["plain_write"].append(_timed(partial(_plain_write, plain, blocks)))
        store = await Store.open(folder / f"store{round_number}", max_bytes=1 << 30, segment_bytes=256 * MEBIBYTE)
        seconds["write"].append(await _timed_async(partial(_store_write, store, blocks)))
        _forget_all(folder)
        seconds["plain_read"].append(_timed(partial(_plain_read, plain)))
        seconds["read"].append(await _timed_async(partial(_store_read, store, blocks)))
        await store.close()
    for what in ("write", "read"):
        _print_rate(f"kvstore_{what}", seconds[what], f"plain file {what}", seconds[f"plain_{what}"])


async def _over_grpc(folder: Path, blocks: list[Block]) -> None:
    address, server = _start_service(folder)
    try:
        async with open_channel(address, peer="kvstore") as channel:
            stub = KvstoreStub(channel)
            await _until_ready(stub)
            idle_mebibytes = _rss_bytes(server.pid) / MEBIBYTE
            write = await _timed_async(lambda: stub.Write(_chunks(blocks), timeout=30))
            _forget_all(folder)
            request = ReadRequest(block_keys=[block.key for block in blocks], fingerprint=FINGERPRINT)
            read = await _timed_async(lambda: _drain(stub, request))
            total = NUM_BLOCKS * BLOCK_BYTES / MEBIBYTE
            _print(name="kvstore_grpc_write", mebibytes_per_second=total / write)
            _print(name="kvstore_grpc_read", mebibytes_per_second=total / read)
            keys = [block.key for block in blocks]
            keys = (keys * (LOOKUP_KEYS // len(keys) + 1))[:LOOKUP_KEYS]
            lookup = LookupRequest(block_keys=keys, fingerprint=FINGERPRINT)
            hit, empty = [], []
            for _ in range(300):
                hit.append(await _timed_async(lambda: stub.Lookup(lookup, timeout=5)))
                empty.append(await _timed_async(lambda: stub.GetStats(GetStatsRequest(), timeout=5)))
            _print(
                name=f"kvstore_grpc_lookup_{LOOKUP_KEYS}",
                p50_microseconds=statistics.median(hit) * 1e6,
                yardstick="GetStats RPC",
                yardstick_microseconds=statistics.median(empty) * 1e6,
                ratio=statistics.median(hit) / statistics.median(empty),
            )
            _print(name="kvstore_rss", idle_mebibytes=idle_mebibytes, after_load=_rss_bytes(server.pid) / MEBIBYTE)
    finally:
        server.terminate()
        server.wait(15)


async def _lookup_and_start(folder: Path) -> None:
    store = await Store.open(folder, max_bytes=1 << 30, segment_bytes=256 * MEBIBYTE)
    payload = bytes(64)
    small = [Block(n.to_bytes(32, "big"), FINGERPRINT, payload, zlib.crc32(payload)) for n in range(INDEXED_BLOCKS)]
    for start in range(0, INDEXED_BLOCKS, 2000):
        await asyncio.gather(*(store.write(block) for block in small[start : start + 2000]))
    keys = [block.key for block in small[:LOOKUP_KEYS]]
    times = [_timed(lambda: store.lookup(FINGERPRINT, keys)) for _ in range(500)]
    _print(name=f"kvstore_lookup_{LOOKUP_KEYS}", p50_microseconds=statistics.median(times) * 1e6)
    await store.close()
    started = time.perf_counter()
    store = await Store.open(folder, max_bytes=1 << 30, segment_bytes=256 * MEBIBYTE)
    _print(name="kvstore_start", seconds_per_100k_blocks=(time.perf_counter() - started) * 100_000 / INDEXED_BLOCKS)
    await store.close()


def _make_blocks() -> list[Block]:
    payloads = [os.urandom(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    return [Block(n.to_bytes(32, "big"), FINGERPRINT, data, zlib.crc32(data)) for n, data in enumerate(payloads)]


def _plain_write(path: Path, blocks: list[Block]) -> None:
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            file.write(block.payload)
        os.fdatasync(file.fileno())


def _plain_read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


async def _store_write(store: Store, blocks: list[Block]) -> None:
    await asyncio.gather(*(store.write(block) for block in blocks))


async def _store_read(store: Store, blocks: list[Block]) -> None:
    count = 0
    async for _ in store.read(FINGERPRINT, [block.key for block in blocks]):
        count += 1
    assert count == len(blocks)


async def _drain(stub: "KvstoreAsyncStub", request: ReadRequest) -> None:
    received = 0
    async for chunk in stub.Read(request, timeout=30):
        received += len(chunk.data)
    assert received == NUM_BLOCKS * BLOCK_BYTES


def _chunks(blocks: list[Block]) -> Iterator[BlockChunk]:
    for block in blocks:
        for offset in range(0, BLOCK_BYTES, MAX_CHUNK_BYTES):
            yield BlockChunk(
                block_key=block.key,
                fingerprint=FINGERPRINT,
                block_bytes=BLOCK_BYTES,
                offset_bytes=offset,
                data=bytes(block.payload[offset : offset + MAX_CHUNK_BYTES]),
                block_crc32=block.crc32,
            )


def _start_service(folder: Path) -> tuple[str, "subprocess.Popen[bytes]"]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = child_environment("kvstore", {"listen": address, "path": folder, "log_level": "error"})
    command = [sys.executable, "-m", "services.kvstore"]
    return address, subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


async def _until_ready(stub: "KvstoreAsyncStub") -> None:
    for _ in range(200):
        try:
            await stub.GetStats(GetStatsRequest(), timeout=1)
        except FathomError:
            await asyncio.sleep(0.1)
        else:
            return
    raise TimeoutError("the kvstore process did not become ready")


def _forget_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def _timed_async(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def _print_rate(name: str, seconds: list[float], yardstick: str, yardstick_seconds: list[float]) -> None:
    mine, plain = statistics.median(seconds), statistics.median(yardstick_seconds)
    total = NUM_BLOCKS * BLOCK_BYTES / MEBIBYTE
    _print(
        name=name,
        mebibytes_per_second=total / mine,
        yardstick=yardstick,
        yardstick_mebibytes_per_second=total / plain,
        ratio=plain / mine,
    )


def _print(**fields: object) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps({**rounded, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}), flush=True)


if __name__ == "__main__":
    main()

"""How fast is the KV store beside the disk it is on and an empty RPC? `python -m bench.kvstore`, about a minute.

Every figure is printed with its yardstick from the same run: fio at the same block size and queue depth, past the page
cache like the store itself (apt-get install fio), right before and after each round; it reads the store's own file, for
one place of a disk is not as fast as another. The gRPC rows use a real `python -m services.kvstore` on loopback,
and for lookups a server that is grpc.aio alone.
"""

import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio
from isal.isal_zlib import crc32

from bench import bare_server
from bench.disk import MEBIBYTE, fio_read_rate, fio_write_rate
from bench.machine import describe
from proto.kvstore_pb2 import BlockChunk, GetStatsRequest, LookupRequest, ReadRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.channel import MAX_CHUNK_BYTES, open_channel
from services.chassis.config import child_environment
from services.chassis.errors import FathomError
from services.chassis.memory import keep_freed_memory
from services.kvstore.segments import Block
from services.kvstore.store import Store

if TYPE_CHECKING:
    from proto.kvstore_pb2_grpc import KvstoreAsyncStub

BLOCK_BYTES = 30 * 2 * 128 * 3 * 64 * 2  # SmolLM2-135M in bf16: layers, K and V, tokens, heads, width, bytes
NUM_BLOCKS = 48
ROUNDS, READ_ROUNDS = 5, 9
TOTAL_BYTES = 192 << 20
SEGMENT_BYTES = 256 << 20
"""A round's blocks lie in one file."""
DEPTH = 4
"""Blocks under way at once, here and in fio."""
PLACE = "/var/tmp"
LOOKUP_KEYS = 400
NUM_CALLS, WARM_CALLS = 520, 20
INDEXED_BLOCKS = 10_000
FINGERPRINT = b"f" * 32


def main() -> None:
    """Print one JSON line per figure."""
    keep_freed_memory()  # as each service does when it starts
    asyncio.run(_run())


async def _run() -> None:
    for block_bytes in (1 * MEBIBYTE, 4 * MEBIBYTE):
        with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-", dir=PLACE) as folder:
            await _bytes_in_process(Path(folder), block_bytes)
    blocks = _make_blocks(NUM_BLOCKS, BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-", dir=PLACE) as folder:
        await _over_grpc(Path(folder), blocks)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-kv-", dir=PLACE) as folder:
        await _lookup_and_start(Path(folder))


async def _bytes_in_process(folder: Path, block_bytes: int) -> None:
    """Write and read with DEPTH blocks under way."""
    blocks = _make_blocks(TOTAL_BYTES // block_bytes, block_bytes)
    total = len(blocks) * block_bytes / MEBIBYTE
    name = f"{block_bytes >> 20}mib"
    fio_write = partial(fio_write_rate, folder, block_bytes=block_bytes, depth=DEPTH, total_bytes=TOTAL_BYTES)
    writes = _Rounds(total, fio_write)
    for round_number in range(ROUNDS):
        place = folder / f"store{round_number}"
        store = await Store.open(place, max_bytes=4 << 30, segment_bytes=SEGMENT_BYTES)
        await writes.add(partial(_store_write, store, blocks))
        if round_number < ROUNDS - 1:
            await store.close()
            shutil.rmtree(place)
    _print(name=f"kvstore_write_{name}", depth=DEPTH, **writes.fields())
    await store.seal_older_than(-1.0)  # or fio would read room that was never written, which costs nothing
    file = max(place.glob("*.seg"), key=lambda path: path.stat().st_size)
    reads = _Rounds(total, partial(fio_read_rate, file, block_bytes=block_bytes, depth=DEPTH))
    for _ in range(READ_ROUNDS):
        await reads.add(partial(_store_read, store, blocks))
    checksum = total / _timed(lambda: [crc32(block.payload) for block in blocks])
    share = statistics.median(reads.rates) / checksum
    _print(name=f"kvstore_read_{name}", depth=DEPTH, **reads.fields(), checksum_share=share)
    await store.close()


class _Rounds:
    """Rounds of work, with the yardstick before and after each: shared disks change their mind within seconds."""

    def __init__(self, mebibytes: float, yardstick: Callable[[], float | None]) -> None:
        """mebibytes: of one round."""
        self.rates: list[float] = []
        self._mebibytes = mebibytes
        self._yardstick = yardstick
        self._yardsticks = [yardstick()]

    async def add(self, work: Callable[[], Awaitable[object]]) -> None:
        self.rates.append(self._mebibytes / await _timed_async(work))
        self._yardsticks.append(self._yardstick())

    def fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"mebibytes_per_second": statistics.median(self.rates), "rounds": len(self.rates)}
        theirs = [rate for rate in self._yardsticks if rate is not None]
        if theirs:
            around = [statistics.mean(pair) for pair in pairwise(theirs)]
            ratios = [mine / plain for mine, plain in zip(self.rates, around, strict=True)]
            fields |= {
                "fio_mebibytes_per_second": statistics.median(theirs),
                "ratio": statistics.median(ratios),
                "worst_ratio": min(ratios),
                "best_ratio": max(ratios),
            }
        return fields


async def _over_grpc(folder: Path, blocks: list[Block]) -> None:
    address, server = _start_service(folder)
    try:
        async with open_channel(address, peer="kvstore") as channel:
            stub = KvstoreStub(channel)
            await _until_ready(stub)
            idle_mebibytes = _rss_bytes(server.pid) / MEBIBYTE
            write = await _timed_async(lambda: stub.Write(_chunks(blocks), timeout=30))
            request = ReadRequest(block_keys=[block.key for block in blocks], fingerprint=FINGERPRINT)
            read = await _timed_async(lambda: _drain(stub, request))
            total = NUM_BLOCKS * BLOCK_BYTES / MEBIBYTE
            _print(name="kvstore_grpc_write", mebibytes_per_second=total / write)
            _print(name="kvstore_grpc_read", mebibytes_per_second=total / read)
            keys = [block.key for block in blocks]
            keys = (keys * (LOOKUP_KEYS // len(keys) + 1))[:LOOKUP_KEYS]
            await _lookup_over_grpc(stub, keys)
            _print(name="kvstore_rss", idle_mebibytes=idle_mebibytes, after_load=_rss_bytes(server.pid) / MEBIBYTE)
    finally:
        server.terminate()
        server.wait(15)


async def _lookup_over_grpc(stub: "KvstoreAsyncStub", keys: list[bytes]) -> None:
    """Lookups between empty calls: our server by our channel, and grpc.aio alone on both sides.

    In another order each time, for the first call to a process that slept takes longer than the next one.
    """
    lookup = LookupRequest(block_keys=keys, fingerprint=FINGERPRINT)
    empty = LookupRequest(fingerprint=bytes(32))
    times: dict[str, list[float]] = {"lookup": [], "empty": [], "bare": []}
    with bare_server.running() as address:
        async with aio.insecure_channel(address) as channel:
            bare = KvstoreStub(channel)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "lookup": lambda: stub.Lookup(lookup, timeout=5),
                "empty": lambda: stub.Lookup(empty, timeout=5),
                "bare": lambda: bare.GetStats(GetStatsRequest(), timeout=5),
            }
            order, chance = list(calls), random.Random(1)
            for _ in range(NUM_CALLS):
                chance.shuffle(order)
                for name in order:
                    times[name].append(await _timed_async(calls[name]))
    middle = {name: statistics.median(found[WARM_CALLS:]) for name, found in times.items()}
    _print(
        name=f"kvstore_grpc_lookup_{len(keys)}",
        p50_microseconds=middle["lookup"] * 1e6,
        empty_microseconds=middle["empty"] * 1e6,
        bare_grpc_microseconds=middle["bare"] * 1e6,
        ratio=middle["lookup"] / middle["empty"],
        ratio_to_bare=middle["lookup"] / middle["bare"],
    )


async def _lookup_and_start(folder: Path) -> None:
    store = await Store.open(folder, max_bytes=1 << 30, segment_bytes=256 * MEBIBYTE)
    payload = bytes(64)
    small = [Block(n.to_bytes(32, "big"), FINGERPRINT, payload, crc32(payload)) for n in range(INDEXED_BLOCKS)]
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


def _make_blocks(num_blocks: int, block_bytes: int) -> list[Block]:
    payloads = [os.urandom(block_bytes) for _ in range(num_blocks)]
    return [Block(n.to_bytes(32, "big"), FINGERPRINT, data, crc32(data)) for n, data in enumerate(payloads)]


async def _store_write(store: Store, blocks: list[Block]) -> None:
    """As a busy writer does: 64 MiB wait at most, and the next comes as soon as one is durable."""
    room = asyncio.Semaphore(max(DEPTH, (64 << 20) // len(blocks[0].payload)))

    async def write(block: Block) -> None:
        async with room:
            await store.write(block)

    await asyncio.gather(*(write(block) for block in blocks))


async def _store_read(store: Store, blocks: list[Block]) -> None:
    """One reader, as a prefix hit is: the store itself keeps reads under way."""
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


def _print(**fields: object) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps({**rounded, "machine": describe()}), flush=True)


if __name__ == "__main__":
    main()

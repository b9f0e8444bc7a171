"""What do the tests of the object store share: segments to upload, replicas of one bucket, and a server that misbehaves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path

import pytest
from isal.isal_zlib import crc32
from obstore.store import MemoryStore

from services.chassis.testing import free_port
from services.kvstore.blobs import BlobBackend, BlobOptions
from services.kvstore.encryption import Keyring
from services.kvstore.format import HEADER_BYTES, record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.remote import RemoteTier
from services.kvstore.store_clock import StoreClock
from services.kvstore.tests.blocks import FINGERPRINT, key, payload
from services.kvstore.tiers import Removed, SealedSegment, Selection

CHAT, AGENT = 1, 2
CREATED = 4_000_000_000.0
"""Later than any date that a real object store may give to what a test puts there."""
LIFE_SECONDS = 1000.0
FAST = BlobOptions(read_seconds=1.0, slow_seconds=0.3, write_seconds=5.0, open_seconds=0.2, refresh_seconds=0.1)


def sealed_segment(
    folder: Path,
    numbers: Sequence[int],
    *,
    number: int = 1,
    epoch: int = 7,
    tenants: Sequence[str] = ("",),
    retention: int = AGENT,
    num_bytes: int = 5000,
    fingerprint: bytes = FINGERPRINT,
    created: float = CREATED,
) -> SealedSegment:
    """A segment file with these blocks' payloads, as the engine would announce it. Tenants take turns."""
    path = folder / f"{number:012d}-{epoch:016x}.seg"
    locations, offset = [], 0
    with path.open("wb") as file:
        for place, block in enumerate(numbers):
            data = payload(block, num_bytes)
            file.seek(offset + HEADER_BYTES)
            file.write(data)
            locations.append(
                BlockLocation(
                    key(block),
                    fingerprint,
                    number,
                    offset,
                    num_bytes,
                    crc32(data),
                    retention,
                    created,
                    tenants[place % len(tenants)],
                )
            )
            offset += record_bytes(num_bytes)
        file.truncate(offset)
    return SealedSegment(path, number, epoch, retention, locations, offset, created, created + LIFE_SECONDS)


class Engine:
    """The engine's side of the tier, as far as the tier can see it: what it was told."""

    def __init__(self) -> None:
        self.sealed_after: list[float] = []
        self.evicted: list[tuple[Selection, float]] = []
        self.tenants: list[str] = []

    async def seal_older_than(self, seconds: float) -> None:
        self.sealed_after.append(seconds)

    def holders(self) -> Collection[str]:
        return self.tenants

    async def evict_local(self, selection: Selection, before_unix_seconds: float) -> Removed:
        self.evicted.append((selection, before_unix_seconds))
        return Removed(1, 100)


class Clock:
    """Wall time that a test moves."""

    def __init__(self) -> None:
        self.now = CREATED

    def __call__(self) -> float:
        return self.now

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let everybody go by it: the clock of the machine, and the one that nobody sets."""
        monkeypatch.setattr("time.time", self)
        monkeypatch.setattr("time.clock_gettime", lambda _clock: self.now)


class SameClock(StoreClock):
    """The object store goes by the clock of the test too, whatever it says of its objects."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(now=clock, steady=clock)
        self.set(clock())

    @property
    def is_due(self) -> bool:
        return False

    def saw(self, unix_seconds: float) -> None:
        """Of no interest: a real store's dates are not of this clock."""


class Bucket:
    """One object store, and replicas that come and go."""

    def __init__(self, store=None, options: BlobOptions = FAST) -> None:
        self.store = store or MemoryStore()
        self.clock = Clock()
        self.options = options

    def replica(self, keyring: Keyring | None = None) -> RemoteTier:
        """One that knows nothing yet."""
        blobs = BlobBackend(self.store, self.options)
        blobs.time = SameClock(self.clock)
        return RemoteTier(blobs, keyring=keyring, now=self.clock)

    async def fresh(self) -> RemoteTier:
        """One that has listed what there is."""
        tier = self.replica()
        await tier.catalog.refresh(is_full=True)
        return tier


@contextlib.asynccontextmanager
async def uploading(tier: RemoteTier) -> AsyncIterator[RemoteTier]:
    """Let a tier upload what it finds no sign of in the store."""
    if not tier.catalog.listed.is_set():
        await tier.catalog.refresh(is_full=True)
    task = asyncio.create_task(tier.uploads.run())
    try:
        yield tier
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def upload(tier: RemoteTier, *segments: SealedSegment) -> None:
    """Have segments uploaded, and wait for it."""
    async with uploading(tier), asyncio.timeout(20):
        for segment in segments:
            tier.sealed(segment)
        await tier.uploads.flush()


async def served(tier: RemoteTier, numbers: Sequence[int], fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    """The bytes of the leading blocks that the tier has."""
    found = await tier.longest(fingerprint, [key(number) for number in numbers])
    return [bytes(await tier.read(location)) for location in found]


def payloads(numbers: Iterable[int], num_bytes: int = 5000) -> list[bytes]:
    """What these blocks hold."""
    return [payload(number, num_bytes) for number in numbers]


async def paths(tier: RemoteTier, prefix: str) -> list[str]:
    """The objects that are there, in order."""
    return sorted(one.path for one in await tier.blobs.list(prefix, max_blobs=1000))


class Gate:
    """A TCP relay in front of a server that is told to misbehave: "pass", "503", "hang" or "down"."""

    def __init__(self, target_port: int) -> None:
        self.mode = "pass"
        self.port = free_port()
        self.num_connections = 0
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while self.mode != "down":
                head = await reader.read(65536)
                if not head:
                    return
                if self.mode == "503":
                    writer.write(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    await writer.drain()
                    return
                if self.mode == "hang":
                    await asyncio.sleep(30)
                    return
                await self._relay(head, reader, writer)
                return
        except (OSError, asyncio.CancelledError):
            pass  # the other side left, or the test is over
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _relay(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        back.write(head)
        pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            back.close()

    def become(self, mode: str) -> None:
        """Change behaviour, of connections that are open too."""
        self.mode = mode
        for writer in tuple(self._writers):
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


@contextlib.asynccontextmanager
async def gate(target_port: int) -> AsyncIterator[Gate]:
    """A relay to a local port."""
    made = Gate(target_port)
    server = await asyncio.start_server(made._serve, "127.0.0.1", made.port)
    try:
        yield made
    finally:
        made.become("down")
        server.close()


async def eventually(promise, seconds: float = 20.0) -> None:
    """Poll until it holds."""
    give_up = time.monotonic() + seconds
    while not promise():
        assert time.monotonic() < give_up, "it did not come true"
        await asyncio.sleep(0.02)

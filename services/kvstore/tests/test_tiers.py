"""Does the tier behind hear of every sealed segment and deletion, and do its blocks fill the gaps of the local store?"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from services.kvstore.directory import segment_files
from services.kvstore.disk import Disk
from services.kvstore.retention import AGENT, CHAT, RetentionPolicy
from services.kvstore.segments import DamagedBlockError, read_run
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, read_all
from services.kvstore.tiers import RemoteChecked, RemoteLocation, Removed, SealedSegment, Selection


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.segments: list[SealedSegment] = []
        self.evicted: list[Selection] = []

    def sealed(self, segment: SealedSegment) -> None:
        assert segment.path.exists()
        self.segments.append(segment)

    async def evict(self, selection: Selection) -> Removed:
        self.evicted.append(selection)
        return Removed(1, 10)

    def keys(self) -> list[bytes]:
        return [one.key for segment in self.segments for one in segment.locations]


class OtherStore:
    """A tier made of another store's sealed segments, with switches for trouble."""

    breaker = "closed"

    def __init__(self, folder: Path, segments: Sequence[SealedSegment]) -> None:
        self._disk = Disk(folder)
        self._files = {file.number: file for file in segment_files(folder)}
        self._blocks = {(one.fingerprint, one.key): (one, segment) for segment in segments for one in segment.locations}
        self.fails = False

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    async def longest(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[RemoteLocation]:
        if self.fails:
            raise TimeoutError
        found = []
        for name in keys:
            if (fingerprint, name) not in self._blocks:
                break
            location, segment = self._blocks[fingerprint, name]
            found.append(RemoteLocation(location, segment.epoch))
        return found

    async def verify(self, *, max_bytes: int) -> AsyncIterator[RemoteChecked]:
        yield RemoteChecked(self.num_blocks, self.num_blocks, max_bytes)

    async def bring(self, _location: RemoteLocation) -> bool:
        return False  # it writes to nobody's disk

    async def read(self, location: RemoteLocation) -> memoryview:
        file = self._files[location.location.segment]
        stored = (await asyncio.to_thread(read_run, self._disk, file, [location.location]))[0]
        if isinstance(stored, DamagedBlockError):
            raise stored
        return stored


async def test_every_sealed_segment_is_told_with_what_is_in_it(tmp_path: Path) -> None:
    """Those of earlier lives at once, new ones when they are full or the store ends; class and end of life with them."""
    store = await open_store(tmp_path)
    await asyncio.gather(*(store.write(block(n, retention=CHAT)) for n in range(3)))
    await store.close()
    listener = Listener()
    store = await open_store(tmp_path, segment_bytes=64 << 10)
    store.connect(listener=listener)
    assert [key(n) for n in range(3)] == listener.keys()
    await asyncio.gather(*(store.write(block(n, 20_000, retention=AGENT)) for n in range(3, 7)))
    await store.close()

    assert [key(n) for n in range(7)] == listener.keys()
    policy = RetentionPolicy()
    for segment in listener.segments:
        assert {segment.retention} == {one.retention for one in segment.locations}
        assert (
            policy.expires_at(segment.retention, segment.last_created_unix_seconds) == segment.expires_at_unix_seconds
        )
        assert segment.path.stat().st_size == segment.num_bytes
    assert [CHAT, AGENT, AGENT] == [segment.retention for segment in listener.segments]


async def test_open_segments_can_be_sealed_early(tmp_path: Path) -> None:
    """So that a replica that is lost takes only its latest blocks with it."""
    listener = Listener()
    store = await open_store(tmp_path)
    store.connect(listener=listener)
    await store.write(block(1))
    await store.seal_older_than(60)
    assert [] == listener.keys()
    await store.seal_older_than(0)
    assert [key(1)] == listener.keys()
    assert math.inf == listener.segments[0].expires_at_unix_seconds
    await store.close()


async def test_a_deletion_reaches_the_tier_and_tells_it_nothing_of_the_deleted(tmp_path: Path) -> None:
    """The segment that a deletion seals is told without the deleted blocks; another replica's deletion stays here."""
    listener = Listener()
    store = await open_store(tmp_path)
    store.connect(listener=listener)
    await asyncio.gather(*(store.write(block(n, tenant="ab"[n % 2])) for n in range(4)))
    removed = await store.evict(Selection(tenant="a"))
    assert (3, [Selection(tenant="a")]) == (removed.num_blocks, listener.evicted)
    assert [key(1), key(3)] == listener.keys()

    assert 0 == (await store.evict_local(Selection(tenant="b"), before_unix_seconds=1.0)).num_blocks
    assert 2 == (await store.evict_local(Selection(tenant="b"), before_unix_seconds=1e12)).num_blocks
    assert 1 == len(listener.evicted)
    await store.close()


async def test_blocks_of_the_tier_fill_the_gaps(tmp_path: Path) -> None:
    """Local, remote and local again in one chain; damage or a tier that is away is a miss from there on."""
    listener = Listener()
    other = await open_store(tmp_path / "other")
    other.connect(listener=listener)
    await asyncio.gather(*(other.write(block(n)) for n in (1, 2, 4)))
    await other.close()
    tier = OtherStore(tmp_path / "other", listener.segments)
    store = await open_store(tmp_path / "own")
    store.connect(remote=tier)
    await asyncio.gather(*(store.write(block(n)) for n in (0, 3)))
    keys = [key(n) for n in range(6)]

    assert 5 == (await store.find(FINGERPRINT, keys)).num_blocks
    assert [payload(n) for n in range(5)] == await read_all(store, list(range(6)))
    assert (3, 2) == (store.counts.remote_blocks, store.counts.read_blocks)
    assert [payload(0)] == (await read_all(store, [0, 9]))
    tier.fails = True
    assert 1 == (await store.find(FINGERPRINT, keys)).num_blocks
    assert [payload(0)] == await read_all(store, [0, 1, 2])
    tier.fails = False
    listener.segments[0].path.write_bytes(b"")
    assert [payload(0)] == await read_all(store, [0, 1, 2])
    await store.close()

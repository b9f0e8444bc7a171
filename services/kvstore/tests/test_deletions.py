"""Is a deletion obeyed, whatever else fails, waits or is wrong at that moment?"""

import asyncio
import dataclasses
import errno
import threading
import time
from pathlib import Path

import pytest

from services.chassis.errors import NoReplica
from services.kvstore import remote_catalog
from services.kvstore.admission import Deletions
from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.object_store import AdmittingTier
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_catalog import TOMBSTONE_SECONDS
from services.kvstore.retention import AGENT
from services.kvstore.segments import load_segment
from services.kvstore.store_clock import StoreClock
from services.kvstore.tests import objects
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, served
from services.kvstore.tests.objects import FAST, Bucket, Clock, Engine, paths, sealed_segment, upload
from services.kvstore.tiers import Selection
from services.kvstore.wall_clock import WallClock
from services.kvstore.writing import again

ACME = Selection(tenant="acme")
DAY = 86_400.0


class Failing(BlobBackend):
    """An object store that refuses one kind of listing."""

    refuses = ""

    async def list(self, prefix, *, after="", max_blobs):
        if self.refuses and prefix.startswith(self.refuses):
            raise BlobError("not now")
        return await super().list(prefix, after=after, max_blobs=max_blobs)


@pytest.mark.parametrize("is_full", [True, False])
async def test_a_deletion_is_obeyed_though_the_listing_behind_it_fails(is_full):
    """It is heard of once; what comes next in the same look must not lose it."""
    bucket = Bucket()
    blobs, engine = Failing(bucket.store, FAST), Engine()
    tier = RemoteTier(blobs, now=bucket.clock)
    await tier._refresh(engine, is_full=True)
    await (await bucket.fresh()).evict(ACME)
    blobs.refuses = "manifest"
    with pytest.raises(BlobError):
        await tier._refresh(engine, is_full=is_full)

    assert [ACME] == [selection for selection, _ in engine.evicted]
    blobs.refuses = ""
    await tier._refresh(engine, is_full=True)
    assert 1 == len(engine.evicted)


async def test_a_deletion_that_the_disk_refused_is_obeyed_later():
    """The next look tries again, though nothing is new by then."""

    class Refusing(Engine):
        is_refusing = True

        async def evict_local(self, selection, before_unix_seconds):
            if self.is_refusing:
                raise OSError("the disk is out of order")
            return await super().evict_local(selection, before_unix_seconds)

    bucket, engine = Bucket(), Refusing()
    tier = await bucket.fresh()
    await (await bucket.fresh()).evict(ACME)
    with pytest.raises(OSError, match="out of order"):
        await tier._refresh(engine, is_full=False)
    engine.is_refusing = False
    await tier._refresh(engine, is_full=False)
    assert [ACME] == [selection for selection, _ in engine.evicted]


async def test_a_deletion_is_obeyed_by_a_replica_that_was_busy_with_another():
    """It hears of the other replica's in the middle of its own."""
    bucket = Bucket()
    one, other = await bucket.fresh(), await bucket.fresh()
    await other.evict(ACME)
    await one.evict(Selection(tenant="zeta"))
    engine = Engine()
    await one._refresh(engine, is_full=False)
    assert [ACME] == [selection for selection, _ in engine.evicted]


async def test_copies_that_wait_for_the_disk_do_not_come_back_with_the_next_start(tmp_path: Path) -> None:
    """A block is being written again while its deletion comes, from another replica and of a minute ago."""
    store = await open_store(tmp_path)
    old = dataclasses.replace(block(0, tenant="acme"), first_created_seconds=time.time() - 600)
    await store.write(old)
    await store.write(block(1, tenant="acme"))
    location = store.catalog.index.find(FINGERPRINT, key(0))
    assert location is not None
    stored = await store.reader.stored_bytes_of(location)
    assert stored is not None
    deletion = asyncio.create_task(store.evict_local(ACME, time.time() - 60))
    await asyncio.sleep(0)
    copy = store._line.put(again(location, stored, AGENT), location)
    new = store._line.put(block(2, tenant="acme"))
    await deletion

    assert ["deleted", ""] == [await copy, await new]
    for _ in range(2):
        assert {n: payload(n) for n in (1, 2)} == await served(store, [0, 1, 2])
        await store.close()
        store = await open_store(tmp_path)
    await store.close()


async def test_whoever_leaves_takes_no_block_out_of_a_deletions_sight(tmp_path: Path, monkeypatch) -> None:
    """A pin is cancelled while a block that it brings is being sealed: the deletion waits until that is written."""
    bucket, now = Bucket(), time.time()
    bucket.clock.now = now
    (tmp_path / "other").mkdir()
    await upload(await bucket.fresh(), sealed_segment(tmp_path / "other", [0], tenants=["acme"], created=now))
    tier = await bucket.fresh()
    (tmp_path / "master").write_bytes(b"m" * 32)
    store = await open_store(tmp_path / "kv", encryption_key_file=tmp_path / "master")
    kept = AdmittingTier(tier, store)
    store.connect(remote=kept)
    keyring = store._keyring
    assert keyring is not None
    seal, begun, goes_on = keyring.seal, threading.Event(), threading.Event()

    def slowly(*what):
        begun.set()
        goes_on.wait(20)
        return seal(*what)

    monkeypatch.setattr(keyring, "seal", slowly)
    pinning = asyncio.create_task(store.pin("acme", "s", FINGERPRINT, [key(0)], hold_seconds=60))
    await asyncio.to_thread(begun.wait, 20)
    pinning.cancel()
    deletion = asyncio.create_task(store.evict(ACME))
    await asyncio.sleep(0.05)
    goes_on.set()
    await asyncio.gather(deletion, pinning, return_exceptions=True)
    while store._in_flight:  # noqa: ASYNC110 - as an operator would see it
        await asyncio.sleep(0.01)

    assert not store.has(FINGERPRINT, key(0))
    await store.close()


async def test_blocks_come_in_side_by_side_and_deletions_alone() -> None:
    """Eight that a pin brings share one sync of the disk; a deletion that waits for them is not overtaken."""
    gate, goes_on, story = Deletions(), asyncio.Event(), []

    async def come(name: str) -> None:
        async with gate.held_off():
            story.append(name)
            await goes_on.wait()

    async def delete() -> None:
        async with gate.alone():
            story.append("deleted")

    tasks = [asyncio.create_task(one) for one in (come("a"), come("b"), delete(), come("c"))]
    for _ in range(5):
        await asyncio.sleep(0)
    assert ["a", "b"] == story
    tasks[1].cancel()
    goes_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ["a", "b", "deleted", "c"] == story


async def test_a_clock_that_is_ahead_ends_no_deletion(tmp_path: Path) -> None:
    """Nor does it delete what others still serve: for that the object store's clock must say so as well."""
    bucket, ahead = Bucket(), Clock()
    await upload(await bucket.fresh(), sealed_segment(tmp_path, [0]))
    await (await bucket.fresh()).evict(ACME)
    ahead.now += TOMBSTONE_SECONDS + DAY
    blobs = BlobBackend(bucket.store, FAST)
    blobs.time = StoreClock(now=bucket.clock, steady=bucket.clock)
    blobs.time.set(bucket.clock())
    wrong = RemoteTier(blobs, now=ahead)
    await wrong.catalog.refresh(is_full=True)
    await wrong.catalog.tidy()
    assert [1, 1] == [len(await paths(wrong, prefix)) for prefix in ("tombstone", "manifest")]

    bucket.clock.now += TOMBSTONE_SECONDS + DAY
    blobs.time.set(bucket.clock())
    await wrong.catalog.tidy()
    assert [0, 0] == [len(await paths(wrong, prefix)) for prefix in ("tombstone", "manifest")]


async def test_no_more_deletions_are_taken_than_can_be_remembered(monkeypatch) -> None:
    """The one too many is refused aloud; those before it are not forgotten for it."""
    monkeypatch.setattr(remote_catalog, "MAX_TOMBSTONES", 2)
    bucket = Bucket()
    tier = await bucket.fresh()
    for tenant in "ab":
        await tier.evict(Selection(tenant=tenant))
    with pytest.raises(NoReplica, match="2 deletions"):
        await tier.evict(ACME)
    assert {"a", "b"} == {one.tenant for one in (await bucket.fresh()).catalog.tombstones}


async def test_a_segment_that_could_not_be_read_does_not_outlive_a_deletion(tmp_path: Path, monkeypatch) -> None:
    """Nobody can say whose blocks are in it, and the next start may be able to read it."""
    store = await open_store(tmp_path)
    await store.write(block(0, tenant="acme"))
    await store.write(block(1, tenant="zeta", retention=AGENT))
    await store.close()

    def load(file):
        if file.retention != AGENT:
            raise OSError(errno.EIO, "bad sector")
        return load_segment(file)

    with monkeypatch.context() as broken:
        broken.setattr("services.kvstore.recovery.load_segment", load)
        store = await open_store(tmp_path)
    assert (1, 2) == (store.num_blocks, store.num_segments)
    await store.evict_local(Selection(retention=AGENT, tenant="nobody"), time.time())
    assert 2 == store.num_segments
    await store.evict_local(ACME, time.time())
    await store.close()

    store = await open_store(tmp_path)
    assert [1] == list(await served(store, [0, 1]))
    await store.close()


async def test_what_a_clock_that_was_ahead_has_dated_is_deleted_all_the_same(tmp_path):
    """A replica wrote with a clock two hours ahead, which was set back since: no copy outlives the deletion."""
    bucket = Bucket()
    one, other = await bucket.fresh(), await bucket.fresh()
    engine = Engine()
    await upload(other, sealed_segment(tmp_path, [1, 2], tenants=["acme"], created=bucket.clock() + 7200))
    await other._refresh(engine, is_full=True)
    await one.evict(ACME)
    await other._refresh(engine, is_full=True)

    assert [] == await objects.served(one, [1, 2])
    ((selection, before),) = engine.evicted
    assert ACME == selection
    assert bucket.clock() + 1000 * DAY < before


async def test_what_waits_to_be_written_is_dated_by_the_clock_that_dates_what_is_written(tmp_path):
    """A raw clock that jumps would make a waiting block younger than the deletion that it must not outlive."""
    store = await open_store(tmp_path)
    store._line.clock = WallClock(now=Clock(), steady=Clock())
    waiting = store._line.put(block(0, tenant="acme"))
    assert Clock().now == store._line._queue[-1].arrived_unix_seconds
    waiting.cancel()
    await store.close()

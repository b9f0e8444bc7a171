"""Does the store keep its promises to callers and clocks that nobody would wish for?"""

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from proto.kvstore_pb2 import LookupRequest, PinRequest, ReadRequest
from services.chassis.errors import InvalidRequest, Overloaded
from services.kvstore.assembly import held_bytes
from services.kvstore.catalog import Catalog
from services.kvstore.directory import new_segment_file
from services.kvstore.encryption import Keyring, MasterKeyError
from services.kvstore.index import BlockIndex, BlockLocation
from services.kvstore.log import SegmentSize
from services.kvstore.manifests import DELETION_SECONDS
from services.kvstore.object_store import AdmittingTier
from services.kvstore.retention import CHAT, RetentionPolicy
from services.kvstore.store import MAX_WAITING_BYTES
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, read_all
from services.kvstore.tests.objects import Bucket, Engine, sealed_segment, uploading
from services.kvstore.tests.serving import chunks, kvstore, write
from services.kvstore.tiers import Removed, Selection


def test_a_block_whose_time_is_over_gives_way_to_a_new_one(tmp_path: Path) -> None:
    """Its segment may stay for the rest of an hour: what is computed again meanwhile is found, and expires anew."""
    catalog = Catalog(BlockIndex(), [], RetentionPolicy(chat_seconds=100.0))
    old, new = (
        BlockLocation(key(1), FINGERPRINT, number, 0, 10, 0, CHAT, created)
        for number, created in ((1, 1.0), (2, 102.0))
    )
    for number in (1, 2):
        catalog.note_sizes([SegmentSize(new_segment_file(tmp_path, number, CHAT), 4096, 4096, is_active=True)])

    assert catalog.publish(old)
    assert not catalog.publish(new._replace(created_seconds=50.0))
    assert catalog.publish(new)
    assert new == catalog.find(FINGERPRINT, key(1), 103.0)
    assert 1 == catalog.index.tenants[""].num_blocks


@pytest.mark.parametrize("asked", [math.nan, math.inf, -math.inf], ids=["nan", "infinite", "minus-infinite"])
async def test_times_that_are_none_are_refused_by_name(tmp_path: Path, asked: float) -> None:
    """A NaN among the event loop's timers would put all of them out of order."""
    what: dict[str, Any] = {"block_keys": [key(0)], "fingerprint": FINGERPRINT}
    async with kvstore(tmp_path) as stub:
        with pytest.raises(InvalidRequest, match="lease_seconds"):
            await stub.Lookup(LookupRequest(request_id="r", lease_seconds=asked, **what), timeout=30)
        with pytest.raises(InvalidRequest, match="pending_seconds"):
            await anext(aiter(stub.Read(ReadRequest(pending_seconds=asked, **what), timeout=30)))
        with pytest.raises(InvalidRequest, match="hold_seconds"):
            await stub.Pin(PinRequest(session_id="s", hold_seconds=asked, **what), timeout=30)


async def test_names_that_are_kept_are_short(tmp_path: Path) -> None:
    """Ten thousand sessions of a megabyte each are no session table."""
    long = "x" * 257
    asked: dict[str, Any] = {"block_keys": [key(0)], "fingerprint": FINGERPRINT}
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0))
        with pytest.raises(InvalidRequest, match="session_id"):
            await stub.Pin(PinRequest(session_id=long, **asked), timeout=30)
        with pytest.raises(InvalidRequest, match="tenant"):
            await stub.Pin(PinRequest(session_id="s", tenant=long, **asked), timeout=30)
        with pytest.raises(InvalidRequest, match="request_id"):
            await stub.Lookup(LookupRequest(request_id=long, **asked), timeout=30)


def test_tiny_blocks_cost_what_they_hold() -> None:
    """Blocks of one byte fill the waiting room long before they fill the memory; the longest still goes in."""
    assert MAX_WAITING_BYTES // held_bytes(1) <= 8192
    assert held_bytes(MAX_WAITING_BYTES) <= MAX_WAITING_BYTES


async def test_nobody_waits_for_a_store_that_has_stopped(tmp_path: Path) -> None:
    """What comes after the last batch is refused; it would never be answered."""
    store = await open_store(tmp_path)
    await store.close()
    async with asyncio.timeout(20):
        with pytest.raises(Overloaded):
            await store.evict_local(Selection(), math.inf)
        assert "stopping" == await store._line.put(block(1))


async def test_what_comes_while_a_store_stops_is_answered(tmp_path: Path, monkeypatch) -> None:
    """Its last blocks are being synced; whoever asks for something in that moment must not wait for ever."""
    store = await open_store(tmp_path)
    start_sync, disk_is_back = store.disk.start_sync, threading.Event()
    monkeypatch.setattr(store.disk, "start_sync", lambda work: start_sync(lambda: (disk_is_back.wait(20), work())[1]))
    writing = asyncio.create_task(store.write(block(1)))
    async with asyncio.timeout(20):
        while not store._line._settling:  # noqa: ASYNC110 - as an operator would see it
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(store.close())
        while not store._line._is_closing:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.001)
        deletion = asyncio.create_task(store.evict_local(Selection(), math.inf))
        late = store._line.put(block(2))
        await asyncio.sleep(0)
        disk_is_back.set()
        assert (1, "deleted") == ((await deletion).num_blocks, await late)
        await asyncio.gather(writing, closing)


def test_another_master_key_stops_the_start(tmp_path: Path) -> None:
    """Under it every block would be found, and none could be read or written."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(b"r" * 32)
    wrong.write_bytes(b"w" * 32)
    sealed = Keyring.load(tmp_path / "keys", right).seal("acme", b"name", b"payload")
    with pytest.raises(MasterKeyError, match="wrong is not the key"):
        Keyring.load(tmp_path / "keys", wrong)

    assert b"payload" == Keyring.load(tmp_path / "keys", right).unseal("acme", b"name", sealed)


async def test_a_deletion_that_is_heard_late_covers_the_copies_made_meanwhile() -> None:
    """A replica that was cut off refreshed old blocks; it deletes all that it has when it hears of it."""
    bucket = Bucket()
    cut_off, engine = await bucket.fresh(), Engine()
    await bucket.replica().evict(Selection(tenant="acme"))
    bucket.clock.now += 10 * DELETION_SECONDS
    await cut_off._refresh(engine, is_full=False)

    (told,) = engine.evicted
    assert Selection(tenant="acme") == told[0]
    assert told[1] > bucket.clock.now


async def test_what_is_read_from_the_tier_during_a_deletion_is_deleted_too(tmp_path: Path) -> None:
    """Blocks that come to the local disk after it was emptied, and before the tier is, go as well."""

    class Tier:
        """A listener that is slow to delete."""

        def sealed(self, _segment: object) -> None:
            """Of no interest here."""

        async def evict(self, _selection: Selection) -> Removed:
            await store.write(block(1, tenant="acme"))
            return Removed()

    store = await open_store(tmp_path)
    store.connect(listener=Tier())
    removed = await store.evict(Selection(tenant="acme"))

    assert (1, []) == (removed.num_blocks, await read_all(store, [1]))
    await store.close()


async def test_a_block_that_was_deleted_while_it_was_read_is_not_kept(tmp_path: Path) -> None:
    """The tier no longer has it when it arrives: then it must not begin a new life on the local disk."""
    bucket = Bucket()
    (tmp_path / "other").mkdir()
    async with uploading(await bucket.fresh()) as tier:
        tier.sealed(sealed_segment(tmp_path / "other", [1, 2], tenants=["acme", "zeta"]))
        await tier.uploads.flush()
    store = await open_store(tmp_path / "store")
    kept = AdmittingTier(tier, store)
    (gone,) = await kept.longest(FINGERPRINT, [key(1)])
    (there,) = await kept.longest(FINGERPRINT, [key(2)])
    await kept.read(there)
    await asyncio.gather(*kept._writes)
    stored = await tier.read(gone)
    await tier.evict(Selection(tenant="acme"))
    await kept._keep(gone.location, stored)

    assert (False, True) == (store.has(FINGERPRINT, key(1)), store.has(FINGERPRINT, key(2)))
    await store.close()

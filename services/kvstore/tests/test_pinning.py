"""Does a pin keep what lies only in the object store, too?"""

import asyncio
import contextlib
import time

from services.kvstore.object_store import AdmittingTier
from services.kvstore.retention import RetentionPolicy
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, served
from services.kvstore.tests.objects import AGENT, Bucket, sealed_segment, upload
from services.kvstore.tiers import Selection


@contextlib.asynccontextmanager
async def store_before(folder, numbers, *, policy=None, tenants=("acme",), created=None):
    """An empty store with these blocks in the object store behind it; yields it and its tier."""
    bucket = Bucket()
    bucket.clock.now = time.time()
    when = bucket.clock.now if created is None else created
    await upload(await bucket.fresh(), sealed_segment(folder, numbers, tenants=tenants, created=when))
    tier = await bucket.fresh()
    store = await open_store(folder / "kv", policy=policy)
    store.connect(listener=tier, remote=AdmittingTier(tier, store))
    try:
        yield store, tier
    finally:
        await store.close()


async def pinned(store, numbers, session="s") -> int:
    count: int
    count, _ = await store.pin("acme", session, FINGERPRINT, [key(n) for n in numbers], hold_seconds=60)
    return count


async def test_a_pin_brings_what_only_the_object_store_has(tmp_path):
    """With local blocks in between; from then on the disk here serves it, whatever becomes of the object store."""
    async with store_before(tmp_path, [*range(3), *range(4, 40)]) as (store, _):
        await store.write(block(3, tenant="acme"))
        assert 40 == await pinned(store, range(45))
        store.connect()

        assert {n: payload(n) for n in range(40)} == await served(store, list(range(45)))
        assert 40 == len(store.catalog.pins)
        locations = [store.catalog.index.find(FINGERPRINT, key(n)) for n in range(4, 6)]
        assert [("acme", AGENT)] * 2 == [(one.tenant, one.retention) for one in locations]


async def test_no_more_is_brought_than_may_be_pinned(tmp_path):
    """A quarter of the disk, or the tenant's quota; what would not be kept is not fetched."""
    async with store_before(tmp_path, range(10), policy=RetentionPolicy(quota_bytes={"acme": 20_000})) as (store, tier):
        assert 4 == await pinned(store, range(10))
        assert (4, 4) == (store.num_blocks, tier.counts.read_blocks)


async def test_a_pin_ends_before_the_first_block_that_cannot_be_had(tmp_path):
    """An object store that is away, or has lost the object, costs the pin those blocks and nothing else."""
    async with store_before(tmp_path, range(1, 5)) as (store, tier):
        await store.write(block(0))
        for blob in await tier.blobs.list("seg", max_blobs=10):
            await tier.blobs.delete(blob.path)
        assert 1 == await pinned(store, range(5))


async def test_a_brought_block_passes_for_no_younger_than_it_is(tmp_path):
    """A deletion of its tenant that somebody else made before the copy takes the copy as well, though it is pinned."""
    async with store_before(tmp_path, range(3), created=time.time() - 600) as (store, _):
        assert 3 == await pinned(store, range(3))
        await store.evict_local(Selection(tenant="acme"), time.time() - 300)
        assert (0, 0) == (store.num_blocks, len(store.catalog.pins))


async def test_a_deletion_while_blocks_are_brought_wins(tmp_path):
    """What was read before the deletion is not written after it."""
    async with store_before(tmp_path, range(30)) as (store, _):
        pinning = asyncio.create_task(pinned(store, range(30)))
        await asyncio.sleep(0)
        await store.evict(Selection(tenant="acme"))
        await pinning

        assert 0 == store.num_blocks
        assert {} == await served(store, list(range(30)))


async def test_a_deletion_after_the_last_look_finds_what_was_written(tmp_path, monkeypatch):
    """Between the check that a block still lies behind and its write, a deletion waits: nothing outlives it here."""
    async with store_before(tmp_path, range(1)) as (store, tier):
        remote = AdmittingTier(tier, store)
        store.connect(listener=tier, remote=remote)
        opened, deletions = remote._opened, []

        async def deleted_meanwhile(location, stored):
            deletions.append(asyncio.create_task(store.evict(Selection(tenant="acme"))))
            await asyncio.sleep(0.1)
            return await opened(location, stored)

        monkeypatch.setattr(remote, "_opened", deleted_meanwhile)
        await pinned(store, range(1))
        (removed,) = await asyncio.gather(*deletions)

        assert removed.num_blocks
        assert 0 == store.num_blocks
        assert {} == await served(store, [0])

"""Do sealed blocks reach every replica through the object store, whole, and do deleted ones leave it for good?"""

import asyncio
import time

import pytest

from services.chassis.errors import NoReplica
from services.kvstore import remote_catalog
from services.kvstore.blobs import BlobError, BlobMissingError, open_blobs
from services.kvstore.manifests import DELETION_SECONDS
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.blocks import FINGERPRINT, OTHER_FINGERPRINT, key, payload
from services.kvstore.tests.objects import (
    AGENT,
    CHAT,
    CREATED,
    FAST,
    LIFE_SECONDS,
    Bucket,
    Engine,
    eventually,
    paths,
    payloads,
    sealed_segment,
    served,
    upload,
)
from services.kvstore.tiers import Selection


async def test_any_replica_finds_what_one_uploaded(tmp_path):
    """A replica that starts with nothing but the bucket serves every block, byte for byte."""
    bucket = Bucket()
    await upload(
        bucket.replica(),
        sealed_segment(tmp_path, range(10)),
        sealed_segment(tmp_path, range(10, 15), number=2, retention=CHAT),
    )

    assert payloads(range(15)) == await served(await bucket.fresh(), range(20))
    assert [] == await served(await bucket.fresh(), range(20), OTHER_FINGERPRINT)


async def test_a_block_comes_back_as_its_footer_had_it(tmp_path):
    """Everything the engine needs to verify, open and keep it is there."""
    bucket = Bucket()
    segment = sealed_segment(tmp_path, range(3), tenants=("acme", ""))
    await upload(bucket.replica(), segment)

    found = await (await bucket.fresh()).longest(FINGERPRINT, [key(n) for n in range(3)])
    assert [one._replace(segment=0) for one in segment.locations] == [one.location for one in found]
    assert {7} == {one.epoch for one in found}


async def test_what_is_not_published_is_not_there(tmp_path):
    """An object without a manifest, as a replica that dies while uploading leaves it, is never read."""
    bucket = Bucket()
    first = bucket.replica()
    await upload(first, sealed_segment(tmp_path, range(3)))
    for path in await paths(first, "manifest"):
        await first.blobs.delete(path)

    assert [] == await served(await bucket.fresh(), range(3))


async def test_neighbours_are_read_together(tmp_path):
    """Ten blocks of one upload are one call to the object store."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(10)))
    tier = await bucket.fresh()

    assert payloads(range(10)) == await served(tier, range(10))
    assert 1 == tier.counts.reads


async def test_runs_are_bounded(tmp_path):
    """Large blocks come a few MiB at a time, in order and whole."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(6), num_bytes=1_500_000))
    tier = await bucket.fresh()

    assert payloads(range(6), 1_500_000) == await served(tier, range(6))
    assert 3 == tier.counts.reads


async def test_a_damaged_block_is_a_miss_and_never_served(tmp_path):
    """Its neighbours are fine; it is counted, and not offered again."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(3)))
    tier = await bucket.fresh()
    (path,) = await paths(tier, "seg")
    raw = bytearray(await tier.blobs.get(path, max_bytes=1 << 20))
    raw[7000] ^= 1
    await tier.blobs.delete(path)
    assert await tier.blobs.put_if_absent(path, bytes(raw))

    found = await tier.longest(FINGERPRINT, [key(n) for n in range(3)])
    assert payload(0) == bytes(await tier.read(found[0]))
    with pytest.raises(BlobError, match="damaged"):
        await tier.read(found[1])
    assert payload(2) == bytes(await tier.read(found[2]))
    assert payloads(range(1)) == await served(tier, range(3))
    assert (1, False) == (tier.counts.damaged_blocks, tier.blobs.is_away)


async def test_a_missing_object_is_a_miss(tmp_path):
    """A manifest whose object is gone, as a lifecycle rule may leave it, ends the prefix."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(3)))
    tier = await bucket.fresh()
    (path,) = await paths(tier, "seg")
    await tier.blobs.delete(path)

    found = await tier.longest(FINGERPRINT, [key(0)])
    with pytest.raises(BlobMissingError):
        await tier.read(found[0])
    assert [] == await served(tier, range(3))


async def test_expired_blocks_are_not_served_and_then_deleted(tmp_path):
    """Not a moment longer than they live; whoever published them takes them away, others after a while."""
    bucket = Bucket()
    mine = bucket.replica()
    await upload(mine, sealed_segment(tmp_path, range(3)))
    other = await bucket.fresh()
    bucket.clock.now = CREATED + LIFE_SECONDS - 1
    assert payloads(range(3)) == await served(other, range(3))

    bucket.clock.now = CREATED + LIFE_SECONDS
    assert [] == await served(other, range(3))
    await other.catalog.tidy()
    assert 1 == len(await paths(other, "manifest"))
    await mine.catalog.tidy()
    assert [] == await paths(mine, "manifest") == await paths(mine, "seg")


async def test_what_a_lost_replica_left_is_deleted_by_others(tmp_path):
    """Expired objects do not stay because their publisher is gone."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(3)))
    other = await bucket.fresh()
    bucket.clock.now = CREATED + LIFE_SECONDS + 301
    await other.catalog.tidy()

    assert [] == await paths(other, "manifest") == await paths(other, "seg")


async def test_a_deleted_tenant_is_gone_from_the_bytes(tmp_path):
    """Objects that hold other tenants' blocks are written again without its own; nothing of it is left anywhere."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(
        tier,
        sealed_segment(tmp_path, range(6), tenants=("acme", "zeta")),
        sealed_segment(tmp_path, range(6, 9), number=2, tenants=("acme",)),
    )
    removed = await tier.evict(Selection(tenant="acme"))

    assert (6, 30_000) == (removed.num_blocks, removed.num_bytes)
    left = b"".join([await tier.blobs.get(path, max_bytes=1 << 20) for path in await paths(tier, "seg")])
    assert b"".join(payloads([1, 3, 5])) == left
    for replica in (tier, await bucket.fresh()):
        assert payloads([1]) == await served(replica, [1])
        assert [] == await served(replica, [0])
        assert [] == await served(replica, range(6, 9))


async def test_no_replica_brings_a_deleted_tenant_back(tmp_path):
    """One that still had its segment in the queue uploads it, and yet nobody finds it; what is written later is found."""
    bucket = Bucket()
    tier, late = bucket.replica(), bucket.replica()
    bucket.clock.now = CREATED + 10
    await tier.evict(Selection(tenant="acme"))
    await upload(late, sealed_segment(tmp_path, range(3), tenants=("acme",)))
    await upload(late, sealed_segment(tmp_path, range(3, 5), number=2, tenants=("acme",), created=CREATED + 71))

    fresh = await bucket.fresh()
    assert [] == await served(fresh, range(3))
    assert payloads(range(3, 5)) == await served(fresh, range(3, 5))
    await late.catalog.refresh(is_full=False)
    await late.catalog.tidy()
    assert [] == await served(late, range(3))
    assert 1 == len(await paths(late, "seg"))


async def test_other_replicas_are_told_to_delete_from_their_disks(tmp_path):
    """A deletion reaches the engine of every replica once, also of one that was away, with the time it was made."""
    bucket = Bucket()
    await bucket.replica().evict(Selection(tenant="acme"))
    engine, tier = Engine(), bucket.replica()
    task = asyncio.create_task(tier.run(engine))
    await eventually(lambda: tier.catalog.counts.refreshes >= 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert [(Selection(tenant="acme"), CREATED + DELETION_SECONDS)] == engine.evicted


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(fingerprint=OTHER_FINGERPRINT), ["a", "c"]),
        (Selection(retention=CHAT), ["a", "b"]),
        (Selection(), []),
        (Selection(retention=AGENT, fingerprint=FINGERPRINT), ["b", "c"]),
    ],
    ids=["model", "class", "all", "both"],
)
async def test_other_selections_are_deleted_alike(tmp_path, selection, expected):
    """Models, classes, or everything."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(
        tier,
        sealed_segment(tmp_path, [0]),
        sealed_segment(tmp_path, [1], number=2, fingerprint=OTHER_FINGERPRINT),
        sealed_segment(tmp_path, [2], number=3, retention=CHAT),
    )
    await tier.evict(selection)

    fresh = await bucket.fresh()
    found = {
        "a": await served(fresh, [0]),
        "b": await served(fresh, [1], OTHER_FINGERPRINT),
        "c": await served(fresh, [2]),
    }
    assert expected == [name for name, blocks in found.items() if blocks]
    assert len(expected) == len(await paths(fresh, "seg"))


async def test_a_purge_that_broke_half_way_is_finished_by_another(tmp_path):
    """The manifest is gone and the object not, or the rewritten copy is there already: both end well."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(tier, sealed_segment(tmp_path, range(4), tenants=("acme", "zeta")))
    (before,) = await paths(tier, "seg")
    original = await tier.blobs.get(before, max_bytes=1 << 20)
    (listed,) = await paths(tier, "manifest")
    old = await tier.blobs.get(listed, max_bytes=1 << 20)
    await tier.evict(Selection(tenant="acme"))
    await tier.blobs.put_if_absent(before, original)  # as if the deletion had not come through
    await tier.blobs.put_if_absent(listed, old)

    other = await bucket.fresh()
    bucket.clock.now += DELETION_SECONDS + 301
    await other.catalog.tidy()
    assert payloads([1, 3]) == await served(other, [1, 3])
    assert 1 == len(await paths(other, "seg")) == len(await paths(other, "manifest"))


async def test_a_purge_of_an_object_that_is_gone_removes_its_manifest(tmp_path):
    """Nothing is left that could be listed for ever."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(tier, sealed_segment(tmp_path, range(4), tenants=("acme", "zeta")))
    for path in await paths(tier, "seg"):
        await tier.blobs.delete(path)
    await tier.evict(Selection(tenant="acme"))

    assert [] == await paths(tier, "manifest")
    assert not tier.blobs.is_away


async def test_a_damaged_manifest_publishes_nothing(tmp_path):
    """It is counted, read once, and the rest is found."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(tier, sealed_segment(tmp_path, [0]), sealed_segment(tmp_path, [1], number=2))
    path = (await paths(tier, "manifest"))[0]
    raw = bytearray(await tier.blobs.get(path, max_bytes=1 << 20))
    raw[50] ^= 1
    await tier.blobs.delete(path)
    await tier.blobs.put_if_absent(path, bytes(raw))

    fresh = await bucket.fresh()
    await fresh.catalog.refresh(is_full=True)
    assert [[], payloads([1])] == [await served(fresh, [0]), await served(fresh, [1])]
    assert 1 == fresh.catalog.counts.damaged_manifests


async def test_a_short_refresh_sees_what_is_new(tmp_path):
    """Other replicas' blocks are found after the next look, without listing everything."""
    bucket = Bucket()
    reader = await bucket.fresh()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(3)))
    assert [] == await served(reader, range(3))
    await reader.catalog.refresh(is_full=False)

    assert payloads(range(3)) == await served(reader, range(3))


async def test_a_full_refresh_sees_what_is_gone(tmp_path):
    """What another replica deleted is not offered any more."""
    bucket = Bucket()
    await upload(bucket.replica(), sealed_segment(tmp_path, range(3)))
    reader = await bucket.fresh()
    for path in await paths(reader, "manifest"):
        await reader.blobs.delete(path)
    await reader.catalog.refresh(is_full=True)

    assert [] == await reader.longest(FINGERPRINT, [key(0)])
    assert 0 == reader.num_blocks


async def test_objects_that_nothing_publishes_are_swept_away(tmp_path):
    """What a replica that died left behind goes after an hour; an upload that may still be under way does not."""
    bucket = Bucket()
    tier = await bucket.fresh()
    await upload(tier, sealed_segment(tmp_path, [0]))
    await tier.blobs.put_if_absent("seg/agent/orphan", b"x" * 100)
    bucket.clock.now = time.time() + 3500
    await tier.catalog.sweep()
    assert 2 == len(await paths(tier, "seg"))

    bucket.clock.now = time.time() + 3700
    await tier.catalog.sweep()
    assert ["seg/agent/000000000001-0000000000000007"] == await paths(tier, "seg")


async def test_a_listing_that_is_cut_short_loses_nothing(tmp_path, monkeypatch):
    """What did not fit into it may be there all the same."""
    bucket = Bucket()
    await upload(bucket.replica(), *(sealed_segment(tmp_path, [n], number=n) for n in range(3)))
    reader = await bucket.fresh()
    monkeypatch.setattr(remote_catalog, "MAX_MANIFESTS", 2)
    await reader.catalog.refresh(is_full=True)

    assert payloads(range(3)) == await served(reader, range(3))


async def test_a_deletion_that_cannot_be_done_is_told(tmp_path):
    """The operator hears that it is not done, and does it again once the object store is back."""
    tier = RemoteTier(open_blobs(f"file://{tmp_path}/elsewhere", FAST))
    blocked = tmp_path / "elsewhere" / "tombstone"
    blocked.write_text("no object can be written below a file")
    with pytest.raises(NoReplica, match="delete again"):
        await tier.evict(Selection(tenant="acme"))

    blocked.unlink()
    assert 0 == (await tier.evict(Selection(tenant="acme"))).num_blocks


async def test_nothing_is_found_behind_while_it_is_left_alone(tmp_path):
    """A lookup that promised what no read may ask for would have its caller wait for a miss."""
    bucket = Bucket()
    await upload(await bucket.fresh(), sealed_segment(tmp_path, [0]))
    tier = await bucket.fresh()
    assert 1 == len(await tier.longest(FINGERPRINT, [key(0)]))
    while not tier.blobs.is_away:
        permit = tier.blobs.reads.begin(time.monotonic())
        assert permit is not None
        tier.blobs.reads.end(permit, is_good=False, now=time.monotonic())

    assert 0 == len(await tier.longest(FINGERPRINT, [key(0)]))

"""Does verifying look at the object store as well, find what is bad there, and read no more than it may?"""

import asyncio

import pytest

from services.chassis.errors import InvalidRequest, NoReplica
from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.object_store import AdmittingTier
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.blocks import block, key, open_store
from services.kvstore.tests.objects import (
    CREATED,
    FAST,
    LIFE_SECONDS,
    Bucket,
    paths,
    payloads,
    sealed_segment,
    served,
    upload,
)
from services.kvstore.tiers import RemoteBad
from services.kvstore.verification import Bad, StoreVerification

EVERYTHING = 1 << 30


class Unreadable(BlobBackend):
    """Objects whose bytes never come."""

    async def get_range(self, path, start, num_bytes):
        raise BlobError("no answer")


async def checked(tier, max_bytes=EVERYTHING):
    return [report async for report in tier.verify(max_bytes=max_bytes)]


def bad(reports):
    return [one for report in reports for one in report.bad]


async def change(tier, path, change_bytes):
    raw = bytearray(await tier.blobs.get(path, max_bytes=1 << 20))
    await tier.blobs.delete(path)
    assert await tier.blobs.put_if_absent(path, bytes(change_bytes(raw)))


def flipped(raw):
    raw[7000] ^= 1
    return raw


async def test_what_is_good_is_good(tmp_path):
    """Every live block is read once; those whose time is over are not looked at."""
    bucket = Bucket()
    tier = bucket.replica()
    for number in range(3):
        created = CREATED + number * 100
        await upload(tier, sealed_segment(tmp_path, range(4 * number, 4 * number + 4), number=number, created=created))
    reports = await checked(tier)
    assert ([], 12, 60_000) == (bad(reports), reports[-1].num_blocks, sum(one.num_bytes for one in reports))
    bucket.clock.now = CREATED + LIFE_SECONDS + 1
    assert 8 == (await checked(tier))[-1].total_blocks


async def test_each_fault_is_named_once(tmp_path):
    """Other bytes, an object that ends too early, one that is gone: by object and place; then they are misses."""
    bucket = Bucket()
    tier = bucket.replica()
    segments = [sealed_segment(tmp_path, range(3 * n, 3 * n + 3), number=n) for n in range(3)]
    await upload(tier, *segments)
    first, second, third = await paths(tier, "seg")
    await change(tier, first, flipped)
    await change(tier, second, lambda raw: raw[:12_000])
    await tier.blobs.delete(third)

    expected = {
        RemoteBad(key(1), first, 5000, "remote"),
        RemoteBad(key(5), second, 10_000, "missing"),
        *(RemoteBad(key(6 + n), third, 5000 * n, "missing") for n in range(3)),
    }
    assert expected == set(bad(await checked(tier)))
    assert payloads([0]) == await served(tier, range(3))
    assert payloads([3, 4]) == await served(tier, range(3, 7))


async def test_no_more_is_read_than_allowed(tmp_path):
    """Several short looks see everything in time."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(tier, *(sealed_segment(tmp_path, [n], number=n) for n in range(4)))
    await change(tier, (await paths(tier, "seg"))[2], lambda raw: raw[::-1])
    found = []
    for _ in range(60):
        reports = await checked(tier, 10_000)
        assert sum(one.num_bytes for one in reports) <= 10_000
        found += bad(reports)

    assert {key(2)} == {one.key for one in found}


async def test_a_store_that_does_not_answer_is_told(tmp_path, monkeypatch):
    """Its blocks are neither good nor bad."""
    monkeypatch.setattr("services.kvstore.remote_verification._RETRY_SECONDS", 0.0)
    bucket = Bucket()
    tier = RemoteTier(Unreadable(bucket.store, FAST), now=bucket.clock)
    await upload(tier, sealed_segment(tmp_path, range(2)))
    with pytest.raises(NoReplica, match="not all is verified"):
        await checked(tier)


async def test_a_running_store_verifies_both_sides(tmp_path):
    """Local blocks first, then those of the object store as far as asked; without one it is refused."""
    bucket = Bucket()
    tier = await bucket.fresh()
    await upload(tier, sealed_segment(tmp_path, range(3)))
    (path,) = await paths(tier, "seg")
    await change(tier, path, flipped)
    store = await open_store(tmp_path / "kv")
    await asyncio.gather(*(store.write(block(n)) for n in range(5, 7)))
    with pytest.raises(InvalidRequest, match="object store"):
        StoreVerification(store.catalog, store.reader, max_bytes_per_second=0, remote_bytes=1)
    store.connect(remote=AdmittingTier(tier, store))

    for remote_bytes, expected in ((EVERYTHING, (5, 5)), (0, (2, 2))):
        look = StoreVerification(store.catalog, store.reader, max_bytes_per_second=0, remote_bytes=remote_bytes)
        reports = [report async for report in look]
        assert (*expected, True) == (reports[-1].num_blocks, reports[-1].total_blocks, reports[-1].is_last)
        assert [Bad(key(1), path, 5000, "remote")] * bool(remote_bytes) == bad(reports)
    await store.close()

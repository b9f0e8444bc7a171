"""Do replicas share blocks over a real S3 API, and do they live through its troubles?"""

import asyncio
import contextlib
import time

import pytest

from services.kvstore.blobs import BlobError, BlobMissingError, BlobOptions, open_blobs
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.blocks import key, payload
from services.kvstore.tests.objects import (
    CREATED,
    LIFE_SECONDS,
    Clock,
    Engine,
    SameClock,
    eventually,
    gate,
    sealed_segment,
    served,
    upload,
)
from services.kvstore.tests.seaweedfs import BUCKET, seaweedfs
from services.kvstore.tiers import Selection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


def payloads(numbers, num_bytes=5000):
    return [payload(number, num_bytes) for number in numbers]


class Prefix:
    """One place in the bucket, and replicas that use it."""

    def __init__(self, s3, name, port=0, **options):
        known = {
            "read_seconds": 2.0,
            "slow_seconds": 0.5,
            "write_seconds": 10.0,
            "open_seconds": 0.3,
            "refresh_seconds": 0.3,
        }
        self.options = BlobOptions.model_validate(s3.options | known | options)
        if port:
            self.options = self.options.model_copy(update={"endpoint": f"http://127.0.0.1:{port}"})
        self.url = f"s3://{BUCKET}/{name}"
        self.clock = Clock()

    def replica(self) -> RemoteTier:
        blobs = open_blobs(self.url, self.options)
        blobs.time = SameClock(self.clock)
        return RemoteTier(blobs, now=self.clock)

    async def fresh(self) -> RemoteTier:
        tier = self.replica()
        await tier.catalog.refresh(is_full=True)
        return tier


async def test_create_if_absent_is_decided_by_the_server(s3):
    """Of many writers of one name exactly one wins, and its bytes stay."""
    blobs = open_blobs(f"s3://{BUCKET}/race", BlobOptions.model_validate(s3.options))
    won = await asyncio.gather(*(blobs.put_if_absent("one", bytes([n])) for n in range(10)))

    assert 1 == sum(won)
    assert bytes([won.index(True)]) == await blobs.get("one", max_bytes=10)


async def test_the_servers_clock_is_read_from_what_it_stores(s3):
    """As often as is wanted, from one object."""
    blobs = open_blobs(f"s3://{BUCKET}/time", BlobOptions.model_validate(s3.options))
    for _ in range(2):
        await blobs.ask_time()
    assert abs(blobs.time.ahead_seconds) < 30
    assert ["clock/mark"] == [one.path for one in await blobs.list("", max_blobs=10)]


async def test_a_lost_replica_loses_nothing(s3, tmp_path):
    """Two replicas upload and are gone with their disks; a third finds every block, byte for byte."""
    prefix = Prefix(s3, "lost")
    for number in range(2):
        segment = sealed_segment(tmp_path, range(20 * number, 20 * number + 20), number=number, num_bytes=300_000)
        await upload(prefix.replica(), segment)
        segment.path.unlink()

    third = await prefix.fresh()
    assert payloads(range(40), 300_000) == await served(third, range(50))
    assert third.counts.reads <= 6  # 12 MB in runs of 4 MiB


async def test_a_large_segment_goes_up_in_parts(s3, tmp_path):
    """Beyond one part's size, with the same bytes on the other side."""
    prefix = Prefix(s3, "large")
    await upload(prefix.replica(), sealed_segment(tmp_path, range(10), num_bytes=2_900_000))

    assert payloads(range(10), 2_900_000) == await served(await prefix.fresh(), range(10))


async def test_deletions_and_expiry_leave_no_bytes(s3, tmp_path):
    """A tenant is deleted from shared objects; what is left expires; then the prefix is empty but for the tombstone."""
    prefix = Prefix(s3, "delete")
    tier = prefix.replica()
    await upload(tier, sealed_segment(tmp_path, range(6), tenants=("acme", "zeta")))
    removed = await tier.evict(Selection(tenant="acme"))
    assert 3 == removed.num_blocks
    assert payloads([1]) == await served(await prefix.fresh(), [1])

    prefix.clock.now = CREATED + LIFE_SECONDS
    await tier.catalog.tidy()
    left = {one.path.split("/")[0] for one in await tier.blobs.list("", max_blobs=100)}
    assert {"tombstone"} == left


@pytest.mark.parametrize("mode", ["503", "hang", "down"])
async def test_trouble_costs_no_time_and_passes_by_itself(s3, tmp_path, mode):
    """While the store fails, lookups say at once that nothing is there and uploads wait; then all is as before."""
    async with gate(s3.port) as there:
        prefix = Prefix(s3, f"trouble-{mode}", port=there.port, read_seconds=0.5, slow_seconds=0.3, write_seconds=2.0)
        tier = prefix.replica()
        background = asyncio.create_task(tier.run(Engine()))
        try:
            tier.sealed(sealed_segment(tmp_path, range(5)))
            await eventually(lambda: tier.num_blocks == 5, 20)
            assert payloads(range(5)) == await served(tier, range(5))

            there.become(mode)
            tier.sealed(sealed_segment(tmp_path, range(5, 8), number=2))
            await eventually(lambda: tier.breaker == "open", 20)
            slowest = 0.0
            for _ in range(20):
                began = time.monotonic()
                with contextlib.suppress(BlobError):  # one that was asked for while a trial went on
                    await served(tier, range(5))
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.02)
            assert slowest < 5

            there.become("pass")
            await eventually(lambda: (tier.num_blocks, tier.breaker) == (8, "closed"), 30)
            assert payloads(range(8)) == await served(tier, range(8))
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)


async def test_wrong_credentials_are_a_miss(s3):
    """Nothing is found and nothing breaks; the reason is told."""
    prefix = Prefix(s3, "denied", secret_access_key="wrong")
    tier = prefix.replica()
    with pytest.raises(BlobError, match="403"):
        await tier.catalog.refresh(is_full=True)

    assert [] == list(await tier.longest(b"f" * 32, [key(1)]))


async def test_a_missing_object_is_no_trouble(s3):
    """The breaker does not open for what is simply not there."""
    blobs = open_blobs(f"s3://{BUCKET}/none", BlobOptions.model_validate(s3.options))
    for _ in range(5):
        with pytest.raises(BlobMissingError):
            await blobs.get_range("seg/none", 0, 10)

    assert not blobs.is_away

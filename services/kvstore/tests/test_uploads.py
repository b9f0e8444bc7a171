"""Does a sealed segment go up once, whole, in its own time, and does nothing wait for it?"""

import asyncio
import dataclasses
import time

import pytest

from services.kvstore import uploads
from services.kvstore.blobs import open_blobs
from services.kvstore.manifests import parse
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.blocks import flip
from services.kvstore.tests.objects import (
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
    uploading,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Retries as in life, sooner."""
    monkeypatch.setattr(uploads, "FIRST_RETRY_SECONDS", 0.02)


async def test_two_uploads_of_one_segment_publish_it_once(tmp_path):
    """A replica that starts again uploads nothing twice, and two at once do not disturb each other."""
    bucket = Bucket()
    segment = sealed_segment(tmp_path, range(3))
    one, two = await bucket.fresh(), await bucket.fresh()
    await upload(one, segment)
    await upload(two, segment)
    again = bucket.replica()
    await upload(again, segment)

    assert 1 == one.uploads.counts.objects
    assert 0 == two.uploads.counts.objects == again.uploads.counts.objects
    assert 1 == len(await paths(one, "manifest")) == len(await paths(one, "seg"))


async def test_blocks_that_are_there_already_are_not_uploaded_again(tmp_path):
    """Copies that replicas keep of each other's blocks cost nothing; a copy that lives on for longer is worth it."""
    bucket = Bucket()
    tier = bucket.replica()
    await upload(tier, sealed_segment(tmp_path, range(3)))
    await upload(tier, sealed_segment(tmp_path, range(4), number=2, created=CREATED + 10))
    assert (3, 4) == (tier.uploads.counts.known_blocks, tier.uploads.counts.blocks)

    await upload(tier, sealed_segment(tmp_path, range(4), number=3, created=CREATED + 0.6 * LIFE_SECONDS))
    assert 8 == tier.uploads.counts.blocks


async def test_bytes_that_are_wrong_on_disk_are_not_uploaded(tmp_path):
    """A block that went bad before its upload stays behind, the others go."""
    bucket = Bucket()
    segment = sealed_segment(tmp_path, range(3))
    flip(segment.path, segment.locations[1].offset_bytes + 4096 + 100)
    tier = bucket.replica()
    await upload(tier, segment)

    assert (1, 2) == (tier.uploads.counts.damaged_blocks, tier.uploads.counts.blocks)
    assert payloads([0]) == await served(tier, range(3))
    assert payloads([2]) == await served(tier, [2])


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_queue_bytes": 60_000}, "bytes"), ({"max_queue_seconds": 0.05}, "age")]
)
async def test_the_queue_gives_up_the_oldest(tmp_path, limits, reason):
    """Bounded by bytes and by age, with a counter for each; the newest are uploaded once they can be."""
    bucket = Bucket(options=FAST.model_copy(update=limits))
    tier = bucket.replica()
    segments = [sealed_segment(tmp_path, range(3 * n, 3 * n + 3), number=n) for n in range(1, 5)]
    for segment in segments[:-1]:
        tier.sealed(segment)
    await asyncio.sleep(0.06)
    await upload(tier, segments[-1])

    assert segments[0].num_bytes < 60_000 < 3 * segments[0].num_bytes
    assert payloads(range(12, 15)) == await served(tier, range(12, 15))
    assert [] == await served(tier, range(3, 6))
    assert tier.uploads.counts.drops[reason] >= 6
    assert 0 == tier.uploads.queued_bytes


async def test_a_segment_that_is_gone_is_given_up(tmp_path):
    """Eviction does not wait for the upload."""
    bucket = Bucket()
    tier = bucket.replica()
    segment = sealed_segment(tmp_path, range(3))
    segment.path.unlink()
    await upload(tier, segment)

    assert {"gone": 3} == {reason: count for reason, count in tier.uploads.counts.drops.items() if count}


async def test_encrypted_blocks_stay_at_home(tmp_path):
    """Their keys are on this replica's disk: no other could read them."""
    bucket = Bucket()
    tier = bucket.replica()
    segment = sealed_segment(tmp_path, range(3))
    sealed = [segment.locations[0], *(one._replace(flags=1) for one in segment.locations[1:])]
    await upload(tier, dataclasses.replace(segment, locations=sealed))

    assert payloads([0]) == await served(tier, range(3))
    assert 2 == tier.uploads.counts.drops["encrypted"]


async def test_blocks_without_a_class_end_too(tmp_path):
    """What has no time of its own gets one in the object store, or it would stay for ever."""
    bucket = Bucket()
    tier = bucket.replica()
    segment = dataclasses.replace(sealed_segment(tmp_path, [0], retention=0), expires_at_unix_seconds=float("inf"))
    await upload(tier, segment)
    (path,) = await paths(tier, "manifest")
    found = parse(await tier.blobs.get(path, max_bytes=1 << 20))

    assert found is not None
    assert CREATED + FAST.unspecified_seconds == found.expires_unix_seconds


async def test_a_store_that_comes_back_gets_what_waited(tmp_path):
    """An upload that fails is tried again until it works."""
    tier = RemoteTier(open_blobs(f"file://{tmp_path}/elsewhere", FAST))
    blocked = tmp_path / "elsewhere" / "seg"
    blocked.write_text("no object can be written below a file")
    async with uploading(tier):
        tier.sealed(sealed_segment(tmp_path, range(3)))
        await eventually(lambda: tier.uploads.counts.retries)
        blocked.unlink()
        async with asyncio.timeout(30):
            await tier.uploads.flush()

    assert 3 == tier.uploads.counts.blocks


async def test_a_store_that_takes_nothing_can_still_be_read(tmp_path):
    """Full, or without the right to write: uploads wait, and what is there is served."""
    tier = RemoteTier(open_blobs(f"file://{tmp_path}/elsewhere", FAST))
    await upload(tier, sealed_segment(tmp_path, range(3), retention=CHAT, created=time.time()))
    (tmp_path / "elsewhere" / "seg" / "agent").write_text("no object can be written below a file")
    async with uploading(tier):
        tier.sealed(sealed_segment(tmp_path, range(3, 6), number=2, created=time.time()))
        await eventually(lambda: tier.uploads.counts.retries >= 3)
        assert tier.blobs.writes.num_opened
        assert "closed" == tier.breaker
        assert payloads(range(3)) == await served(tier, range(6))


async def test_sealing_is_asked_for(tmp_path):
    """Blocks do not stay on one disk alone for long: open segments are sealed after a while."""
    bucket = Bucket(options=FAST.model_copy(update={"seal_seconds": 0.04}))
    engine = Engine()
    task = asyncio.create_task(bucket.replica().run(engine))
    await eventually(lambda: len(engine.sealed_after) >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert {0.04} == set(engine.sealed_after)

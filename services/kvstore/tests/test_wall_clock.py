"""Does a clock that is wrong for a moment do harm that lasts?"""

import asyncio
from pathlib import Path

from services.kvstore.blobs import BlobBackend
from services.kvstore.remote import RemoteTier
from services.kvstore.retention import AGENT, RetentionPolicy
from services.kvstore.tests.blocks import block, open_store, payload, served
from services.kvstore.tests.objects import CREATED, FAST, Bucket, Clock
from services.kvstore.tiers import Selection
from services.kvstore.wall_clock import BELIEVED_SECONDS, WallClock

DAY = 86_400.0


def test_a_jump_ahead_is_believed_after_an_hour_and_one_back_at_once():
    """What goes on as it should is followed; small corrections are too."""
    here, steady = Clock(), Clock()
    clock = WallClock(now=here, steady=steady)
    for passed, set_by in ((10.0, 0.0), (1000.0, 59.0), (10.0, -500.0)):
        here.now += passed + set_by
        steady.now += passed
        assert here.now == clock.now()
    right = here.now
    here.now += 40 * DAY
    assert right == clock.now()
    here.now -= 40 * DAY
    assert right == clock.now()

    here.now += 40 * DAY
    for passed in (0.0, BELIEVED_SECONDS - 1):
        here.now += passed
        steady.now += passed
        assert right + passed == clock.now()
    here.now += 1.0
    steady.now += 1.0
    assert here.now == clock.now()


async def test_a_clock_that_jumps_ahead_and_back_costs_no_block(tmp_path: Path, monkeypatch) -> None:
    """While it is ahead everything looks ended and is a miss; nothing is unlinked, nor dated in the future."""
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    store = await open_store(tmp_path, policy=RetentionPolicy(agent_seconds=DAY))
    await store.write(block(0, retention=AGENT))
    clock.now += 40 * DAY
    assert {} == await served(store, [0])
    await store.write(block(1, retention=AGENT))
    await asyncio.sleep(0)
    await store._upkeep._tick(store._line.clock.now())
    clock.now -= 40 * DAY

    assert {n: payload(n) for n in range(2)} == await served(store, [0, 1])
    assert max(one.created_seconds for one in store.catalog.index) < CREATED + 600
    await store.close()


async def test_a_deletion_covers_no_more_for_a_clock_that_has_jumped_ahead() -> None:
    """Else what its tenant writes in the next weeks would be deleted too, everywhere."""
    bucket = Bucket()
    tier = RemoteTier(BlobBackend(bucket.store, FAST), now=bucket.clock)
    bucket.clock.now += 40 * DAY
    await tier.evict(Selection(tenant="acme"))
    (tombstone,) = tier.catalog.tombstones
    assert tombstone.before_unix_seconds < CREATED + 600

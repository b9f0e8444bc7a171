"""Are blocks kept as long as promised, and not longer, under classes, hits, quotas, pins and leases?"""

import asyncio
import time
from pathlib import Path

import pytest

from services.chassis.errors import Overloaded
from services.kvstore.retention import AGENT, CHAT, UNSPECIFIED, RetentionPolicy
from services.kvstore.store import Outcome, Store
from services.kvstore.tests.blocks import (
    FINGERPRINT,
    MEBIBYTE,
    block,
    key,
    open_store,
    payload,
    read_all,
    segments,
    served,
)
from services.kvstore.tests.soak import soak, soak_for

pytestmark = pytest.mark.slow  # lives of tenths of a second, and evictions that must be filled up to

SHORT = RetentionPolicy(agent_seconds=0.8, chat_seconds=2.4)


class Clock:
    """The wall clock of a test: it stands until it is moved, so no life ends because the machine is busy."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stands = Clock()
    monkeypatch.setattr(time, "time", stands)
    return stands


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - as an operator would see it
            await asyncio.sleep(0.01)


async def write_all(store: Store, numbers: range, num_bytes: int, at_once: int = 8) -> None:
    for start in range(numbers.start, numbers.stop, at_once):
        batch = range(start, min(start + at_once, numbers.stop))
        await asyncio.gather(*(store.write(block(n, num_bytes)) for n in batch))


def found(store: Store, number: int, retention: int = UNSPECIFIED) -> int:
    return store.lookup(FINGERPRINT, [key(number)], retention=retention)


async def test_expired_blocks_are_never_served_even_while_on_disk(tmp_path: Path, clock: Clock) -> None:
    """From the end of its class's time a block is a miss, for lookups and reads, before and after a restart."""
    store = await open_store(tmp_path, policy=RetentionPolicy(agent_seconds=0.3, chat_seconds=60))
    await store._upkeep.close()  # nothing tidies up: the files stay
    for number, retention in ((1, AGENT), (2, CHAT), (3, UNSPECIFIED)):
        await store.write(block(number, retention=retention))
    assert [1, 1, 1] == [found(store, number) for number in (1, 2, 3)]
    clock.now += 0.31

    assert 3 == len(segments(tmp_path))
    assert [0, 1, 1] == [found(store, number) for number in (1, 2, 3)]
    assert {2: payload(2), 3: payload(3)} == await served(store, [1, 2, 3])
    assert await store.write(block(4)) is Outcome.STORED
    await store.close()
    store = await open_store(tmp_path, policy=RetentionPolicy(agent_seconds=0.3, chat_seconds=60))
    assert {2: payload(2), 3: payload(3), 4: payload(4)} == await served(store, [1, 2, 3, 4])
    await store.close()


async def test_a_chain_ends_at_its_first_expired_block(tmp_path: Path, clock: Clock) -> None:
    """Live blocks behind an expired one are of no use and are not counted."""
    store = await open_store(tmp_path, policy=RetentionPolicy(agent_seconds=0.3, chat_seconds=60))
    for number, retention in ((0, CHAT), (1, AGENT), (2, CHAT)):
        await store.write(block(number, retention=retention))
    assert 3 == store.lookup(FINGERPRINT, [key(n) for n in range(3)])
    clock.now += 0.31
    assert 1 == store.lookup(FINGERPRINT, [key(n) for n in range(3)])
    await store.close()


async def test_expiry_unlinks_whole_segments(tmp_path: Path) -> None:
    """The class whose time is over goes as files; the others' files are not touched."""
    store = await open_store(tmp_path, policy=RetentionPolicy(agent_seconds=0.3, chat_seconds=60))
    for number in range(6):
        await store.write(block(number, retention=AGENT if number % 2 else CHAT))
    await until(lambda: not [path for path in segments(tmp_path) if "agent" in path.name])

    assert 3 == store.counts.evictions["ttl"]
    assert {n: payload(n) for n in (0, 2, 4)} == await served(store, list(range(6)))
    await store.close()


async def test_a_segment_that_ends_while_it_is_read_goes_after_the_read(tmp_path: Path, clock: Clock) -> None:
    """Whoever began in time gets the bytes: a file that was gone would count as damage."""
    store = await open_store(tmp_path, policy=SHORT)
    await store._upkeep.close()
    await store.write(block(1, retention=AGENT))
    clock.now += 0.5
    await store.seal_older_than(-1.0)
    (segment,) = store.catalog.segments.values()
    segment.readers += 1  # as a thread that is just about to open the file
    clock.now += 1.0
    await store._upkeep._tick(clock.now)
    assert ([], 1) == (list(store.catalog.index), len(segments(tmp_path)))

    segment.readers -= 1
    await store._upkeep._tick(clock.now)
    assert 0 == len(segments(tmp_path))
    await store.close()


async def test_a_hit_late_in_life_gives_a_new_life(tmp_path: Path, clock: Clock) -> None:
    """Blocks in use live on by being copied forward; those that nobody asks for end."""
    store = await open_store(tmp_path, policy=SHORT)
    await store._upkeep.close()  # by hand instead, and on time
    for number in (1, 2):
        await store.write(block(number, retention=AGENT))
    for _ in range(100):
        clock.now += 0.02
        found(store, 1, AGENT)
        await store._upkeep._tick(clock.now)

    assert {1: payload(1)} == await served(store, [1, 2])
    assert store.counts.refreshed_blocks >= 2
    assert store.counts.refreshed_blocks <= 2.0 / (0.8 * 0.75) + 1
    await store.close()


async def test_a_hit_by_a_longer_class_moves_the_block_to_it(tmp_path: Path, clock: Clock) -> None:
    """An agent's block that a chat goes on from lives as long as chats do."""
    store = await open_store(tmp_path, policy=SHORT)
    await store.write(block(1, retention=AGENT))
    assert 1 == found(store, 1, CHAT)
    await until(lambda: store.counts.refreshed_blocks)
    clock.now += 1.0
    assert {1: payload(1)} == await served(store, [1])
    clock.now += 1.5
    assert not store.has(FINGERPRINT, key(1))
    await store.close()


async def test_hot_blocks_of_an_evicted_segment_are_saved(tmp_path: Path) -> None:
    """A block that was hit lately survives its cold neighbours, within a tenth of the segment."""
    store = await open_store(tmp_path, max_bytes=4 * MEBIBYTE, segment_bytes=256 << 10)
    await write_all(store, range(8), 20_000)
    assert 1 == found(store, 3)
    await write_all(store, range(100, 280), 20_000)

    assert {3: payload(3, 20_000)} == await served(store, list(range(8)))
    assert 1 <= store.counts.refreshed_blocks <= 2
    await store.close()


async def test_a_lease_ends_in_time_though_the_clock_is_set_back(tmp_path: Path, clock: Clock) -> None:
    """Else a machine whose clock was days ahead could make no room for as many days."""
    clock.now += 40 * 86_400.0
    store = await open_store(tmp_path)
    await store.write(block(1))
    assert 0 < (await store.find(FINGERPRINT, [key(1)], request_id="r", lease_seconds=0.001)).lease_seconds
    clock.now -= 40 * 86_400.0
    await asyncio.sleep(0.002)
    await store._upkeep._tick(clock.now)
    assert 0 == len(store.catalog.leases)
    await store.close()


async def test_a_tenant_over_its_quota_loses_its_own_coldest_blocks_only(tmp_path: Path) -> None:
    """One tenant's flood costs no other tenant a block, and its own warm ones stay."""
    policy = RetentionPolicy(quota_bytes={"*": 100_000})
    store = await open_store(tmp_path, max_bytes=16 * MEBIBYTE, segment_bytes=64 << 10, policy=policy)
    for number in range(4):
        await store.write(block(number, 20_000, tenant="quiet"))
        await store.write(block(10 + number, 20_000, tenant="loud"))
    for number in range(100, 140):
        await store.write(block(number, 20_000, tenant="loud"))
        assert store.catalog.index.tenants["loud"].num_bytes <= 100_000
    assert {n: payload(n, 20_000) for n in range(4)} == await served(store, list(range(4)))
    assert {139: payload(139, 20_000)} == await served(store, [10, 11, 12, 13, 139])
    assert store.counts.evictions["capacity"] == 0 < store.counts.evictions["quota"]

    with pytest.raises(Overloaded, match="quota"):
        await store.write(block(500, 100_001, tenant="loud"))
    assert 1 == store.counts.write_drops["quota"]
    await store.close()


async def test_pinned_blocks_stay_whatever_is_written(tmp_path: Path) -> None:
    """A session's blocks outlive eviction, until it lets go or its time is over."""
    store = await open_store(tmp_path, max_bytes=4 * MEBIBYTE, segment_bytes=256 << 10)
    await write_all(store, range(12), 20_000)
    num_pinned, until_seconds = await store.pin("t", "s", FINGERPRINT, [key(2), key(3), key(999)], hold_seconds=60)
    assert (2, True) == (num_pinned, 50 < until_seconds - time.time() < 61)
    await write_all(store, range(100, 400), 20_000)
    assert {n: payload(n, 20_000) for n in (2, 3)} == await served(store, list(range(12)))

    assert 2 == store.release("t", "s")
    await write_all(store, range(1000, 1400), 20_000)
    assert {} == await served(store, list(range(12)))
    await store.close()


async def test_a_pin_outlives_the_class(tmp_path: Path, clock: Clock) -> None:
    """A block that is pinned for longer than its class lives is written again before it ends."""
    store = await open_store(tmp_path, policy=SHORT)
    await store.write(block(1, retention=AGENT))
    await store.write(block(2, retention=AGENT))
    await store.pin("t", "s", FINGERPRINT, [key(1)], hold_seconds=1.5)
    clock.now += 0.7
    await until(lambda: store.counts.refreshed_blocks)
    clock.now += 0.3
    assert {1: payload(1)} == await served(store, [1, 2])
    clock.now += 2.0
    assert not store.has(FINGERPRINT, key(1))
    await store.close()


async def test_leased_segments_are_not_unlinked_and_leases_end_by_themselves(tmp_path: Path) -> None:
    """Between lookup and read nothing can take the blocks away; a reader that never comes holds them for a moment."""
    store = await open_store(tmp_path, max_bytes=4 * MEBIBYTE, segment_bytes=128 << 10)
    await write_all(store, range(4), 30_000)
    keys = [key(n) for n in range(4)]
    answer = await store.find(FINGERPRINT, keys, request_id="r1", lease_seconds=30)
    assert (4, 30.0) == (answer.num_blocks, answer.lease_seconds)
    await write_all(store, range(100, 250), 30_000)
    assert [payload(n, 30_000) for n in range(4)] == [
        bytes(one.payload) async for one in store.read(FINGERPRINT, keys, request_id="r1")
    ]
    assert 0 == len(store.catalog.leases)

    await store.find(FINGERPRINT, [key(249)], request_id="r2", lease_seconds=0.05)
    assert 1 == len(store.catalog.leases)
    await until(lambda: len(store.catalog.leases) == 0)
    assert 1 == store.catalog.leases.num_expired
    await store.close()


async def test_a_lease_that_ends_during_the_read_yields_right_bytes_or_a_miss(tmp_path: Path) -> None:
    """The slowest reader gets no wrong byte while its segments are evicted under it."""
    store = await open_store(tmp_path, max_bytes=4 * MEBIBYTE, segment_bytes=128 << 10)
    await write_all(store, range(40), 30_000)
    await store.find(FINGERPRINT, [key(n) for n in range(40)], request_id="r", lease_seconds=0.01)
    reading = store.read(FINGERPRINT, [key(n) for n in range(40)], request_id="r")
    got = [bytes((await anext(reading)).payload)]
    await asyncio.sleep(0.02)
    await write_all(store, range(100, 260), 30_000)
    got += [bytes(one.payload) async for one in reading]

    assert [payload(n, 30_000) for n in range(len(got))] == got
    assert 0 == store.counts.damaged_blocks
    await store.close()


async def test_physical_bytes_stay_under_the_cap_in_a_soak(tmp_path: Path) -> None:
    """Every class, quotas, pins and expiry at once: what the file system gave never exceeds the cap."""
    for seconds in (3.0, 10.0, 30.0):  # which reasons come up in which time is a matter of the disk's speed
        store = await soak(tmp_path / f"{seconds}", seconds)
        await store.close()
        assert 0 == store.counts.damaged_blocks
        if store.counts.evictions["capacity"]:
            break
    assert store.counts.evictions["capacity"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_physical_bytes_stay_under_the_cap_for_long(tmp_path: Path) -> None:
    """The same for ten minutes; descriptors and memory do not grow either. `soak.py` goes on for as long as it is told."""
    await soak_for(tmp_path, 600.0, every_seconds=60.0)


async def test_reading_a_refreshed_block_from_its_old_place_is_no_mix(tmp_path: Path, clock: Clock) -> None:
    """Readers before, during and after a copy forward see the same bytes."""
    store = await open_store(tmp_path, policy=SHORT)
    await store._upkeep.close()  # by hand instead, beside the reading
    for number in range(5):
        await store.write(block(number, 40_000, retention=AGENT))
    for _ in range(100):
        clock.now += 0.015
        store.lookup(FINGERPRINT, [key(n) for n in range(5)], retention=AGENT)
        got, _ = await asyncio.gather(read_all(store, list(range(5))), store._upkeep._tick(clock.now))
        assert [payload(n, 40_000) for n in range(5)] == got
    assert store.counts.refreshed_blocks >= 5
    await store.close()

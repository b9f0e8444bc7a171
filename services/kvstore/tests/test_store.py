"""Does the store keep what it took, in one copy, under its cap?"""

import asyncio
import random
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.chassis.errors import InvalidRequest, Overloaded
from services.kvstore.admission import ByteBudget
from services.kvstore.directory import StoreLockedError
from services.kvstore.segments import Block
from services.kvstore.store import Outcome
from services.kvstore.tests.blocks import (
    FINGERPRINT,
    MEBIBYTE,
    OTHER_FINGERPRINT,
    block,
    flip,
    key,
    open_store,
    payload,
    read_all,
    segments,
    served,
)


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """A real disk error without a full disk: the kernel refuses to let any file grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_blocks_come_back_byte_for_byte_also_after_a_restart(tmp_path: Path) -> None:
    """What was written is what is read, whatever its size, and a restart keeps the hits."""
    sizes = [1, 4095, 4096, 4097, 300_000]
    store = await open_store(tmp_path)
    for number, size in enumerate(sizes):
        assert await store.write(block(number, size)) is Outcome.STORED
    wanted = [payload(number, size) for number, size in enumerate(sizes)]
    assert wanted == await read_all(store, [0, 1, 2, 3, 4])
    await store.close()

    store = await open_store(tmp_path)
    assert 5 == store.lookup(FINGERPRINT, [key(n) for n in range(6)])
    assert wanted == await read_all(store, [0, 1, 2, 3, 4, 5])
    await store.close()


async def test_another_fingerprint_finds_and_reads_nothing(tmp_path: Path) -> None:
    """KV of another model, layout or recipe is invisible."""
    store = await open_store(tmp_path)
    await store.write(block(1))

    assert 0 == store.lookup(OTHER_FINGERPRINT, [key(1)])
    assert [] == await read_all(store, [1], OTHER_FINGERPRINT)
    await store.close()


async def test_many_writers_of_one_key_store_it_once_and_never_mix(tmp_path: Path) -> None:
    """First writer wins: one record on disk, its bytes are one writer's, all others hear "duplicate"."""
    store = await open_store(tmp_path)
    payloads = [payload(100 + n, 20_000) for n in range(16)]
    outcomes = await asyncio.gather(
        *(store.write(Block(key(1), FINGERPRINT, data, zlib.crc32(data))) for data in payloads)
    )

    assert 1 == outcomes.count(Outcome.STORED)
    assert [payloads[outcomes.index(Outcome.STORED)]] == await read_all(store, [1])
    assert store.disk_bytes < 2 * 20_000 + 16_384
    await store.close()


async def test_a_writer_that_goes_away_does_not_take_the_block_with_it(tmp_path: Path) -> None:
    """Once handed to the disk a block is stored, also when the calls that brought it are cancelled."""
    store = await open_store(tmp_path)
    first, second = asyncio.create_task(store.write(block(1))), asyncio.create_task(store.write(block(1)))
    async with asyncio.timeout(30):
        while not store._in_flight:  # noqa: ASYNC110 - the moment between two steps of write()
            await asyncio.sleep(0)
    first.cancel()
    second.cancel()

    assert await asyncio.wait_for(store.write(block(1)), 30) is Outcome.DUPLICATE
    assert [payload(1)] == await read_all(store, [1])
    await store.close()


async def test_a_wrong_crc_publishes_nothing(tmp_path: Path) -> None:
    """Bytes that were damaged on the way are refused, and the right ones can still be written."""
    store = await open_store(tmp_path)
    with pytest.raises(InvalidRequest):
        await store.write(Block(key(1), FINGERPRINT, payload(1), 1234))

    assert 0 == store.lookup(FINGERPRINT, [key(1)])
    assert await store.write(block(1)) is Outcome.STORED
    await store.close()


async def test_the_cap_holds_and_warm_segments_survive(tmp_path: Path) -> None:
    """Room is made by whole cold segments; what is hit stays; the files never exceed the cap."""
    store = await open_store(tmp_path, max_bytes=MEBIBYTE, segment_bytes=128 << 10)
    for number in range(0, 60, 3):
        await asyncio.gather(*(store.write(block(number + n, 40_000)) for n in range(3)))
        assert 1 == store.lookup(FINGERPRINT, [key(0)])
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= store.disk_bytes <= MEBIBYTE
    found = await served(store, list(range(60)))

    assert {n: payload(n, 40_000) for n in found} == found
    assert 0 in found
    assert 59 in found
    assert 4 not in found
    assert len(found) == store.num_blocks == 60 - store.counts.evicted_blocks
    await store.close()


async def test_a_lowered_cap_holds_from_the_start_on(tmp_path: Path) -> None:
    """A smaller disk allowance after a restart is obeyed."""
    store = await open_store(tmp_path, max_bytes=4 * MEBIBYTE, segment_bytes=128 << 10)
    await asyncio.gather(*(store.write(block(number, 40_000)) for number in range(60)))
    await store.close()

    store = await open_store(tmp_path, max_bytes=MEBIBYTE, segment_bytes=128 << 10)
    assert store.disk_bytes <= MEBIBYTE
    await store.write(block(99, 40_000))
    assert store.disk_bytes <= MEBIBYTE
    assert [payload(99, 40_000)] == await read_all(store, [99])
    await store.close()


async def test_eviction_never_pulls_a_segment_from_under_a_reader(tmp_path: Path) -> None:
    """Readers in the middle of eviction get right bytes or a miss; pins are all returned."""
    store = await open_store(tmp_path, max_bytes=MEBIBYTE, segment_bytes=128 << 10)
    rng = random.Random(5)
    wrong = []

    async def reader() -> None:
        for _ in range(40):
            number = rng.randrange(80)
            for data in await read_all(store, [number]):
                if data != payload(number, 30_000):
                    wrong.append(number)

    async def writer() -> None:
        for number in range(0, 80, 4):
            await asyncio.gather(*(store.write(block(number + n, 30_000)) for n in range(4)))

    await asyncio.wait_for(asyncio.gather(writer(), *(reader() for _ in range(4))), 60)
    await asyncio.sleep(0)
    assert [] == wrong
    assert 0 == store.counts.damaged_blocks
    assert 0 == sum(segment.readers for segment in store.catalog.segments.values())
    await store.close()


async def test_a_failing_disk_publishes_nothing_and_the_store_lives_on(tmp_path: Path) -> None:
    """When a write fails nothing of it can be found, older blocks are still served, later writes work."""
    store = await open_store(tmp_path)
    await store.write(block(1))
    with files_at_most(256 << 10):
        refused = await asyncio.gather(*(store.write(block(n, 300_000)) for n in (2, 3)), return_exceptions=True)
        assert [Overloaded, Overloaded] == [type(one) for one in refused]
        assert {1: payload(1)} == await served(store, [1, 2, 3])

    assert 2 == store.counts.refused_blocks
    assert await store.write(block(2, 300_000)) is Outcome.STORED
    await store.close()
    store = await open_store(tmp_path)
    assert {1: payload(1), 2: payload(2, 300_000)} == await served(store, [1, 2, 3])
    await store.close()


async def test_a_damaged_block_is_a_miss_that_can_be_written_again(tmp_path: Path) -> None:
    """Damage is dropped and counted; the new copy also wins over the old one after a restart."""
    store = await open_store(tmp_path)
    for number in range(3):
        await store.write(block(number))
    flip(segments(tmp_path)[0], 4096 + 17)

    assert [] == await read_all(store, [0, 1, 2])
    assert (1, 0) == (store.counts.damaged_blocks, store.lookup(FINGERPRINT, [key(0)]))
    assert await store.write(block(0)) is Outcome.STORED
    await store.close()
    store = await open_store(tmp_path)
    assert [payload(0), payload(1), payload(2)] == await read_all(store, [0, 1, 2])
    await store.close()


async def test_reading_stops_before_the_first_missing_block(tmp_path: Path) -> None:
    """A reader never has to guess which block a payload is."""
    store = await open_store(tmp_path)
    for number in (0, 1, 3):
        await store.write(block(number))

    assert [payload(0), payload(1)] == await read_all(store, [0, 1, 2, 3])
    await store.close()


async def test_a_second_store_on_the_same_folder_is_refused_clearly(tmp_path: Path) -> None:
    """Two processes can never append to the same files; the folder is free again after close."""
    store = await open_store(tmp_path)
    with pytest.raises(StoreLockedError, match=r"open in another kvstore \(process \d+\)"):
        await open_store(tmp_path)
    await store.close()
    await (await open_store(tmp_path)).close()


async def test_a_budget_lends_in_order_and_gives_up_in_time() -> None:
    """A slow disk makes writers wait, then Overloaded; nothing lent is lost on the way."""
    budget = ByteBudget(100)
    await budget.take(80, timeout_seconds=1)
    with pytest.raises(Overloaded):
        await budget.take(30, timeout_seconds=0.01)
    big = asyncio.create_task(budget.take(90, timeout_seconds=1))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(10, timeout_seconds=1))
    await asyncio.sleep(0)
    assert not small.done()
    budget.give_back(80)
    await asyncio.gather(big, small)
    budget.give_back(90)
    budget.give_back(10)
    assert 0 == budget.used_bytes

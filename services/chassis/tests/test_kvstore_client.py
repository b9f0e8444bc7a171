"""How do blocks come from the KV store and go to it? Against a store that keeps them in memory."""

import asyncio
import zlib

import pytest

from services.chassis.channel import open_channel
from services.chassis.kvstore_client import BlockWriter, StoredBlock, read_blocks, write_blocks
from services.chassis.tests.memory_kvstore import memory_kvstore

FINGERPRINT = b"f" * 32
SIZE = (2 << 20) + 1000


@pytest.fixture
async def store():
    async with memory_kvstore() as memory:
        yield memory


def block(number):
    return StoredBlock(bytes([number]) * 32, bytes([number]) * SIZE)


async def read(store, numbers, timeout_seconds=5):
    keys = [block(number).key for number in numbers]
    blocks = read_blocks(
        store.channel, keys, fingerprint=FINGERPRINT, block_bytes=SIZE, timeout_seconds=timeout_seconds
    )
    return [payload async for payload in blocks]


async def write(store, *numbers):
    blocks = [block(number) for number in numbers]
    return await write_blocks(store.channel, blocks, fingerprint=FINGERPRINT, timeout_seconds=5)


async def test_what_was_written_is_read(store):
    """Blocks of several pieces come back whole and in order."""
    assert 2 == (await write(store, 1, 2)).num_stored
    assert [block(1).payload, block(2).payload] == await read(store, [1, 2])


async def test_a_missing_block_ends_the_hit(store):
    """What follows a gap is not used."""
    await write(store, 1, 3)

    assert [block(1).payload] == await read(store, [1, 2, 3])


async def test_a_damaged_block_ends_the_hit(store):
    """A flipped byte is a miss, never wrong KV."""
    await write(store, 1, 2)
    payload, crc32 = store.blocks[block(2).key]
    store.blocks[block(2).key] = (b"!" + payload[1:], crc32)

    assert [block(1).payload] == await read(store, [1, 2])


async def test_a_block_of_another_size_ends_the_hit(store):
    """A store that answers with other blocks than asked for is not believed."""
    store.blocks[block(1).key] = (b"short", zlib.crc32(b"short"))

    assert [] == await read(store, [1])


async def test_a_store_that_is_away_is_a_miss():
    """No store, no hit, no error."""
    channel = open_channel("127.0.0.1:1", peer="kvstore")
    keys = [block(1).key]
    blocks = read_blocks(channel, keys, fingerprint=FINGERPRINT, block_bytes=SIZE, timeout_seconds=2)

    assert [] == [payload async for payload in blocks]
    await channel.close()


async def test_the_queue_is_bounded_and_drops_are_counted(store):
    """A slow store costs blocks, never time; what fits is written."""
    drops: list[int] = []
    writer = BlockWriter(store.channel, fingerprint=FINGERPRINT, max_bytes=2 * SIZE, on_drop=drops.append)
    running = asyncio.create_task(writer.run())
    store.gate.clear()
    for number in (1, 2, 3):
        if writer.has_room(SIZE):
            writer.put(block(number))
    assert [1] == drops

    store.gate.set()
    await asyncio.sleep(0)  # let the puts reach the queue
    await asyncio.wait_for(writer.flush(), 5)

    assert {block(1).key, block(2).key} == set(store.blocks)
    assert writer.has_room(2 * SIZE)
    running.cancel()


async def test_failed_writes_are_counted_and_the_writer_goes_on(store):
    """A store that fails and recovers is written to again."""
    drops: list[int] = []
    writer = BlockWriter(store.channel, fingerprint=FINGERPRINT, max_bytes=9 * SIZE, on_drop=drops.append)
    running = asyncio.create_task(writer.run())
    store.fails = True
    writer.put(block(1))
    await asyncio.sleep(0)
    await asyncio.wait_for(writer.flush(), 5)
    assert [1] == drops

    store.fails = False
    writer.put(block(2))
    await asyncio.sleep(0)
    await asyncio.wait_for(writer.flush(), 5)

    assert {block(2).key} == set(store.blocks)
    running.cancel()

"""How do blocks come from the KV store? Against stores that keep them in memory."""

import asyncio
import time
import zlib
from contextlib import AsyncExitStack

import pytest

from services.chassis import kvstore_client
from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores, Wanted, read_blocks
from services.chassis.kvstore_shards import GROUP_BLOCKS, keys_of, order, split
from services.chassis.kvstore_writer import StoredBlock, write_blocks
from services.chassis.tests.memory_kvstore import memory_kvstore

FINGERPRINT = b"f" * 32
SIZE = (2 << 20) + 1000
SMALL = 64


@pytest.fixture
async def store():
    async with memory_kvstore() as memory:
        yield memory


def block(number):
    return StoredBlock(bytes([number]) * 32, bytes([number]) * SIZE)


async def read(stores, numbers, timeout_seconds=30, **asked):
    keys = [block(number).key for number in numbers]
    wanted = Wanted(keys, 0, FINGERPRINT, SIZE, **asked)
    return [payload async for payload in read_blocks(stores, wanted, timeout_seconds=timeout_seconds)]


async def write(store, *numbers):
    blocks = [block(number) for number in numbers]
    return await write_blocks(store.channel, blocks, fingerprint=FINGERPRINT, timeout_seconds=30)


async def test_what_was_written_is_read(store):
    """Blocks of several pieces come back whole and in order."""
    assert 2 == (await write(store, 1, 2)).num_stored
    assert [block(1).payload, block(2).payload] == await read(store.stores, [1, 2])


async def test_a_missing_block_ends_the_hit(store):
    """What follows a gap is not used."""
    await write(store, 1, 3)

    assert [block(1).payload] == await read(store.stores, [1, 2, 3])


async def test_a_damaged_block_ends_the_hit(store):
    """A flipped byte is a miss, never wrong KV."""
    await write(store, 1, 2)
    payload, crc32 = store.blocks[block(2).key]
    store.blocks[block(2).key] = (b"!" + payload[1:], crc32)

    assert [block(1).payload] == await read(store.stores, [1, 2])


async def test_a_block_of_another_size_ends_the_hit(store):
    """A store that answers with other blocks than asked for is not believed."""
    store.blocks[block(1).key] = (b"short", zlib.crc32(b"short"))

    assert [] == await read(store.stores, [1])


async def test_a_store_that_is_away_is_a_miss():
    """No store, no hit, no error."""
    channel = open_channel("127.0.0.1:1", peer="kvstore")

    assert [] == await read(Stores.single(channel), [1], timeout_seconds=2)
    await channel.close()


async def test_a_late_block_ends_the_hit(store):
    """What has come until the deadline is used; the deadline is kept."""
    await write(store, 1, 2)
    store.pending[block(2).key] = asyncio.Event()
    async with asyncio.timeout(30):
        assert [block(1).payload] == await read(store.stores, [1, 2], timeout_seconds=1.5, pending_seconds=60)


async def test_a_block_that_is_being_written_is_waited_for(store):
    """The next turn comes milliseconds after the last: its blocks are on their way."""
    await write(store, 1, 2)
    ready = store.pending[block(2).key] = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, ready.set)

    assert [block(1).payload, block(2).payload] == await read(store.stores, [1, 2], pending_seconds=2)


async def test_the_read_names_its_request(store):
    """So that the store ends the request's lease with it."""
    await read(store.stores, [1], request_id="mine", pending_seconds=0.25)

    assert [("mine", 0.25)] == [(asked.request_id, asked.pending_seconds) for asked in store.reads]


# Several replicas.

CHAIN = [bytes([n // 256, n % 256]) * 16 for n in range(3 * GROUP_BLOCKS + 5)]


def payload_of(key):
    return (key * 2)[:SMALL]


@pytest.fixture
async def three():
    """Three replicas, each with the blocks that placement gives it; and what callers are told of them."""
    async with AsyncExitStack() as stack:
        memories = {f"kvstore-{n}": await stack.enter_async_context(memory_kvstore()) for n in range(3)}
        runs = split(CHAIN, 0, memories)
        for name, memory in memories.items():
            memory.blocks = {key: (payload_of(key), zlib.crc32(payload_of(key))) for key in keys_of(name, runs, CHAIN)}
        yield memories, Stores({name: memory.channel for name, memory in memories.items()})


async def read_chain(stores, first_index=0, timeout_seconds=30):
    wanted = Wanted(CHAIN, first_index, FINGERPRINT, SMALL)
    return [bytes(payload) async for payload in read_blocks(stores, wanted, timeout_seconds=timeout_seconds)]


@pytest.mark.parametrize("first_index", [0, 7, GROUP_BLOCKS, 3 * GROUP_BLOCKS + 4])
async def test_a_chain_is_put_together_from_its_replicas(three, first_index):
    """In the chain's order, each replica asked once."""
    memories, stores = three

    assert [payload_of(key) for key in CHAIN[first_index:]] == await read_chain(stores, first_index)
    assert all(len(memory.reads) <= 1 for memory in memories.values())


async def test_a_lost_replica_is_asked_for_elsewhere(three):
    """Behind one object store, the next in each group's order has its blocks; without, the prefix ends there."""
    memories, _ = three
    lost = order(CHAIN[GROUP_BLOCKS], memories)[0]
    left = {name: memory.channel for name, memory in memories.items() if name != lost}
    away = open_channel("127.0.0.1:1", peer="kvstore")
    with_away = Stores({**left, lost: away})
    first_lost = next(n for n in range(0, len(CHAIN), GROUP_BLOCKS) if order(CHAIN[n], memories)[0] == lost)
    assert [payload_of(key) for key in CHAIN[:first_lost]] == await read_chain(with_away)

    for name in left:
        memories[name].blocks |= memories[lost].blocks
    assert [payload_of(key) for key in CHAIN] == await read_chain(with_away)
    await away.close()


async def test_an_address_names_the_replicas():
    """One host:port is a store of one replica, several with names are shards, nothing is no store."""
    channels = []

    def channel(address):
        channels.append(open_channel(address))
        return channels[-1]

    assert Stores.of("", channel) is None
    one, several = Stores.of("host:1", channel), Stores.of("a=host:1,b=host:2", channel)
    assert one is not None
    assert several is not None
    assert (["host:1"], ["a", "b"]) == (list(one.channels), list(several.channels))
    for each in channels:
        await each.close()


async def test_a_store_whose_reads_never_come_is_spared_for_a_while(store, monkeypatch):
    """One request waits as long as computing would take; those behind it begin to compute at once."""
    monkeypatch.setattr(kvstore_client, "_LEAST_LATE_SECONDS", 0.1)
    await write(store, 1)
    store.gate.clear()
    assert [] == await read(store.stores, [1], timeout_seconds=0.2)
    store.gate.set()
    assert [] == await read(store.stores, [1])
    assert 1 == len(store.reads)
    (until,) = store.stores.late_until.values()
    assert 0 < until - time.monotonic() <= 5
    store.stores.late_until["kvstore"] = time.monotonic()  # as if the while had gone by

    assert [block(1).payload] == await read(store.stores, [1])
    assert 2 == len(store.reads)


async def test_a_slow_reader_is_not_the_stores_fault(store, monkeypatch):
    """Time that went by while blocks were used is not held against the replica."""
    monkeypatch.setattr(kvstore_client, "_LEAST_LATE_SECONDS", 0.8)
    await write(store, 1, 2)
    wanted = Wanted([block(1).key, block(2).key], 0, FINGERPRINT, SIZE)
    async for _ in read_blocks(store.stores, wanted, timeout_seconds=0.7):
        await asyncio.sleep(1)

    assert {} == store.stores.late_until

"""How do computed blocks get to the KV store, and which are given up? Against stores that keep them in memory."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from proto.common_pb2 import RETENTION_CLASS_AGENT
from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_shards import GROUP_BLOCKS, keys_of, order, split
from services.chassis.kvstore_writer import BlockWriter, Origin, StoredBlock, Writeback
from services.chassis.testing import until
from services.chassis.tests.memory_kvstore import memory_kvstore

FINGERPRINT = b"f" * 32
SIZE = 1000
ORIGIN = Origin()
KEYS = [bytes([n // 256, n % 256]) * 16 for n in range(2 * GROUP_BLOCKS)]


@pytest.fixture
async def store():
    async with memory_kvstore() as memory:
        yield memory


def block(index, keys=KEYS, origin=ORIGIN):
    return StoredBlock.of_chain(keys, index, bytes([index]) * SIZE, origin)


@asynccontextmanager
async def writing(stores, **options):
    """Run a writer; yield it and its drops by reason."""
    drops: Counter[str] = Counter()
    asked: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "max_bytes": 100 * SIZE,
        "on_drop": lambda why, n: drops.update({why: n}),
    }
    writer = BlockWriter(stores, **(asked | options))
    running = asyncio.create_task(writer.run())
    try:
        yield writer, drops
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def put(writer, *blocks):
    for each in blocks:
        if writer.has_room(SIZE):
            writer.put(each)
    await asyncio.sleep(0)  # let them reach the queue


async def flushed(writer):
    async with asyncio.timeout(30):
        await writer.flush()


async def test_blocks_arrive_in_order_with_what_is_known_of_them(store):
    """Parents before children, each with its tenant and its class."""
    async with writing(store.stores) as (writer, drops):
        origin = Origin("acme", RETENTION_CLASS_AGENT)
        await put(writer, *(block(n, origin=origin) for n in range(20)))
        await flushed(writer)

    assert KEYS[:20] == store.order
    assert {origin} == set(store.origins.values())
    assert not drops


async def test_too_many_bytes_drop_the_oldest(store):
    """A slow store costs blocks, never time; the newest, whose next turn is still to come, are kept."""
    store.gate.clear()
    async with writing(store.stores, max_bytes=3 * SIZE) as (writer, drops):
        chains = [[bytes([chain, n]) * 16 for n in range(2)] for chain in range(5)]
        await put(writer, block(0, chains[0]))
        await until(lambda: store.num_write_calls == 1)  # this one is on its way
        await put(writer, *(block(0, keys) for keys in chains[1:]))
        store.gate.set()
        await flushed(writer)

    assert {chains[0][0], chains[3][0], chains[4][0]} == set(store.blocks)
    assert {"bytes": 2} == drops


async def test_a_chain_that_does_not_fit_loses_its_end(store):
    """Its beginning can be found without its end, but not the other way round."""
    store.gate.clear()
    async with writing(store.stores, max_bytes=3 * SIZE) as (writer, drops):
        await put(writer, *(block(n) for n in range(8)))
        store.gate.set()
        await flushed(writer)

    assert (KEYS[:3], 5) == (store.order, drops["bytes"] + drops["orphan"])


async def test_a_block_that_waits_too_long_is_dropped(store):
    """Its turn's successor has come and gone; also while the call before it hangs."""
    store.gate.clear()
    async with writing(store.stores, max_age_seconds=0.5) as (writer, drops):
        await put(writer, block(0))
        await until(lambda: store.num_write_calls == 1)  # this one is on its way
        await put(writer, block(1))
        await until(lambda: drops)
        store.gate.set()
        await flushed(writer)

    assert ({"age": 1}, [KEYS[0]]) == (drops, store.order)


async def test_what_nothing_could_find_is_not_written(store):
    """A block goes with the parent that was given up; when the parent is computed again, both are welcome."""
    async with writing(store.stores) as (writer, drops):
        store.fails = True
        await put(writer, block(0))
        await flushed(writer)
        store.fails = False
        await put(writer, block(1), block(2))
        await flushed(writer)
        assert ({"failed": 1, "orphan": 2}, set()) == (drops, set(store.blocks))

        await put(writer, *(block(n) for n in range(3)))
        await flushed(writer)
    assert set(KEYS[:3]) == set(store.blocks)


async def test_an_event_loop_that_stands_still_is_no_leak(store):
    """The engine thread stops copying when not even the oldest could be dropped yet."""
    async with writing(store.stores, max_bytes=2 * SIZE) as (writer, drops):
        for n in range(10):
            if writer.has_room(SIZE):
                writer.put(block(n))
        assert ({"bytes": 6}, 4 * SIZE) == (drops, writer.pending_bytes)
        await asyncio.sleep(0)
        await flushed(writer)
        assert 0 == writer.pending_bytes


async def test_failed_writes_are_counted_and_the_writer_goes_on(store):
    """A store that fails and recovers is written to again."""
    async with writing(store.stores) as (writer, drops):
        store.fails = True
        await put(writer, block(0))
        await flushed(writer)
        store.fails = False
        await put(writer, block(0, [b"x" * 32]))
        await flushed(writer)

    assert ({"failed": 1}, {b"x" * 32}) == (drops, set(store.blocks))


async def test_each_replica_gets_its_groups():
    """And one that hangs holds up its own only."""
    async with AsyncExitStack() as stack:
        memories = {f"kvstore-{n}": await stack.enter_async_context(memory_kvstore()) for n in range(3)}
        stores = Stores({name: memory.channel for name, memory in memories.items()})
        hanging = order(KEYS[0], memories)[0]
        memories[hanging].gate.clear()
        async with writing(stores) as (writer, _):
            await put(writer, *(block(n) for n in range(len(KEYS))))
            runs = split(KEYS, 0, memories)
            others = {name: set(keys_of(name, runs, KEYS)) for name in memories if name != hanging}
            await until(lambda: others == {name: set(memories[name].blocks) for name in others})
            memories[hanging].gate.set()
            await flushed(writer)

        assert set(keys_of(hanging, runs, KEYS)) == set(memories[hanging].blocks)


async def test_a_replica_that_is_away_is_passed_over():
    """What comes next goes to the next in its group's order, where it is looked for meanwhile."""
    async with memory_kvstore() as memory:
        away = open_channel("127.0.0.1:1", peer="kvstore")
        names = ("here", "away")
        chains = [[bytes([n]) * 32] for n in range(40)]
        theirs = [keys for keys in chains if order(keys[0], names)[0] == "away"]
        async with writing(Stores({"here": memory.channel, "away": away})) as (writer, drops):
            await put(writer, block(0, theirs[0]))
            await flushed(writer)
            await put(writer, block(0, theirs[1]))
            await flushed(writer)

        assert ({"failed": 1}, {theirs[1][0]}) == (drops, set(memory.blocks))
        await away.close()


class Coming:
    """A block that is there when the test says so."""

    def __init__(self, number):
        self.number, self.has_come = number, False

    def is_there(self):
        return self.has_come

    def payload(self):
        return bytes([self.number]) * SIZE


async def test_nobody_waits_for_a_block_on_its_way(store):
    """They are queued in the order in which they were offered, when they have come; at the latest when all is idle."""
    async with writing(store.stores) as (writer, drops):
        coming: dict[int, Coming] = {}
        writeback = Writeback(lambda number: coming.setdefault(number, Coming(number)), SIZE, writer)
        for number in range(3):
            writeback.offer(ORIGIN, KEYS, number, number)
        coming[1].has_come = True
        writeback.settle()
        assert 0 == writer.pending_bytes
        coming[0].has_come = True
        writeback.settle()
        assert 2 * SIZE == writer.pending_bytes
        writeback.settle(wait=True)
        await flushed(writer)

    assert KEYS[:3] == list(store.blocks)
    assert [bytes([number]) * SIZE for number in range(3)] == [payload for payload, _ in store.blocks.values()]
    assert not drops


async def test_blocks_on_their_way_count_as_queued(store):
    """A store that stands still does not fill the host with copies either."""
    async with writing(store.stores, max_bytes=2 * SIZE) as (writer, drops):
        writeback = Writeback(Coming, SIZE, writer)
        for number in range(6):
            writeback.offer(ORIGIN, KEYS, number, number)

    assert {"bytes": 2} == drops

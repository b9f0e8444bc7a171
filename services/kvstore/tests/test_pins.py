"""Is a session that is spread over several stores pinned as a whole, or not at all?"""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from proto.kvstore_pb2 import GetStatsRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.channel import open_channel
from services.chassis.errors import NoReplica
from services.chassis.kvstore_pins import Pinned, Session, pin, release
from services.chassis.kvstore_shards import GROUP_BLOCKS, keys_of, split
from services.chassis.testing import free_port, running
from services.kvstore.server import build
from services.kvstore.tests.blocks import FINGERPRINT, key
from services.kvstore.tests.serving import chunks, settings_for, write

NUM_BLOCKS = 4 * GROUP_BLOCKS
NUMBERS = {key(n): n for n in range(NUM_BLOCKS)}
SESSION = Session("s", "acme", FINGERPRINT, list(NUMBERS), hold_seconds=60)


@asynccontextmanager
async def stores(folder, *, left_out=()):
    """Three stores, each with its own blocks of the session, but for some; yields their channels by name."""
    names = ["kvstore-0", "kvstore-1", "kvstore-2"]
    runs = split(SESSION.keys, 0, names)
    assert len({run.replica for run in runs}) > 1
    async with AsyncExitStack() as stack:
        channels = {}
        for name in names:
            service = await stack.enter_async_context(running(settings_for(folder / name), build))
            channels[name] = await stack.enter_async_context(open_channel(service.address, peer="kvstore"))
            mine = [NUMBERS[one] for one in keys_of(name, runs, SESSION.keys)]
            await write(KvstoreStub(channels[name]), *(chunks(n, 500) for n in mine if n not in left_out))
        yield channels


async def num_pinned(channels) -> int:
    stats = [await KvstoreStub(channel).GetStats(GetStatsRequest(), timeout=30) for channel in channels.values()]
    return sum(one.num_pinned for one in stats)


async def test_every_block_is_pinned_where_it_is(tmp_path):
    """And released again: a part of them, or the whole session."""
    async with stores(tmp_path) as channels:
        found = await pin(channels, SESSION, seconds=30)
        assert (NUM_BLOCKS, None) == (found.num_pinned, found.first_missing)
        assert NUM_BLOCKS == await num_pinned(channels)
        assert 2 == await release(channels, "s", "acme", [key(0), key(NUM_BLOCKS - 1)], seconds=5)
        assert 0 == await release(channels, "s", "another", [], seconds=5)
        assert NUM_BLOCKS - 2 == await release(channels, "s", "acme", [], seconds=5)
        assert 0 == await num_pinned(channels)


async def test_a_block_that_is_missing_anywhere_leaves_nothing_pinned(tmp_path):
    """The first such block is named; what the other replicas pinned is released."""
    async with stores(tmp_path, left_out=(70, 100)) as channels:
        assert Pinned(0, first_missing=70) == await pin(channels, SESSION, seconds=30)
        assert 0 == await num_pinned(channels)


async def test_a_replica_that_is_away_leaves_nothing_pinned(tmp_path):
    """And is named; releasing goes through to the others."""
    async with stores(tmp_path) as channels, open_channel(f"127.0.0.1:{free_port()}", peer="kvstore") as nowhere:
        names = {run.replica for run in split(SESSION.keys, 0, sorted(channels))}
        away = {**channels, max(names): nowhere}
        with pytest.raises(NoReplica, match=max(names)):
            await pin(away, SESSION, seconds=2)
        assert 0 == await num_pinned(channels)
        await pin(channels, SESSION, seconds=30)
        with pytest.raises(NoReplica, match=max(names)):
            await release(away, "s", "acme", [], seconds=2)
        assert 0 < await num_pinned(channels) < NUM_BLOCKS

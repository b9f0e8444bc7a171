"""Do replicas find each other through a real NATS, and keep working while it is away?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from proto.common_pb2 import ModelCard
from proto.events_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_READY, LoadReport, ReplicaRecord
from services.chassis import names
from services.chassis.bus import Bus, Entry
from services.chassis.errors import NoReplica
from services.chassis.registry import TTL_SECONDS, Registry, ReplicaTable
from services.chassis.testing import NatsServer, free_port, until


def record(replica: str = "decode-0", boot_id: str = "b1", **fields) -> ReplicaRecord:
    fields = {"address": "127.0.0.1:1", "state": REPLICA_STATE_READY, **fields}
    return ReplicaRecord(service="decode", replica=replica, boot_id=boot_id, **fields)


@pytest_asyncio.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


@contextlib.asynccontextmanager
async def member(url: str) -> AsyncIterator[tuple[Bus, Registry]]:
    """One process's bus and registry."""
    bus = Bus(url)
    registry = Registry(bus)
    bus.connect()
    try:
        yield bus, registry
    finally:
        await registry.close()
        await bus.close()


async def test_a_replica_is_seen_changed_and_withdrawn_at_once(nats: NatsServer) -> None:
    """Watchers, early or late, see the whole record; draining and leaving show at once, and not when records expire."""
    at_once = TTL_SECONDS - 0.5
    async with member(nats.url) as (_, ours), member(nats.url) as (_, theirs):
        table = theirs.watch("decode")
        ours.register(record(model=ModelCard(name="m", block_tokens=16), total_blocks=9, tiers=[1, 2]))
        (seen,) = await table.wait_for(1, 30)
        assert ("decode-0", "b1", "127.0.0.1:1", 9, (1, 2)) == (
            seen.replica,
            seen.boot_id,
            seen.address,
            seen.total_blocks,
            seen.tiers,
        )
        assert seen.model is not None
        assert 16 == seen.model.block_tokens

        async with member(nats.url) as (_, late):
            assert 1 == len(await late.watch("decode").wait_for(1, 30))

        ours.update(state=REPLICA_STATE_DRAINING)
        await until(lambda: table.ready() == (), at_once)
        assert REPLICA_STATE_DRAINING == table.snapshot()[0].state
        await ours.withdraw()
        await until(lambda: table.snapshot() == (), at_once)


async def test_snapshots_are_sorted_and_a_new_boot_replaces_the_old(nats: NatsServer) -> None:
    async with member(nats.url) as (_, one), member(nats.url) as (_, two), member(nats.url) as (_, watcher):
        table = watcher.watch("decode")
        one.register(record("decode-1"))
        two.register(record("decode-0", "old"))
        await table.wait_for(2, 30)
        async with member(nats.url) as (_, again):
            again.register(record("decode-0", "new"))
            await until(lambda: "new" in {replica.boot_id for replica in table.snapshot()})
            assert [("decode-0", "new"), ("decode-1", "b1")] == [(r.replica, r.boot_id) for r in table.snapshot()]


async def test_load_reports_reach_the_table_of_their_boot_only(nats: NatsServer) -> None:
    """Latest wins; a report of another boot is not this replica's."""
    async with member(nats.url) as (bus, ours), member(nats.url) as (_, theirs):
        table = theirs.watch("decode")
        ours.register(record())
        await table.wait_for(1, 30)
        for free in (5, 4):
            await bus.publish_load(LoadReport(service="decode", replica="decode-0", boot_id="b1", free_blocks=free))
        await until(lambda: (load := table.load("decode-0")) is not None and load.free_blocks == 4)
        await bus.publish_load(LoadReport(service="decode", replica="decode-0", boot_id="b0", free_blocks=1))
        await until(lambda: table.load("decode-0") is None)


async def test_everything_works_without_nats() -> None:
    """Nothing raises and nothing waits: the registry is empty, publishes are lost."""
    async with member(f"nats://127.0.0.1:{free_port()}") as (bus, registry):
        table = registry.watch("decode")
        registry.register(record())
        await bus.publish_load(LoadReport(service="decode", replica="decode-0"))
        with pytest.raises(NoReplica, match="0 of 1 decode replicas"):
            await table.wait_for(1, 0.05)
        assert not bus.connected
        assert not await bus.store("decode.x.y", b"", ttl_seconds=5)


async def test_a_nats_that_comes_late_is_found() -> None:
    server = NatsServer()
    async with member(server.url) as (_, registry):
        table = registry.watch("decode")
        registry.register(record())
        await asyncio.sleep(0.1)
        async with server:
            await table.wait_for(1, 30)


async def test_denied_publishes_are_counted() -> None:
    """NATS tells of them only in passing; an operator must be able to see it."""
    rules = (
        'authorization { default_permissions { publish { deny: "fathom.load.>" } }, users: [{user: a, password: a}] }'
    )
    async with NatsServer(config=rules) as server, member(server.url.replace("//", "//a:a@")) as (bus, _):
        await bus.wait_connected()
        await bus.publish_load(LoadReport(service="decode", replica="decode-0"))
        await until(lambda: bus.num_denied == 1)


def table_at(now: list[float]) -> ReplicaTable:
    return ReplicaTable("decode", lambda: now[0])


def put(replica: str, boot_id: str) -> Entry:
    value = record(replica, boot_id).SerializeToString()
    return Entry(f"decode.{replica}.{boot_id}", value, is_erased=False, is_expired=False)


def expired(replica: str, boot_id: str) -> Entry:
    return Entry(f"decode.{replica}.{boot_id}", b"", is_erased=False, is_expired=True)


def test_silence_counts_only_while_the_watch_is_healthy() -> None:
    """A replica leaves after the TTL of a healthy watch; a deaf watch and a fresh one hold nothing against it."""
    now = [100.0]
    table = table_at(now)
    table.mark_watching(is_watching=True)
    table.take(put("a", "1"))
    now[0] += TTL_SECONDS - 0.1
    assert 1 == len(table.snapshot())
    table.mark_watching(is_watching=False)
    now[0] += 1000
    assert 1 == len(table.snapshot())
    table.mark_watching(is_watching=True)
    now[0] += TTL_SECONDS - 0.1
    assert 1 == len(table.snapshot())
    now[0] += 0.2
    assert () == table.snapshot()


def test_an_expiry_told_by_a_returning_nats_is_not_believed() -> None:
    """After an outage it expires everybody at once, before anybody could register again."""
    now = [100.0]
    table = table_at(now)
    table.take(put("a", "1"))
    now[0] += 60
    table.mark_watching(is_watching=True)
    table.take(expired("a", "1"))
    assert 1 == len(table.snapshot())
    now[0] += TTL_SECONDS + 0.1
    assert () == table.snapshot()


def test_rubbish_in_the_bucket_is_skipped() -> None:
    table = table_at([0.0])
    table.take(Entry("decode.a.1", b"\xff\xff", is_erased=False, is_expired=False))
    assert () == table.snapshot()


@pytest.mark.slow
async def test_a_replica_that_dies_silently_expires(nats: NatsServer) -> None:
    """Killed, it withdraws nothing: watchers forget it after the TTL, and NATS too."""
    async with member(nats.url) as (_, theirs):
        table = theirs.watch("decode")
        async with member(nats.url) as (_, ours):
            ours.register(record())
            await table.wait_for(1, 30)
            for task in ours._tasks:
                task.cancel()
            await until(lambda: table.snapshot() == (), TTL_SECONDS + 25)
            ours._record = None
        async with member(nats.url) as (_, late):
            with pytest.raises(NoReplica):
                await late.watch("decode").wait_for(1, 1)


@pytest.mark.slow
async def test_a_killed_nats_changes_nothing_and_heals() -> None:
    """Away: the last known replicas stay. Back, with its store or without: nobody drops out, and changes flow again."""
    # Both at once: they mostly wait, for records to expire that must not.
    await asyncio.gather(_killed_and_healed(keep_store=True), _killed_and_healed(keep_store=False))


async def _killed_and_healed(*, keep_store: bool) -> None:
    async with NatsServer() as nats, member(nats.url) as (bus, ours), member(nats.url) as (_, theirs):
        table = theirs.watch("decode")
        ours.register(record())
        await table.wait_for(1, 30)
        await nats.kill()
        await until(lambda: not bus.connected)
        await asyncio.sleep(TTL_SECONDS + 1)
        assert 1 == len(table.ready())

        await nats.start(keep_store=keep_store)
        for _ in range(int((TTL_SECONDS + 3) / 0.1)):
            assert 1 == len(table.ready())
            await asyncio.sleep(0.1)
        async with member(nats.url) as (_, new):
            new.register(record("decode-1"))
            await table.wait_for(2, 30)
        await bus.publish_load(LoadReport(service="decode", replica="decode-0", boot_id="b1", free_blocks=3))
        await until(lambda: table.load("decode-0") is not None)
        await until(lambda: len(table.snapshot()) == 1)


@pytest.mark.slow
async def test_a_bucket_deleted_under_a_running_nats_is_made_again(nats: NatsServer) -> None:
    async with member(nats.url) as (bus, ours), member(nats.url) as (_, theirs):
        table = theirs.watch("decode")
        ours.register(record())
        await table.wait_for(1, 30)
        assert bus._js is not None
        await bus._js.delete_key_value(names.REPLICA_BUCKET)
        async with member(nats.url) as (_, late):
            await late.watch("decode").wait_for(1, 30)
        ours.update(total_blocks=77)
        await until(lambda: any(r.total_blocks == 77 for r in table.snapshot()))

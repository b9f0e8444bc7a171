"""Do whole stores share their blocks through an object store, and does none of them depend on it?"""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proto.kvstore_pb2 import EvictRequest, GetStatsRequest, KvstoreStats
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.channel import open_channel
from services.chassis.testing import running
from services.kvstore.config import KvstoreSettings
from services.kvstore.server import build
from services.kvstore.tests.blocks import payload
from services.kvstore.tests.serving import chunks, lookup, read, write

if TYPE_CHECKING:
    from proto.kvstore_pb2_grpc import KvstoreAsyncStub

pytestmark = pytest.mark.slow

QUICK = {"refresh_seconds": 0.1, "seal_seconds": 0.1, "open_seconds": 0.2}
RIGHT_AWAY = 30.0


@dataclass
class Cluster:
    """A folder that all replicas see, and each replica's own disk."""

    root: Path
    options: dict[str, float] = field(default_factory=lambda: dict(QUICK))
    key_file: str = ""

    @property
    def url(self) -> str:
        return f"file://{self.root}/mount"

    @contextlib.asynccontextmanager
    async def replica(self, name: str) -> AsyncIterator["KvstoreAsyncStub"]:
        options = self.root / "options.json"
        options.write_text(json.dumps(self.options))
        settings = KvstoreSettings(
            path=self.root / name,
            max_bytes=64 << 20,
            segment_bytes=4 << 20,
            drain_seconds=1,
            object_store_url=self.url,
            object_store_options_file=str(options),
            encryption_key_file=self.key_file,
        )
        async with (
            running(settings, build) as service,
            open_channel(service.address, peer="kvstore") as channel,
        ):
            yield KvstoreStub(channel)

    def lose(self, name: str) -> None:
        """Its disk is gone."""
        shutil.rmtree(self.root / name)


async def stats(stub) -> KvstoreStats:
    found: KvstoreStats = await stub.GetStats(GetStatsRequest(), timeout=30)
    return found


async def until_found(stub, numbers, expected) -> None:
    """Wait until a lookup finds so many."""
    give_up = time.monotonic() + RIGHT_AWAY
    while (found := await lookup(stub, numbers)) != expected:
        assert time.monotonic() < give_up, f"{found} of {numbers} found instead of {expected}"
        await asyncio.sleep(0.05)


async def bytes_of(stub, numbers) -> bytes:
    return b"".join([chunk.data for chunk in await read(stub, numbers)])


def expected_bytes(numbers) -> bytes:
    return b"".join(payload(number) for number in numbers)


async def test_blocks_outlive_the_replica_that_wrote_them(tmp_path):
    """Its disk is lost after a while; another one, new to the cluster, has every byte."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one, cluster.replica("two") as two:
        await write(one, *(chunks(number) for number in range(6)))
        assert 0 == await lookup(two, range(6))
        await until_found(two, range(6), 6)
    cluster.lose("one")
    cluster.lose("two")

    async with cluster.replica("three") as three:
        await until_found(three, range(8), 6)
        assert expected_bytes(range(6)) == await bytes_of(three, range(8))


async def test_blocks_of_others_are_found_within_five_seconds(tmp_path):
    """With the settings as they come: their segment is still open, and no full listing was due."""
    cluster = Cluster(tmp_path, options={})
    async with cluster.replica("one") as one, cluster.replica("two") as two:
        await asyncio.sleep(0.5)  # both have had their first look
        began = time.monotonic()
        await write(one, *(chunks(number) for number in range(6)))
        await until_found(two, range(6), 6)
        assert time.monotonic() - began < 15  # five, where nobody else uses the disk
        assert expected_bytes(range(6)) == await bytes_of(two, range(6))


async def test_encrypted_blocks_are_shared_until_their_tenant_is_deleted(tmp_path):
    """One seals, is lost with its disk, another opens; deletion at a third leaves nothing, and no key anywhere."""
    key_file = tmp_path / "master.key"
    key_file.write_text("5a" * 32)
    cluster = Cluster(tmp_path, key_file=str(key_file))
    async with cluster.replica("one") as one:
        await write(one, *(chunks(number, tenant="acme") for number in range(3)))
    cluster.lose("one")
    async with cluster.replica("two") as two, cluster.replica("three") as three:
        for other in (two, three):
            await until_found(other, range(3), 3)
        assert expected_bytes(range(3)) == await bytes_of(two, range(3))
        for _ in range(2):  # from the object store, then from its own disk
            assert expected_bytes(range(3)) == await bytes_of(three, range(3))
            await asyncio.sleep(0.3)
        everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert not any(payload(number)[1000:1032] in everything for number in range(3))
        assert 3 == len([path for path in tmp_path.rglob("*") if path.match("key*/*-*") and path.is_file()])

        await three.Evict(EvictRequest(tenant="acme", is_tenant_set=True), timeout=20)
        await until_found(two, range(3), 0)
        give_up = time.monotonic() + RIGHT_AWAY
        while [path for path in tmp_path.rglob("*") if path.match("key*/*-*") and path.is_file()]:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)


async def test_a_replica_that_stops_leaves_its_blocks(tmp_path):
    """What was written a moment before is uploaded on the way out."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one:
        await write(one, *(chunks(number) for number in range(3)))
    cluster.lose("one")

    async with cluster.replica("two") as two:
        await until_found(two, range(3), 3)
        assert expected_bytes(range(3)) == await bytes_of(two, range(3))


async def test_blocks_that_were_read_once_are_kept_here_too(tmp_path):
    """The second read needs no object store."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one:
        await write(one, *(chunks(number) for number in range(3)))
    async with cluster.replica("two") as two:
        await until_found(two, range(3), 3)
        assert 0 == (await stats(two)).num_blocks
        await bytes_of(two, range(3))
        give_up = time.monotonic() + RIGHT_AWAY
        while (await stats(two)).num_blocks < 3:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        shutil.rmtree(tmp_path / "mount" / "seg")

        assert expected_bytes(range(3)) == await bytes_of(two, range(3))


async def test_local_and_remote_blocks_make_one_prefix(tmp_path):
    """Some here, some there: the reader cannot tell."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one:
        await write(one, *(chunks(number) for number in (2, 3, 4)))
    async with cluster.replica("two") as two:
        await write(two, chunks(0), chunks(1), chunks(5))
        await until_found(two, range(7), 6)

        assert expected_bytes(range(6)) == await bytes_of(two, range(7))


async def test_a_deleted_tenant_is_gone_from_every_disk(tmp_path):
    """Deleted at one replica: from the object store at once, from the other replicas when they hear of it."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one, cluster.replica("two") as two:
        await write(one, chunks(0, tenant="acme"), chunks(1, tenant="zeta"))
        await until_found(two, range(2), 2)
        await two.Evict(EvictRequest(tenant="acme", is_tenant_set=True), timeout=20)
        assert 0 == await lookup(two, range(1))
        await until_found(one, range(1), 0)
        assert expected_bytes([1]) == await bytes_of(one, range(1, 2))

    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert payload(0) not in left
    assert payload(1) in left


async def test_a_store_without_its_object_store_goes_on(tmp_path):
    """It starts, stores and serves; it says that the other side is away; and uploads when it is there."""
    cluster = Cluster(tmp_path)
    async with cluster.replica("one") as one:
        mount = tmp_path / "mount"
        shutil.rmtree(mount, ignore_errors=True)
        mount.write_text("no folder")
        await write(one, *(chunks(number) for number in range(3)))
        give_up = time.monotonic() + RIGHT_AWAY
        while (await stats(one)).breaker != "open":
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        assert 3 == await lookup(one, range(5))
        assert expected_bytes(range(3)) == await bytes_of(one, range(5))

        mount.unlink()
        mount.mkdir()
        while (await stats(one)).num_remote_blocks < 3:
            assert time.monotonic() < give_up + RIGHT_AWAY
            await asyncio.sleep(0.05)
        assert "closed" == (await stats(one)).breaker


@pytest.mark.parametrize("options", ['{"endpoint": "no url"}', '{"surprise": 1}', "{"])
async def test_bad_options_stop_the_start(tmp_path, options):
    """A store that cannot reach what it was told to use says so, and does not run without it."""
    (tmp_path / "options.json").write_text(options)
    settings = KvstoreSettings(
        path=tmp_path / "kv",
        object_store_url=f"file://{tmp_path}/mount",
        object_store_options_file=str(tmp_path / "options.json"),
    )
    with pytest.raises(ValueError, match=r"options\.json"):
        async with running(settings, build):
            pass

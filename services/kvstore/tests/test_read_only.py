"""May a replica that can only read the object store keep what it has, and does it still obey deletions?"""

import os
from pathlib import Path

import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import LocalStore

from services.kvstore.absence import FILE_NAME, Absence
from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.encryption import Keyring
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_catalog import TOMBSTONE_SECONDS
from services.kvstore.store_clock import StoreClock
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, served
from services.kvstore.tests.objects import FAST, Clock, Engine, paths
from services.kvstore.tests.test_tenant_keys import MASTER
from services.kvstore.tiers import Selection

HOUR, DAY = 3600.0, 86_400.0
_REAL_END = 3e9
"""Dates before it are the machine's, and not the test's."""


class DatedBlobs(BlobBackend):
    """A folder whose objects are dated by the clock of the test; one who may not write is refused."""

    def __init__(self, folder: Path, clock: Clock, *, may_write: bool) -> None:
        super().__init__(LocalStore(folder, mkdir=True), FAST)
        self.time = StoreClock(now=clock, steady=clock)
        self._folder = folder
        self._date = clock
        self._may_write = may_write

    async def list(self, prefix, *, after="", max_blobs):
        for path in self._folder.rglob("*"):
            if path.is_file() and path.stat().st_mtime < _REAL_END:
                os.utime(path, (self._date(), self._date()))
        return await super().list(prefix, after=after, max_blobs=max_blobs)

    async def _judged(self, breaker, work, slow_seconds):
        async def refuse():
            raise PermissionDeniedError("for reading only")

        is_write = breaker is self.writes and not self._may_write
        return await super()._judged(breaker, refuse if is_write else work, slow_seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.rule(monkeypatch)
    return made


def replica(folder: Path, clock: Clock, *, name: str, may_write: bool, keyring: Keyring | None = None) -> RemoteTier:
    """One that starts, with its own file of what it has heard."""
    blobs = DatedBlobs(folder / "objects", clock, may_write=may_write)
    absence = Absence(folder / f"{name}.{FILE_NAME}", "s3://kv", blobs.time, now=clock, steady=clock)
    return RemoteTier(blobs, keyring=keyring, absence=absence, now=clock)


async def test_a_replica_that_may_only_read_keeps_its_old_blocks(tmp_path: Path, clock: Clock) -> None:
    """As long as it listens, whatever their age: all deletions are known to it; and over a restart."""
    writer = replica(tmp_path, clock, name="writer", may_write=True)
    await writer._refresh(Engine(), is_full=True)
    store = await open_store(tmp_path / "kv")
    await store.write(block(0))
    reader = replica(tmp_path, clock, name="reader", may_write=False)
    await reader._refresh(store, is_full=True)
    for _ in range(40):
        clock.now += DAY
        await writer._refresh(Engine(), is_full=False)
        await reader._refresh(store, is_full=False)
    reader = replica(tmp_path, clock, name="reader", may_write=False)
    await reader.ask_time()
    await reader.forget_doubtful(store)

    assert (0, {0: payload(0)}) == (reader.counts.evicted_in_doubt, await served(store, [0]))
    assert not reader.blobs.time.is_set
    await store.close()


@pytest.mark.parametrize("late_days", [0, 25], ids=["with a right clock", "with a clock that is late"])
async def test_one_that_was_away_for_a_month_drops_what_may_have_been_deleted(
    tmp_path: Path, clock: Clock, late_days: int
) -> None:
    """The deletion is forgotten by then; the date that was written when it was tells how late it is."""
    writer = replica(tmp_path, clock, name="writer", may_write=True)
    await writer._refresh(Engine(), is_full=True)
    store = await open_store(tmp_path / "kv")
    await store.write(block(0, tenant="acme"))
    await replica(tmp_path, clock, name="reader", may_write=False)._refresh(store, is_full=True)
    clock.now += DAY
    await writer.evict(Selection(tenant="acme"))
    clock.now += TOMBSTONE_SECONDS + 2 * HOUR
    await writer._refresh(Engine(), is_full=True)
    assert [] == await paths(writer, "tombstone")

    clock.now -= late_days * DAY
    reader = replica(tmp_path, clock, name="reader", may_write=False)
    await reader.ask_time()
    await reader.forget_doubtful(store)
    assert not store.has(FINGERPRINT, key(0))
    await store.close()


async def test_a_deletion_is_forgotten_only_when_a_date_was_just_written(tmp_path: Path, clock: Clock) -> None:
    """By it those who cannot write one know how much time went by."""
    writer = replica(tmp_path, clock, name="writer", may_write=True)
    await writer._refresh(Engine(), is_full=True)
    await writer.evict(Selection(tenant="acme"))
    clock.now += TOMBSTONE_SECONDS + 2 * HOUR
    await writer.catalog.tidy()
    assert 1 == len(await paths(writer, "tombstone"))
    await writer.ask_time()
    await writer.catalog.tidy()
    assert 0 == len(await paths(writer, "tombstone"))


async def test_a_replica_that_may_only_read_gets_keys_and_loses_those_of_deleted_tenants(
    tmp_path: Path, clock: Clock
) -> None:
    """Else it could open nothing, and a deletion would leave a key behind."""
    keys = Keyring(tmp_path / "writer.keys", MASTER)
    writer = replica(tmp_path, clock, name="writer", may_write=True, keyring=keys)
    keys.seal("acme", b"", b"")
    await writer._refresh(Engine(), is_full=True)
    own = Keyring(tmp_path / "reader.keys", MASTER)
    own.seal("zeta", b"", b"")  # nobody else ever gets it
    reader, engine = replica(tmp_path, clock, name="reader", may_write=False, keyring=own), Engine()
    for _ in range(8):
        clock.now += HOUR
        try:
            await reader._refresh(engine, is_full=False)
        except BlobError:  # until the breaker knows that nothing can be written
            continue
    assert (True, True) == (own.has("acme"), own.has("zeta"))
    clock.now += HOUR
    await writer.evict(Selection(tenant="acme"))
    await reader._refresh(engine, is_full=False)
    assert (False, True) == (own.has("acme"), own.has("zeta"))

"""Does a replica that was away for longer than deletions are remembered bring anything back that was deleted?"""

import dataclasses
import time
from pathlib import Path

import pytest
from obstore.store import LocalStore

from services.kvstore.absence import FILE_NAME, MAX_ABSENCE_SECONDS, Absence
from services.kvstore.blobs import BlobBackend
from services.kvstore.encryption import Keyring
from services.kvstore.local_reads import LocalReads
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_catalog import TOMBSTONE_SECONDS
from services.kvstore.store_clock import StoreClock
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, served
from services.kvstore.tests.objects import CREATED, FAST, Bucket, Clock, Engine, paths, upload, uploading
from services.kvstore.tests.serving import kvstore
from services.kvstore.tests.test_tenant_keys import MASTER, encrypted_segment
from services.kvstore.tiers import Selection

DAY = 86_400.0
URL = "memory:"


@pytest.fixture
def bucket(monkeypatch):
    """An object store, and the one clock of everybody."""
    made = Bucket()
    made.clock.rule(monkeypatch)
    return made


def comes_back(bucket, folder, keyring=None) -> RemoteTier:
    """The tier of a replica with that folder, as it starts."""
    tier: RemoteTier = bucket.replica(keyring)
    tier._absence = Absence(folder / FILE_NAME, URL, tier.blobs.time, now=bucket.clock, steady=bucket.clock)
    return tier


async def deleted_for_long(bucket, folder, seconds):
    """Another replica deletes a tenant, and then so much time goes by."""
    other = bucket.replica(Keyring(folder, MASTER))
    await other._refresh(Engine(), is_full=True)
    bucket.clock.now += DAY
    await other.evict(Selection(tenant="acme"))
    bucket.clock.now += seconds
    await other._refresh(Engine(), is_full=True)


@pytest.mark.parametrize(
    ("days", "is_forgotten"), [(5, False), (28.9, True), (31, True), (200, True)], ids=["5", "29", "31", "200"]
)
async def test_what_was_deleted_meanwhile_stays_deleted(tmp_path, bucket, days, is_forgotten):
    """Blocks and keys: by the deletion while it is remembered, and by their age once it may not be."""
    store = await open_store(tmp_path / "kv")
    await store.write(block(0, tenant="acme"))
    await store.write(block(1, tenant="zeta"))
    keyring = Keyring(tmp_path / "keys", MASTER)
    tier = comes_back(bucket, tmp_path, keyring)
    await tier._refresh(store, is_full=True)
    await upload(tier, encrypted_segment(tmp_path, keyring, [2]))
    await store.close()
    await deleted_for_long(bucket, tmp_path / "other", days * DAY)

    store = await open_store(tmp_path / "kv")
    keyring = Keyring(tmp_path / "keys", MASTER)
    tier = comes_back(bucket, tmp_path, keyring)
    await tier.forget_doubtful(store)  # before anything is served, also while the object store is away
    assert ([False, False] if is_forgotten else [True, True]) == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    store.connect(listener=tier)
    await tier._refresh(store, is_full=True)
    async with uploading(tier):
        await tier.uploads.flush()
    assert [False, not is_forgotten] == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    assert (0, frozenset()) == (len(await paths(tier, "key")), keyring.names)
    await store.close()


async def test_only_what_may_have_been_deleted_goes(tmp_path, bucket):
    """What is younger than the oldest deletion that is remembered stays, and keys that the object store has."""
    keyring = Keyring(tmp_path / "keys", MASTER)
    tier = comes_back(bucket, tmp_path, keyring)
    await tier._refresh(Engine(), is_full=True)
    keyring.seal("zeta", b"", b"")
    await tier._refresh(Engine(), is_full=True)
    store = await open_store(tmp_path / "kv")
    await store.write(block(0))
    bucket.clock.now += 2 * DAY
    await store.write(block(1))
    keyring.seal("young", b"", b"")
    bucket.clock.now += MAX_ABSENCE_SECONDS - DAY

    tier = comes_back(bucket, tmp_path, keyring)
    await tier._refresh(store, is_full=True)
    assert [False, True] == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    assert 1 == tier.counts.evicted_in_doubt
    assert 2 == len(keyring.names) == len(await paths(tier, "key"))
    await store.close()


@pytest.mark.parametrize("stays", [True, False], ids=["of a tenant with young blocks", "of one with old ones"])
async def test_an_old_key_goes_only_with_the_last_block_that_it_may_have_sealed(tmp_path, bucket, stays):
    """Replicas that get their first object store, or another one: only the first of them knows that it is new."""
    await bucket.replica(Keyring(tmp_path / "other", MASTER)).keys.refresh(())
    master_key_file = tmp_path / "master"
    master_key_file.write_bytes(MASTER)
    store = await open_store(tmp_path / "kv", encryption_key_file=master_key_file)
    await store.write(block(0, tenant="acme"))
    bucket.clock.now += 2 * TOMBSTONE_SECONDS
    if stays:
        await store.write(block(1, tenant="acme"))
    keyring = Keyring.load(tmp_path / "kv" / "keys", master_key_file)
    tier = comes_back(bucket, tmp_path, keyring)
    for _ in range(2):
        await tier._refresh(store, is_full=True)

    assert ({1: payload(1)} if stays else {}) == await served(store, [0, 1])
    assert stays == len(keyring.names) == len(await paths(tier, "key"))
    assert (0, 0) == (store.counts.damaged_blocks, store.counts.evictions["key"])
    await store.close()


async def test_a_key_in_doubt_is_not_published_before_the_object_store_was_seen(tmp_path, bucket):
    """An upload that comes first must not bring it back."""
    keyring = Keyring(tmp_path / "keys", MASTER)
    await comes_back(bucket, tmp_path, None)._refresh(Engine(), is_full=True)
    keyring.seal("acme", b"", b"")
    await bucket.replica(Keyring(tmp_path / "other", MASTER))._refresh(Engine(), is_full=True)
    bucket.clock.now += 2 * TOMBSTONE_SECONDS
    tier = comes_back(bucket, tmp_path, keyring)
    await tier.forget_doubtful(Engine())
    await tier.keys.publish(["acme"])

    assert [] == await paths(tier, "key")


async def test_the_first_replica_of_an_object_store_keeps_its_keys(tmp_path, bucket):
    """Nobody can have deleted anything there; blocks that are older than deletions are remembered for still go."""
    keyring = Keyring(tmp_path / "keys", MASTER)
    keyring.seal("acme", b"", b"")
    bucket.clock.now += 2 * TOMBSTONE_SECONDS
    tier, engine = comes_back(bucket, tmp_path, keyring), Engine()
    await tier._refresh(engine, is_full=True)

    assert 1 == len(keyring.names) == len(await paths(tier, "key"))
    assert [(Selection(), bucket.clock.now - MAX_ABSENCE_SECONDS)] == engine.evicted


async def test_a_replica_that_listens_drops_nothing(tmp_path, bucket):
    """However long it lives; one that hears nothing for a month drops its old blocks once, and again as time goes by."""
    tier, engine = comes_back(bucket, tmp_path), Engine()
    await tier._refresh(engine, is_full=True)
    engine.evicted.clear()
    for _ in range(100):
        bucket.clock.now += DAY
        await tier._refresh(engine, is_full=False)
    assert [] == engine.evicted
    bucket.clock.now += 40 * DAY
    for _ in range(5):
        await tier.forget_doubtful(engine)
        bucket.clock.now += 60.0
    assert 1 == len(engine.evicted)
    bucket.clock.now += DAY
    await tier.forget_doubtful(engine)
    assert 2 == len(engine.evicted)


def there_since(clock) -> StoreClock:
    """An object store's clock that was set when this one showed the same."""
    there = StoreClock(now=clock, steady=clock)
    there.set(clock())
    return there


def absence(path, there, *, here, steady) -> Absence:
    return Absence(path, URL, there, now=here, steady=steady)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b'{"url": "memory:"}',
        b'{"url": "s3://another", "unix_seconds": %f}' % CREATED,
        b'{"url": "memory:", "unix_seconds": %f}' % (CREATED + 9 * DAY),
        b'{"url": "memory:", "unix_seconds": NaN}',
        b'{"url": "memory:", "unix_seconds": %f, "object_store_unix_seconds": null}' % CREATED,
    ],
    ids=["empty", "list", "no time", "another store", "future", "nan", "null"],
)
@pytest.mark.parametrize("is_set", [False, True], ids=["by its own clock", "by the object store's"])
def test_a_file_that_says_nothing_good_counts_as_long_away(tmp_path, said, is_set):
    """As does none at all: better a miss than a deleted block."""
    path, clock = tmp_path / FILE_NAME, Clock()
    path.write_bytes(said)
    there = there_since(clock) if is_set else StoreClock(now=clock, steady=clock)
    assert CREATED - MAX_ABSENCE_SECONDS == absence(path, there, here=clock, steady=clock).doubted_before()


def test_what_was_heard_is_known_to_the_next_life(tmp_path):
    """By the file; and nothing is taken for heard while nobody knows what time it is over there."""
    path, clock = tmp_path / FILE_NAME, Clock()
    one = absence(path, StoreClock(now=clock, steady=clock), here=clock, steady=clock)
    one.heard()
    one.note()
    assert (False, CREATED - MAX_ABSENCE_SECONDS) == (path.exists(), one.doubted_before())

    one = absence(path, there_since(clock), here=clock, steady=clock)
    one.heard()
    one.note()
    assert one.doubted_before() is None
    for there in (there_since(clock), StoreClock(now=clock, steady=clock)):
        clock.now = CREATED
        two = absence(path, there, here=clock, steady=clock)
        clock.now += 28 * DAY
        assert two.doubted_before() is None
        clock.now += 2 * DAY
        assert CREATED + DAY == two.doubted_before()


def test_a_clock_that_jumps_drops_nothing_while_the_process_runs(tmp_path):
    """Forty days ahead and back, with or without an answer from the object store."""
    here, steady = Clock(), Clock()
    there = StoreClock(now=here, steady=steady)
    there.set(here())
    one = absence(tmp_path / FILE_NAME, there, here=here, steady=steady)
    one.heard()
    for seconds in (40 * DAY, -80 * DAY, 40 * DAY):
        here.now += seconds
        assert there.is_due == (abs(here.now - CREATED) > 60)
        assert one.doubted_before() is None
        one.heard()
    steady.now += 30 * DAY
    assert CREATED + DAY == one.doubted_before()


@pytest.mark.parametrize("days", [-2, 40], ids=["late", "ahead"])
def test_the_object_stores_clock_has_the_last_word(tmp_path, days):
    """A replica whose own clock is two days late was away for a month nevertheless; one that is ahead was not."""
    here, away_days = Clock(), 30 if days < 0 else 5
    first = absence(tmp_path / FILE_NAME, there_since(here), here=here, steady=here)
    first.heard()
    first.note()
    right = Clock()
    right.now += away_days * DAY
    here.now += (away_days + days) * DAY
    there = StoreClock(now=here, steady=here)
    one = absence(tmp_path / FILE_NAME, there, here=here, steady=here)
    assert (days > 0) == (one.doubted_before() is not None)
    there.set(right())
    assert (right() - MAX_ABSENCE_SECONDS if days < 0 else None) == one.doubted_before()
    assert days * DAY == pytest.approx(there.ahead_seconds)


def test_a_listing_tells_a_machine_that_stood_still_what_time_it_is(tmp_path):
    """None of its own clocks went on; something that others wrote since did not exist when it last heard."""
    clock = Clock()
    there = there_since(clock)
    one = absence(tmp_path / FILE_NAME, there, here=clock, steady=clock)
    one.heard()
    there.saw(CREATED + 20 * DAY)
    assert one.doubted_before() is None
    there.saw(CREATED + 31 * DAY)
    there.saw(CREATED)
    assert CREATED + 2 * DAY == one.doubted_before()


async def test_the_time_is_that_of_an_object_that_is_written(tmp_path, bucket):
    """Of the store's making, and never of the name or the content."""
    tier = RemoteTier(BlobBackend(LocalStore(tmp_path / "objects", mkdir=True), FAST), now=bucket.clock)
    before = Path(tmp_path).stat().st_mtime
    assert tier.blobs.time.is_due
    await tier.ask_time()
    there = tier.blobs.time.now()
    assert there is not None
    assert before - 1 <= there <= before + 60
    assert (False, True) == (tier.blobs.time.is_due, tier.blobs.time.is_set)


async def test_what_is_in_doubt_is_gone_before_anybody_is_let_in(tmp_path, monkeypatch):
    """Readers of the store's files, who would not hear of it, included."""
    folder = tmp_path / "kv"
    store = await open_store(folder)
    await store.write(block(0))
    await store.write(dataclasses.replace(block(1), first_created_seconds=time.time() - 40 * DAY))
    await store.close()
    let_in = []

    def start(store, *_place, **_more):
        let_in.append([store.has(FINGERPRINT, key(n)) for n in range(2)])

    monkeypatch.setattr(LocalReads, "start", start)
    async with kvstore(folder, object_store_url=f"file://{tmp_path}/objects"):
        assert [[True, False]] == let_in

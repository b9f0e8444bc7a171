"""Does a replica that was away for longer than deletions are remembered bring anything back that was deleted?"""

import pytest

from services.kvstore.absence import FILE_NAME, MAX_ABSENCE_SECONDS, Absence
from services.kvstore.encryption import Keyring
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_catalog import TOMBSTONE_SECONDS
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store
from services.kvstore.tests.objects import CREATED, Bucket, Engine, paths, upload, uploading
from services.kvstore.tests.test_tenant_keys import MASTER, encrypted_segment
from services.kvstore.tiers import Selection

DAY = 86_400.0
URL = "memory:"


@pytest.fixture
def bucket(monkeypatch):
    """An object store, and the one clock of everybody."""
    made = Bucket()
    monkeypatch.setattr("time.time", made.clock)
    return made


def comes_back(bucket, folder, keyring=None) -> RemoteTier:
    """The tier of a replica with that folder, as it starts."""
    tier: RemoteTier = bucket.replica(keyring)
    tier._absence = Absence(folder / FILE_NAME, URL)
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


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b'{"url": "memory:"}',
        b'{"url": "s3://another", "unix_seconds": %f}' % CREATED,
        b'{"url": "memory:", "unix_seconds": %f}' % (CREATED + 9 * DAY),
        b'{"url": "memory:", "unix_seconds": NaN}',
    ],
    ids=["empty", "list", "no time", "another store", "future", "nan"],
)
def test_a_file_that_says_nothing_good_counts_as_long_away(tmp_path, said):
    """As does none at all: better a miss than a deleted block."""
    path = tmp_path / FILE_NAME
    path.write_bytes(said)
    assert CREATED - MAX_ABSENCE_SECONDS == Absence(path, URL).doubted_before(CREATED)
    Absence(path, URL).heard(CREATED)
    assert Absence(path, URL).doubted_before(CREATED + 28 * DAY) is None
    assert CREATED + DAY == Absence(path, URL).doubted_before(CREATED + MAX_ABSENCE_SECONDS + DAY)

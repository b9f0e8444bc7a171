"""Do sealed blocks open wherever the operator's key is, nowhere else, and nowhere at all once their tenant is deleted?"""

import dataclasses

import pytest
from isal.isal_zlib import crc32

from services.kvstore.encryption import Keyring, SealedAwayError, tenant_hash
from services.kvstore.format import HEADER_BYTES, record_bytes
from services.kvstore.index import ENCRYPTED
from services.kvstore.manifests import DELETION_SECONDS
from services.kvstore.tests.blocks import FINGERPRINT, key, payload
from services.kvstore.tests.objects import CREATED, Bucket, Engine, paths, sealed_segment, served, upload
from services.kvstore.tiers import Selection

MASTER = b"m" * 32


def encrypted_segment(folder, keyring, numbers, *, tenant="acme", **more):
    """A segment of blocks that a store sealed with its tenant's key."""
    segment = sealed_segment(folder, numbers, tenants=(tenant,), **more)
    locations, offset = [], 0
    with segment.path.open("wb") as file:
        for number, one in zip(numbers, segment.locations, strict=True):
            stored = keyring.seal(tenant, one.key + one.fingerprint, payload(number))
            file.seek(offset + HEADER_BYTES)
            file.write(stored)
            locations.append(one._replace(offset_bytes=offset, crc32=crc32(stored), flags=ENCRYPTED))
            offset += record_bytes(len(stored))
        file.truncate(offset)
    return dataclasses.replace(segment, locations=locations, num_bytes=offset)


def opened(tier, stored, number, tenant="acme"):
    return tier.keys.keyring.unseal(tenant, key(number) + FINGERPRINT, stored)


class Replicas:
    """Replicas of one bucket, each with a key folder of its own."""

    def __init__(self, folder) -> None:
        self.bucket = Bucket()
        self._folder = folder

    async def fresh(self, name, master=MASTER):
        folder = self._folder / name
        folder.mkdir()
        tier = self.bucket.replica(Keyring(folder / "keys", master))
        await tier._refresh(Engine(), is_full=True)
        return tier

    def pass_time(self, seconds):
        self.bucket.clock.now += seconds


@pytest.fixture
def replicas(tmp_path, monkeypatch):
    made = Replicas(tmp_path)
    made.bucket.clock.rule(monkeypatch)
    return made


async def test_another_replica_opens_what_one_sealed(tmp_path, replicas):
    """The object store has the same noise as the disk, and the key that opens it, which itself opens with the master."""
    one = await replicas.fresh("one")
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, range(3)))
    for path in await paths(one, ""):
        raw = await one.blobs.get(path, max_bytes=1 << 20)
        assert not any(payload(n)[100:132] in raw for n in range(3))

    two = await replicas.fresh("two")
    stored = await served(two, range(3))
    assert [payload(n) for n in range(3)] == [opened(two, one, n) for n, one in enumerate(stored)]
    assert two.keys.keyring.names == one.keys.keyring.names


async def test_without_the_key_nothing_is_offered(tmp_path, replicas):
    """A replica that does not encrypt, or does with another master key, counts sealed blocks as misses; plain ones hit."""
    one = await replicas.fresh("one")
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, range(3)))
    await upload(one, sealed_segment(tmp_path, [9], number=2))
    stranger = await replicas.fresh("stranger", b"n" * 32)
    stranger.keys.keyring.seal("acme", b"", b"")

    for other in (stranger, await replicas.bucket.fresh()):
        assert [] == await served(other, range(3))
        assert [payload(9)] == await served(other, [9])
    assert stranger.keys.is_refused
    await upload(stranger, encrypted_segment(tmp_path, stranger.keys.keyring, range(5, 7), number=3))
    assert 2 == stranger.uploads.counts.drops["encrypted"]


async def test_two_that_meet_a_tenant_at_once_open_each_others_blocks(tmp_path, replicas):
    """Each made a key; both have both, and from then on seal with the same."""
    one, two = await replicas.fresh("one"), await replicas.fresh("two")
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, range(2)))
    await upload(two, encrypted_segment(tmp_path, two.keys.keyring, range(2, 4), number=2))
    for tier in (one, two):
        await tier._refresh(Engine(), is_full=True)
        stored = await served(tier, range(4))
        assert [payload(n) for n in range(4)] == [opened(tier, raw, n) for n, raw in enumerate(stored)]

    assert 2 == len(one.keys.keyring.names)
    sealed = one.keys.keyring.seal("acme", b"name", b"payload")
    two.keys.keyring.destroy([max(two.keys.keyring.names)])
    assert b"payload" == two.keys.keyring.unseal("acme", b"name", sealed)


async def test_a_new_tenants_blocks_are_found_with_the_news(tmp_path, replicas):
    """Its key is fetched when its first manifest is heard of, not with the next listing."""
    one, two = await replicas.fresh("one"), await replicas.fresh("two")
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, range(2)))
    heard = await two.catalog.hear()

    assert [True] == [two.keys.lacks_key_for(manifest) for manifest in heard]
    await two.keys.refresh(two.catalog.tombstones)
    assert [False] == [two.keys.lacks_key_for(manifest) for manifest in heard]
    assert 2 == len(await served(two, range(2)))


async def test_deleting_a_tenant_destroys_its_keys_everywhere(tmp_path, replicas):
    """Even a copy of the bucket that somebody kept cannot be read; other tenants' keys stay."""
    one, two = await replicas.fresh("one"), await replicas.fresh("two")
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, [0]))
    await upload(one, encrypted_segment(tmp_path, one.keys.keyring, [1], number=2, tenant="zeta"))
    await two._refresh(Engine(), is_full=True)
    (kept,) = await served(two, [0])
    replicas.pass_time(5)
    one.keys.keyring.delete("acme")  # as the engine does before it tells the tier
    await one.evict(Selection(tenant="acme"))
    await two._refresh(Engine(), is_full=False)

    assert 1 == len(await paths(one, "key"))
    for tier in (one, two):
        assert {tenant_hash("zeta")} == {name.tenant_hash for name in tier.keys.keyring.names}
        with pytest.raises(SealedAwayError):
            opened(tier, kept, 0)
    (left,) = await served(two, [1])
    assert payload(1) == opened(two, left, 1, "zeta")


async def test_a_partitioned_replica_brings_no_key_back(tmp_path, replicas):
    """It publishes its old key after the deletion: whoever looks next destroys it, and its own copy goes when it hears."""
    one, cut_off = await replicas.fresh("one"), await replicas.fresh("cut off")
    segment = encrypted_segment(tmp_path, cut_off.keys.keyring, range(2))
    replicas.pass_time(5)
    await one.evict(Selection(tenant="acme"))
    await upload(cut_off, segment)
    assert 1 == len(await paths(one, "key"))
    await one._refresh(Engine(), is_full=True)
    assert [] == await paths(one, "key")
    assert [] == await served(one, range(2))
    await cut_off._refresh(Engine(), is_full=True)

    assert frozenset() == cut_off.keys.keyring.names
    assert [] == await paths(one, "key")


async def test_a_tenant_that_comes_back_gets_a_new_key(tmp_path, replicas):
    """The deletion that is remembered for a month does not touch it."""
    one, two = await replicas.fresh("one"), await replicas.fresh("two")
    await one.evict(Selection(tenant="acme"))
    replicas.pass_time(1 + DELETION_SECONDS)
    later = encrypted_segment(tmp_path, one.keys.keyring, [0], created=CREATED + 1 + DELETION_SECONDS)
    await upload(one, later)
    for tier in (one, two, one):
        await tier._refresh(Engine(), is_full=True)
        (stored,) = await served(tier, [0])
        assert payload(0) == opened(tier, stored, 0)


def test_a_key_of_a_store_that_stood_alone_goes_on(tmp_path):
    """It was called after its tenant only."""
    keyring = Keyring(tmp_path, MASTER)
    stored = keyring.seal("acme", b"name", b"payload")
    (path,) = tmp_path.glob("*.key")
    path.rename(tmp_path / f"{tenant_hash('acme')}.key")

    assert b"payload" == Keyring(tmp_path, MASTER).unseal("acme", b"name", stored)
    assert 1 == len(Keyring(tmp_path, MASTER).names)


def test_one_bad_key_does_not_hide_the_others(tmp_path):
    """What a stranger put into the bucket opens nothing and closes nothing."""
    keyring, stranger = Keyring(tmp_path / "a", MASTER), Keyring(tmp_path / "b", b"n" * 32)
    stranger.seal("acme", b"name", b"payload")
    (foreign,) = stranger.names
    wrapped = stranger.wrapped(foreign)
    assert wrapped is not None
    stored = keyring.seal("acme", b"name", b"payload")
    keyring.take(dataclasses.replace(foreign, created_milliseconds=1), wrapped)

    assert b"payload" == keyring.unseal("acme", b"name", stored)
    assert b"more" == keyring.unseal("acme", b"name", keyring.seal("acme", b"name", b"more"))


def test_a_strangers_key_alone_does_not_keep_a_tenant_out(tmp_path):
    """It cannot seal: the tenant gets a key of its own beside it."""
    keyring, stranger = Keyring(tmp_path / "a", MASTER), Keyring(tmp_path / "b", b"n" * 32)
    stranger.seal("acme", b"name", b"payload")
    (foreign,) = stranger.names
    keyring.take(foreign, stranger.wrapped(foreign) or b"")

    assert b"payload" == keyring.unseal("acme", b"name", keyring.seal("acme", b"name", b"payload"))
    assert 2 == len(keyring.names)

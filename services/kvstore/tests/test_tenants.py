"""Does a deletion take a tenant's bytes off the disk, and only those, and does encryption keep all of them unreadable?"""

import asyncio
import os
import time
from pathlib import Path

import pytest

from services.kvstore.disk import Disk
from services.kvstore.encryption import Keyring, MasterKeyError, SealedAwayError
from services.kvstore.retention import AGENT, CHAT
from services.kvstore.store import Store
from services.kvstore.tests.blocks import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    block,
    flip,
    key,
    open_store,
    payload,
    segments,
    served,
)
from services.kvstore.tiers import Selection
from services.kvstore.verification import verify_folder


def on_disk(folder: Path, number: int) -> bool:
    """Whether any file holds a stretch of a block's payload."""
    needle = payload(number)[1000:1032]
    return any(needle in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "master.key"
    path.write_text("5a" * 32 + "\n")
    return path


async def fill(store: Store) -> None:
    """Blocks 0..5 of tenants a and b, mixed in the same segments."""
    await asyncio.gather(*(store.write(block(n, tenant="ab"[n % 2], retention=CHAT)) for n in range(6)))


async def test_deleting_a_tenant_erases_its_bytes_and_no_one_elses(tmp_path: Path) -> None:
    """In shared segments its records become holes; the others are read back right, also after a restart."""
    store = await open_store(tmp_path)
    await fill(store)
    assert on_disk(tmp_path, 0)
    removed = await store.evict(Selection(tenant="a"))

    assert 3 == removed.num_blocks
    assert removed.num_bytes >= 3 * 8192
    assert [False, True] * 3 == [on_disk(tmp_path, n) for n in range(6)]
    others = {n: payload(n) for n in (1, 3, 5)}
    assert others == await served(store, list(range(6)))
    assert {"b"} == set(store.catalog.index.tenants)
    await store.close()
    store = await open_store(tmp_path)
    assert others == await served(store, list(range(6)))
    assert 3 == store.num_blocks
    assert (0, 3) == (store.counts.damaged_blocks, store.counts.read_blocks)
    await store.close()
    assert [] == [bad for report in verify_folder(tmp_path) for bad in report.bad]


@pytest.mark.slow
async def test_former_copies_are_erased_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was moved, or found damaged, leaves bytes behind that nothing finds: deletion does."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # a new hour would begin a new segment
    store = await open_store(tmp_path)
    await store.write(block(0, tenant="a", retention=AGENT))
    await store.write(block(1, tenant="b", retention=AGENT))
    await store.write(block(2, tenant="a", retention=AGENT))
    store.lookup(FINGERPRINT, [key(0)], retention=CHAT)  # moves it to the longer class
    async with asyncio.timeout(20):
        while not store.counts.refreshed_blocks:  # noqa: ASYNC110 - as an operator would see it
            await asyncio.sleep(0.02)
    flip(segments(tmp_path)[0], 2 * 3 * 4096 + 4096)
    assert {0: payload(0), 1: payload(1)} == await served(store, [0, 1, 2])
    await store.close()
    store = await open_store(tmp_path)
    await store.evict(Selection(tenant="a"))

    assert [False, True, False] == [on_disk(tmp_path, n) for n in range(3)]
    assert {1: payload(1)} == await served(store, [0, 1, 2])
    await store.close()


async def test_a_deletion_that_a_crash_cut_short_can_be_repeated(tmp_path: Path) -> None:
    """Between the holes and the new footer: the blocks are misses, and asking again finds and finishes it."""
    store = await open_store(tmp_path)
    await fill(store)
    await store.close()
    disk = Disk(tmp_path)
    disk.erase(segments(tmp_path)[0], [(n * 12_288, (n + 1) * 12_288) for n in (0, 2, 4)])
    disk.close()

    store = await open_store(tmp_path)
    assert 3 == (await store.evict(Selection(tenant="a"))).num_blocks
    await store.close()
    store = await open_store(tmp_path)
    assert (3, {n: payload(n) for n in (1, 3, 5)}) == (store.num_blocks, await served(store, list(range(6))))
    assert 0 == store.counts.damaged_blocks
    await store.close()


async def test_what_still_waits_for_the_disk_goes_as_well(tmp_path: Path) -> None:
    """A deletion is not outrun by its own tenant's writes that came before it."""
    store = await open_store(tmp_path)
    writes = [asyncio.create_task(store.write(block(n, tenant="a"))) for n in range(20)]
    for _ in range(3):
        await asyncio.sleep(0)
    await store.evict(Selection(tenant="a"))
    await asyncio.gather(*writes, return_exceptions=True)

    assert {} == await served(store, list(range(20)))
    assert [] == [n for n in range(20) if on_disk(tmp_path, n)]
    await store.close()


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(tenant=""), [1, 2, 3]),
        (Selection(fingerprint=OTHER_FINGERPRINT), [0, 1, 3]),
        (Selection(retention=AGENT), [0, 1, 2]),
        (Selection(tenant="t", retention=AGENT), [0, 1, 2]),
        (Selection(tenant="t", retention=CHAT), [0, 2, 3]),
        (Selection(), []),
    ],
    ids=["anonymous", "fingerprint", "class", "tenant-and-class", "tenant-and-chat", "all"],
)
async def test_only_what_matches_everything_named_goes(tmp_path: Path, selection: Selection, left: list[int]) -> None:
    """Tenant, model and class narrow each other; nothing named is everything."""
    store = await open_store(tmp_path)
    for one in (
        block(0),
        block(1, tenant="t", retention=CHAT),
        block(2, tenant="u", fingerprint=OTHER_FINGERPRINT),
        block(3, tenant="t", retention=AGENT),
    ):
        await store.write(one)
    await store.evict(selection)

    found = [
        n
        for n, name in enumerate([FINGERPRINT, FINGERPRINT, OTHER_FINGERPRINT, FINGERPRINT])
        if store.has(name, key(n))
    ]
    assert left == found
    assert left == [n for n in range(4) if on_disk(tmp_path, n)]
    await store.close()


async def test_pins_and_leases_do_not_stop_a_deletion(tmp_path: Path) -> None:
    """Keeping from eviction is not keeping from the tenant's own deletion."""
    store = await open_store(tmp_path)
    await fill(store)
    await store.pin("a", "s", FINGERPRINT, [key(0)], hold_seconds=60)
    await store.find(FINGERPRINT, [key(0)], request_id="r")
    reading = store.read(FINGERPRINT, [key(n) for n in range(6)])
    await anext(reading)
    await store.evict(Selection(tenant="a"))

    assert [False, True] * 3 == [on_disk(tmp_path, n) for n in range(6)]
    assert 0 == len(store.catalog.pins)
    await reading.aclose()
    await store.close()


async def test_the_bytes_of_an_encrypted_store_are_not_the_tenants(tmp_path: Path, key_file: Path) -> None:
    """Nothing of a payload is on disk; reads give it back, also after a restart; without the key nothing is."""
    folder = tmp_path / "kv"
    store = await open_store(folder, encryption_key_file=key_file)
    await fill(store)
    everything = {n: payload(n) for n in range(6)}
    assert everything == await served(store, list(range(6)))
    assert [False] * 6 == [on_disk(folder, n) for n in range(6)]
    await store.close()
    assert [] == [bad for report in verify_folder(folder) for bad in report.bad]

    store = await open_store(folder, encryption_key_file=key_file)
    assert everything == await served(store, list(range(6)))
    await store.close()
    store = await open_store(folder)
    assert {} == await served(store, list(range(6)))
    await store.close()


async def test_crypto_shredding_makes_even_kept_copies_unreadable(tmp_path: Path, key_file: Path) -> None:
    """Deleting a tenant destroys its key: files that were copied before it (a backup) cannot be read any more."""
    folder = tmp_path / "kv"
    store = await open_store(folder, encryption_key_file=key_file)
    await fill(store)
    await store.close()
    backup = {path.name: path.read_bytes() for path in segments(folder)}
    assert 2 == len(list((folder / "keys").glob("*.key")))
    store = await open_store(folder, encryption_key_file=key_file)
    await store.evict(Selection(tenant="a"))
    await store.close()
    assert 1 == len(list((folder / "keys").glob("*.key")))
    for name, data in backup.items():
        (folder / name).write_bytes(data)

    store = await open_store(folder, encryption_key_file=key_file)
    assert {n: payload(n) for n in (1, 3, 5)} == await served(store, list(range(6)))
    await store.write(block(0, tenant="a"))  # the tenant may come back, with a new key
    assert {0: payload(0)} == await served(store, [0])
    await store.close()


def test_a_sealed_block_opens_only_as_what_it_was(tmp_path: Path) -> None:
    """Another tenant, another name, another byte, another master key: no payload."""
    keyring = Keyring(tmp_path, b"m" * 32)
    stored = keyring.seal("a", b"name", b"payload" * 100)
    assert b"payload" * 100 == keyring.unseal("a", b"name", memoryview(stored))
    keyring.seal("b", b"name", b"x")
    broken = bytes([stored[50] ^ 1])
    for ring, tenant, name, data in (
        (keyring, "b", b"name", stored),
        (keyring, "a", b"other", stored),
        (keyring, "a", b"name", stored[:50] + broken + stored[51:]),
        (keyring, "nobody", b"name", stored),
        (Keyring(tmp_path, b"n" * 32), "a", b"name", stored),
    ):
        with pytest.raises(SealedAwayError):
            ring.unseal(tenant, name, data)
    assert stored != keyring.seal("a", b"name", b"payload" * 100)


@pytest.mark.parametrize("content", [b"", b"short", b"z" * 64, None], ids=["empty", "short", "no-hex", "missing"])
def test_a_master_key_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    """The store does not start without the protection that it was told to have."""
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MasterKeyError, match=str(path)):
        Keyring.load(tmp_path / "keys", path)
    path.write_bytes(os.urandom(32))
    Keyring.load(tmp_path / "keys", path)


async def test_a_block_whose_key_is_gone_is_a_miss_and_no_damage(tmp_path: Path, key_file: Path) -> None:
    """Nothing is wrong with the disk; the block can be written anew, and is then read."""
    store = await open_store(tmp_path / "kv", encryption_key_file=key_file)
    await store.write(block(0, tenant="a"))
    Keyring.load(tmp_path / "kv" / "keys", key_file).delete("a")
    assert {} == await served(store, [0])
    assert (0, 1, False) == (store.counts.damaged_blocks, store.counts.evictions["key"], store.has(FINGERPRINT, key(0)))
    await store.write(block(0, tenant="a"))
    assert {0: payload(0)} == await served(store, [0])
    await store.close()

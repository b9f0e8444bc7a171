"""Does a deletion cover every copy of the blocks that were there before it, whenever and wherever the copy was made?"""

import asyncio
import os
import time
from pathlib import Path

import pytest

from services.kvstore import remote
from services.kvstore.directory import segment_files
from services.kvstore.retention import AGENT, CHAT
from services.kvstore.segments import load_segment
from services.kvstore.store import Store
from services.kvstore.tests.blocks import FINGERPRINT, block, key, open_store, payload, read_all, segments
from services.kvstore.tests.objects import Bucket, served, uploading
from services.kvstore.tiers import Selection


async def copied_forward(store: Store, number: int) -> None:
    """A hit of a request whose class lives longer has a block written again."""
    before = store.counts.refreshed_blocks
    store.lookup(FINGERPRINT, [key(number)], retention=CHAT)
    async with asyncio.timeout(30):
        while store.counts.refreshed_blocks == before:  # noqa: ASYNC110 - as an operator would see it
            await asyncio.sleep(0.02)


async def test_a_copy_remembers_when_its_block_was_first_written(tmp_path: Path) -> None:
    """In memory, by the footer, and by the header when a crash left no footer; rounded to the earlier minute."""
    store = await open_store(tmp_path)
    await store.write(block(0, retention=AGENT))
    first = store.catalog.index.find(FINGERPRINT, key(0))
    await copied_forward(store, 0)
    copy = store.catalog.index.find(FINGERPRINT, key(0))
    await store.close()
    assert first is not None
    assert copy is not None
    assert (AGENT, 0, CHAT, 1) == (first.retention, first.age_minutes, copy.retention, copy.age_minutes)
    assert first.created_seconds - 60 < copy.first_created_seconds <= first.created_seconds < copy.created_seconds

    store = await open_store(tmp_path)
    assert copy == store.catalog.index.find(FINGERPRINT, key(0))
    await store.close()
    os.truncate(segments(tmp_path)[-1], 12_288)
    assert [copy] == list(load_segment(segment_files(tmp_path)[-1]).locations)
    store = await open_store(tmp_path)
    assert [payload(0)] == await read_all(store, [0])
    await store.close()


async def test_a_local_deletion_of_the_past_covers_copies_that_were_made_since(tmp_path: Path) -> None:
    """What another replica was told before the copy was made; a block that is new since then stays."""
    store = await open_store(tmp_path)
    await store.write(block(0, tenant="acme", retention=AGENT))
    first = store.catalog.index.find(FINGERPRINT, key(0))
    assert first is not None
    await copied_forward(store, 0)
    await store.write(block(1, tenant="acme", retention=AGENT))
    await store.evict_local(Selection(tenant="acme"), first.created_seconds + 0.001)

    assert [False, True] == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    await store.close()


@pytest.mark.parametrize("hears_first", [False, True], ids=["uploads before it hears", "was restarted meanwhile"])
async def test_a_partitioned_replica_brings_nothing_back(tmp_path: Path, monkeypatch, hears_first: bool) -> None:
    """Its copy is younger than the deletion of its tenant; nobody finds it, and its own disk loses it when it hears."""
    monkeypatch.setattr(remote, "DELETION_SECONDS", 0.0)  # the minute that a deletion covers beyond itself is over
    bucket = Bucket()
    bucket.clock = time.time  # type: ignore[assignment]  # the wall clock, as the store has
    store = await open_store(tmp_path)
    await asyncio.gather(*(store.write(block(n, tenant="acme", retention=AGENT)) for n in range(2)))
    cut_off = await bucket.fresh()
    store.connect(listener=cut_off)

    await (await bucket.fresh()).evict(Selection(tenant="acme"))
    await copied_forward(store, 0)
    if hears_first:
        await store.close()
        store = await open_store(tmp_path)
        cut_off = bucket.replica()
        store.connect(listener=cut_off)
        await cut_off._refresh(store, is_full=True)
        assert [False, False] == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    async with uploading(cut_off), asyncio.timeout(20):
        await store.seal_older_than(-1)
        await cut_off.uploads.flush()
        assert hears_first == (cut_off.uploads.counts.blocks == 0)
    assert [] == await served(await bucket.fresh(), [0]) == await served(await bucket.fresh(), [1])

    if not hears_first:
        await cut_off._refresh(store, is_full=False)
        assert [False, False] == [store.has(FINGERPRINT, key(n)) for n in range(2)]
    await store.close()

"""Does a batch that is written while another is synced share that one's fate where it must, and only there?"""

import asyncio
import os
from concurrent.futures import wait
from pathlib import Path

import pytest

from services.kvstore.directory import new_segment_file
from services.kvstore.disk import Disk
from services.kvstore.segments import SegmentWriter
from services.kvstore.tests.blocks import block, open_store, payload, served
from services.kvstore.tiers import Selection

BIG = 3 << 20


def test_after_a_failed_sync_no_later_one_of_the_file_succeeds(tmp_path: Path) -> None:
    """The kernel tells of lost pages once; all that was written since the last good sync is given up."""
    disk = Disk(tmp_path)
    file = new_segment_file(tmp_path, 1, 1)
    writer = SegmentWriter(disk, file, slot=0, segment_bytes=64 << 20, now=1.0)
    kept, (unused, pipe) = os.dup(writer._fd), os.pipe()
    writer.append([block(1)], now=1.0)
    wait(writer._pieces)
    os.dup2(pipe, writer._fd)  # a pipe cannot be synced
    with pytest.raises(OSError, match="Invalid"):
        writer.start_sync().result()
    os.dup2(kept, writer._fd)
    writer.append([block(2)], now=1.0)
    with pytest.raises(OSError, match="Invalid"):
        writer.start_sync().result()

    assert 0 == writer.abandon()
    assert not file.path.exists()
    disk.close()
    for descriptor in (kept, unused, pipe):
        os.close(descriptor)


async def test_batches_overlap_and_every_block_is_what_was_written(tmp_path: Path) -> None:
    """Several batches, several segments, two classes; a deletion among them finds all that was written before it."""
    store = await open_store(tmp_path, max_bytes=1 << 30, segment_bytes=16 << 20)
    numbers = range(24)
    writes = [asyncio.create_task(store.write(block(n, BIG, retention=n % 2, tenant="ab"[n % 2]))) for n in numbers]
    await writes[3]
    removed = await store.evict(Selection(tenant="b"))
    await asyncio.gather(*writes, return_exceptions=True)
    found = await served(store, [*numbers])

    assert removed.num_blocks >= 1
    assert {n: payload(n, BIG) for n in numbers if n % 2 == 0} == {n: data for n, data in found.items() if n % 2 == 0}
    assert {n: payload(n, BIG) for n in found} == found
    await store.close()

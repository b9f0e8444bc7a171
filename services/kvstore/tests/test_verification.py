"""Does verifying a stopped store find every bad block, change nothing, and read no faster than allowed?"""

import asyncio
import os
import time
from pathlib import Path

import pytest

from services.kvstore.directory import StoreLockedError
from services.kvstore.format import record_bytes
from services.kvstore.tests.blocks import block, flip, key, open_store, segments
from services.kvstore.verification import Bad, Report, verify_folder

RECORD = record_bytes(5000)


async def filled(folder: Path) -> Path:
    store = await open_store(folder)
    await asyncio.gather(*(store.write(block(n)) for n in range(6)))
    await store.close()
    return segments(folder)[0]


def bad(reports: list[Report]) -> list[Bad]:
    return [one for report in reports for one in report.bad]


async def test_a_good_store_is_good(tmp_path: Path) -> None:
    """Every block is counted, none is bad, and the last report says so."""
    await filled(tmp_path)
    reports = list(verify_folder(tmp_path))
    assert [] == bad(reports)
    assert (6, 6, True) == (reports[-1].num_blocks, reports[-1].total_blocks, reports[-1].is_last)


async def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    """Payload, header, and a file that ends too early; the files stay as they were."""
    path = await filled(tmp_path)
    flip(path, RECORD + 4096 + 3)
    flip(path, 4 * RECORD + 50)
    before = path.read_bytes()
    expected = [
        Bad(key(1), path.name, RECORD, "payload"),
        Bad(key(4), path.name, 4 * RECORD, "header"),
    ]
    assert expected == bad(list(verify_folder(tmp_path)))
    assert before == path.read_bytes()


async def test_a_killed_store_is_scanned(tmp_path: Path) -> None:
    """Without a footer: damaged payloads are found, the torn tail is no block."""
    path = await filled(tmp_path)
    os.truncate(path, 5 * RECORD + 5000)
    flip(path, 2 * RECORD + 4096)
    reports = list(verify_folder(tmp_path))
    assert [Bad(key(2), path.name, 2 * RECORD, "payload")] == bad(reports)
    assert 5 == reports[-1].total_blocks


async def test_a_running_store_is_not_read_behind_its_back(tmp_path: Path) -> None:
    """It must be asked instead."""
    store = await open_store(tmp_path)
    with pytest.raises(StoreLockedError):
        list(verify_folder(tmp_path))
    await store.close()
    with pytest.raises(FileNotFoundError):
        list(verify_folder(tmp_path / "nothing"))


async def test_the_reading_is_throttled(tmp_path: Path) -> None:
    """Stopped or running, no more bytes a second than allowed."""
    store = await open_store(tmp_path)
    await asyncio.gather(*(store.write(block(n, 100_000)) for n in range(4)))
    started = time.monotonic()
    async for report in store.verify(max_bytes_per_second=2_000_000):
        assert () == report.bad
    assert 0.2 < time.monotonic() - started < 10
    await store.close()
    started = time.monotonic()
    list(verify_folder(tmp_path, max_bytes_per_second=2_000_000))
    assert 0.2 < time.monotonic() - started < 10

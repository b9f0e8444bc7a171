"""Do aligned, overlapping writes and reads move exactly the bytes they are given, also where O_DIRECT is refused?"""

import os
import random
import threading
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.disk import PIECE_BYTES, Buffers, Disk, physical_bytes
from services.kvstore.tests.blocks import block, open_store, payload, served


@pytest.fixture
def disk(tmp_path: Path):
    disk = Disk(tmp_path)
    yield disk
    disk.close()


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 100, 4096, 70_000, PIECE_BYTES, PIECE_BYTES + 5]), min_size=1, max_size=5))
def test_parts_are_written_one_behind_the_other(tmp_path_factory, sizes: list[int]) -> None:
    """Whatever their sizes against the pieces; zeros follow up to the next page."""
    disk = Disk(tmp_path_factory.mktemp("disk"))
    parts = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)] + [b"end"]
    fd = disk.open(disk.folder / "file", os.O_RDWR | os.O_CREAT)
    end = disk.write(fd, [bytes(4096)], 0)
    end = disk.write(fd, parts, end)
    expected = bytes(4096) + b"".join(parts)
    assert expected + bytes(-len(expected) % 4096) == (disk.folder / "file").read_bytes()
    assert len(expected) + -len(expected) % 4096 == end
    assert expected[4096:8192] == bytes(disk.read(fd, 4096, 4096))[: len(expected) - 4096]
    os.close(fd)
    disk.close()


def test_memory_is_used_again_only_when_nobody_looks_at_it() -> None:
    """A view that is still held keeps its bytes, whatever others take meanwhile."""
    buffers = Buffers()
    first = buffers.take(100_000)
    first[:5] = b"first"
    kept = first[:5]
    del first
    for _ in range(5):
        other = buffers.take(100_000)
        other[:5] = b"other"
        del other
    assert b"first" == bytes(kept)
    del kept
    assert 2 == len(buffers._pool[1 << 17])
    assert bytes(buffers.take(100_000)[:5]) in {b"first", b"other"}


def test_threads_never_share_memory() -> None:
    """Each reads back what it wrote."""
    buffers, wrong = Buffers(), []

    def work(number: int) -> None:
        for _ in range(300):
            view = buffers.take(65_536)
            view[:8] = number.to_bytes(8, "little")
            if int.from_bytes(view[:8], "little") != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


def test_memory_beyond_the_pool_is_not_kept() -> None:
    """Bounded, however many are taken at once."""
    buffers = Buffers(pooled_bytes=1 << 20)
    views = [buffers.take(400_000) for _ in range(10)]
    assert 10 == len(views)
    assert 1 << 20 >= sum(size * len(pool) for size, pool in buffers._pool.items())


def test_erased_ranges_read_as_zeros_and_take_no_disk(disk: Disk) -> None:
    """Holes where bytes were, the rest as it was."""
    path = disk.folder / "file"
    path.write_bytes(b"x" * (1 << 20))
    os.sync()
    before = physical_bytes(path)
    disk.erase(path, [(4096, 8192), (65_536, 1 << 19)])
    data = path.read_bytes()
    assert (b"x" * 4096 + bytes(4096), bytes((1 << 19) - 65_536)) == (data[:8192], data[65_536 : 1 << 19])
    assert data[8192:65_536] + data[1 << 19 :] == b"x" * (65_536 - 8192 + (1 << 19))
    assert physical_bytes(path) < before


async def test_without_direct_io_all_is_the_same_after_one_warning(tmp_path: Path, monkeypatch) -> None:
    """A file system that refuses O_DIRECT: buffered, said once, same bytes."""
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT and str(path).endswith(".seg"):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with structlog.testing.capture_logs() as logs:
        store = await open_store(tmp_path)
        for number, size in enumerate((1, 5000, 300_000)):
            await store.write(block(number, size))
        assert {n: payload(n, size) for n, size in enumerate((1, 5000, 300_000))} == await served(store, [0, 1, 2])
        await store.close()
    assert 1 == [entry["event"] for entry in logs].count("kvstore.disk.buffered")
    assert not store.disk.is_direct

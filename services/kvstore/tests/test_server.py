"""Do gRPC callers get the store's promises: one lookup, verified reads, atomic bounded writes?"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proto.kvstore_pb2 import BlockChunk, GetStatsRequest, LookupRequest, ReadRequest
from services.chassis.errors import InvalidRequest, Overloaded
from services.chassis.testing import running
from services.kvstore import server as server_module
from services.kvstore.directory import StoreLockedError
from services.kvstore.tests.blocks import FINGERPRINT, OTHER_FINGERPRINT, flip, key, payload, segments
from services.kvstore.tests.serving import PIECE, chunks, kvstore, lookup, metrics, read, settings_for, write

BIG = PIECE + 700_000


async def test_blocks_travel_in_pieces_and_come_back_whole(tmp_path: Path) -> None:
    """Order, offsets, sizes and checksum let a reader put blocks together and verify them."""
    async with kvstore(tmp_path) as stub:
        assert (3, 0) == await write(stub, chunks(0), chunks(1, BIG), chunks(2))
        assert (1, 2) == await write(stub, chunks(2), chunks(1, BIG), chunks(3))
        assert 4 == await lookup(stub, range(9))
        got = await read(stub, range(9))

    assert [(key(0), 0), (key(1), 0), (key(1), PIECE), (key(2), 0), (key(3), 0)] == [
        (chunk.block_key, chunk.offset_bytes) for chunk in got
    ]
    assert payload(1, BIG) == got[1].data + got[2].data
    assert (BIG, zlib.crc32(payload(1, BIG))) == (got[2].block_bytes, got[2].block_crc32)
    assert [payload(0), payload(2), payload(3)] == [got[n].data for n in (0, 3, 4)]


async def test_a_restart_keeps_the_hits(tmp_path: Path) -> None:
    """Stopping and starting the service loses nothing."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0), chunks(1))
    async with kvstore(tmp_path) as stub:
        assert 2 == await lookup(stub, range(3))
        assert [payload(0), payload(1)] == [chunk.data for chunk in await read(stub, range(3))]


async def test_another_fingerprint_sees_an_empty_store(tmp_path: Path) -> None:
    """KV of another model can neither be looked up nor read."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0))
        assert 0 == await lookup(stub, range(1), OTHER_FINGERPRINT)
        assert [] == await read(stub, range(1), OTHER_FINGERPRINT)


async def test_a_flipped_byte_is_a_miss_and_counted(tmp_path: Path) -> None:
    """The reader gets the blocks before the damage and none of the wrong bytes."""
    async with kvstore(tmp_path) as stub:
        # Of no class: those have one segment, whatever the hour.
        await write(stub, *(chunks(n, retention=0) for n in range(3)))
        flip(segments(tmp_path)[0], 3 * 4096 + 4096 + 10)
        assert [payload(0)] == [chunk.data for chunk in await read(stub, range(3))]
        assert 1 == await lookup(stub, range(3))
        stats = await stub.GetStats(GetStatsRequest(), timeout=30)

    assert (2, 1, 1, 64 << 20) == (stats.num_blocks, stats.num_damaged, stats.num_segments, stats.max_bytes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_key": b"short"}, "block_key"),
        ({"fingerprint": b""}, "fingerprint"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": 1 << 40}, "block_bytes"),
        ({"block_bytes": 5001}, "data"),
        ({"offset_bytes": 1}, "offset_bytes"),
        ({"data": b""}, "data"),
        ({"block_crc32": 1}, "block_crc32"),
    ],
)
async def test_a_malformed_write_is_refused_by_name_and_stores_only_what_was_whole(tmp_path, changes, field) -> None:
    """The error names the field; the good block before it stays; nothing of the bad one is found."""
    async with kvstore(tmp_path) as stub:
        with pytest.raises(InvalidRequest) as caught:
            await write(stub, chunks(0), chunks(1, **changes))
        assert (field, 1) == (caught.value.field, await lookup(stub, range(2)))
        assert (1, 0) == await write(stub, chunks(1))


async def test_interleaved_or_jumping_pieces_are_refused(tmp_path: Path) -> None:
    """A block can never be made of two writers' or two blocks' bytes."""
    async with kvstore(tmp_path) as stub:
        first = list(chunks(0, BIG))
        for second in (next(chunks(1)), BlockChunk(block_key=key(0), offset_bytes=PIECE + 1, data=b"x")):
            with pytest.raises(InvalidRequest):
                await stub.Write(iter([first[0], second]), timeout=30)
        with pytest.raises(InvalidRequest, match="within the block"):
            await stub.Write(
                iter([first[0], BlockChunk(block_key=key(0), offset_bytes=PIECE, data=bytes(PIECE))]), timeout=30
            )
        assert 0 == await lookup(stub, range(2))


async def test_bad_keys_are_refused_by_name(tmp_path: Path) -> None:
    """Lookup and Read take 32-byte keys, at most 8,192 of them, and a 32-byte fingerprint."""
    async with kvstore(tmp_path) as stub:
        for request, field in (
            (LookupRequest(block_keys=[b"x"], fingerprint=FINGERPRINT), "block_keys"),
            (LookupRequest(block_keys=[key(1)], fingerprint=b"x"), "fingerprint"),
            (LookupRequest(block_keys=[key(1)] * 8193, fingerprint=FINGERPRINT), "block_keys"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await stub.Lookup(request, timeout=30)
            assert field == caught.value.field
        with pytest.raises(InvalidRequest):
            await read(stub, range(1), b"x")


async def test_too_many_writes_are_shed_and_their_memory_comes_back(tmp_path: Path) -> None:
    """Writers beyond the limit hear Overloaded at once; cancelled ones leave nothing behind."""
    async with kvstore(tmp_path) as stub:

        async def hang(number: int) -> AsyncIterator[BlockChunk]:
            yield next(chunks(number, BIG))
            await asyncio.sleep(60)

        calls = [stub.Write(hang(n), timeout=30) for n in range(server_module.MAX_WRITES)]
        async with asyncio.timeout(20):
            while metrics(tmp_path)["waiting_bytes"] < BIG * server_module.MAX_WRITES:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.02)
        with pytest.raises(Overloaded) as caught:
            await write(stub, chunks(99))
        assert caught.value.retry_after > 0
        for call in calls:
            call.cancel()
        async with asyncio.timeout(20):
            while metrics(tmp_path)["waiting_bytes"] > 0:  # noqa: ASYNC110 - as an operator would see it
                await asyncio.sleep(0.02)
        assert (1, 0) == await write(stub, chunks(99))


async def test_a_reader_that_goes_away_leaves_no_pin(tmp_path: Path) -> None:
    """Cancelled reads do not keep segments on disk for ever, and others go on."""
    async with kvstore(tmp_path, max_bytes=16 << 20) as stub:
        await write(stub, *(chunks(n, BIG) for n in range(4)))
        call = stub.Read(ReadRequest(block_keys=[key(n) for n in range(4)], fingerprint=FINGERPRINT), timeout=30)
        await call.read()
        call.cancel()
        await write(stub, *(chunks(100 + n, BIG) for n in range(6)))
        stats = await stub.GetStats(GetStatsRequest(), timeout=30)

    assert stats.num_evicted >= 4
    assert stats.disk_bytes <= stats.max_bytes


async def test_metrics_tell_what_happened(tmp_path: Path) -> None:
    """Operators see lookups, hits, stored, duplicates, damaged, evicted and disk bytes."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0), chunks(0))
        await lookup(stub, range(3))
        shown = metrics(tmp_path)

    wanted = {
        "lookups": 1,
        "hit_blocks": 1,
        "stored_blocks": 1,
        "duplicate_blocks": 1,
        "damaged_blocks": 0,
        "evicted_blocks": 0,
    }
    assert wanted == {name: shown[f"{name}_total"] for name in wanted}
    assert shown["disk_bytes"] > 5000


async def test_a_second_service_on_the_folder_does_not_start(tmp_path: Path) -> None:
    """It says which process has it instead of writing into the same files."""
    async with kvstore(tmp_path):
        with pytest.raises(StoreLockedError):
            async with running(settings_for(tmp_path), server_module.build):
                pass

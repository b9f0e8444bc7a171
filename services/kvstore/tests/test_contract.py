"""Do callers get leases, pins, pending blocks, deletions, verification and stats over the wire?"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proto.common_pb2 import RETENTION_CLASS_AGENT, RETENTION_CLASS_CHAT
from proto.kvstore_pb2 import (
    BlockChunk,
    EvictRequest,
    GetStatsRequest,
    LocateRequest,
    LookupRequest,
    PinRequest,
    ReadRequest,
    ReleaseRequest,
    VerifyRequest,
)
from services.chassis.errors import InvalidRequest
from services.kvstore.tests.blocks import FINGERPRINT, block, flip, key, open_store, payload, segments
from services.kvstore.tests.serving import PIECE, chunks, kvstore, lookup, metrics, read, write


def wanted(numbers: range, **more) -> LookupRequest:
    return LookupRequest(block_keys=[key(n) for n in numbers], fingerprint=FINGERPRINT, **more)


async def test_the_next_turn_hits_blocks_that_are_still_being_written(tmp_path: Path) -> None:
    """A lookup names the blocks on their way right behind the stored ones; a read waits for them and gets them."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0))
        gate = asyncio.Event()

        async def slowly() -> AsyncIterator[BlockChunk]:
            first, second = chunks(1, PIECE + 1000)
            yield first
            await gate.wait()
            yield second

        writing = asyncio.ensure_future(stub.Write(slowly(), timeout=30))
        async with asyncio.timeout(20):
            while (reply := await stub.Lookup(wanted(range(3)), timeout=30)).num_pending == 0:  # noqa: ASYNC110 - as a caller sees it
                await asyncio.sleep(0.005)
        assert (1, 1) == (reply.num_blocks, reply.num_pending)
        assert 0 < reply.pending_seconds < 5
        assert [payload(0)] == [chunk.data for chunk in await read(stub, range(3))]
        assert [payload(0)] == [chunk.data for chunk in await read(stub, range(3), pending_seconds=0.05)]

        reading = asyncio.create_task(read(stub, range(3), pending_seconds=5))
        await asyncio.sleep(0.02)
        gate.set()
        assert payload(0) + payload(1, PIECE + 1000) == b"".join(chunk.data for chunk in await reading)
        assert 1 == (await writing).num_stored
        reply = await stub.Lookup(wanted(range(3)), timeout=30)
        assert (2, 0, 0.0) == (reply.num_blocks, reply.num_pending, reply.pending_seconds)
        assert 1 <= metrics(tmp_path)["pending_blocks_total"]


async def test_pending_is_answered_at_once_and_served_within_milliseconds(tmp_path: Path) -> None:
    """A turn that comes while its predecessor's blocks are at the disk waits for exactly that."""
    store = await open_store(tmp_path)
    blocks = [block(n, 100_000) for n in range(8)]
    writes = [asyncio.create_task(store.write(one)) for one in blocks]
    await asyncio.sleep(0)
    started = time.thread_time()
    found = await store.find(FINGERPRINT, [key(n) for n in range(10)])
    answered = time.thread_time() - started
    assert (0, 8) == (found.num_blocks, found.num_pending)
    assert answered < 0.005  # of work: what else runs on this machine is not counted

    got = [bytes(one.payload) async for one in store.read(FINGERPRINT, [key(n) for n in range(10)], pending_seconds=30)]
    assert [payload(n, 100_000) for n in range(8)] == got
    await asyncio.gather(*writes)
    await store.close()


async def test_a_writer_that_breaks_off_ends_the_wait_at_once(tmp_path: Path) -> None:
    """A pending block that will not come is a miss as soon as that is known, not after the whole wait."""
    async with kvstore(tmp_path) as stub:

        async def broken() -> AsyncIterator[BlockChunk]:
            yield next(chunks(0, PIECE + 1000))
            await asyncio.sleep(60)

        call = stub.Write(broken(), timeout=30)
        async with asyncio.timeout(20):
            while (await stub.Lookup(wanted(range(1)), timeout=30)).num_pending == 0:  # noqa: ASYNC110 - as a caller sees it
                await asyncio.sleep(0.005)
        reading = asyncio.create_task(read(stub, range(1), pending_seconds=9))
        await asyncio.sleep(0.02)
        started = time.monotonic()
        call.cancel()
        assert [] == await reading
        assert time.monotonic() - started < 8


async def test_a_lease_ends_with_the_read_of_its_request(tmp_path: Path) -> None:
    """Lookup grants it, the read of the same request gives it back, whatever becomes of the read."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0), chunks(1))
        reply = await stub.Lookup(wanted(range(2), request_id="r", lease_seconds=7), timeout=30)
        assert (2, 7.0) == (reply.num_blocks, reply.lease_seconds)
        assert 1 == (await stub.GetStats(GetStatsRequest(), timeout=30)).num_leases
        request = ReadRequest(block_keys=[key(0)], fingerprint=FINGERPRINT, request_id="r")
        assert 1 == len([chunk async for chunk in stub.Read(request, timeout=30)])
        assert 0 == (await stub.GetStats(GetStatsRequest(), timeout=30)).num_leases
        assert 0.0 == (await stub.Lookup(wanted(range(2)), timeout=30)).lease_seconds
        assert 0.0 == (await stub.Lookup(wanted(range(5, 6), request_id="x"), timeout=30)).lease_seconds


async def test_pin_and_release_over_the_wire(tmp_path: Path) -> None:
    """A session pins what is there, sees until when, and takes it back."""
    async with kvstore(tmp_path, quota_bytes={"small": 6000}) as stub:
        await write(stub, *(chunks(n, tenant="t") for n in range(3)))
        pin = PinRequest(
            session_id="s",
            tenant="t",
            block_keys=[key(n) for n in range(5)],
            fingerprint=FINGERPRINT,
            hold_seconds=60,
        )
        reply = await stub.Pin(pin, timeout=30)
        assert 3 == reply.num_pinned
        assert 50 < reply.expires_at_unix_seconds - time.time() < 61
        assert 3 == (await stub.GetStats(GetStatsRequest(), timeout=30)).num_pinned
        other = PinRequest(session_id="s", tenant="small", block_keys=pin.block_keys, fingerprint=FINGERPRINT)
        assert 1 == (await stub.Pin(other, timeout=30)).num_pinned
        one = ReleaseRequest(session_id="s", tenant="t", block_keys=[key(0)])
        assert 1 == (await stub.Release(one, timeout=30)).num_released
        assert 2 == (await stub.Release(ReleaseRequest(session_id="s", tenant="t"), timeout=30)).num_released
        with pytest.raises(InvalidRequest, match="session"):
            await stub.Pin(PinRequest(block_keys=[key(0)], fingerprint=FINGERPRINT), timeout=30)


async def test_stats_tell_who_holds_what(tmp_path: Path) -> None:
    """Tenants by size with their quotas, classes with their lives, physical bytes."""
    async with kvstore(tmp_path, quota_bytes={"*": 1 << 20}) as stub:
        await write(stub, chunks(0, tenant="a"), chunks(1, 9000, tenant="b", retention=RETENTION_CLASS_AGENT))
        stats = await stub.GetStats(GetStatsRequest(), timeout=30)

    assert [("b", 1, 9000, 1 << 20), ("a", 1, 5000, 1 << 20)] == [
        (one.tenant, one.num_blocks, one.num_bytes, one.quota_bytes) for one in stats.tenants
    ]
    lives = {one.retention: (one.seconds, one.num_blocks) for one in stats.retentions}
    assert {0: (0.0, 0), RETENTION_CLASS_CHAT: (604_800.0, 1), RETENTION_CLASS_AGENT: (259_200.0, 1)} == lives
    assert stats.disk_bytes <= stats.physical_bytes <= stats.max_bytes
    assert "off" == stats.breaker


async def test_evict_needs_to_be_told_what(tmp_path: Path) -> None:
    """Nothing named is refused; everything must be said by name."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0), chunks(1, tenant="t"), chunks(2, tenant="u"))
        for request in (EvictRequest(), EvictRequest(is_all=True, tenant="t")):
            with pytest.raises(InvalidRequest):
                await stub.Evict(request, timeout=30)
        assert 1 == (await stub.Evict(EvictRequest(tenant="t"), timeout=30)).num_blocks
        assert 1 == (await stub.Evict(EvictRequest(is_tenant_set=True), timeout=30)).num_blocks
        assert 1 == (await stub.Evict(EvictRequest(is_all=True), timeout=30)).num_blocks
        assert 3 == metrics(tmp_path)['evictions_total{reason="tenant"}']


async def test_verify_names_the_bad_blocks_and_quarantines_them(tmp_path: Path) -> None:
    """Payload and header damage, each by key, file and place; a second look finds nothing, for they are gone."""
    async with kvstore(tmp_path) as stub:
        await write(stub, *(chunks(n) for n in range(5)))
        path = segments(tmp_path)[0]
        flip(path, 1 * 12288 + 4096 + 9)
        flip(path, 3 * 12288 + 30)
        reports = [one async for one in stub.Verify(VerifyRequest(), timeout=30)]
        bad = {(one.block_key, one.segment, one.offset_bytes, one.fault) for report in reports for one in report.bad}
        assert {(key(1), path.name, 12288, "payload"), (key(3), path.name, 3 * 12288, "header")} == bad
        assert (True, 5, 5) == (reports[-1].is_last, reports[-1].num_blocks, reports[-1].total_blocks)
        assert 1 == await lookup(stub, range(5))
        again = [one async for one in stub.Verify(VerifyRequest(max_bytes_per_second=10**9), timeout=30)]
        assert [] == [one for report in again for one in report.bad]


async def test_locate_gives_the_socket_of_this_store(tmp_path: Path) -> None:
    """Path and boot id are what a reader on the same host needs."""
    async with kvstore(tmp_path) as stub:
        reply = await stub.Locate(LocateRequest(), timeout=30)
        assert (str(tmp_path / "reads.sock"), 32) == (reply.socket_path, len(reply.boot_id))
        assert (tmp_path / "reads.sock").is_socket()
    assert not (tmp_path / "reads.sock").exists()


async def test_a_class_of_a_newer_peer_counts_as_none(tmp_path: Path) -> None:
    """Rolling upgrades: what this store does not know of lives until its room is needed."""
    async with kvstore(tmp_path) as stub:
        assert (2, 0) == await write(stub, chunks(0, retention=9), chunks(1, retention=RETENTION_CLASS_CHAT))
        assert 2 == (await stub.Lookup(wanted(range(2), retention=9), timeout=30)).num_blocks
        assert 512 >= metrics(tmp_path)['hit_tokens_total{retention="any",tier="disk"}'] == 256
        stats = await stub.GetStats(GetStatsRequest(), timeout=30)
    assert [1, 1, 0] == [one.num_blocks for one in sorted(stats.retentions, key=lambda one: one.retention)]


async def test_a_tenant_name_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    """Too long, or with a zero in it."""
    async with kvstore(tmp_path) as stub:
        for name in ("x" * 65, "a\0"):
            with pytest.raises(InvalidRequest) as caught:
                await write(stub, chunks(0, tenant=name))
            assert "tenant" == caught.value.field


async def test_metrics_follow_the_page(tmp_path: Path) -> None:
    """Tokens asked for and found by class, lag, ages, drops and evictions by reason."""
    async with kvstore(tmp_path) as stub:
        await write(stub, chunks(0), chunks(1))
        await stub.Lookup(wanted(range(4), retention=RETENTION_CLASS_CHAT), timeout=30)
        with pytest.raises(InvalidRequest):
            await write(stub, chunks(7, block_crc32=1))
        shown = metrics(tmp_path)

    assert (512.0, 256.0) == (
        shown['eligible_tokens_total{retention="chat"}'],
        shown['hit_tokens_total{retention="chat",tier="disk"}'],
    )
    assert 1.0 == shown['write_drops_total{reason="crc"}']
    assert (1.0, 2.0, 1.0) == tuple(
        shown[f"{name}_count"] for name in ("lookup_seconds", "publish_lag_seconds", "hit_age_seconds")
    )
    assert (0.0, 0.0) == (shown["read_bytes_total"], shown["short_reads_total"])
    assert shown["physical_bytes"] >= shown["payload_bytes"] == 10_000

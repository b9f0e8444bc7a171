"""Do readers on the same host get the right bytes by descriptor, held for them as long as promised and no longer?"""

import array
import asyncio
import errno
import mmap
import os
import socket
from pathlib import Path

import pytest

from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores, Wanted, read_blocks
from services.chassis.local_read_format import (
    BlockPlace,
    OpenRequest,
    WrongPacketError,
    aligned,
    pack_done,
    pack_open,
    parse_blocks,
    parse_hello,
)
from services.chassis.local_reads import LocalReads as ClientReads
from services.kvstore import local_reads as local_reads_module
from services.kvstore.local_reads import LocalReads
from services.kvstore.store import Store
from services.kvstore.tests.blocks import FINGERPRINT, OTHER_FINGERPRINT, block, key, open_store, payload, segments
from services.kvstore.tests.serving import SERVICES, chunks, kvstore, metrics, write
from services.kvstore.tiers import Selection


class Reader:
    """The simplest reader of the socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self.boot_id = parse_hello(self.socket.recv(1000))

    def open(self, numbers: list[int], fingerprint: bytes = FINGERPRINT, request_id: str = "") -> list[bytes]:
        """The payloads of the leading blocks, read by their descriptors."""
        self.socket.send(pack_open(OpenRequest(fingerprint, tuple(key(n) for n in numbers), request_id)))
        rights = array.array("i")
        packet, ancillary, _, _ = self.socket.recvmsg(128 << 10, socket.CMSG_SPACE(64 * rights.itemsize))
        for _, _, data in ancillary:
            rights.frombytes(data)
        reply = parse_blocks(packet)
        assert reply.num_files == len(rights)
        try:
            return [self.payload(rights[place.file], place) for place in reply.blocks]
        finally:
            for descriptor in rights:
                os.close(descriptor)

    @staticmethod
    def payload(descriptor: int, place: BlockPlace) -> bytes:
        buffer = mmap.mmap(-1, aligned(place.block_bytes))
        os.preadv(descriptor, [buffer], place.offset_bytes)
        return buffer[: place.block_bytes]

    def done(self) -> None:
        self.socket.send(pack_done())

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
async def opened(tmp_path: Path):
    """A store with blocks 0..5 in two segments, and its socket."""
    store = await open_store(tmp_path)
    for number in range(6):
        await store.write(block(number, 30_000, retention=number % 2))
    reads = LocalReads.start(store, tmp_path, boot_id="boot")
    assert reads is not None
    yield store, reads
    await reads.close()
    await store.close()


def readers_of(store: Store) -> int:
    return sum(segment.readers for segment in store.catalog.segments.values())


async def settled(store: Store, num_readers: int) -> None:
    async with asyncio.timeout(20):
        while readers_of(store) != num_readers:  # noqa: ASYNC110 - as an operator would see it
            await asyncio.sleep(0.005)


async def test_leading_blocks_are_read_by_descriptor(opened) -> None:
    """Right bytes, in order, up to the first that is missing; several opens on one connection."""
    store, reads = opened
    reader = await asyncio.to_thread(Reader, reads.path)
    assert "boot" == reader.boot_id
    assert [payload(n, 30_000) for n in range(6)] == await asyncio.to_thread(reader.open, [0, 1, 2, 3, 4, 5, 6, 0])
    assert 2 == readers_of(store)
    reader.done()
    await settled(store, 0)
    assert [payload(3, 30_000)] == await asyncio.to_thread(reader.open, [3])
    reader.done()
    assert [] == await asyncio.to_thread(reader.open, [9])
    reader.done()
    assert [] == await asyncio.to_thread(reader.open, [0], OTHER_FINGERPRINT)
    reader.close()
    await settled(store, 0)


async def test_open_blocks_hold_their_files_until_the_reader_hangs_up(opened) -> None:
    """A reader that dies lets go at once; eviction waits for the living."""
    store, reads = opened
    reader = await asyncio.to_thread(Reader, reads.path)
    await asyncio.to_thread(reader.open, [0])
    assert [1] == [segment.readers for segment in store.catalog.segments.values() if segment.readers]
    assert 1 == sum(not use.evictable and use.segment == 1 for use in store.catalog.uses())
    reader.close()
    await settled(store, 0)


async def test_a_reader_that_dawdles_is_cut_off(opened, monkeypatch) -> None:
    """Nobody can hold files for longer than the store says."""
    monkeypatch.setattr(local_reads_module, "HOLD_SECONDS", 0.5)  # enough to ask in
    store, reads = opened
    reader = await asyncio.to_thread(Reader, reads.path)
    await asyncio.to_thread(reader.open, [0])
    await settled(store, 0)
    assert b"" == await asyncio.to_thread(reader.socket.recv, 10)
    reader.close()


async def test_a_reader_that_asks_for_nothing_loses_its_place(opened, monkeypatch) -> None:
    """Places are few: sixty-four silent connections would turn reading by descriptor off for everybody."""
    monkeypatch.setattr(local_reads_module, "HOLD_SECONDS", 0.05)
    _, reads = opened
    silent = await asyncio.to_thread(Reader, reads.path)
    assert b"" == await asyncio.to_thread(silent.socket.recv, 10)
    silent.close()


async def test_the_read_ends_the_lease_of_its_request(opened) -> None:
    """As over gRPC."""
    store, reads = opened
    await store.find(FINGERPRINT, [key(0)], request_id="r")
    reader = await asyncio.to_thread(Reader, reads.path)
    await asyncio.to_thread(reader.open, [0], FINGERPRINT, "r")
    assert 1 == len(store.catalog.leases)
    reader.done()
    await settled(store, 0)
    assert 0 == len(store.catalog.leases)
    reader.close()


async def test_strangers_and_crowds_are_hung_up_on(opened, monkeypatch) -> None:
    """Garbage ends its connection only; connections are bounded; the socket is for this user alone."""
    monkeypatch.setattr(local_reads_module, "MAX_READERS", 2)
    _, reads = opened
    stranger, reader = await asyncio.to_thread(Reader, reads.path), await asyncio.to_thread(Reader, reads.path)
    extra = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    extra.connect(reads.path)
    assert b"" == await asyncio.to_thread(extra.recv, 100)
    stranger.socket.send(b"GET / HTTP/1.1\r\n\r\n")
    assert b"" == await asyncio.to_thread(stranger.socket.recv, 100)
    assert [payload(0, 30_000)] == await asyncio.to_thread(reader.open, [0])
    assert 0o600 == Path(reads.path).stat().st_mode & 0o777
    for one in (stranger.socket, extra, reader):
        one.close()


async def test_encrypted_blocks_are_not_offered(tmp_path: Path) -> None:
    """Only the store can open them."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    store = await open_store(tmp_path / "kv", encryption_key_file=tmp_path / "key")
    await store.write(block(0))
    reads = LocalReads.start(store, tmp_path / "kv", boot_id="boot")
    assert reads is not None
    reader = await asyncio.to_thread(Reader, reads.path)
    assert [] == await asyncio.to_thread(reader.open, [0])
    reader.close()
    await reads.close()
    await store.close()


async def test_a_deleted_tenants_bytes_are_gone_from_open_descriptors(opened) -> None:
    """A reader that keeps its descriptors reads nothing of what was deleted meanwhile."""
    store, _ = opened
    descriptors = [os.open(path, os.O_RDONLY) for path in segments(store.disk.folder)]
    await store.evict(Selection())
    needles = [payload(n, 30_000)[:64] for n in range(6)]
    for descriptor in descriptors:
        data = os.pread(descriptor, 1 << 20, 0)
        assert not any(needle in data for needle in needles)
        os.close(descriptor)


async def test_a_path_too_long_for_a_socket_only_turns_it_off(tmp_path: Path) -> None:
    """The store serves by gRPC alone then."""
    folder = tmp_path / ("x" * 120)
    store = await open_store(folder)
    assert LocalReads.start(store, folder, boot_id="b") is None
    await store.close()


async def test_the_services_client_reads_by_descriptor(tmp_path: Path) -> None:
    """Prefill's own reader against the whole service: right bytes without a Read call; gRPC for what is behind."""
    numbers = range(12)
    async with kvstore(tmp_path) as stub:
        await write(stub, *(chunks(n, 30_000, retention=n % 3) for n in numbers))
        address = SERVICES[tmp_path].address
        async with open_channel(address, peer="kvstore") as channel:
            stores = Stores({"kvstore": channel}, {"kvstore": ClientReads(channel)})
            wanted = Wanted([key(n) for n in range(14)], 0, FINGERPRINT, 30_000)
            got = [bytes(one) async for one in read_blocks(stores, wanted, timeout_seconds=30)]
        shown = metrics(tmp_path)
    assert [payload(n, 30_000) for n in numbers] == got
    assert (0.0, True) == (shown["read_blocks_total"], shown["local_opens_total"] >= 1)


async def test_readers_are_let_in_again_after_descriptors_ran_out(opened, monkeypatch) -> None:
    """The socket goes on accepting, after a moment."""
    store, former = opened
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

    async def accept_or_fail(listener):
        connection = await accept(listener)
        if failures:
            connection[0].close()
            raise failures.pop()
        return connection

    await former.close()
    monkeypatch.setattr(local_reads_module, "_ACCEPT_PAUSE_SECONDS", 0.01)
    reads = LocalReads.start(store, Path(former.path).parent, boot_id="boot")
    assert reads is not None
    monkeypatch.setattr(loop, "sock_accept", accept_or_fail)
    with pytest.raises((OSError, WrongPacketError)):
        await asyncio.to_thread(Reader, reads.path)
    reader = await asyncio.to_thread(Reader, reads.path)
    assert "boot" == reader.boot_id
    reader.close()
    await reads.close()

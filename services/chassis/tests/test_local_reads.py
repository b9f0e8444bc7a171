"""How are a KV store's files read on its host, and what happens at the first doubt? Against a real socket and files."""

import gc
import os
import socket
import threading
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores, Wanted, read_blocks
from services.chassis.local_read_format import (
    BlockPlace,
    Kind,
    aligned,
    kind_of,
    pack_blocks,
    pack_hello,
    parse_open,
)
from services.chassis.local_reads import LocalReads
from services.chassis.testing import until
from services.chassis.tests.memory_kvstore import memory_kvstore

FINGERPRINT = b"f" * 32
SIZE = 10_000
KEYS = [bytes([n]) * 32 for n in range(10)]
PAYLOADS = [bytes([n, 255 - n]) * (SIZE // 2) for n in range(10)]


class LocalStore(threading.Thread):
    """Passes the descriptor of one file with all blocks; switches make it lie."""

    def __init__(self, folder, *, boot_id="memory-boot"):
        super().__init__(daemon=True)
        self.file = folder / "blocks.seg"
        self.file.write_bytes(b"".join(payload.ljust(aligned(SIZE), b"\0") for payload in PAYLOADS))
        self.path = str(folder / "local.sock")
        self.boot_id = boot_id
        self.at_a_time = 4
        self.first_missing = 10
        self.flags = os.O_RDONLY
        self.wrong_crc = -1
        self.is_silent = False
        self.size = SIZE
        self.heard = []
        self.asked = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen()

    def run(self):
        with suppress(OSError):
            while True:
                link, _ = self._socket.accept()
                with link, suppress(OSError):
                    link.settimeout(30)
                    self._serve(link)

    def close(self):
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.join(5)

    def _serve(self, link):
        link.send(pack_hello(self.boot_id))
        while packet := link.recv(1 << 20):
            self.heard.append(kind_of(packet))
            if self.heard[-1] is not Kind.OPEN or self.is_silent:
                continue
            request = parse_open(packet)
            self.asked.append(request)
            numbers = [KEYS.index(key) for key in request.keys][: self.at_a_time]
            places = [self._place(number) for number in numbers if number < self.first_missing]
            descriptor = os.open(self.file, self.flags)
            reply = pack_blocks(places, num_files=bool(places), hold_seconds=5)
            if places:
                socket.send_fds(link, [reply], [descriptor])
            else:
                link.send(reply)
            os.close(descriptor)

    def _place(self, number):
        crc32 = zlib.crc32(PAYLOADS[number]) ^ (number == self.wrong_crc)
        return BlockPlace(0, number * aligned(SIZE), self.size, crc32, bool(self.flags & os.O_DIRECT))


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def local_store(folder, **options):
    store = LocalStore(folder, **options)
    store.start()
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
async def memory(tmp_path):
    """A store that has all blocks, and the path of a socket on this host."""
    async with memory_kvstore() as store:
        store.blocks = {key: (payload, zlib.crc32(payload)) for key, payload in zip(KEYS, PAYLOADS, strict=True)}
        store.socket_path = str(tmp_path / "local.sock")
        yield store


@pytest.fixture
def local(memory, tmp_path):
    with local_store(tmp_path) as store:
        yield store


async def read(memory):
    """Read all as prefill does; return the payloads and the keys that had to come over gRPC."""
    stores = Stores({"kvstore": memory.channel}, {"kvstore": LocalReads(memory.channel)})
    wanted = Wanted(KEYS, 0, FINGERPRINT, SIZE, request_id="mine")
    memory.reads.clear()
    payloads = [bytes(payload) async for payload in read_blocks(stores, wanted, timeout_seconds=30)]
    return payloads, [key for asked in memory.reads for key in asked.block_keys]


async def test_blocks_are_read_from_the_files(memory, local):
    """All of them, in several turns, and the store hears when each is over."""
    assert (PAYLOADS, []) == await read(memory)
    await until(lambda: len(local.heard) >= 6)
    assert [Kind.OPEN, Kind.DONE] * 3 == local.heard
    assert {"mine"} == {asked.request_id for asked in local.asked}


async def test_files_that_bypass_the_page_cache(memory, local):
    """A descriptor with O_DIRECT is read in whole aligned pages."""
    try:
        os.close(os.open(local.file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this folder's file system refuses O_DIRECT")
    local.flags |= os.O_DIRECT

    assert (PAYLOADS, []) == await read(memory)


async def test_what_the_files_do_not_have_comes_over_grpc(memory, local):
    """Missing, encrypted or elsewhere: the store is asked from there on."""
    local.first_missing = 6

    assert (PAYLOADS, KEYS[6:]) == await read(memory)


@pytest.mark.parametrize("trouble", ["checksum", "truncated", "size", "silent", "another store", "nobody"])
async def test_any_doubt_ends_local_reading(memory, local, trouble):
    """Every byte still comes out right, from the store itself, and the files are left alone for a while."""
    first_bad = 0
    match trouble:
        case "checksum":
            local.wrong_crc = first_bad = 5
        case "truncated":
            first_bad = 2
            os.truncate(local.file, 2 * aligned(SIZE) + 100)
        case "size":
            local.size = SIZE + 2
        case "silent":
            local.is_silent = True
        case "another store":
            local.boot_id = "somebody else"
        case "nobody":
            local.close()
    stores = Stores({"kvstore": memory.channel}, {"kvstore": LocalReads(memory.channel)})
    wanted = Wanted(KEYS, 0, FINGERPRINT, SIZE)
    payloads = [bytes(payload) async for payload in read_blocks(stores, wanted, timeout_seconds=30)]
    assert (PAYLOADS, KEYS[first_bad:]) == (payloads, list(memory.reads[0].block_keys))

    asked = len(local.asked)
    assert PAYLOADS == [bytes(payload) async for payload in read_blocks(stores, wanted, timeout_seconds=30)]
    assert asked == len(local.asked)


async def test_a_store_without_a_socket_is_asked_over_grpc(memory):
    """And not asked for its socket at every read."""
    memory.socket_path = ""

    assert (PAYLOADS, KEYS) == await read(memory)


async def test_a_reading_that_is_given_up_leaves_no_descriptor(memory, local):
    """Also when reads are under way in the threads."""
    await read(memory)  # threads, channel and the rest are there
    before = num_descriptors()
    stores = Stores({"kvstore": memory.channel}, {"kvstore": LocalReads(memory.channel)})
    for _ in range(5):
        blocks = read_blocks(stores, Wanted(KEYS, 0, FINGERPRINT, SIZE), timeout_seconds=30)
        assert PAYLOADS[0] == await anext(blocks)
        await blocks.aclose()

    def all_closed() -> bool:
        gc.collect()
        return bool(before >= num_descriptors())

    await until(all_closed)


async def test_nobody_at_all_is_a_miss():
    """Neither the socket nor the store."""
    channel = open_channel("127.0.0.1:1", peer="kvstore")
    stores = Stores({"kvstore": channel}, {"kvstore": LocalReads(channel)})
    wanted = Wanted(KEYS, 0, FINGERPRINT, SIZE)

    assert [] == [payload async for payload in read_blocks(stores, wanted, timeout_seconds=2)]
    await channel.close()

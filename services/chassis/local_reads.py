"""How does a reader on the KV store's host read its files without it?

The store passes the files' descriptors over a unix socket and keeps the bytes as they are until the reader is done.
Whatever looks doubtful - another store behind the path, a short read, a wrong checksum - ends the reading here, and the
store itself is asked for the rest.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog

from proto.kvstore_pb2 import LocateRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError
from services.chassis.handoff import block_crc32
from services.chassis.local_read_format import (
    ALIGN_BYTES,
    MAX_FILES,
    MAX_KEYS,
    MAX_PACKET_BYTES,
    BlockPlace,
    OpenRequest,
    WrongPacketError,
    aligned,
    pack_done,
    pack_open,
    parse_blocks,
    parse_hello,
)

_LOCATE_SECONDS = 0.5
_SOCKET_SECONDS = 0.5
_ASK_AGAIN_SECONDS = 10.0
"""A store that has no socket, or is on another host, is not asked for it at every read."""
_NUM_THREADS = 4
"""Reads under way at a time: enough to keep a disk busy."""

log = structlog.get_logger()


class _DoubtError(Exception):
    """Something is not as the store said."""


class LocalReads:
    """Reads of one replica's files, for as long as it runs on this host."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = KvstoreStub(channel)
        self._place: tuple[str, str] | None = None
        """Of the socket: its path, and the boot id that must answer there."""
        self._ask_at = 0.0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="local read")

    async def read(
        self, keys: Sequence[bytes], *, fingerprint: bytes, block_bytes: int, request_id: str
    ) -> AsyncGenerator[memoryview]:
        """Yield the payloads of the leading keys, verified, as far as the files can be had; never an error."""
        place = await self._locate()
        if place is None:
            return
        link = _Link()
        step: Future[Any] = self._threads.submit(link.open, *place)
        try:
            await asyncio.wrap_future(step)
            num_read = 0
            while num_read < len(keys):
                request = OpenRequest(fingerprint, tuple(keys[num_read : num_read + MAX_KEYS]), request_id)
                asking = step = self._threads.submit(link.ask, request)
                opened = await asyncio.wrap_future(asking)
                if not opened.blocks:
                    return
                async for payload in self._payloads(opened, block_bytes):
                    num_read += 1
                    yield payload
                step = self._threads.submit(link.done)
                await asyncio.wrap_future(step)
        except (OSError, WrongPacketError, _DoubtError) as error:
            log.info("kvstore.local_read.ended", reason=str(error))
            self._place, self._ask_at = None, time.monotonic() + _ASK_AGAIN_SECONDS
        finally:
            step.add_done_callback(lambda _step: link.close())  # not while a thread still talks on it

    async def _payloads(self, opened: _Opened, block_bytes: int) -> AsyncGenerator[memoryview]:
        """Read some blocks ahead of the one that is wanted next."""
        waiting = deque(opened.blocks)
        coming: deque[asyncio.Future[memoryview]] = deque()
        try:
            while waiting or coming:
                while waiting and len(coming) < _NUM_THREADS:
                    read = self._threads.submit(_read, opened.files, waiting.popleft(), block_bytes)
                    coming.append(asyncio.wrap_future(read))
                yield await coming.popleft()
        finally:
            for each in coming:
                each.cancel()

    async def _locate(self) -> tuple[str, str] | None:
        if self._place is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_AGAIN_SECONDS
            with suppress(FathomError):
                reply = await self._stub.Locate(LocateRequest(), timeout=_LOCATE_SECONDS)
                if reply.socket_path:
                    self._place = reply.socket_path, reply.boot_id
        return self._place


class _File:
    """A descriptor that is closed with its last reference: a read in another thread may outlive the reading."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class _Opened:
    """Blocks that the store keeps as they are until it hears DONE."""

    blocks: tuple[BlockPlace, ...]
    files: tuple[_File, ...]


class _Link:
    """One connection to the store's socket. Its methods block, and run in a thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SOCKET_SECONDS)
        self._is_owed_done = False

    def open(self, path: str, boot_id: str) -> None:
        """Connect. Raises _DoubtError when another store answers there."""
        self._socket.connect(path)
        if parse_hello(self._socket.recv(MAX_PACKET_BYTES)) != boot_id:
            raise _DoubtError(f"another store answers at {path}")

    def ask(self, request: OpenRequest) -> _Opened:
        """Return where the leading blocks lie."""
        self._socket.sendall(pack_open(request))
        self._is_owed_done = True
        packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, MAX_FILES)
        files = tuple(_File(descriptor) for descriptor in descriptors)
        reply = parse_blocks(packet)
        if len(files) != reply.num_files:
            raise _DoubtError(f"{len(files)} descriptors came where {reply.num_files} were said to come")
        return _Opened(reply.blocks, files)

    def done(self) -> None:
        """Let the store do with the bytes what it likes."""
        self._is_owed_done = False
        self._socket.sendall(pack_done())

    def close(self) -> None:
        """Hang up; a reading that ends early says so first."""
        if self._is_owed_done:
            with suppress(OSError):
                self.done()
        self._socket.close()


def _read(files: Sequence[_File], place: BlockPlace, block_bytes: int) -> memoryview:
    """Read one block and check it, into memory that a direct read can use."""
    if place.block_bytes != block_bytes:
        raise _DoubtError(f"a block has {block_bytes} bytes, the store offers {place.block_bytes}")
    buffer = memoryview(mmap.mmap(-1, aligned(block_bytes)))
    wanted = aligned(block_bytes) if place.is_direct else block_bytes
    received = 0
    while received < block_bytes:
        count = os.preadv(files[place.file].descriptor, [buffer[received:wanted]], place.offset_bytes + received)
        if count <= 0 or (place.is_direct and count % ALIGN_BYTES and received + count < block_bytes):
            raise _DoubtError(f"a read of {wanted} bytes ended after {received + count}")
        received += count
    payload = buffer[:block_bytes]
    if block_crc32(payload) != place.crc32:
        raise _DoubtError("a block is not what its checksum says")
    return payload

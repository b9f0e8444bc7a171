"""How do readers on the same host get descriptors and offsets instead of bytes?

The wire is services/chassis/local_read_format.py. Bytes then cross no socket and no Python here: the reader preads them
and checks them itself. While a reader has blocks open, their segments count as read, so that nothing is unlinked.
"""

import array
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.chassis.local_read_format import (
    MAX_FILES,
    MAX_PACKET_BYTES,
    BlockPlace,
    Kind,
    OpenRequest,
    WrongPacketError,
    kind_of,
    pack_blocks,
    pack_hello,
    parse_open,
)
from services.kvstore.catalog import Segment
from services.kvstore.format import HEADER_BYTES
from services.kvstore.index import BlockLocation
from services.kvstore.store import Store

_log = structlog.get_logger()

SOCKET_NAME = "reads.sock"
MAX_READERS = 64
"""Connections at once; one more is closed before it is greeted."""
HOLD_SECONDS = 10.0
"""How long blocks stay open without a DONE."""
_ACCEPT_PAUSE_SECONDS = 0.2
_MAX_PATH_BYTES = 107  # sun_path of unix(7), without its final zero


class LocalReads:
    """The unix socket of one store."""

    def __init__(self, store: Store, path: str, listener: socket.socket, *, boot_id: str) -> None:
        self.path = path
        self.boot_id = boot_id
        self._store = store
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name="kvstore-local-reads")

    @classmethod
    def start(cls, store: Store, folder: Path, *, boot_id: str) -> "LocalReads | None":
        """Listen in the store's folder; None, with a warning, where that cannot be: readers then use gRPC."""
        path = str((folder / SOCKET_NAME).resolve())
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if len(os.fsencode(path)) > _MAX_PATH_BYTES:
                raise OSError(f"the path is longer than {_MAX_PATH_BYTES} bytes")  # noqa: TRY301 - one way out
            Path(path).unlink(missing_ok=True)  # of an earlier life: the folder's lock is ours
            listener.bind(path)
            Path(path).chmod(0o600)
            listener.listen(MAX_READERS)
        except OSError as exc:
            listener.close()
            _log.warning("kvstore.local_reads.off", path=path, reason=str(exc))
            return None
        return cls(store, path, listener, boot_id=boot_id)

    async def close(self) -> None:
        """Hang up on all readers."""
        tasks = [self._task, *self._readers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        await asyncio.to_thread(Path(self.path).unlink, missing_ok=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as exc:  # out of descriptors, or the caller left
                _log.warning("kvstore.local_reads.accept_failed", reason=str(exc))
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._readers) >= MAX_READERS:
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection), name="kvstore-local-reader")
            self._readers.add(task)
            task.add_done_callback(self._readers.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, WrongPacketError, TimeoutError):
            connection.send(pack_hello(self.boot_id))
            while packet := await self._receive(connection):
                await self._lend(connection, parse_open(packet))

    async def _receive(self, connection: socket.socket) -> bytes:
        """Return the next packet; nothing at the end. Raises TimeoutError: a silent reader must not keep its place."""
        async with asyncio.timeout(HOLD_SECONDS):
            return await self._loop.sock_recv(connection, MAX_PACKET_BYTES)

    async def _lend(self, connection: socket.socket, request: OpenRequest) -> None:
        """Send places and descriptors, and keep the files until the reader is done with them."""
        store = self._store
        lease = store.catalog.leases.claim(request.request_id)
        locations = self._leading(request)
        segments = [store.catalog.segments[number] for number in dict.fromkeys(one.segment for one in locations)]
        for segment in segments:
            segment.readers += 1
        try:
            files = await asyncio.to_thread(self._open, segments)
            try:
                _send(connection, locations, segments, files, is_direct=store.disk.is_direct)
            finally:
                for descriptor in files:
                    os.close(descriptor)
            store.counts.local_opens += 1
            packet = await self._receive(connection)
            if packet and kind_of(packet) is not Kind.DONE:
                raise WrongPacketError("expected DONE")
        finally:
            for segment in segments:
                segment.readers -= 1
            store.catalog.leases.end(lease)

    def _leading(self, request: OpenRequest) -> Sequence[BlockLocation]:
        """Return the leading blocks that can be lent: stored here, live, not sealed, in few enough files."""
        hit = self._store.catalog.lookup(request.fingerprint, request.keys, wanted=0, now=time.time())
        files: set[int] = set()
        for count, location in enumerate(hit.locations):
            files.add(location.segment)
            if location.is_encrypted or len(files) > MAX_FILES:
                return hit.locations[:count]
        return hit.locations

    def _open(self, segments: Sequence[Segment]) -> list[int]:
        files: list[int] = []
        try:
            files.extend(self._store.disk.open(segment.file.path) for segment in segments)
        except OSError:
            for descriptor in files:
                os.close(descriptor)
            raise
        return files


def _send(
    connection: socket.socket,
    locations: Sequence[BlockLocation],
    segments: Sequence[Segment],
    files: Sequence[int],
    *,
    is_direct: bool,
) -> None:
    position = {segment.file.number: place for place, segment in enumerate(segments)}
    places = [
        BlockPlace(
            position[one.segment], one.offset_bytes + HEADER_BYTES, one.block_bytes, one.crc32, is_direct=is_direct
        )
        for one in locations
    ]
    packet = pack_blocks(places, num_files=len(files), hold_seconds=HOLD_SECONDS)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([packet], rights)

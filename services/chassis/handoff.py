"""What do blocks look like between a prefill and a decode replica?

Two ways, one meaning. In shared memory: a file with a 4 KiB header that begins with the ticket's nonce, then the
blocks that must travel, in table order, without gaps, then the window state. Over gRPC: pieces of at most 2 MiB, each
with its checksum. Both end in the same staging area on the receiver, and nothing is read from it before the commit.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from proto.common_pb2 import Ticket
from proto.decode_pb2 import PushChunk
from services.chassis.errors import BlocksLost, InvalidRequest

HEADER_BYTES = 4096
NONCE_BYTES = 16
CHUNK_BYTES = 2 << 20
SHM_ROOT = Path("/dev/shm")  # noqa: S108 - the folder below it is private (0700) and its owner is checked
_PREFIX = "fathom-"


class StagingUnavailableError(Exception):
    """This file cannot be used from here: the peer is on another host, or it is not the file of this ticket."""


class Staging:
    """Receiver's side: room for one handoff's blocks and window state, private to one ticket.

    With a folder it is a file there that a peer on this host can fill; without one it is plain memory for Push.
    """

    def __init__(
        self, *, nonce: bytes, num_blocks: int, block_bytes: int, window_bytes: int = 0, folder: Path | None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.window_bytes = window_bytes
        self.path: Path | None = None
        size = _staging_bytes(num_blocks, block_bytes, window_bytes)
        if folder is not None:
            self._map = self._map_file(folder / nonce.hex(), size)
        else:
            self._map = mmap.mmap(-1, size)
        self._map[: len(nonce)] = nonce

    def _map_file(self, path: Path, size: int) -> mmap.mmap:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Claim the pages now: a full tmpfs is an OSError here, but would be a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.path = path
        return mapped

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        """Put a piece of the block at that place (counted among the blocks that travel) where it belongs."""
        end = offset_bytes + len(data)
        if not (0 <= block < self.num_blocks and end <= self.block_bytes):
            raise InvalidRequest(f"block {block}, bytes {offset_bytes} to {end} lie outside the reservation")
        start = HEADER_BYTES + block * self.block_bytes + offset_bytes
        self._map[start : start + len(data)] = data

    def write_window(self, offset_bytes: int, data: bytes) -> None:
        """Put a piece of the window state where it belongs."""
        end = offset_bytes + len(data)
        if end > self.window_bytes:
            raise InvalidRequest(f"window bytes {offset_bytes} to {end} lie outside the reservation")
        start = HEADER_BYTES + self.num_blocks * self.block_bytes + offset_bytes
        self._map[start : start + len(data)] = data

    def read(self, block: int) -> bytes:
        """Copy a block out: what was verified stays verified, whoever still writes into the file."""
        start = HEADER_BYTES + block * self.block_bytes
        return self._map[start : start + self.block_bytes]

    def read_window(self) -> bytes:
        """Copy the window state out, as `read` does."""
        start = HEADER_BYTES + self.num_blocks * self.block_bytes
        return self._map[start : start + self.window_bytes]

    def close(self) -> None:
        """Give the room back. A late writer may keep the unlinked file; nobody reads it again."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self._map.close()


def fill_staging(
    path: str,
    *,
    nonce: bytes,
    num_blocks: int,
    block_bytes: int,
    first_block: int,
    payloads: Sequence[bytes],
    window_bytes: int = 0,
    window: bytes = b"",
) -> list[int]:
    """Sender's side: write whole blocks from that place on; return their checksums. Without payloads it only checks.

    window_bytes: of the state that travels behind the blocks, 0 without one.  window: that state, once it is to be
    written; its checksum then follows the blocks'.

    Blocks the calling thread; opens and closes the file itself, so that a caller who stops waiting leaves nothing
    half closed. Raises StagingUnavailableError when the file is not reachable from here.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StagingUnavailableError(f"cannot open {path}: {error.strerror}") from error
    try:
        is_ours = os.pread(descriptor, len(nonce), 0) == nonce
        if not is_ours or os.fstat(descriptor).st_size != _staging_bytes(num_blocks, block_bytes, window_bytes):
            raise StagingUnavailableError(f"{path} is not the file of this ticket")
        for block, payload in enumerate(payloads, start=first_block):
            _write_all(descriptor, payload, HEADER_BYTES + block * block_bytes)
        if window:
            _write_all(descriptor, window, HEADER_BYTES + num_blocks * block_bytes)
    finally:
        os.close(descriptor)
    return [block_crc32(payload) for payload in (*payloads, window) if payload]


def _staging_bytes(num_blocks: int, block_bytes: int, window_bytes: int) -> int:
    return HEADER_BYTES + num_blocks * block_bytes + window_bytes


def _write_all(descriptor: int, payload: bytes, offset: int) -> None:
    view = memoryview(payload)
    while view:  # a write may be cut short
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


class StagingFolder:
    """A private folder in shared memory for one boot; the lock in it dies with the process."""

    def __init__(self, boot_id: str, *, root: Path = SHM_ROOT) -> None:
        """Create the folder and remove those of dead boots. Raises OSError where there is no shared memory."""
        remove_dead_folders(root)
        # Locked before it gets the name that a booting neighbour looks for, or it would be taken for dead.
        unnamed = root / f".{_PREFIX}{boot_id}"
        unnamed.mkdir(mode=0o700)
        self._lock = os.open(unnamed / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unnamed.rename(root / f"{_PREFIX}{boot_id}")

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_dead_folders(root: Path) -> list[Path]:
    """Remove folders whose owner died without cleaning up; only our own user's, and only when nobody holds the lock."""
    removed = []
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # went away meanwhile, or is just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # alive
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed


def block_crc32(payload: bytes) -> int:
    """Return the checksum that every block and window state carries on every path (CRC-32, IEEE)."""
    return zlib.crc32(payload)


def chunks_of(
    payload: bytes, *, block_index: int = 0, ticket: Ticket | None, is_window: bool = False
) -> Iterator[PushChunk]:
    """Cut one block, or the window state, into pieces for Push. Only a stream's first piece carries the ticket."""
    for offset in range(0, len(payload), CHUNK_BYTES):
        data = payload[offset : offset + CHUNK_BYTES]
        yield PushChunk(
            ticket=ticket if offset == 0 else None,
            block_index=block_index,
            offset_bytes=offset,
            data=data,
            crc32=zlib.crc32(data),
            is_window=is_window,
        )


def check_chunk(chunk: PushChunk) -> None:
    """Raise BlocksLost when a piece arrived changed."""
    if zlib.crc32(chunk.data) != chunk.crc32:
        what = "the window state" if chunk.is_window else f"block {chunk.block_index}"
        raise BlocksLost(f"a piece of {what} arrived damaged")

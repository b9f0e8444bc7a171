"""What do blocks look like between a prefill and a decode replica?

In shared memory: a file with a 4 KiB header that begins with the ticket's nonce, then room for the blocks that must
travel, in table order, without gaps, then for the window state. Where a lane says what lies where, room that the
receiver has emptied, as marks in the header say, is used again while it is still in the CPU's cache.
Over gRPC: `handoff_push`; pieces of a block that is larger than a message are put together in such an area in the
receiver's own memory. On a plain socket: `handoff_lane`.
Bytes are copied once on each side: from the sender's cache into the file, and from there into the receiver's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32
from xxhash import xxh3_64_intdigest

from services.chassis.errors import InvalidRequest

HEADER_BYTES = 4096
NONCE_BYTES = 16
MAX_MARKS = HEADER_BYTES - NONCE_BYTES
"""Runs' places beyond so many are used once."""
SHM_ROOT = Path("/dev/shm")  # noqa: S108 - the folder below it is private (0700) and its owner is checked
HOLD_BEAT_SECONDS = 0.5
HOLD_SILENCE_SECONDS = 3.0
"""A peer that died is noticed by its broken connection, at once; this is for a host that went silent."""
_PREFIX = "fathom-"
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python 3.11 has no name for."""
_TOUCH_BYTES = 2 << 20
_CLOSE_SECONDS = 0.05


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
        self.path: Path | None = None
        self._shape = _Shape(num_blocks, block_bytes, window_bytes)
        if folder is not None:
            self._map = self._map_file(folder / nonce.hex(), self._shape.num_bytes)
        else:
            self._map = mmap.mmap(-1, self._shape.num_bytes)
        self._map[: len(nonce)] = nonce

    def _map_file(self, path: Path, size: int) -> mmap.mmap:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, size)
            mapped = mmap.mmap(descriptor, size)
            populate(mapped)
            # All pages are claimed now: a full tmpfs is an OSError here, but would be a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.path = path
        return mapped

    def write(self, block: int, offset_bytes: int, data: bytes | memoryview) -> None:
        """Put a piece of the block at that place (counted among the blocks that travel) where it belongs."""
        end = offset_bytes + len(data)
        if not (0 <= block < self.num_blocks and end <= self._shape.block_bytes):
            raise InvalidRequest(f"block {block}, bytes {offset_bytes} to {end} lie outside the reservation")
        self.block(block)[offset_bytes:end] = data

    def write_window(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """Put a piece of the window state where it belongs."""
        end = offset_bytes + len(data)
        if end > self._shape.window_bytes:
            raise InvalidRequest(f"window bytes {offset_bytes} to {end} lie outside the reservation")
        self.window()[offset_bytes:end] = data

    def block(self, block: int) -> memoryview:
        """Return the bytes of a block that travels, not a copy of them."""
        return memoryview(self._map)[self._shape.block(block)]

    def window(self) -> memoryview:
        """Return the bytes of the window state, not a copy of them."""
        return memoryview(self._map)[self._shape.window]

    def mark_empty(self, area: int) -> None:
        """Say that what lay there was copied: the sender may put something else there. Any thread, and never fails.

        area: of those that the sender cuts the blocks' room into; below MAX_MARKS.
        """
        with contextlib.suppress(ValueError):  # closed meanwhile: nobody looks at the marks any more
            self._map[NONCE_BYTES + area] = 1

    def remove(self) -> None:
        """Take the file's name away. A late writer may keep the unlinked file; nobody reads it again."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the room back; milliseconds, for many pages."""
        self.remove()
        _unmap(self._map)


class PeerStaging:
    """Sender's side: the receiver's file, mapped here for as long as it is filled.

    The receiver takes copies and sums those, so whatever is written after a commit changes nothing.
    """

    def __init__(self, path: str, *, nonce: bytes, num_blocks: int, block_bytes: int, window_bytes: int = 0) -> None:
        """Blocks the calling thread for as long as mapping the pages takes.

        Raises StagingUnavailableError when the file is not reachable from here, or not the ticket's.
        """
        self._shape = _Shape(num_blocks, block_bytes, window_bytes)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StagingUnavailableError(f"cannot open {path}: {error.strerror}") from error
        try:
            is_ours = os.pread(descriptor, len(nonce), 0) == nonce
            if not is_ours or os.fstat(descriptor).st_size != self._shape.num_bytes:
                raise StagingUnavailableError(f"{path} is not the file of this ticket")
            self._map = mmap.mmap(descriptor, self._shape.num_bytes)
        finally:
            os.close(descriptor)
        populate(self._map)

    def block(self, block: int) -> memoryview:
        """Return where a block that travels goes."""
        return memoryview(self._map)[self._shape.block(block)]

    def window(self) -> memoryview:
        """Return where the window state goes."""
        return memoryview(self._map)[self._shape.window]

    def is_empty(self, area: int) -> bool:
        """Say whether the receiver has copied what lay there since it was filled."""
        return bool(self._map[NONCE_BYTES + area])

    def fill(self, area: int) -> None:
        """Take the mark away: something lies there from now on."""
        self._map[NONCE_BYTES + area] = 0

    def close(self) -> bool:
        """Unmap the file; False when somebody still writes, whose last reference will then unmap it."""
        return _unmap(self._map)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where things lie in a staging area: a header, the blocks that travel, the window state."""

    num_blocks: int
    block_bytes: int
    window_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.window.stop

    @property
    def window(self) -> slice[int, int]:
        start = HEADER_BYTES + self.num_blocks * self.block_bytes
        return slice(start, start + self.window_bytes)

    def block(self, block: int) -> slice[int, int]:
        start = HEADER_BYTES + block * self.block_bytes
        return slice(start, start + self.block_bytes)


def populate(mapped: mmap.mmap) -> None:
    """Claim and map the pages now, while nobody waits, large ones where the kernel grants them.

    A kernel before 5.14 maps each at its first use instead.
    """
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        for start in range(0, len(mapped), _TOUCH_BYTES):  # in pieces: the call holds the interpreter lock
            mapped.madvise(_POPULATE_WRITE, start, min(_TOUCH_BYTES, len(mapped) - start))


def close_soon(close: Callable[[], object]) -> None:
    """Let go of mapped memory in a moment, in a thread: that takes milliseconds, and holds the interpreter lock.

    What ends a handoff is said first. To be called on the event loop.
    """
    loop = asyncio.get_running_loop()

    def close_in_thread() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is ending, and the process with it
            loop.run_in_executor(None, close)

    loop.call_later(_CLOSE_SECONDS, close_in_thread)


def _unmap(mapped: mmap.mmap) -> bool:
    try:
        mapped.close()
    except BufferError:
        return False
    return True


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


def block_crc32(payload: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the checksum that every block and window state carries where it is kept (CRC-32, IEEE).

    before: of what comes before it.  The same value as zlib's, four times as fast, and like that without the
    interpreter lock.
    """
    return crc32(payload, before)


def block_xxh3(payload: bytes | bytearray | memoryview) -> int:
    """Return the checksum of a block or window state on its way from prefill to decode (XXH3, 64 bits).

    Three times as fast as CRC-32 on what was just copied, and without the interpreter lock. Bytes that are kept have
    a `block_crc32`.
    """
    return xxh3_64_intdigest(payload)

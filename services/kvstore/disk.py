"""How do bytes get to files and back past the page cache, several pieces at a time?

O_DIRECT where the file system takes it, buffered with one warning where it does not (some overlays and network mounts).
Blocking work, for threads.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import structlog

from services.kvstore.format import ALIGN_BYTES, aligned

_log = structlog.get_logger()

PIECE_BYTES = 2 << 20
"""One write; long enough for any disk's full speed, short enough that a batch keeps several under way."""
DEPTH = 4
"""Writes under way at once."""
HUGE_PAGE_BYTES = 2 << 20
"""A disk reads into few large pages at up to twice the speed of many small ones: each is pinned for every read."""
_POOLED_BYTES = 64 << 20
"""Buffers kept for the next read or write; what is beyond is returned to the system after use."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})
_libc = ctypes.CDLL(None, use_errno=True)


class Buffers:
    """Page-aligned memory that is used again once nobody holds a view of it any more. Any thread."""

    def __init__(self, pooled_bytes: int = _POOLED_BYTES) -> None:
        self._left_bytes = pooled_bytes
        self._pool: dict[int, list[mmap.mmap]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of memory, an unknown earlier user's bytes in it. Drop all views to give it back."""
        size = _buffer_bytes(num_bytes)
        with self._lock:
            pool = self._pool.setdefault(size, [])
            for memory in pool:
                try:
                    memory.resize(size)  # refuses, and changes nothing, while a view is alive
                except BufferError:
                    continue
                return memoryview(memory)[:num_bytes]
            memory = _map(size)
            if size <= self._left_bytes:
                self._left_bytes -= size
                pool.append(memory)
            return memoryview(memory)[:num_bytes]


def _buffer_bytes(num_bytes: int) -> int:
    """Return the length of the buffer to take: few lengths, so that most fit again."""
    if num_bytes >= HUGE_PAGE_BYTES:
        return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return max(64 << 10, 1 << (num_bytes - 1).bit_length())


def _map(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Disk:
    """The file operations of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_direct = True
        self.buffers = Buffers()
        self._writers = ThreadPoolExecutor(DEPTH, thread_name_prefix="kvstore-disk")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-sync")

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """Open a file past the page cache, or through it where the file system refuses."""
        flags |= os.O_CLOEXEC
        if self.is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as exc:
                if exc.errno not in _REFUSALS:
                    raise
            self.is_direct = False
            _log.warning("kvstore.disk.buffered", folder=str(self.folder), reason="the file system refuses O_DIRECT")
            flags &= ~os.O_EXCL  # the refused call may have created the file
        return os.open(path, flags, 0o600)

    def read(self, fd: int, num_bytes: int, offset: int) -> memoryview:
        """Return up to `num_bytes` from `offset` (both multiples of 4 KiB); less only at the end of the file."""
        buffer = self.buffers.take(num_bytes)
        done = 0
        while done < num_bytes:
            got = os.preadv(fd, [buffer[done:]], offset + done)
            done += got
            if got == 0 or got % ALIGN_BYTES:
                break
        return buffer[:done]

    def write(self, fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> int:
        """Write the parts one behind the other at `offset`, zeros up to the next 4 KiB, and return the new end.

        Raises the first OSError, after all pieces have ended.
        """
        writing = self.start_write(fd, parts, offset)
        failures = [failure for one in writing if (failure := one.exception()) is not None]
        if failures:
            raise failures[0]
        return offset + aligned(sum(map(len, parts)))

    def start_write(
        self, fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int
    ) -> "list[Future[None]]":
        """Begin the same, several pieces under way at once; return the pieces. The parts must not change meanwhile.

        They only run side by side in what preallocate() reserved: behind it each moves the end of the file.
        """
        ends = list(accumulate(len(part) for part in parts))
        total = aligned(ends[-1])
        return [
            self._writers.submit(self._write_piece, fd, parts, ends, (start, min(start + PIECE_BYTES, total)), offset)
            for start in range(0, total, PIECE_BYTES)
        ]

    def start_sync(self, work: Callable[[], int]) -> "Future[int]":
        """Have something synced in the one thread for that, behind what was asked for before."""
        return self._syncer.submit(work)

    def preallocate(self, fd: int, start_bytes: int, num_bytes: int) -> None:
        """Reserve disk from `start_bytes` on, and let the file end there; it reads as zeros until it is written.

        Seldom and long, for it waits until nothing is written. Where disk is not to be had, the writes find out by
        themselves whether there is room for what really comes.
        """
        try:
            _fallocate(fd, 0, start_bytes, num_bytes)
        except OSError as exc:
            if exc.errno not in _REFUSALS | {errno.ENOSYS, errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
                raise
            os.ftruncate(fd, start_bytes + num_bytes)

    def erase(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        """Make (start, end) ranges of a file read as zeros and give their disk back, durably."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for start, end in ranges:
                try:
                    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)
                except OSError as exc:
                    if exc.errno not in _REFUSALS | {errno.ENOSYS}:
                        raise
                    for at in range(start, end, PIECE_BYTES):
                        os.pwrite(fd, bytes(min(PIECE_BYTES, end - at)), at)
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Wait for what is under way."""
        self._writers.shutdown()
        self._syncer.shutdown()

    def _write_piece(
        self,
        fd: int,
        parts: Sequence[bytes | bytearray | memoryview],
        ends: Sequence[int],
        span: tuple[int, int],
        offset: int,
    ) -> None:
        start, end = span
        buffer = self.buffers.take(end - start)
        at = start
        for place in range(bisect_right(ends, start), len(parts)):
            part_start = ends[place] - len(parts[place])
            if part_start >= end:
                break
            stop = min(ends[place], end)
            buffer[at - start : stop - start] = memoryview(parts[place])[at - part_start : stop - part_start]
            at = stop
        if at < end:
            buffer[at - start :] = bytes(end - at)
        done = 0
        while done < end - start:
            written = os.pwrite(fd, buffer[done:], offset + start + done)
            if written <= 0 or written % ALIGN_BYTES:
                raise OSError(errno.ENOSPC, "the disk took a part of a page")
            done += written


def physical_bytes(path: Path) -> int:
    """Return what the file system gave to a file; 0 when it is gone."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def free_bytes(folder: Path) -> tuple[int, int]:
    """Return (bytes that may still be written, size of the file system)."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize


def _fallocate(fd: int, mode: int, start: int, length: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

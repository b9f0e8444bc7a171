"""Which segment files does a folder hold, and who may open it?"""

import fcntl
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("any", "chat", "agent")
"""By RetentionClass number; the name tells an operator what a file is without opening it."""
_NAME = re.compile(rf"(\d{{12}})-([0-9a-f]{{16}})-({'|'.join(CLASSES)})\.seg")
_FORMER_NAME = re.compile(r"\d{12}-[0-9a-f]{16}\.seg")


class StoreLockedError(RuntimeError):
    """Another process has the folder open; two writers would overwrite each other's plans for the disk."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment's place and identity. Numbers grow in the order of creation."""

    number: int
    epoch: int
    retention: int
    """RetentionClass number of all its blocks."""
    path: Path


def new_segment_file(folder: Path, number: int, retention: int) -> SegmentFile:
    """Name the segment with that number; its epoch is random, so no other life's records can pass for its own."""
    epoch = secrets.randbits(64)
    return SegmentFile(number, epoch, retention, folder / f"{number:012d}-{epoch:016x}-{CLASSES[retention]}.seg")


def segment_files(folder: Path) -> list[SegmentFile]:
    """Return the segments directly in a folder, oldest first. Files with other names are not ours and stay."""
    found = [
        SegmentFile(int(match[1]), int(match[2], 16), CLASSES.index(match[3]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda one: (one.number, one.epoch))


def former_files(folder: Path) -> list[Path]:
    """Return segments of the format before this one: nothing reads them, and they would count against no cap."""
    return [path for path in folder.iterdir() if _FORMER_NAME.fullmatch(path.name)]


def lock(folder: Path) -> int:
    """Create the folder if need be and lock it for this process; return the descriptor that holds the lock.

    Raises StoreLockedError when another process has it. The kernel drops the lock with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLockedError(
            f"{folder} is open in another kvstore (process {holder}): stop it, or give this one another folder"
            " (FATHOM_KVSTORE_PATH)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make created and removed names survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

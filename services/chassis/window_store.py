"""Where do window states wait for the next prompt that begins the same?

In host memory, shared by all replicas of one host that run one model: a private folder under /dev/shm, a file for each
(block key, position, kind). A state is a hint and nothing more: whatever is doubtful about a file makes it a miss and
removes it. States outlive replicas and are lost with the host, or when another model starts while nobody uses them. The
KV store never sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from services.chassis.handoff import SHM_ROOT, block_crc32

Kind = Literal["whole", "encoder"]
"""A whole state, or its encoder layers' part (what bounded replay starts from)."""

_MAGIC = b"fathomWS"
_VERSION = 1
_HEADER = struct.Struct("<8sII32s32sQQI")
"""Magic, version, kind, fingerprint, key, position, payload bytes, CRC-32 of all before it and the payload."""
_KINDS: dict[Kind, int] = {"whole": 1, "encoder": 2}
_PREFIX = "fathom.windows"  # not "fathom-": those folders belong to one boot and die with it
_USERS, _WRITING = "users", "writing"
_OPEN_ATTEMPTS = 20
_PENDING_BYTES = 64 << 20
_LOCK_SECONDS = 1.0
"""Longest wait for another writer, which takes milliseconds: one that was stopped must not hold up all prompts."""


class Start(Protocol):
    """What a plan says about the state it starts from."""

    @property
    def state_position(self) -> int | None:
        """Position of the state; None starts without one."""


S = TypeVar("S", bound=Start)


@dataclass(slots=True)
class Counts:
    """Since the start of this process; `num_bytes` is what all processes together held at the last save."""

    num_hits: int = 0
    num_misses: int = 0
    """Prompts with found blocks for which no usable state was here."""
    num_damaged: int = 0
    num_saved: int = 0
    num_evicted: int = 0
    num_dropped: int = 0
    """States not saved: no room, or the queue was full."""
    num_bytes: int = 0


class WindowStore:
    """The states of one model on one host. Blocks on files: call it off the event loop, from one thread at a time."""

    def __init__(
        self,
        *,
        fingerprint: bytes,
        kind: Kind,
        state_bytes: int,
        block_tokens: int,
        max_bytes: int,
        root: Path = SHM_ROOT,
    ) -> None:
        """Open or make the folder; remove those of other models that no process uses.

        kind, state_bytes: of the states this replica starts from.  max_bytes: of all files together, headers included.
        Raises OSError where there is no private folder to be had.
        """
        self._fingerprint = fingerprint
        self._kind = kind
        self._state_bytes = state_bytes
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self.counts = Counts()
        folder = root / f"{_PREFIX}.{os.geteuid()}.{fingerprint[:12].hex()}"
        _remove_unused(root, spare=folder)
        self.folder, self._users = _open_folder(folder)

    def find_start(self, keys: Sequence[bytes], plan: Callable[[Container[int]], S]) -> tuple[S, bytes | None]:
        """Plan with the positions that have a state, and read the one the plan starts from.

        keys: of the prompt's found blocks.  plan: gets the positions, in tokens; it is asked again without a state that
        turns out unusable.
        """
        states = _States(keys, self._block_tokens, self.has)
        while True:
            start = plan(states)
            if start.state_position is None:
                self.counts.num_misses += 1
                return start, None
            payload = self.load(states.key_of(start.state_position), start.state_position)
            if payload is not None:
                self.counts.num_hits += 1
                return start, payload
            states.refused.add(start.state_position)

    def has(self, key: bytes, position: int) -> bool:
        """Say whether there is a file; only `load` says whether it is good."""
        return self._path(key, position).exists()

    def load(self, key: bytes, position: int) -> bytes | None:
        """Return a state that was verified whole, or None; a file that is not what it should be is removed."""
        path = self._path(key, position)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError:  # a link, or a folder: nothing of ours
            payload = None
        else:
            try:
                payload = self._verified(descriptor, key, position)
                if payload is not None:
                    _touch(descriptor)
            finally:
                os.close(descriptor)
        if payload is None:
            self.counts.num_damaged += 1
            with contextlib.suppress(OSError):
                path.unlink()
        return payload

    def save(self, key: bytes, position: int, payload: bytes) -> bool:
        """Keep a state, in the room of those unused for the longest time; False when it cannot be kept.

        A state that is here already stays: it is the same.  Raises ValueError for a payload of another size.
        """
        if len(payload) != self._state_bytes:
            raise ValueError(f"a state of this kind has {self._state_bytes} bytes, the payload {len(payload)}")
        path, header = self._path(key, position), self._header(key, position, payload)
        try:
            if not self.folder.exists():  # somebody cleaned up
                self.close()
                self.folder, self._users = _open_folder(self.folder)
            with self._writing():
                kept = self._keep(path, header, payload)
        except OSError:  # shared memory is full, the folder just went away, or another writer hangs
            kept = False
        self.counts.num_dropped += not kept
        return kept

    def close(self) -> None:
        """Leave. What is saved stays."""
        if self._users >= 0:
            os.close(self._users)
        self._users = -1

    def _path(self, key: bytes, position: int) -> Path:
        return self.folder / f"{key.hex()}.{position}.{self._kind}"

    def _header(self, key: bytes, position: int, payload: bytes) -> bytes:
        fields = (_MAGIC, _VERSION, _KINDS[self._kind], self._fingerprint, key, position, len(payload))
        unsigned = _HEADER.pack(*fields, 0)[:-4]
        return _HEADER.pack(*fields, block_crc32(payload, block_crc32(unsigned)))

    def _verified(self, descriptor: int, key: bytes, position: int) -> bytes | None:
        status = os.fstat(descriptor)
        size = _HEADER.size + self._state_bytes
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != size:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            header, payload = file.read(_HEADER.size), file.read(self._state_bytes)
        return payload if header == self._header(key, position, payload) else None

    def _keep(self, path: Path, header: bytes, payload: bytes) -> bool:
        """Write under the lock: so the sum over all processes stays within bounds, and a torn file is a dead one's."""
        num_bytes = len(header) + len(payload)
        kept = self._in_order()
        if path.name in kept:
            os.utime(path, ns=(time.time_ns(),) * 2)
            return True
        if not self._make_room(kept, num_bytes):
            return False
        unnamed = path.with_name(f".{path.name}")
        try:
            with unnamed.open("xb") as file:
                file.write(header)
                file.write(payload)
            unnamed.rename(path)
        except OSError:
            unnamed.unlink(missing_ok=True)
            raise
        self.counts.num_saved += 1
        self.counts.num_bytes += num_bytes
        return True

    def _make_room(self, kept: dict[str, int], num_bytes: int) -> bool:
        total = sum(kept.values())
        for name, size in kept.items():
            if total + num_bytes <= self._max_bytes:
                break
            (self.folder / name).unlink(missing_ok=True)
            total -= size
            self.counts.num_evicted += 1
        self.counts.num_bytes = total
        return total + num_bytes <= self._max_bytes

    def _in_order(self) -> dict[str, int]:
        """Return the bytes of each file by name, the longest unused first; torn files of dead writers are removed."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name not in {_USERS, _WRITING}:
                    with contextlib.suppress(FileNotFoundError):  # a reader just found it damaged
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, entry.name, status.st_size))
        return {name: size for _, name, size in sorted(found)}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        descriptor = os.open(self.folder / _WRITING, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _States:
    """Positions of one prompt that have a state."""

    keys: Sequence[bytes]
    block_tokens: int
    has: Callable[[bytes, int], bool]
    refused: set[int] = field(default_factory=set)

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, int) or position in self.refused:
            return False
        block, rest = divmod(position, self.block_tokens)
        return rest == 0 and 0 < block <= len(self.keys) and self.has(self.key_of(position), position)

    def key_of(self, position: int) -> bytes:
        """Key of the block that ends at the position."""
        return self.keys[position // self.block_tokens - 1]


class WindowWorker:
    """A replica's thread for the store's files: saves never hold the engine up, searches never the event loop.

    The engine thread alone calls `has_room` and `save`. All work is done in order, so what was saved is found.
    """

    def __init__(self, store: WindowStore, *, max_pending_bytes: int = _PENDING_BYTES) -> None:
        """max_pending_bytes: states waiting to be written; at least one may always wait."""
        self.store = store
        self._max_pending_bytes = max_pending_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="window store")
        self._is_closed = False
        self._bytes_in = 0
        self._bytes_out = 0

    def has_room(self, num_bytes: int) -> bool:
        """Say whether a state may be saved now; counts a drop when it may not. Ask before copying it off the device."""
        pending = self._bytes_in - self._bytes_out
        if not self._is_closed and (pending == 0 or pending + num_bytes <= self._max_pending_bytes):
            return True
        self.store.counts.num_dropped += 1
        return False

    def save(self, key: bytes, position: int, payload: bytes) -> None:
        """Write a state soon."""
        self._bytes_in += len(payload)
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the process is ending
            self._thread.submit(self._save, key, position, payload)

    async def find_start(self, keys: Sequence[bytes], plan: Callable[[Container[int]], S]) -> tuple[S, bytes | None]:
        """As the store's, in the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.store.find_start, keys, plan)

    async def flush(self) -> None:
        """Wait until all that was saved before is written."""
        await asyncio.get_running_loop().run_in_executor(self._thread, _nothing)

    async def close(self) -> None:
        """Write what waits, then leave the store."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)
        self.store.close()

    def _save(self, key: bytes, position: int, payload: bytes) -> None:
        try:
            self.store.save(key, position, payload)
        finally:
            self._bytes_out += len(payload)


def folders(root: Path = SHM_ROOT) -> list[Path]:
    """This user's folders on this host, one for each model."""
    return sorted(root.glob(f"{_PREFIX}.{os.geteuid()}.*"))


def _nothing() -> None:
    """Come after what was submitted before."""


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError when somebody else holds it for too long."""
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(0.001)
        else:
            return


def _touch(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # evicted meanwhile: what was read is good all the same
        os.utime(descriptor, ns=(time.time_ns(),) * 2)


def _open_folder(folder: Path) -> tuple[Path, int]:
    """Make or join a folder; the shared lock on its `users` file says that it is in use, until the process ends."""
    for _ in range(_OPEN_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            _check_private(folder)
            users = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another model has just removed it
            continue
        fcntl.flock(users, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(users), (folder / _USERS).lstat()):
                return folder, users
        os.close(users)
    raise OSError(f"{folder} is being removed over and over")


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise PermissionError(f"{folder} is not a private folder of this user")


def _remove_unused(root: Path, *, spare: Path) -> None:
    """Remove this user's folders of other models that no process uses: what crashed replicas left behind."""
    for folder in folders(root):
        if folder == spare:
            continue
        try:
            _check_private(folder)
            users = os.open(folder / _USERS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # went away meanwhile, is just being made, or is none of ours
            continue
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(users)

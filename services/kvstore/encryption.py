"""With which key are a tenant's blocks sealed, and how does deleting it make them unreadable?

Each tenant has a random AES-256-GCM key, kept in the store's folder, wrapped by a master key that comes from a file
elsewhere. Replicas that share an object store share the wrapped keys too (tenant_keys.py): a tenant may have a key of
each replica that met it first; the oldest seals, any of them opens. Deleting a tenant deletes its wrapped keys: what is
left of its blocks anywhere is noise from then on. Blocking file work, for threads.
"""

import contextlib
import hashlib
import os
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kvstore.directory import sync_folder
from services.kvstore.wall_clock import WallClock

WRAPPED_BYTES = 12 + 32 + 16
"""Of a wrapped key: nonce, key, tag."""
_KEY_BYTES = 32
_NONCE_BYTES = 12
_MASTER_MARK = "master.mark"
"""Wraps no secret: it only opens with the right master key."""
_NAME = re.compile(r"([0-9a-f]{64})\.(\d{13})-([0-9a-f]{8})")
_FORMER_FILE = re.compile(r"[0-9a-f]{64}\.key")


class MasterKeyError(RuntimeError):
    """The master key file cannot be used; the message says why and never shows what it holds."""


class SealedAwayError(Exception):
    """A block cannot be opened: its tenant's key is gone, was made under another master key, or the bytes are wrong."""


@dataclass(frozen=True, slots=True, order=True)
class KeyName:
    """What a wrapped key is called, on disk and in the object store. Sorts by tenant, then by age."""

    tenant_hash: str
    """SHA-256 of the tenant's name, in hex."""
    created_milliseconds: int
    """When it was made, since the Unix epoch."""
    tag: str
    """Eight random hex digits: two replicas may make one at the same moment."""

    def __str__(self) -> str:
        return f"{self.tenant_hash}.{self.created_milliseconds:013d}-{self.tag}"

    @property
    def created_unix_seconds(self) -> float:
        return self.created_milliseconds / 1000


def parse_key_name(text: str) -> KeyName | None:
    """Return the key that is called so; None for what is no key of ours."""
    match = _NAME.fullmatch(text)
    return None if match is None else KeyName(match[1], int(match[2]), match[3])


def tenant_hash(tenant: str) -> str:
    """Return what stands for a tenant in the names of its keys."""
    return hashlib.sha256(tenant.encode()).hexdigest()


class Keyring:
    """The keys of the tenants of one store. Any thread."""

    def __init__(self, folder: Path, master_key: bytes) -> None:
        self._folder = folder
        self._master = AESGCM(master_key)
        self._open: dict[str, list[AESGCM]] = {}
        """By tenant; the one that opened a block last comes first."""
        self._sealing: dict[str, AESGCM] = {}
        """By tenant: its oldest key that opens."""
        self._names: dict[str, set[KeyName]] = {}
        """By the hash of the tenant."""
        self._lock = threading.Lock()
        self._clock = WallClock()
        self._find_keys()

    @classmethod
    def load(cls, folder: Path, master_key_file: Path) -> "Keyring":
        """Read the master key: 32 bytes, or 64 hex digits; raise MasterKeyError otherwise.

        A process has one keyring of a folder: a key that one of its users destroys is gone for all of them.
        """
        try:
            raw = master_key_file.read_bytes()
        except OSError as exc:
            raise MasterKeyError(f"{master_key_file}: {exc.strerror}") from None
        if len(raw) != _KEY_BYTES:
            try:
                raw = bytes.fromhex(raw.decode("ascii").strip())
            except ValueError:
                raw = b""
        if len(raw) != _KEY_BYTES:
            raise MasterKeyError(f"{master_key_file} must hold 32 bytes, or 64 hex digits")
        place = (folder.resolve(), hashlib.sha256(raw).digest())
        keyring = _loaded.get(place)
        if keyring is None:
            keyring = cls(folder, raw)
        else:
            keyring._find_keys()
        if not keyring._is_its_master():
            raise MasterKeyError(f"{master_key_file} is not the key that {folder} was made with: use that one again")
        _loaded[place] = keyring
        return keyring

    @property
    def names(self) -> frozenset[KeyName]:
        """All keys that are here."""
        with self._lock:
            return frozenset(name for names in self._names.values() for name in names)

    def has(self, tenant: str) -> bool:
        """Say whether there is a key of this tenant."""
        return bool(self._names.get(tenant_hash(tenant)))

    def seal(self, tenant: str, name: bytes, payload: bytes | bytearray | memoryview) -> bytes:
        """Return nonce, ciphertext and tag. name: what the bytes are (key and fingerprint); opening needs the same."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        with self._lock:
            if tenant not in self._sealing:
                try:
                    keys = self._unwrapped(tenant)
                except SealedAwayError:  # none yet, or none that was made under this master key
                    self._create(tenant)
                    keys = self._unwrapped(tenant)
                self._sealing[tenant] = keys[0]
            key = self._sealing[tenant]
        return nonce + key.encrypt(nonce, payload, name)

    def unseal(self, tenant: str, name: bytes, stored: bytes | memoryview) -> bytes:
        """Return the payload; raise SealedAwayError when it cannot be had."""
        with self._lock:
            if tenant not in self._open:
                self._open[tenant] = self._unwrapped(tenant)
            keys = self._open[tenant]
        for place, key in enumerate(keys):
            with contextlib.suppress(InvalidTag):
                payload = key.decrypt(bytes(stored[:_NONCE_BYTES]), stored[_NONCE_BYTES:], name)
                if place:
                    with self._lock:
                        self._open[tenant] = [key, *(other for other in keys if other is not key)]
                return payload
        raise SealedAwayError("the bytes do not open with any key of the tenant")

    def wrapped(self, name: KeyName) -> bytes | None:
        """Return a key as it is kept, for other replicas with the same master key; None when it is gone."""
        try:
            raw = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        return raw if len(raw) == WRAPPED_BYTES else None

    def take(self, name: KeyName, wrapped: bytes) -> None:
        """Keep a key that another replica made. Whether it opens is seen when it is used."""
        with self._lock:
            self._write(self._path(name), wrapped)
            self._add(name)
            self._forget()

    def mark(self) -> bytes:
        """Return bytes by which others tell whether they have the same master key."""
        return self._wrap(bytes(_KEY_BYTES), _MASTER_MARK)

    def has_same_master(self, mark: bytes) -> bool:
        """Say whether a mark of another replica was made with this master key."""
        try:
            self._master.decrypt(mark[:_NONCE_BYTES], mark[_NONCE_BYTES:], _MASTER_MARK.encode())
        except (InvalidTag, ValueError):
            return False
        return True

    def delete(self, tenant: str) -> bool:
        """Destroy a tenant's keys for good; False when it had none."""
        with self._lock:
            names = self._names_of(tenant)
        self.destroy(names)
        return bool(names)

    def destroy(self, names: list[KeyName]) -> None:
        """Destroy these keys for good; those that are gone already are none."""
        with self._lock:
            self._forget()
            for name in names:
                self._names.get(name.tenant_hash, set()).discard(name)
                with contextlib.suppress(FileNotFoundError):
                    with self._path(name).open("r+b") as file:
                        file.write(secrets.token_bytes(WRAPPED_BYTES))
                        file.flush()
                        os.fsync(file.fileno())
                    self._path(name).unlink()
            if names:
                sync_folder(self._folder)

    def _names_of(self, tenant: str) -> list[KeyName]:
        """Return a tenant's keys, the oldest first: all replicas seal with the same one once they know it."""
        return sorted(self._names.get(tenant_hash(tenant), ()))

    def _add(self, name: KeyName) -> None:
        self._names.setdefault(name.tenant_hash, set()).add(name)

    def _unwrapped(self, tenant: str) -> list[AESGCM]:
        """Return a tenant's keys that open with the master key, the oldest first; raise SealedAwayError without any."""
        keys = []
        for name in self._names_of(tenant):
            with contextlib.suppress(FileNotFoundError, InvalidTag):
                wrapped = self._path(name).read_bytes()
                key = self._master.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], tenant.encode())
                keys.append(AESGCM(key))
        if not keys:
            raise SealedAwayError("the tenant's key is gone, or was made under another master key")
        return keys

    def _find_keys(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._names.clear()
        self._forget()
        for path in list(self._folder.iterdir()):
            if _FORMER_FILE.fullmatch(path.name):  # as they were called when each store had keys of its own
                name = KeyName(path.stem, int(path.stat().st_mtime * 1000), secrets.token_hex(4))
                path.rename(self._path(name))
                self._add(name)
            elif path.suffix == ".key" and (known := parse_key_name(path.stem)) is not None:
                self._add(known)

    def _is_its_master(self) -> bool:
        """Say whether the folder's keys are wrapped by this master key; a folder that nobody marked takes it.

        With another one every block would be found, and none could be read or written.
        """
        path = self._folder / _MASTER_MARK
        if not path.exists():
            self._write(path, self._wrap(bytes(_KEY_BYTES), _MASTER_MARK))
        return self.has_same_master(path.read_bytes())

    def _create(self, tenant: str) -> None:
        name = KeyName(tenant_hash(tenant), int(self._clock.now() * 1000), secrets.token_hex(4))
        self._write(self._path(name), self._wrap(secrets.token_bytes(_KEY_BYTES), tenant))
        self._add(name)
        self._forget()

    def _forget(self) -> None:
        """Let keys be read from the folder again: some came or went."""
        self._open.clear()
        self._sealing.clear()

    def _wrap(self, key: bytes, name: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._master.encrypt(nonce, key, name.encode())

    def _write(self, path: Path, wrapped: bytes) -> None:
        draft = path.with_suffix(".new")
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(wrapped)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(self._folder)

    def _path(self, name: KeyName) -> Path:
        return self._folder / f"{name}.key"


_loaded: "WeakValueDictionary[tuple[Path, bytes], Keyring]" = WeakValueDictionary()
"""By folder and digest of the master key."""

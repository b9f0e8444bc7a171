"""With which key are a tenant's blocks sealed, and how does deleting it make them unreadable?

Each tenant has a random AES-256-GCM key of its own, kept in the store's folder, wrapped by a master key that comes from
a file elsewhere. Deleting a tenant deletes the wrapped key: what is left of its blocks anywhere is noise from then on.
Blocking file work, for threads.
"""

import contextlib
import hashlib
import os
import secrets
import threading
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from services.kvstore.directory import sync_folder

_KEY_BYTES = 32
_NONCE_BYTES = 12
_MASTER_MARK = "master.mark"
"""Wraps no secret: it only opens with the right master key."""
_WRAPPED_BYTES = _NONCE_BYTES + _KEY_BYTES + 16


class MasterKeyError(RuntimeError):
    """The master key file cannot be used; the message says why and never shows what it holds."""


class SealedAwayError(Exception):
    """A block cannot be opened: its tenant's key is gone, was made under another master key, or the bytes are wrong."""


class Keyring:
    """The keys of the tenants of one store. Any thread."""

    def __init__(self, folder: Path, master_key: bytes) -> None:
        self._folder = folder
        self._master = AESGCM(master_key)
        self._open: dict[str, AESGCM] = {}
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @classmethod
    def load(cls, folder: Path, master_key_file: Path) -> "Keyring":
        """Read the master key: 32 bytes, or 64 hex digits; raise MasterKeyError otherwise."""
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
        keyring = cls(folder, raw)
        if not keyring._is_its_master():
            raise MasterKeyError(f"{master_key_file} is not the key that {folder} was made with: use that one again")
        return keyring

    def seal(self, tenant: str, name: bytes, payload: bytes | bytearray | memoryview) -> bytes:
        """Return nonce, ciphertext and tag. name: what the bytes are (key and fingerprint); opening needs the same."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._key(tenant, is_new_allowed=True).encrypt(nonce, payload, name)

    def unseal(self, tenant: str, name: bytes, stored: bytes | memoryview) -> bytes:
        """Return the payload; raise SealedAwayError when it cannot be had."""
        try:
            key = self._key(tenant, is_new_allowed=False)
            return key.decrypt(bytes(stored[:_NONCE_BYTES]), stored[_NONCE_BYTES:], name)
        except InvalidTag:
            raise SealedAwayError("the bytes do not open with the tenant's key") from None

    def delete(self, tenant: str) -> bool:
        """Destroy a tenant's key for good; False when it had none."""
        path = self._path(tenant)
        with self._lock:
            self._open.pop(tenant, None)
            try:
                with path.open("r+b") as file:
                    file.write(secrets.token_bytes(_WRAPPED_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except FileNotFoundError:
                return False
            path.unlink()
            sync_folder(self._folder)
        return True

    def _key(self, tenant: str, *, is_new_allowed: bool) -> AESGCM:
        with self._lock:
            if tenant not in self._open:
                path = self._path(tenant)
                if is_new_allowed and not path.exists():
                    self._create(tenant, path)
                self._open[tenant] = self._unwrap(tenant, path)
            return self._open[tenant]

    def _is_its_master(self) -> bool:
        """Say whether the folder's keys are wrapped by this master key; a folder that nobody marked takes it.

        With another one every block would be found, and none could be read or written.
        """
        path = self._folder / _MASTER_MARK
        if not path.exists():
            self._wrap(bytes(_KEY_BYTES), _MASTER_MARK, path)
        with contextlib.suppress(SealedAwayError):
            self._unwrap(_MASTER_MARK, path)
            return True
        return False

    def _create(self, tenant: str, path: Path) -> None:
        self._wrap(secrets.token_bytes(_KEY_BYTES), tenant, path)

    def _wrap(self, key: bytes, name: str, path: Path) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = nonce + self._master.encrypt(nonce, key, name.encode())
        draft = path.with_suffix(".new")
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(wrapped)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(self._folder)

    def _unwrap(self, tenant: str, path: Path) -> AESGCM:
        with contextlib.suppress(FileNotFoundError, InvalidTag):
            wrapped = path.read_bytes()
            if len(wrapped) == _WRAPPED_BYTES:
                return AESGCM(self._master.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], tenant.encode()))
        raise SealedAwayError("the tenant's key is gone, or was made under another master key")

    def _path(self, tenant: str) -> Path:
        return self._folder / f"{hashlib.sha256(tenant.encode()).hexdigest()}.key"

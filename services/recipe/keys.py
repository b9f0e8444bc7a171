"""Which API keys exist, what may the holder of each do, and whose is the one presented?

A key reads sk-<id>_<secret>. The file knows the id and the SHA-256 of the secret. The secret is 256 random bits, so a
plain hash is enough: nobody can try 2**255 of them, whatever the hash costs. A slow one (scrypt) is for passwords that
people think up; here it would only let anybody keep our cores busy with wrong keys, 50 ms each.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_FILE_BYTES = 4 << 20
MAX_KEY_CHARACTERS = 256
SECRET_BYTES = 32
_KEY = re.compile(r"sk-([a-z0-9]{1,32})_([A-Za-z0-9_-]{16,128})")
_NOBODY = "0" * 64

Retention = Literal["chat", "agent"]
"""How long the KV of a request is worth keeping, in kvstore's words."""
RETENTIONS: tuple[str, ...] = get_args(Retention)


class KeysFileError(Exception):
    """The key file cannot be used; the message says where and why, and never shows what it holds."""


class ApiKey(BaseModel):
    """One key. Limits that are left out do not exist; those per minute hold in each recipe process by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    id: str = Field(pattern=r"^[a-z0-9]{1,32}$")
    """Public part of the key: it stands in logs and metrics."""

    secret_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the secret part, in hex."""

    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Whose it is. Keys of one tenant share stored KV and responses; tenants never do."""

    models: tuple[str, ...] = ()
    """Names of the models it may use; empty: all."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    input_tokens_per_minute: int | None = Field(default=None, ge=1)
    output_tokens_per_minute: int | None = Field(default=None, ge=1)

    max_concurrency: int | None = Field(default=None, ge=1)
    """Requests that may be under way at once."""

    priority: int = Field(default=0, ge=-100, le=100)
    """Higher is served first."""

    retention: Retention = "chat"
    """What its requests get that ask for none."""

    allowed_retentions: tuple[Retention, ...] = ()
    """What its requests may ask for besides."""

    def may_use(self, model: str) -> bool:
        """Return whether the holder may use the model."""
        return not self.models or model in self.models

    def may_keep(self, retention: str) -> bool:
        """Return whether the holder's KV may be kept as that class."""
        return retention == self.retention or retention in self.allowed_retentions


class KeyFile(BaseModel):
    """What a key file holds: {"keys": [...]}."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        seen: set[str] = set()
        for key in self.keys:
            if key.id in seen:
                raise ValueError(f"the id {key.id} is there twice")
            seen.add(key.id)
        return self


class Keyring:
    """The keys by id."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._by_id = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, key_id: str) -> ApiKey | None:
        """Return the key with that id, None when it is not, or no more, there."""
        return self._by_id.get(key_id)

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that `presented` is, None when there is none. Takes as long for wrong as for right."""
        match = _KEY.fullmatch(presented) if len(presented) <= MAX_KEY_CHARACTERS else None
        if match is None:
            return None
        key = self._by_id.get(match[1])
        is_right = hmac.compare_digest(key.secret_sha256 if key else _NOBODY, secret_hash(match[2]))
        return key if is_right else None


def parse_keys(text: bytes) -> KeyFile:
    """Return the keys in a file's bytes; raise KeysFileError, a line for each problem."""
    if len(text) > MAX_FILE_BYTES:
        raise KeysFileError(f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        return KeyFile.model_validate_json(text)
    except ValidationError as exc:
        # Not the whole text of the error: only places and rules are free of what the file holds.
        problems = [f"{_place(error['loc'])}: {error['msg']}" for error in exc.errors(include_input=False)]
        raise KeysFileError("; ".join(problems[:10])) from None


def new_key() -> tuple[str, str, str]:
    """Return (id, the whole key to hand over, SHA-256 of its secret) of a key nobody had before."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(SECRET_BYTES)
    return key_id, f"sk-{key_id}_{secret}", secret_hash(secret)


def secret_hash(secret: str) -> str:
    """Return the SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _place(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".") or "the file"

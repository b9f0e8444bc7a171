"""What is a block of KV called, in every process alike?"""

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from proto.common_pb2 import ImageRef

KEY_BYTES = 32
NO_EXTRA: Mapping[int, bytes] = MappingProxyType({})
_DOMAIN = b"\x01"


def key_root(cluster_key: bytes, fingerprint: bytes, tenant_salt: bytes) -> bytes:
    """Return the 32-byte root of a tenant's key chains for one model.

    HMAC rather than a plain hash: without the cluster key nobody can name, or probe for, another tenant's blocks.
    """
    return hmac.digest(cluster_key, fingerprint + tenant_salt, "sha256")


def block_keys(
    root: bytes, token_ids: Sequence[int], *, block_tokens: int, extra: Mapping[int, bytes] = NO_EXTRA
) -> tuple[bytes, ...]:
    """Return the 32-byte keys of the full blocks of `token_ids`; a last partial block has no key.

    root: 32 bytes from `key_root`.  token_ids: each below 2**32.  extra: block index -> bytes that also identify
    the block (`image_extras`).  Raises OverflowError for an id that is no u32.
    """
    keys = []
    parent = root
    packed = _pack(token_ids[: len(token_ids) // block_tokens * block_tokens])
    width = 4 * block_tokens
    for index, start in enumerate(range(0, len(packed), width)):
        parent = _next_key(parent, packed[start : start + width], extra.get(index, b""))
        keys.append(parent)
    return tuple(keys)


def image_extras(images: Iterable[ImageRef], *, block_tokens: int) -> dict[int, bytes]:
    """Return what tells blocks with parts of images apart: block index -> bytes, for `extra` of the functions here.

    Token ids at an image's positions are the same for every image, so a block's key also takes, of each image that
    overlaps it and in prompt order: content hash, vision fingerprint, and where the image begins relative to the block
    (u32 little-endian, two's complement). So equal keys need the same pixels at the same place, from the same tower.

    images: in prompt order, with content_hash, vision_fingerprint, position and num_tokens set and checked: an image of
    n tokens touches n / block_tokens blocks.
    """
    extras: dict[int, bytes] = {}
    for image in images:
        name = image.content_hash + image.vision_fingerprint
        first, last = image.position // block_tokens, (image.position + image.num_tokens - 1) // block_tokens
        for index in range(first, last + 1):
            place = struct.pack("<i", image.position - index * block_tokens)
            extras[index] = extras.get(index, b"") + name + place
    return extras


class KeyChain:
    """A key chain that grows token by token, as decode writes its answer.

    Gives the same keys as `block_keys` over all tokens at once.
    """

    def __init__(self, root: bytes, *, block_tokens: int, extra: Mapping[int, bytes] = NO_EXTRA) -> None:
        self._parent = root
        self._block_tokens = block_tokens
        self._extra = extra
        self._partial = array("I")
        self._keys: list[bytes] = []

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of the blocks that are full so far."""
        return tuple(self._keys)

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, the partial block's included."""
        return len(self._keys) * self._block_tokens + len(self._partial)

    def append(self, token_id: int) -> bytes | None:
        """Add one token; return the new block's key when it fills a block, else None."""
        self._partial.append(token_id)
        if len(self._partial) < self._block_tokens:
            return None
        extra = self._extra.get(len(self._keys), b"")
        self._parent = _next_key(self._parent, _little_endian(self._partial), extra)
        self._keys.append(self._parent)
        self._partial = array("I")
        return self._parent

    def extend(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Add many tokens; return the keys of the blocks they filled."""
        before = len(self._keys)
        for token_id in token_ids:
            self.append(token_id)
        return tuple(self._keys[before:])


def _next_key(parent: bytes, block: bytes, extra: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + parent + block + extra).digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    return _little_endian(array("I", token_ids))


def _little_endian(tokens: "array[int]") -> bytes:
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()

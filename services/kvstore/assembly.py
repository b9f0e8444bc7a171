"""Which blocks does a stream of chunks carry?"""

import math
from dataclasses import dataclass, field

from proto.kvstore_pb2 import BlockChunk
from services.chassis.errors import InvalidRequest
from services.kvstore.format import KEY_BYTES, TENANT_BYTES
from services.kvstore.segments import Block

MAX_CHUNK_BYTES = 2 << 20
MAX_NAME_BYTES = 256
"""Of a request's or session's id."""
_LEAST_HELD_BYTES = 8 << 10


@dataclass(slots=True)
class BlockAssembly:
    """One block being received: pieces come in order, without gaps, until `block_bytes` are there."""

    key: bytes
    fingerprint: bytes
    block_bytes: int
    is_kept: bool
    retention: int = 0
    tenant: str = ""
    """False when the store has the block already: pieces are checked and dropped, and no memory is taken."""
    received_bytes: int = 0
    _payload: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, chunk: BlockChunk, *, max_block_bytes: int, is_kept: bool) -> "BlockAssembly":
        """Begin with a block's first chunk; raise InvalidRequest when its key, fingerprint or size cannot be right."""
        check_key(chunk.block_key, "block_key")
        check_key(chunk.fingerprint, "fingerprint")
        if not 0 < chunk.block_bytes <= max_block_bytes:
            raise InvalidRequest(
                f"block_bytes is {chunk.block_bytes}; this store takes 1 to {max_block_bytes}", field="block_bytes"
            )
        check_name(chunk.tenant, "tenant", max_bytes=TENANT_BYTES)
        return cls(chunk.block_key, chunk.fingerprint, chunk.block_bytes, is_kept, chunk.retention, chunk.tenant)

    @property
    def held_bytes(self) -> int:
        """Memory this block takes of the store's budget."""
        return held_bytes(self.block_bytes) if self.is_kept else 0

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.block_bytes

    def add(self, chunk: BlockChunk) -> None:
        """Put one piece in its place; raise InvalidRequest when it belongs elsewhere or nowhere."""
        data = chunk.data
        if chunk.block_key != self.key:
            raise InvalidRequest(
                f"a new block begins after {self.received_bytes} of {self.block_bytes} bytes", field="block_key"
            )
        if chunk.block_bytes not in {0, self.block_bytes}:
            raise InvalidRequest(
                f"block_bytes changed from {self.block_bytes} to {chunk.block_bytes}", field="block_bytes"
            )
        if chunk.offset_bytes != self.received_bytes:
            raise InvalidRequest(
                f"offset_bytes is {chunk.offset_bytes}; the next piece starts at {self.received_bytes}",
                field="offset_bytes",
            )
        if not 0 < len(data) <= min(MAX_CHUNK_BYTES, self.block_bytes - self.received_bytes):
            raise InvalidRequest(
                f"a piece has {len(data)} bytes; allowed are 1 to {MAX_CHUNK_BYTES}, within the block", field="data"
            )
        if self.is_kept:
            if not self._payload:
                self._payload = bytearray(self.block_bytes)
            self._payload[self.received_bytes : self.received_bytes + len(data)] = data
        self.received_bytes += len(data)

    def finish(self, last: BlockChunk) -> Block:
        """Return the block; its CRC-32, which came with the last chunk, is checked by the writer thread."""
        retention = self.retention or last.retention
        return Block(self.key, self.fingerprint, self._payload, last.block_crc32, retention, self.tenant)


def held_bytes(block_bytes: int) -> int:
    """Return what a block on its way costs in memory: a stream of tiny ones is mostly what goes with each."""
    return max(block_bytes, _LEAST_HELD_BYTES)


def check_name(value: str, name: str, *, max_bytes: int = MAX_NAME_BYTES) -> None:
    """Raise InvalidRequest for a name that is too long to be kept in memory by the thousand."""
    if len(value.encode()) > max_bytes:
        raise InvalidRequest(f"{name} has at most {max_bytes} bytes", field=name)


def check_seconds(value: float, name: str) -> None:
    """Raise InvalidRequest for a time that is none: in the event loop's timers a NaN would hold up everybody's."""
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}; it must be a finite number of seconds", field=name)


def check_key(value: bytes, name: str) -> None:
    """Raise InvalidRequest unless `value` has the length of a key or fingerprint."""
    if len(value) != KEY_BYTES:
        raise InvalidRequest(f"{name} has {len(value)} bytes instead of {KEY_BYTES}", field=name)

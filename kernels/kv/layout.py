"""What does one block hold, and one window, in bytes?

A block is opaque to everything but the model that wrote it: the KV store, the handoff and shared memory move
`block_bytes` of it and compare `digest()`. Two processes whose digests differ must not exchange blocks.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

ALIGN_BYTES = 32
"""Every stream starts on this boundary, so that a vector load never straddles two streams."""

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int8": 1, "uint8": 1}

_DIGEST_TAG = "fathom.kv_layout.1"


@dataclass(frozen=True, slots=True)
class Stream:
    """One array of a block (or window): where it starts, and what it is.

    shape: for a block normally [block_tokens, heads, head_dim]; a compressed stream may have fewer entries than tokens.
    offset: bytes from the start of the block (or window).
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The bytes of one block of `block_tokens` tokens, and of one request's window state (none for Llama).

    Blocks are shareable between requests; a window belongs to one request at one exact position.
    """

    block_tokens: int
    streams: tuple[Stream, ...]
    window_streams: tuple[Stream, ...] = ()

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens}; a block holds at least one token")
        if not self.streams:
            raise ValueError("a block holds at least one stream")
        for group in (self.streams, self.window_streams):
            _check(group)

    @classmethod
    def dense(cls, *, num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, dtype: str) -> Self:
        """The Llama family: per layer K, then V, each [block_tokens, num_kv_heads, head_dim]."""
        shape = (block_tokens, num_kv_heads, head_dim)
        return cls(block_tokens, place((layer, name, shape, dtype) for layer in range(num_layers) for name in "kv"))

    @property
    def block_bytes(self) -> int:
        return _aligned(self.streams[-1].end)

    @property
    def window_bytes(self) -> int:
        """Bytes of one request's window state; 0 when the model has none."""
        return _aligned(self.window_streams[-1].end) if self.window_streams else 0

    def stream(self, layer: int, name: str) -> Stream:
        """The block stream of that layer and name; KeyError when the layout has none."""
        for stream in self.streams:
            if (stream.layer, stream.name) == (layer, name):
                return stream
        raise KeyError(f"layer {layer} has no stream {name!r}")

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of everything above, the same in every process that means the same bytes."""

        def rows(streams: tuple[Stream, ...]) -> list[list[object]]:
            return [[s.layer, s.name, list(s.shape), s.dtype, s.offset] for s in streams]

        described = [
            _DIGEST_TAG,
            self.block_tokens,
            rows(self.streams),
            self.block_bytes,
            rows(self.window_streams),
            self.window_bytes,
        ]
        return hashlib.sha256(json.dumps(described, separators=(",", ":")).encode()).digest()


def place(sections: Iterable[tuple[int, str, tuple[int, ...], str]]) -> tuple[Stream, ...]:
    """Put (layer, name, shape, dtype) sections one after the other, each on its boundary."""
    placed: list[Stream] = []
    offset = 0
    for layer, name, shape, dtype in sections:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} of stream {name!r} is none of {', '.join(DTYPE_BYTES)}")
        placed.append(Stream(layer, name, shape, dtype, offset))
        offset = _aligned(placed[-1].end)
    return tuple(placed)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _check(streams: Sequence[Stream]) -> None:
    """Streams lie in order on their boundaries without overlap, each (layer, name) once."""
    end = 0
    seen: set[tuple[int, str]] = set()
    for stream in streams:
        if stream.offset < end or stream.offset % ALIGN_BYTES:
            raise ValueError(f"{stream} overlaps the one before it or is not on a {ALIGN_BYTES}-byte boundary")
        if (stream.layer, stream.name) in seen:
            raise ValueError(f"layer {stream.layer} has stream {stream.name!r} twice")
        seen.add((stream.layer, stream.name))
        end = stream.end

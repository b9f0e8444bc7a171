"""What do a KV store and a reader on its host say to each other on the store's unix socket?

SOCK_SEQPACKET, so a message is one packet, both ways; all numbers are little-endian. The store speaks first:

    store   HELLO  its boot id; it must be the one that the Locate RPC gave
    reader  OPEN   fingerprint, leading block keys, request id (its lease ends with DONE)
    store   BLOCKS where each leading block lies; the files' descriptors come with it (SCM_RIGHTS), each once
    reader  DONE   the bytes are read and verified (or given up)

BLOCKS may cover fewer keys than asked for: those behind are missing, encrypted, elsewhere, or did not fit the packet;
ask for them again after DONE, and what then comes back empty over gRPC. The files stay as they are from BLOCKS until
DONE, the end of the connection, or `hold_seconds`, whichever is first. One OPEN at a time on a connection; many, one
after another, are fine. A descriptor with `is_direct` was opened with O_DIRECT: offset, length and buffer of a read
must be multiples of 4,096, so read aligned(block_bytes) bytes. The reader owns the descriptors it gets: it closes them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

VERSION = 1
MAX_KEYS = 2048
"""In one OPEN, so that every packet fits a socket's default buffer."""
MAX_FILES = 64
"""Descriptors with one BLOCKS."""
MAX_PACKET_BYTES = 128 << 10
ALIGN_BYTES = 4096

_MAGIC = b"FKLR"
# magic, version, kind
_START = struct.Struct("<4sHH")
# length of the boot id
_HELLO = struct.Struct("<H")
# fingerprint, number of keys, length of the request id
_OPEN = struct.Struct("<32sIH")
# hold_seconds, number of blocks, number of files
_BLOCKS = struct.Struct("<fIH")
# file, flags, crc32, offset of the payload, payload bytes
_BLOCK = struct.Struct("<HHIQI")
_KEY_BYTES = 32
_IS_DIRECT = 1


class Kind(IntEnum):
    """What a packet is."""

    HELLO = 0
    OPEN = 1
    DONE = 2
    BLOCKS = 3


_KINDS = frozenset(Kind)


class WrongPacketError(ValueError):
    """The other side speaks another version, or is no KV store (or no reader of one) at all."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The leading blocks of a chain that the reader wants to read itself."""

    fingerprint: bytes
    """32 bytes."""
    keys: tuple[bytes, ...]
    """32 bytes each, at most MAX_KEYS."""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where one block's payload lies, and how to know that it is right."""

    file: int
    """Position among the descriptors of the same packet."""
    offset_bytes: int
    """Of the payload; a multiple of 4,096."""
    block_bytes: int
    crc32: int
    """CRC-32 (IEEE) of the payload. The reader must check it."""
    is_direct: bool
    """The descriptor bypasses the page cache."""


@dataclass(frozen=True, slots=True)
class OpenReply:
    """Places of the leading blocks, in the order of the keys."""

    blocks: tuple[BlockPlace, ...]
    num_files: int
    hold_seconds: float
    """How long the store keeps the bytes as they are without hearing DONE."""


def aligned(num_bytes: int) -> int:
    """Round up to what one direct read must ask for."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def kind_of(packet: bytes) -> Kind:
    """Return what a packet is; raise WrongPacketError when it is not of this protocol and version."""
    if len(packet) < _START.size:
        raise WrongPacketError(f"{len(packet)} bytes are no packet")
    magic, version, kind = _START.unpack_from(packet)
    if magic != _MAGIC or version != VERSION or kind not in _KINDS:
        raise WrongPacketError(f"magic {magic!r}, version {version}, kind {kind}; expected version {VERSION}")
    return Kind(kind)


def pack_hello(boot_id: str) -> bytes:
    name = boot_id.encode()
    return _start(Kind.HELLO) + _HELLO.pack(len(name)) + name


def parse_hello(packet: bytes) -> str:
    """Return the boot id."""
    (length,) = _fields(packet, Kind.HELLO, _HELLO)
    return _text(packet, _START.size + _HELLO.size, length)


def pack_open(request: OpenRequest) -> bytes:
    """Return the packet; raise ValueError when there are too many keys or one has another length."""
    if len(request.keys) > MAX_KEYS or any(len(key) != _KEY_BYTES for key in request.keys):
        raise ValueError(f"{len(request.keys)} keys; at most {MAX_KEYS} of {_KEY_BYTES} bytes")
    name = request.request_id.encode()
    return (
        _start(Kind.OPEN)
        + _OPEN.pack(request.fingerprint, len(request.keys), len(name))
        + name
        + b"".join(request.keys)
    )


def parse_open(packet: bytes) -> OpenRequest:
    fingerprint, num_keys, length = _fields(packet, Kind.OPEN, _OPEN)
    start = _START.size + _OPEN.size
    request_id = _text(packet, start, length)
    start += length
    if num_keys > MAX_KEYS or len(packet) != start + num_keys * _KEY_BYTES:
        raise WrongPacketError(f"{len(packet)} bytes do not hold {num_keys} keys")
    keys = tuple(packet[at : at + _KEY_BYTES] for at in range(start, len(packet), _KEY_BYTES))
    return OpenRequest(fingerprint, keys, request_id)


def pack_done() -> bytes:
    return _start(Kind.DONE)


def pack_blocks(blocks: Sequence[BlockPlace], *, num_files: int, hold_seconds: float) -> bytes:
    """Return the packet that goes with `num_files` descriptors."""
    places = b"".join(
        _BLOCK.pack(one.file, _IS_DIRECT * one.is_direct, one.crc32, one.offset_bytes, one.block_bytes)
        for one in blocks
    )
    return _start(Kind.BLOCKS) + _BLOCKS.pack(hold_seconds, len(blocks), num_files) + places


def parse_blocks(packet: bytes) -> OpenReply:
    hold_seconds, num_blocks, num_files = _fields(packet, Kind.BLOCKS, _BLOCKS)
    places = packet[_START.size + _BLOCKS.size :]
    if num_files > MAX_FILES or len(places) != num_blocks * _BLOCK.size:
        raise WrongPacketError(f"{len(places)} bytes do not hold {num_blocks} places")
    blocks = tuple(
        BlockPlace(file, offset_bytes, block_bytes, crc32, bool(flags & _IS_DIRECT))
        for file, flags, crc32, offset_bytes, block_bytes in _BLOCK.iter_unpack(places)
    )
    if any(block.file >= num_files for block in blocks):
        raise WrongPacketError("a block lies in a file that was not sent")
    return OpenReply(blocks, num_files, hold_seconds)


def _start(kind: Kind) -> bytes:
    return _START.pack(_MAGIC, VERSION, kind)


def _fields(packet: bytes, kind: Kind, layout: struct.Struct) -> tuple[Any, ...]:
    if kind_of(packet) is not kind or len(packet) < _START.size + layout.size:
        raise WrongPacketError(f"expected {kind.name}, got {len(packet)} bytes of {kind_of(packet).name}")
    return layout.unpack_from(packet, _START.size)


def _text(packet: bytes, start: int, length: int) -> str:
    raw = packet[start : start + length]
    if len(raw) != length:
        raise WrongPacketError("a name is cut off")
    return raw.decode(errors="replace")

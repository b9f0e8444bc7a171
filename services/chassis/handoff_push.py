"""How does a piece of a handoff travel by `Push` without being copied by protobuf?

On the wire it is a `PushChunk`, and whoever reads or writes it as such is understood. Here its `data` is put behind the
other fields as it is, and read as a view of the message, for protobuf would copy it twice on each side.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from proto.common_pb2 import Ticket
from proto.decode_pb2 import PushChunk
from services.chassis.errors import BlocksLost, InvalidRequest
from services.chassis.handoff import block_crc32

_MAX_HEAD_BYTES = 4096
"""Everything beside the data: a ticket, numbers and a checksum."""
PUSH_METHOD = "/fathom.v1.Decode/Push"
PIECE_BYTES = 4 << 20
"""Most of a block in one message: larger ones cost less each, and hold up whatever else is on the connection."""
_DATA_TAG = PushChunk.DATA_FIELD_NUMBER << 3 | 2
_FIXED_BYTES = {1: 8, 5: 4}
"""Length of what follows a tag, by its wire type."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block, or of the window state, and where it goes."""

    head: PushChunk
    """Everything but the bytes."""
    data: memoryview


def encode_pieces(
    payload: memoryview, *, block_index: int = 0, ticket: Ticket | None, is_window: bool = False
) -> list[bytes]:
    """Cut one block, or the window state, into messages. Only a stream's first piece carries the ticket."""
    messages = []
    for offset in range(0, len(payload), PIECE_BYTES):
        data = payload[offset : offset + PIECE_BYTES]
        head = PushChunk(
            ticket=ticket if offset == 0 else None,
            block_index=block_index,
            offset_bytes=offset,
            crc32=block_crc32(data),
            is_window=is_window,
        )
        length = bytearray()
        _put_varint(length, _DATA_TAG)
        _put_varint(length, len(data))
        messages.append(b"".join((head.SerializeToString(), length, data)))
    return messages


def parse_piece(message: bytes) -> Piece:
    """Read a `PushChunk`. Raises InvalidRequest for what is none."""
    view = memoryview(message)
    others, data, at = bytearray(), view[:0], 0
    while at < len(view):
        start = at
        tag, at = _varint(view, at)
        if tag & 7 == 0:
            _, at = _varint(view, at)
        elif tag & 7 == 2:
            num_bytes, at = _varint(view, at)
            at += num_bytes
        elif tag & 7 in _FIXED_BYTES:
            at += _FIXED_BYTES[tag & 7]
        else:
            raise InvalidRequest(f"a field of kind {tag & 7} in a piece of a handoff")
        if at > len(view):
            raise InvalidRequest("a piece of a handoff was cut off")
        if tag == _DATA_TAG:
            data = view[at - num_bytes : at]
        else:
            others += view[start:at]
            if len(others) > _MAX_HEAD_BYTES:  # millions of tiny fields would keep the loop for seconds
                raise InvalidRequest(f"a piece of a handoff says more than {_MAX_HEAD_BYTES} bytes of itself")
    try:
        return Piece(PushChunk.FromString(bytes(others)), data)
    except DecodeError as error:
        raise InvalidRequest(f"no piece of a handoff: {error}") from error


def check_piece(piece: Piece) -> None:
    """Raise BlocksLost when a piece arrived changed."""
    if block_crc32(piece.data) != piece.head.crc32:
        what = "the window state" if piece.head.is_window else f"block {piece.head.block_index}"
        raise BlocksLost(f"a piece of {what} arrived damaged")


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the number there, and where it ends."""
    value = shift = 0
    while at < len(view) and shift < 64:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequest("a piece of a handoff was cut off")

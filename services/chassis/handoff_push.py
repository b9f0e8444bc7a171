"""How does a piece of a handoff travel by `Push` without being copied by protobuf?

On the wire it is a `PushChunk`, and whoever reads or writes it as such is understood. Here its `data` is copied from
the device to where it is sent from, between the other fields, and read as a view of the message: protobuf would copy it
twice on each side.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

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
_CRC_TAG = PushChunk.CRC32_FIELD_NUMBER << 3
_CRC_BYTES = 6
"""The checksum behind the data: a tag, and a varint that is as long for small numbers as for large ones."""
_FIXED_BYTES = {1: 8, 5: 4}
"""Length of what follows a tag, by its wire type."""
# The C API lets whoever has just made a `bytes` fill it, as long as nobody else has seen it.
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block, or of the window state, and where it goes."""

    head: PushChunk
    """Everything but the bytes."""
    data: memoryview


class BlankPiece:
    """A message whose data is still to be written, at `place`: what gRPC takes is then copied once, off the device."""

    def __init__(
        self, num_bytes: int, *, block_index: int = 0, ticket: Ticket | None = None, is_window: bool = False
    ) -> None:
        """num_bytes: of the data, a whole block or window state; PIECE_BYTES at most."""
        head = PushChunk(ticket=ticket, block_index=block_index, is_window=is_window).SerializeToString()
        head += _data_begins(num_bytes)
        size = len(head) + num_bytes + _CRC_BYTES
        self._message: bytes = _new_bytes(None, size)
        memory: Any = (ctypes.c_char * size).from_address(_address_of(self._message))
        memory.message = self._message  # whoever still writes to the place keeps the message alive
        self._whole = memoryview(memory).cast("B")
        self._whole[: len(head)] = head
        self.place = self._whole[len(head) : -_CRC_BYTES]

    def seal(self) -> bytes:
        """Return the message, to which nobody may write any more."""
        left = block_crc32(self.place)
        crc = bytearray([_CRC_TAG])
        for _ in range(_CRC_BYTES - 2):
            crc.append(left & 0x7F | 0x80)
            left >>= 7
        crc.append(left)
        self._whole[-_CRC_BYTES:] = crc
        return self._message


def encode_pieces(
    payload: memoryview, *, block_index: int = 0, ticket: Ticket | None, is_window: bool = False
) -> list[bytes]:
    """Cut one block, or the window state, into messages. Only a stream's first piece carries the ticket.

    For those that are larger than a message; smaller ones need no copy of their own, see `BlankPiece`.
    """
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
        messages.append(b"".join((head.SerializeToString(), _data_begins(len(data)), data)))
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


def _data_begins(num_bytes: int) -> bytes:
    begin = bytearray()
    _put_varint(begin, _DATA_TAG)
    _put_varint(begin, num_bytes)
    return bytes(begin)


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

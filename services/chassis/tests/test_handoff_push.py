"""How does a piece of a handoff travel by `Push` without being copied by protobuf?"""

import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.common_pb2 import Ticket
from proto.decode_pb2 import PushChunk
from services.chassis import handoff_push as subject
from services.chassis.errors import BlocksLost, InvalidRequest
from services.chassis.handoff_push import BlankPiece, check_piece, encode_pieces, parse_piece

CHUNKS = st.builds(
    PushChunk,
    ticket=st.none() | st.builds(Ticket, epoch=st.integers(0, 2**64 - 1), nonce=st.binary(max_size=16)),
    block_index=st.integers(0, 2**32 - 1),
    offset_bytes=st.integers(0, 2**64 - 1),
    data=st.binary(max_size=300),
    crc32=st.integers(0, 2**32 - 1),
    is_window=st.booleans(),
)


@given(chunk=CHUNKS)
@settings(max_examples=60)
def test_whatever_protobuf_writes_is_read_without_it(chunk):
    """Peers that know only the contract are understood."""
    piece = parse_piece(chunk.SerializeToString())

    assert chunk.data == piece.data
    chunk.ClearField("data")
    assert chunk == piece.head


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 1000, 1001])
def test_protobuf_reads_what_was_cut_past_it(monkeypatch, num_bytes):
    """Pieces put together are the payload; the ticket goes with the first only."""
    monkeypatch.setattr(subject, "PIECE_BYTES", 500)
    payload = bytes(n % 251 for n in range(num_bytes))
    messages = encode_pieces(memoryview(payload), block_index=3, ticket=Ticket(epoch=5), is_window=num_bytes == 1)
    chunks = [PushChunk.FromString(message) for message in messages]

    assert payload == b"".join(chunk.data for chunk in chunks)
    assert [*range(0, num_bytes, 500)] == [chunk.offset_bytes for chunk in chunks]
    assert [n == 0 for n in range(len(chunks))] == [chunk.HasField("ticket") for chunk in chunks]
    assert {(3, num_bytes == 1)} == {(chunk.block_index, chunk.is_window) for chunk in chunks}


@given(data=st.binary(max_size=300), chunk=CHUNKS)
@settings(max_examples=60)
def test_protobuf_reads_what_was_written_where_it_is_sent_from(data, chunk):
    """With a checksum that is right, however small; and so is what is read past protobuf."""
    where = {"block_index": chunk.block_index, "is_window": chunk.is_window}
    blank = BlankPiece(len(data), ticket=chunk.ticket, **where)
    blank.place[:] = data
    message = blank.seal()
    expected = PushChunk(ticket=chunk.ticket, data=data, crc32=zlib.crc32(data), **where)

    assert expected == PushChunk.FromString(message)
    piece = parse_piece(message)
    assert (data, expected.crc32) == (piece.data, piece.head.crc32)
    check_piece(piece)


def test_who_writes_to_a_piece_that_was_given_up_writes_to_its_own_memory():
    """An engine may copy a block long after whoever asked for it has stopped waiting."""
    place = BlankPiece(1000).place
    place[:] = b"late" * 250
    memory: Any = place.obj

    assert memory.message[:-6].endswith(b"late" * 250)


def test_a_damaged_piece_is_seen():
    """One bit is enough."""
    (message,) = encode_pieces(memoryview(b"payload"), ticket=None)
    check_piece(parse_piece(message))
    with pytest.raises(BlocksLost, match="block 0"):
        check_piece(parse_piece(message.replace(b"payload", b"paymoad")))


@given(cut=st.integers(0, 60), flipped=st.integers(0, 60), bit=st.integers(0, 7))
@settings(max_examples=100)
def test_nonsense_is_an_error_or_a_piece_and_nothing_else(cut, flipped, bit):
    """A stranger's message never takes the server down."""
    message = bytearray(encode_pieces(memoryview(b"x" * 20), block_index=300, ticket=Ticket(epoch=5, nonce=b"n"))[0])
    if flipped < len(message):
        message[flipped] ^= 1 << bit
    try:
        piece = parse_piece(bytes(message[:cut]))
    except InvalidRequest:
        return
    assert len(piece.data) <= cut

"""Does every packet of the local-read protocol come back as it was, and is everything else refused?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.local_read_format import (
    MAX_KEYS,
    MAX_PACKET_BYTES,
    BlockPlace,
    Kind,
    OpenReply,
    OpenRequest,
    WrongPacketError,
    kind_of,
    pack_blocks,
    pack_done,
    pack_hello,
    pack_open,
    parse_blocks,
    parse_hello,
    parse_open,
)

KEYS = st.binary(min_size=32, max_size=32)
PLACES = st.builds(
    BlockPlace,
    file=st.integers(0, 5),
    offset_bytes=st.integers(0, 2**63),
    block_bytes=st.integers(1, 2**32 - 1),
    crc32=st.integers(0, 2**32 - 1),
    is_direct=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(KEYS, st.lists(KEYS, max_size=8), st.text(max_size=40))
def test_requests_come_back(fingerprint: bytes, keys: list[bytes], request_id: str) -> None:
    """Whatever the keys and the request's name."""
    request = OpenRequest(fingerprint, tuple(keys), request_id)
    assert request == parse_open(pack_open(request))


@settings(max_examples=30, deadline=None)
@given(st.lists(PLACES, max_size=8), st.integers(6, 64))
def test_places_come_back(blocks: list[BlockPlace], num_files: int) -> None:
    """Whatever the places."""
    expected = OpenReply(tuple(blocks), num_files, 10.0)
    assert expected == parse_blocks(pack_blocks(blocks, num_files=num_files, hold_seconds=10.0))


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=100), st.binary(max_size=80).map(lambda tail: pack_done()[:8] + tail)))
def test_garbage_is_refused_and_nothing_else_happens(packet: bytes) -> None:
    """A stranger on the socket gets an error of ours, never another one."""
    for parse in (parse_open, parse_blocks, parse_hello):
        with pytest.raises(WrongPacketError):
            parse(packet)


def test_hello_and_done_say_what_they_are() -> None:
    """The boot id is text; DONE is its own kind."""
    assert ("b-1", Kind.HELLO, Kind.DONE) == (
        parse_hello(pack_hello("b-1")),
        kind_of(pack_hello("x")),
        kind_of(pack_done()),
    )


def test_the_largest_packets_fit() -> None:
    """Both directions stay below what a socket takes by default."""
    request = OpenRequest(b"f" * 32, (b"k" * 32,) * MAX_KEYS, "r" * 64)
    places = [BlockPlace(0, 4096, 100, 1, is_direct=True)] * MAX_KEYS
    assert max(len(pack_open(request)), len(pack_blocks(places, num_files=1, hold_seconds=1))) <= MAX_PACKET_BYTES
    with pytest.raises(ValueError, match="keys"):
        pack_open(OpenRequest(b"f" * 32, (b"k" * 32,) * (MAX_KEYS + 1)))
    with pytest.raises(WrongPacketError):
        parse_blocks(pack_blocks([BlockPlace(1, 0, 1, 1, is_direct=False)], num_files=1, hold_seconds=1))

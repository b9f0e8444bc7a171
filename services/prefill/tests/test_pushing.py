"""How do blocks and the window become messages where only gRPC gets through?"""

import asyncio
import time

import pytest

from proto.common_pb2 import Ticket
from services.chassis import handoff_push
from services.chassis.errors import BlocksLost, DeadlinePassed
from services.chassis.handoff import block_xxh3
from services.chassis.handoff_push import check_piece, parse_piece
from services.chassis.testing import until
from services.prefill import pushing as subject
from services.prefill.pushing import pieces
from services.prefill.tests.device import Device

TICKET = Ticket(epoch=7, nonce=b"n" * 16)
BLOCK_BYTES, WINDOW_BYTES = 1000, 700


def pushed(device, checksums, seconds=10.0):
    sizes = {"block_bytes": BLOCK_BYTES, "window_bytes": WINDOW_BYTES}
    deadline = time.time() + seconds
    return pieces(TICKET, range(2, 7), device, **sizes, checksums=checksums, deadline_unix_seconds=deadline)


@pytest.mark.parametrize("copies_beside", [True, False])
@pytest.mark.parametrize("piece_bytes", [300, 1000, 2500, 4 << 20], ids=["parts", "single", "pairs", "all"])
async def test_all_arrives_in_order_and_is_summed(monkeypatch, copies_beside, piece_bytes):
    """Whoever copies it, in runs or in parts; the ticket goes with the first message only."""
    monkeypatch.setattr(subject, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(handoff_push, "PIECE_BYTES", piece_bytes)
    checksums: list[int] = []
    arrived: dict[int | None, bytearray] = {}
    tickets = []
    async for message in pushed(Device(BLOCK_BYTES, WINDOW_BYTES, copies_beside=copies_beside), checksums):
        piece = parse_piece(message)
        check_piece(piece)
        place = arrived.setdefault(None if piece.head.is_window else piece.head.block_index, bytearray())
        assert len(place) == piece.head.offset_bytes
        place += piece.data
        tickets.append(piece.head.ticket if piece.head.HasField("ticket") else None)
    expected = {block: bytes([block + 1]) * BLOCK_BYTES for block in range(2, 7)} | {None: b"w" * WINDOW_BYTES}

    assert expected == arrived
    assert [*expected] == [*arrived]
    assert [block_xxh3(payload) for payload in expected.values()] == checksums
    assert [TICKET, *[None] * (len(tickets) - 1)] == tickets


@pytest.mark.parametrize(("copies_beside", "num_copied"), [(True, 1), (False, 3)])
async def test_the_engine_copies_two_runs_ahead_and_no_more(monkeypatch, copies_beside, num_copied):
    """That bounds the memory of a handoff whose peer takes nothing; so does making each when it is sent."""
    monkeypatch.setattr(subject, "PIECE_BYTES", BLOCK_BYTES)
    device = Device(BLOCK_BYTES, WINDOW_BYTES, copies_beside=copies_beside)
    messages = pushed(device, [])
    await anext(messages)
    await until(lambda: device.num_copied >= num_copied)
    await asyncio.sleep(0.1)  # for one more, which must not come
    assert num_copied == device.num_copied
    await messages.aclose()


@pytest.mark.parametrize("copies_beside", [True, False])
async def test_a_released_prompt_ends_the_push(copies_beside):
    """The blocks may be somebody else's already."""
    device = Device(BLOCK_BYTES, WINDOW_BYTES, copies_beside=copies_beside)
    device.error = BlocksLost("the prompt's blocks were released")
    with pytest.raises(BlocksLost, match="released"):
        await anext(pushed(device, []))


async def test_an_engine_that_copies_nothing_is_waited_for_until_the_deadline():
    """Not for ever."""
    device = Device(BLOCK_BYTES, WINDOW_BYTES, copies_beside=False)
    device.is_stuck = True
    with pytest.raises(DeadlinePassed):
        await anext(pushed(device, [], seconds=0.1))

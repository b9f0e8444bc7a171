"""How do blocks and the window get to decode past gRPC?"""

import asyncio
import socket
import threading
import time

import pytest

from proto.common_pb2 import Ticket
from services.chassis import handoff_lane
from services.chassis.errors import BlocksLost, DeadlinePassed, PeerLost
from services.chassis.handoff import PeerStaging, Staging, block_xxh3
from services.chassis.handoff_lane import (
    ACCEPTED,
    HELLO_BYTES,
    LaneUnavailableError,
    connect,
    parse_hello,
    receive_into,
    receive_run,
)
from services.prefill import sending as subject
from services.prefill.sending import Sender, Way
from services.prefill.tests.device import Device
from services.prefill.tests.rig import BLOCK, kinds, prefill_replica, request

BLOCK_BYTES, WINDOW_BYTES, NUM_BLOCKS = handoff_lane.RUN_BYTES * 3 // 4, 1 << 20, 4  # each block is a run
TICKET = Ticket(epoch=7, nonce=b"n" * 16)


@pytest.fixture(autouse=True)
def nothing_is_unreachable():
    """Another test may be given the same port."""
    yield
    handoff_lane._unreachable.clear()


class Receiver(threading.Thread):
    """Lets one connection in and keeps what it brings, after `takes` is set."""

    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.runs = []
        self.told = lambda _run: None
        """What decode does with what lies in the file."""
        self.takes = threading.Event()
        self.takes.set()
        self.answer = ACCEPTED
        self.start()

    def run(self):
        connection, _ = self.listener.accept()
        with connection, self.listener:
            self.hello = parse_hello(connection.recv(HELLO_BYTES))
            connection.sendall(self.answer)
            while self.takes.wait(5) and (run := receive_run(connection)) is not None:
                data = bytearray(run.num_bytes)
                receive_into(connection, memoryview(data))
                self.runs.append((run.is_window, run.first, run.num_blocks, run.at, bytes(data[:: 1 << 19])))
                self.told(run)


def sender(way, device, wanted=range(2, 2 + NUM_BLOCKS)):
    return Sender(way, wanted, device, block_bytes=BLOCK_BYTES, window_bytes=WINDOW_BYTES)


def travelling(receiver):
    way = Way(lane=connect("127.0.0.1", receiver.port, TICKET, shares_file=False))
    way.make_buffers(NUM_BLOCKS, block_bytes=BLOCK_BYTES, window_bytes=WINDOW_BYTES)
    return way


def expected_checksums():
    return [block_xxh3(bytes([n]) * BLOCK_BYTES) for n in range(3, 7)] + [block_xxh3(b"w" * WINDOW_BYTES)]


def test_runs_that_travel_arrive_in_order_and_are_summed():
    """Blocks are counted among those that travel; the ticket comes first, the window last."""
    receiver = Receiver()
    way = travelling(receiver)
    assert expected_checksums() == sender(way, Device(BLOCK_BYTES, WINDOW_BYTES)).send(time.time() + 10)
    receiver.join(5)
    blocks = [(False, n, 1, 0, bytes([n + 3]) * 2) for n in range(NUM_BLOCKS)]

    assert [*blocks, (True, 0, 0, 0, b"ww")] == receiver.runs
    assert (7, b"n" * 16, False) == (receiver.hello.epoch, receiver.hello.nonce, receiver.hello.shares_file)
    way.close()


@pytest.mark.parametrize("has_lane", [True, False])
def test_runs_in_the_file_are_only_told_of(tmp_path, has_lane):
    """Or not even that, where no connection could be made: the commit finds them."""
    shape = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "window_bytes": WINDOW_BYTES}
    area = Staging(nonce=TICKET.nonce, folder=tmp_path, **shape)
    receiver = Receiver()
    way = Way(staging=PeerStaging(str(area.path), nonce=TICKET.nonce, **shape))
    if has_lane:
        way.lane = connect("127.0.0.1", receiver.port, TICKET, shares_file=True)
    assert expected_checksums() == sender(way, Device(BLOCK_BYTES, WINDOW_BYTES)).send(time.time() + 10)
    if has_lane:
        receiver.join(5)
        assert [*((False, n, 1, n, b"") for n in range(NUM_BLOCKS)), (True, 0, 0, 0, b"")] == receiver.runs

    assert expected_checksums() == [*(block_xxh3(area.block(n)) for n in range(NUM_BLOCKS)), block_xxh3(area.window())]
    way.close()
    area.close()
    receiver.listener.close()


@pytest.mark.parametrize(("is_patient", "num_areas"), [(True, range(1, 26)), (False, range(32, 33))])
def test_room_in_the_file_that_decode_has_emptied_is_used_again(tmp_path, monkeypatch, is_patient, num_areas):
    """While it is still in cache; a decode that empties none for longer than copying takes gets other room."""
    monkeypatch.setattr(subject, "_PATIENCE_SECONDS_PER_BYTE", 1.0 if is_patient else 0.0)
    shape = {"num_blocks": 32, "block_bytes": BLOCK_BYTES, "window_bytes": WINDOW_BYTES}
    area = Staging(nonce=TICKET.nonce, folder=tmp_path, **shape)
    receiver, taken = Receiver(), []

    def take(run):
        taken.append(block_xxh3(area.window() if run.is_window else area.block(run.at)))
        if run.num_blocks and is_patient:
            area.mark_empty(run.at)

    receiver.told = take
    way = Way(staging=PeerStaging(str(area.path), nonce=TICKET.nonce, **shape))
    way.lane = connect("127.0.0.1", receiver.port, TICKET, shares_file=True)
    sent = sender(way, Device(BLOCK_BYTES, WINDOW_BYTES), range(32)).send(time.time() + 10)
    receiver.join(5)

    assert sent == taken
    assert [*range(32)] == [first for is_window, first, *_ in receiver.runs if not is_window]
    assert len({at for is_window, _, _, at, _ in receiver.runs if not is_window}) in num_areas
    way.close()
    area.close()


def test_a_released_prompt_ends_the_sending():
    """The blocks may be somebody else's already."""
    receiver, device = Receiver(), Device(BLOCK_BYTES, WINDOW_BYTES)
    device.error = BlocksLost("the prompt's blocks were released")
    way = travelling(receiver)
    with pytest.raises(BlocksLost):
        sender(way, device).send(time.time() + 10)
    way.close()
    receiver.join(5)


def test_who_copies_the_blocks_itself_sends_each_before_it_copies_the_next(monkeypatch):
    """Decode takes one while the next is copied; the engine, which may be in a long step, is not asked."""
    receiver, device = Receiver(), Device(BLOCK_BYTES, WINDOW_BYTES, copies_beside=True)
    way = travelling(receiver)
    told: list[int] = []
    sending = sender(way, device)
    tell = sending._tell

    def count(run):
        told.append(device.num_copied)
        tell(run)

    monkeypatch.setattr(sending, "_tell", count)
    assert expected_checksums() == sending.send(time.time() + 10)
    receiver.join(5)

    assert [1, 2, 3, 4, 4] == told
    way.close()


def test_a_receiver_that_takes_nothing_holds_up_nobody_for_longer_than_it_is_waited_for():
    """Whoever gives the handoff up wakes the thread that sends; its buffers are free after that."""
    receiver = Receiver()
    receiver.takes.clear()
    way = travelling(receiver)
    sending = sender(way, Device(BLOCK_BYTES, WINDOW_BYTES))
    failed = []

    def send():
        try:
            sending.send(time.time() + 30)
        except PeerLost as error:
            failed.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    sending.stop()
    thread.join(1)
    assert failed
    receiver.takes.set()
    way.close()


def test_an_engine_that_copies_nothing_is_waited_for_until_the_deadline():
    """Not for ever."""
    receiver, device = Receiver(), Device(BLOCK_BYTES, WINDOW_BYTES)
    device.is_stuck = True
    way = travelling(receiver)
    with pytest.raises(DeadlinePassed):
        sender(way, device).send(time.time() + 0.1)
    way.close()


def test_whoever_is_not_let_in_says_so():
    """No such port, and a ticket that nobody knows."""
    receiver = Receiver()
    receiver.answer = b"\x00"
    with pytest.raises(LaneUnavailableError, match="ticket"):
        connect("127.0.0.1", receiver.port, TICKET, shares_file=False)
    receiver.join(5)
    for reason in ("refused", "a moment ago"):  # it is not tried again at every handoff
        with pytest.raises(LaneUnavailableError, match=reason):
            connect("127.0.0.1", receiver.port, TICKET, shares_file=False)


async def test_a_lane_that_cannot_be_reached_is_done_without(folder):
    """Decode names a port that a firewall closes: the blocks go by Push."""
    async with prefill_replica(folder) as rig:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            rig.decode.lane_port = closed.getsockname()[1]
        wanted = request("walled", 3 * BLOCK + 3)
        events = await asyncio.wait_for(rig.serve(wanted), 20)

        assert ["last_chunk_started", "first_token", "handoff_done"] == kinds(events)
        assert "grpc" == events[-1].handoff_done.backend
        assert rig.source.prompt(wanted)[0][:3] == rig.decode.committed[0][1][:3]
        await rig.idle()

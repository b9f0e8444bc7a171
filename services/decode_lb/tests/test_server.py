"""Do picks, releases and reports over the wire reach policy and bookings?"""

import time

import pytest
from prometheus_client import CollectorRegistry

from proto.common_pb2 import ModelCard
from proto.decode_lb_pb2 import DecodePickRequest, DecodeReleaseRequest
from proto.decode_lb_pb2_grpc import DecodeLbStub
from proto.events_pb2 import LoadReport
from services.chassis.channel import open_channel
from services.chassis.errors import NoReplica, Overloaded
from services.chassis.registry import REPLICA_STATE_READY, Replica, ReplicaTable
from services.chassis.testing import free_port, running
from services.decode_lb.bookings import Bookings
from services.decode_lb.config import DecodeLbSettings
from services.decode_lb.server import DecodeLb, build

CARD = ModelCard(name="tiny", fingerprint=b"f" * 32, block_tokens=128)


class FixedTable(ReplicaTable):
    def __init__(self, *replicas):
        super().__init__("decode", time.monotonic)
        self.replicas = list(replicas)

    def snapshot(self):
        return tuple(self.replicas)


def replica(name, **changes):
    known = {
        "service": "decode", "replica": name, "boot_id": f"boot-{name}", "address": f"{name}:1", "model": CARD,
        "state": REPLICA_STATE_READY, "total_blocks": 100, "tiers": (), "version": "0", "ep_group": "", "seen": 0.0,
    }  # fmt: skip
    return Replica(**{**known, **changes})


def balancer(*replicas):
    table, bookings = FixedTable(*replicas), Bookings()
    return DecodeLb(table, bookings, CollectorRegistry(), boot_id="abc", full_batch=32), table, bookings


def ask(number=1, kv_tokens=1000, **changes):
    given = {"request_id": f"r{number}", "fingerprint": CARD.fingerprint, "kv_tokens": kv_tokens, "max_tokens": 100}
    return DecodePickRequest(**{**given, **changes})


def report(name, **load):
    return LoadReport(service="decode", replica=name, boot_id=f"boot-{name}", **load)


async def test_a_pick_is_booked_before_the_next_one():
    made, _table, bookings = balancer(replica("a"), replica("b"))
    picked = [await made.Pick(ask(n), None) for n in range(4)]

    assert ["a", "b", "a", "b"] == [reply.replica for reply in picked]
    assert [("a:1", "boot-a"), ("b:1", "boot-b")] == [(reply.address, reply.boot_id) for reply in picked[:2]]
    assert 4 == len({reply.booking_id for reply in picked}) == len(bookings)


async def test_a_release_frees_the_load():
    made, _table, bookings = balancer(replica("a"), replica("b"))
    first = await made.Pick(ask(1), None)
    for _ in range(2):
        await made.Release(DecodeReleaseRequest(booking_id=first.booking_id), None)

    assert 0 == len(bookings)
    assert "a" == (await made.Pick(ask(2), None)).replica


async def test_reported_sequences_and_kv_count():
    made, _table, _bookings = balancer(replica("a"), replica("b"))
    made.on_load(report("a", running_sequences=3, queued_sequences=1, free_blocks=90, total_blocks=100))
    made.on_load(report("b", running_sequences=3, free_blocks=90, total_blocks=100))

    assert "b" == (await made.Pick(ask(), None)).replica


async def test_blocks_booked_for_kv_on_its_way_are_not_given_twice():
    """Nine prompts of ten blocks leave ten of a hundred, and the nine may grow, before a single report came."""
    made, _table, _bookings = balancer(replica("a"))
    for number in range(9):
        await made.Pick(ask(number, 1279), None)

    with pytest.raises(Overloaded):
        await made.Pick(ask(9, 128), None)
    assert "a" == (await made.Pick(ask(10, 127), None)).replica


async def test_a_reported_queue_closes_a_replica_until_it_is_gone():
    made, _table, _bookings = balancer(replica("a"))
    made.on_load(report("a", running_sequences=3, queued_sequences=1, free_blocks=60, total_blocks=100))
    with pytest.raises(Overloaded, match="all decode replicas are full"):
        await made.Pick(ask(), None)
    made.on_load(report("a", running_sequences=4, free_blocks=60, total_blocks=100))

    assert "a" == (await made.Pick(ask(), None)).replica


async def test_a_repeated_pick_is_one_booking_and_not_in_its_own_way():
    """The reply got lost, so the caller asks again."""
    made, _table, bookings = balancer(replica("a"), replica("b"))
    first = await made.Pick(ask(1), None)
    again = await made.Pick(ask(1), None)

    assert ("a", 1) == (again.replica, len(bookings))
    await made.Release(DecodeReleaseRequest(booking_id=first.booking_id), None)
    assert 1 == len(bookings)


async def test_bookings_end_with_deadline_and_with_the_replica():
    made, table, bookings = balancer(replica("a"), replica("b"))
    await made.Pick(ask(1, deadline_unix_seconds=time.time() + 60), None)
    await made.Pick(ask(2), None)
    made.sweep(time.time() + 61)
    after_deadline = len(bookings)
    table.replicas = [replica("a"), replica("b", boot_id="next boot")]
    made.sweep(time.time())

    assert (1, 0) == (after_deadline, len(bookings))


async def test_a_whole_balancer_serves_without_nats():
    """It starts, says that there is no replica, and lives on."""
    settings = DecodeLbSettings(nats_url=f"nats://127.0.0.1:{free_port()}")
    async with running(settings, build) as service, open_channel(service.address) as channel:
        stub = DecodeLbStub(channel)
        with pytest.raises(NoReplica):
            await stub.Pick(ask(), timeout=30)
        await stub.Release(DecodeReleaseRequest(booking_id="unknown"), timeout=30)

        assert service.health()["ready"]

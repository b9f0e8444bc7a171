"""Do picks, releases and reports over the wire reach policy and bookings?"""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from proto.common_pb2 import ModelCard
from proto.events_pb2 import LoadReport, ReplicaRecord
from proto.prefill_lb_pb2 import PrefillPickRequest, PrefillReleaseRequest
from proto.prefill_lb_pb2_grpc import PrefillLbStub
from services.chassis.bus import Bus
from services.chassis.channel import open_channel
from services.chassis.errors import NoReplica
from services.chassis.registry import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    Registry,
    Replica,
    ReplicaTable,
)
from services.chassis.testing import NatsServer, running
from services.prefill_lb.bookings import Bookings
from services.prefill_lb.config import PrefillLbSettings
from services.prefill_lb.server import PrefillLb, build

CARD = ModelCard(name="tiny", fingerprint=b"f" * 32, block_tokens=128)


class FixedTable(ReplicaTable):
    def __init__(self, *replicas):
        super().__init__("prefill", time.monotonic)
        self.replicas = list(replicas)

    def snapshot(self):
        return tuple(self.replicas)


def replica(name, **changes):
    known = {
        "service": "prefill", "replica": name, "boot_id": f"boot-{name}", "address": f"{name}:1", "model": CARD,
        "state": REPLICA_STATE_READY, "total_blocks": 1000, "tiers": (), "version": "0", "ep_group": "", "seen": 0.0,
    }  # fmt: skip
    return Replica(**{**known, **changes})


def balancer(*replicas):
    table, bookings = FixedTable(*replicas), Bookings()
    made = PrefillLb(table, bookings, CollectorRegistry(), boot_id="abc", max_queued_tokens=1 << 20)
    return made, table, bookings


def ask(number=1, tokens=1000, **changes):
    given = {"request_id": f"r{number}", "fingerprint": CARD.fingerprint, "prompt_tokens": tokens}
    return PrefillPickRequest(**{**given, **changes})


async def test_a_pick_is_booked_before_the_next_one():
    """Simultaneous prompts do not all go to the replica that was idle a moment ago."""
    made, _table, bookings = balancer(replica("a"), replica("b"))
    picked = [await made.Pick(ask(n), None) for n in range(4)]

    assert ["a", "b", "a", "b"] == [reply.replica for reply in picked]
    assert [("a:1", "boot-a"), ("b:1", "boot-b")] == [(reply.address, reply.boot_id) for reply in picked[:2]]
    assert 4 == len({reply.booking_id for reply in picked}) == len(bookings)


async def test_a_release_frees_the_load():
    made, _table, bookings = balancer(replica("a"), replica("b"))
    first = await made.Pick(ask(1), None)
    await made.Release(PrefillReleaseRequest(booking_id=first.booking_id), None)
    await made.Release(PrefillReleaseRequest(booking_id=first.booking_id), None)

    assert 0 == len(bookings)
    assert "a" == (await made.Pick(ask(2), None)).replica


async def test_stored_tokens_are_not_booked():
    made, _table, bookings = balancer(replica("a"))
    await made.Pick(ask(1, 1000, hit_tokens=896), None)

    assert 104 == bookings.queued_tokens(("a", "boot-a"), time.time())


async def test_reported_queues_count():
    made, _table, _bookings = balancer(replica("a"), replica("b"))
    made.on_load(LoadReport(replica="a", boot_id="boot-a", queued_tokens=5000))

    assert "b" == (await made.Pick(ask(), None)).replica


async def test_a_repeated_pick_is_one_booking_and_not_in_its_own_way():
    """The reply got lost, so the caller asks again."""
    made, _table, bookings = balancer(replica("a"), replica("b"))
    first = await made.Pick(ask(1), None)
    again = await made.Pick(ask(1), None)

    assert ("a", 1) == (again.replica, len(bookings))
    await made.Release(PrefillReleaseRequest(booking_id=first.booking_id), None)
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


async def test_draining_replicas_take_nothing():
    made, _table, _bookings = balancer(replica("a", state=REPLICA_STATE_DRAINING), replica("b"))

    assert "b" == (await made.Pick(ask(), None)).replica


async def test_the_tier_used_is_told():
    made, _table, _bookings = balancer(replica("a", tiers=(0,)), replica("long", tiers=(3,), total_blocks=10_000))

    reply = await made.Pick(ask(tokens=20_000), None)

    assert ("long", 3) == (reply.replica, reply.tier)


async def test_a_whole_balancer_learns_of_replicas_and_loads_from_nats():
    """Registry and reports, over a real NATS, with the real service around it."""
    async with NatsServer() as nats, running(PrefillLbSettings(nats_url=nats.url), build) as service:
        buses = [Bus(nats.url), Bus(nats.url)]
        registries = [Registry(bus) for bus in buses]
        for name, bus, registry in zip("ab", buses, registries, strict=True):
            bus.connect()
            record = ReplicaRecord(
                service="prefill", replica=name, boot_id=f"boot-{name}", address=f"{name}:1", model=CARD,
                state=REPLICA_STATE_READY, total_blocks=1000,
            )  # fmt: skip
            registry.register(record)
        await service.registry.watch("prefill").wait_for(2, 30)
        report = LoadReport(service="prefill", replica="a", boot_id="boot-a", queued_tokens=5000)
        async with open_channel(service.address) as channel:
            stub = PrefillLbStub(channel)
            picked = []
            for number in range(100):
                await buses[0].publish_load(report)
                reply = await stub.Pick(ask(number), timeout=30)
                await stub.Release(PrefillReleaseRequest(booking_id=reply.booking_id), timeout=30)
                picked.append(reply.replica)
                if reply.replica == "b":
                    break
                await asyncio.sleep(0.02)
            with pytest.raises(NoReplica):
                await stub.Pick(ask(fingerprint=b"o" * 32), timeout=30)
        for registry, bus in zip(registries, buses, strict=True):
            await registry.close()
            await bus.close()

    assert "b" == picked[-1]

"""Translate between the wire and the decode policy."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from proto.decode_lb_pb2 import DecodePickReply, DecodePickRequest, DecodeReleaseReply, DecodeReleaseRequest
from proto.decode_lb_pb2_grpc import DecodeLbServicer, add_DecodeLbServicer_to_server
from proto.events_pb2 import LoadReport
from services.chassis.errors import FathomError
from services.chassis.registry import Replica, ReplicaTable
from services.chassis.service import Service
from services.decode_lb.bookings import Booking, Bookings, Load
from services.decode_lb.config import DecodeLbSettings
from services.decode_lb.policy import Candidate, Sequence, blocks_for, pick

SWEEP_SECONDS = 1.0

DEFAULT_BOOKING_SECONDS = 600.0
"""For callers that give no deadline."""


class DecodeLb(DecodeLbServicer):
    """Picks and books in one step of the event loop: two picks never see the same load."""

    def __init__(
        self, replicas: ReplicaTable, bookings: Bookings, metrics: CollectorRegistry, *, boot_id: str, full_batch: int
    ) -> None:
        """boot_id: makes booking ids that no earlier boot has given."""
        self._replicas = replicas
        self._bookings = bookings
        self._ids = (f"{boot_id[:12]}-{number}" for number in itertools.count(1))
        self._full_batch = full_batch
        self._picks = Counter(
            "fathom_decode_lb_picks", "Picks by replica, or by the error's name.", ["result"], registry=metrics
        )
        booked = Gauge("fathom_decode_lb_bookings", "Sequences booked and not yet released.", registry=metrics)
        booked.set_function(lambda: len(bookings))

    async def Pick(self, request: DecodePickRequest, context: Any) -> DecodePickReply:  # noqa: ARG002 - gRPC's signature
        """Choose a replica and book the sequence on it."""
        now = time.time()
        self.sweep(now)
        self._bookings.forget_request(request.request_id)  # or it would stand in its own way
        sequence = Sequence(request.fingerprint, request.kv_tokens, request.max_tokens, frozenset(request.exclude))
        try:
            chosen = pick(self._candidates(now), sequence, full_batch=self._full_batch)
        except FathomError as refusal:
            self._picks.labels(refusal.kind).inc()
            raise
        self._picks.labels(chosen.replica).inc()
        return self._book(request, sequence, chosen, now)

    async def Release(self, request: DecodeReleaseRequest, context: Any) -> DecodeReleaseReply:  # noqa: ARG002 - gRPC's signature
        """Give a booking back."""
        self._bookings.release(request.booking_id)
        return DecodeReleaseReply()

    def on_load(self, report: LoadReport) -> None:
        """Take a replica's report in."""
        used_blocks = max(report.total_blocks - report.free_blocks, 0)
        load = Load(
            sequences=report.running_sequences + report.queued_sequences,
            kv_tokens=report.kv_tokens,
            kv_blocks=used_blocks,
            expected_blocks=used_blocks,
            queued=report.queued_sequences,
        )
        self._bookings.report((report.replica, report.boot_id), load, time.time())

    def sweep(self, now: float) -> None:
        """Drop bookings whose deadline has passed or whose replica is gone."""
        self._bookings.expire(now)
        self._bookings.keep_boots({(replica.replica, replica.boot_id) for replica in self._replicas.snapshot()})

    def _candidates(self, now: float) -> list[Candidate]:
        return [self._candidate(replica, now) for replica in self._replicas.snapshot() if replica.model is not None]

    def _candidate(self, replica: Replica, now: float) -> Candidate:
        assert replica.model is not None
        load = self._bookings.load((replica.replica, replica.boot_id), now)
        return Candidate(
            replica=replica.replica,
            boot_id=replica.boot_id,
            address=replica.address,
            ready=replica.is_ready,
            fingerprint=replica.model.fingerprint,
            block_tokens=replica.model.block_tokens,
            total_blocks=replica.total_blocks,
            free_blocks=replica.total_blocks - load.kv_blocks,
            free_after_answers=replica.total_blocks - load.expected_blocks,
            sequences=load.sequences,
            queued=load.queued,
            kv_tokens=load.kv_tokens,
        )

    def _book(self, request: DecodePickRequest, sequence: Sequence, chosen: Candidate, now: float) -> DecodePickReply:
        booking = Booking(
            booking_id=next(self._ids),
            request_id=request.request_id,
            boot=(chosen.replica, chosen.boot_id),
            kv_tokens=sequence.kv_tokens,
            kv_blocks=blocks_for(sequence.kv_tokens + 1, chosen.block_tokens),
            expected_blocks=blocks_for(sequence.expected_tokens, chosen.block_tokens),
            made_seconds=now,
            deadline_seconds=request.deadline_unix_seconds or now + DEFAULT_BOOKING_SECONDS,
        )
        self._bookings.book(booking)
        return DecodePickReply(
            replica=chosen.replica, address=chosen.address, booking_id=booking.booking_id, boot_id=chosen.boot_id
        )


async def build(service: Service) -> None:
    """Wire one decode balancer: the table of decode replicas, their load reports, the bookings."""
    settings: DecodeLbSettings = service.settings
    balancer = DecodeLb(
        service.registry.watch("decode"),
        Bookings(),
        service.metrics,
        boot_id=service.boot_id,
        full_batch=settings.full_batch,
    )
    service.bus.subscribe_load("decode", balancer.on_load)
    add_DecodeLbServicer_to_server(balancer, service.server)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            balancer.sweep(time.time())

    service.spawn(sweep(), "sweep bookings")

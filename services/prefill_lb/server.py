"""Translate between the wire and the prefill policy."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from proto.events_pb2 import LoadReport
from proto.prefill_lb_pb2 import PrefillPickReply, PrefillPickRequest, PrefillReleaseReply, PrefillReleaseRequest
from proto.prefill_lb_pb2_grpc import PrefillLbServicer, add_PrefillLbServicer_to_server
from services.chassis.errors import FathomError
from services.chassis.registry import Replica, ReplicaTable
from services.chassis.service import Service
from services.prefill_lb.bookings import Booking, Bookings
from services.prefill_lb.config import PrefillLbSettings
from services.prefill_lb.policy import Candidate, Choice, Prompt, pick

SWEEP_SECONDS = 1.0

DEFAULT_BOOKING_SECONDS = 600.0
"""For callers that give no deadline."""


class PrefillLb(PrefillLbServicer):
    """Picks and books in one step of the event loop: two picks never see the same load."""

    def __init__(
        self,
        replicas: ReplicaTable,
        bookings: Bookings,
        metrics: CollectorRegistry,
        *,
        boot_id: str,
        max_queued_tokens: int,
    ) -> None:
        """boot_id: makes booking ids that no earlier boot has given."""
        self._replicas = replicas
        self._bookings = bookings
        self._ids = (f"{boot_id[:12]}-{number}" for number in itertools.count(1))
        self._max_queued_tokens = max_queued_tokens
        self._picks = Counter(
            "fathom_prefill_lb_picks", "Picks by replica, or by the error's name.", ["result"], registry=metrics
        )
        booked = Gauge("fathom_prefill_lb_bookings", "Prompts booked and not yet released.", registry=metrics)
        booked.set_function(lambda: len(bookings))

    async def Pick(self, request: PrefillPickRequest, context: Any) -> PrefillPickReply:  # noqa: ARG002 - gRPC's signature
        """Choose a replica and book the prompt on it."""
        now = time.time()
        self.sweep(now)
        self._bookings.forget_request(request.request_id)  # or it would stand in its own way
        prompt = Prompt(request.fingerprint, request.prompt_tokens, request.hit_tokens, frozenset(request.exclude))
        try:
            choice = pick(self._candidates(now), prompt, max_queued_tokens=self._max_queued_tokens)
        except FathomError as refusal:
            self._picks.labels(refusal.kind).inc()
            raise
        self._picks.labels(choice.candidate.replica).inc()
        return self._book(request, prompt, choice, now)

    async def Release(self, request: PrefillReleaseRequest, context: Any) -> PrefillReleaseReply:  # noqa: ARG002 - gRPC's signature
        """Give a booking back."""
        self._bookings.release(request.booking_id)
        return PrefillReleaseReply()

    def on_load(self, report: LoadReport) -> None:
        """Take a replica's report in."""
        boot = (report.replica, report.boot_id)
        self._bookings.report(boot, report.queued_tokens, report.tokens_per_second, time.time())

    def sweep(self, now: float) -> None:
        """Drop bookings whose deadline has passed or whose replica is gone."""
        self._bookings.expire(now)
        self._bookings.keep_boots({(replica.replica, replica.boot_id) for replica in self._replicas.snapshot()})

    def _candidates(self, now: float) -> list[Candidate]:
        return [self._candidate(replica, now) for replica in self._replicas.snapshot() if replica.model is not None]

    def _candidate(self, replica: Replica, now: float) -> Candidate:
        assert replica.model is not None
        boot = (replica.replica, replica.boot_id)
        return Candidate(
            replica=replica.replica,
            boot_id=replica.boot_id,
            address=replica.address,
            ready=replica.is_ready,
            fingerprint=replica.model.fingerprint,
            block_tokens=replica.model.block_tokens,
            total_blocks=replica.total_blocks,
            tiers=frozenset(replica.tiers),
            queued_tokens=self._bookings.queued_tokens(boot, now),
            tokens_per_second=self._bookings.tokens_per_second(boot, now),
        )

    def _book(self, request: PrefillPickRequest, prompt: Prompt, choice: Choice, now: float) -> PrefillPickReply:
        chosen = choice.candidate
        booking = Booking(
            booking_id=next(self._ids),
            request_id=request.request_id,
            boot=(chosen.replica, chosen.boot_id),
            uncached_tokens=prompt.uncached_tokens,
            made_seconds=now,
            deadline_seconds=request.deadline_unix_seconds or now + DEFAULT_BOOKING_SECONDS,
        )
        self._bookings.book(booking)
        return PrefillPickReply(
            replica=chosen.replica,
            address=chosen.address,
            booking_id=booking.booking_id,
            tier=choice.tier,
            boot_id=chosen.boot_id,
        )


async def build(service: Service) -> None:
    """Wire one prefill balancer: the table of prefill replicas, their load reports, the bookings."""
    settings: PrefillLbSettings = service.settings
    balancer = PrefillLb(
        service.registry.watch("prefill"),
        Bookings(),
        service.metrics,
        boot_id=service.boot_id,
        max_queued_tokens=settings.max_queued_tokens,
    )
    service.bus.subscribe_load("prefill", balancer.on_load)
    add_PrefillLbServicer_to_server(balancer, service.server)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            balancer.sweep(time.time())

    service.spawn(sweep(), "sweep bookings")

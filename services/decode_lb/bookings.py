"""How many sequences, and how much KV, does each decode replica carry right now?

A pick books its sequence at once; the booking lives until the request ends. Reports tell the rest: answers that grew,
sequences of other balancers. A booking younger than the last report is added to it; and since a booked sequence whose
KV is still travelling is in no report, the load is never taken as less than all bookings together. So nothing is
counted twice and nothing is missed. Times are passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SETTLE_SECONDS = 0.1
"""A report that arrives sooner than this after a booking may have been made before its sequence got there."""

STALE_SECONDS = 5.0
"""Reports come every second at least. Older than this, NATS or the replica is away: only bookings count."""

Boot = tuple[str, str]
"""A replica's name and boot id."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A sequence that was sent to a replica and has not ended."""

    booking_id: str
    request_id: str
    boot: Boot
    kv_tokens: int
    kv_blocks: int
    """Room for the KV handed over."""
    expected_blocks: int
    """Room for that and an estimated answer."""
    made_seconds: float
    """Unix time."""
    deadline_seconds: float
    """Unix time after which nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica carries."""

    sequences: int
    kv_tokens: int
    kv_blocks: int
    """Blocks that hold KV or wait for KV on its way."""
    expected_blocks: int
    """The same with estimated answers."""
    queued: int = 0
    """Sequences that the replica itself says wait for blocks; bookings know nothing of it."""


@dataclass(frozen=True, slots=True)
class _Report:
    load: Load
    arrived_seconds: float


class Bookings:
    """What is booked and reported per replica boot. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._bookings: dict[str, Booking] = {}
        self._by_request: dict[str, str] = {}
        self._reports: dict[Boot, _Report] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def book(self, booking: Booking) -> None:
        """Count a sequence. A request has one booking: an earlier one, whose answer got lost, is replaced."""
        self.forget_request(booking.request_id)
        self._bookings[booking.booking_id] = booking
        self._by_request[booking.request_id] = booking.booking_id

    def release(self, booking_id: str) -> bool:
        """Forget a booking; False when there is none (released before, expired, made by an earlier boot)."""
        booking = self._bookings.pop(booking_id, None)
        if booking is None:
            return False
        self._by_request.pop(booking.request_id, None)
        return True

    def forget_request(self, request_id: str) -> None:
        """Forget what is booked for a request, if anything: who asks again has nothing from before."""
        self.release(self._by_request.get(request_id, ""))

    def report(self, boot: Boot, load: Load, now: float) -> None:
        self._reports[boot] = _Report(load, now)

    def expire(self, now: float) -> int:
        """Drop bookings whose deadline has passed; return how many."""
        return self._drop([b.booking_id for b in self._bookings.values() if b.deadline_seconds <= now])

    def keep_boots(self, alive: Collection[Boot]) -> int:
        """Drop what belongs to replicas that are gone or restarted; return how many bookings that were."""
        self._reports = {boot: report for boot, report in self._reports.items() if boot in alive}
        return self._drop([b.booking_id for b in self._bookings.values() if b.boot not in alive])

    def load(self, boot: Boot, now: float) -> Load:
        """What the replica carries: reported and booked work, each once."""
        mine = [b for b in self._bookings.values() if b.boot == boot]
        booked = _total(mine)
        report = self._reports.get(boot)
        if report is None or now - report.arrived_seconds > STALE_SECONDS:
            return booked
        since = _total([b for b in mine if b.made_seconds >= report.arrived_seconds - SETTLE_SECONDS])
        return Load(
            max(booked.sequences, report.load.sequences + since.sequences),
            max(booked.kv_tokens, report.load.kv_tokens + since.kv_tokens),
            max(booked.kv_blocks, report.load.kv_blocks + since.kv_blocks),
            max(booked.expected_blocks, report.load.expected_blocks + since.expected_blocks),
            report.load.queued,
        )

    def _drop(self, booking_ids: Collection[str]) -> int:
        return sum(self.release(booking_id) for booking_id in booking_ids)


def _total(bookings: Collection[Booking]) -> Load:
    return Load(
        len(bookings),
        sum(b.kv_tokens for b in bookings),
        sum(b.kv_blocks for b in bookings),
        sum(b.expected_blocks for b in bookings),
    )

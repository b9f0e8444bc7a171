"""How many prompt tokens wait at each prefill replica, right now?

Reports are up to a second old, picks are milliseconds apart. So each pick books its tokens at once, and a booking
counts until a report that is surely younger than it has arrived; from then on the report speaks for it. Nothing is
counted twice, and a burst between two reports cannot land on one replica. Times are passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SETTLE_SECONDS = 0.1
"""A report that arrives sooner than this after a booking may have been made before its prompt got there."""

STALE_SECONDS = 5.0
"""Reports come every second at least. Older than this, NATS or the replica is away: only bookings count."""

Boot = tuple[str, str]
"""A replica's name and boot id."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A prompt that was sent to a replica and has no first token yet."""

    booking_id: str
    request_id: str
    boot: Boot
    uncached_tokens: int
    made_seconds: float
    """Unix time."""
    deadline_seconds: float
    """Unix time after which nobody waits for it."""


@dataclass(frozen=True, slots=True)
class _Report:
    queued_tokens: int
    tokens_per_second: float
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
        """Count a prompt. A request has one booking: an earlier one, whose answer got lost, is replaced."""
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

    def report(self, boot: Boot, queued_tokens: int, tokens_per_second: float, now: float) -> None:
        self._reports[boot] = _Report(queued_tokens, tokens_per_second, now)

    def expire(self, now: float) -> int:
        """Drop bookings whose deadline has passed; return how many."""
        return self._drop([b.booking_id for b in self._bookings.values() if b.deadline_seconds <= now])

    def keep_boots(self, alive: Collection[Boot]) -> int:
        """Drop what belongs to replicas that are gone or restarted; return how many bookings that were."""
        self._reports = {boot: report for boot, report in self._reports.items() if boot in alive}
        return self._drop([b.booking_id for b in self._bookings.values() if b.boot not in alive])

    def queued_tokens(self, boot: Boot, now: float) -> int:
        """Prompt tokens not yet computed there: the last report plus what was booked since. Unit: tokens."""
        report = self._fresh(boot, now)
        since = report.arrived_seconds - SETTLE_SECONDS if report else 0.0
        booked = sum(b.uncached_tokens for b in self._bookings.values() if b.boot == boot and b.made_seconds >= since)
        return booked + (report.queued_tokens if report else 0)

    def tokens_per_second(self, boot: Boot, now: float) -> float:
        """Last reported speed; 0 when unknown."""
        report = self._fresh(boot, now)
        return report.tokens_per_second if report else 0.0

    def _fresh(self, boot: Boot, now: float) -> _Report | None:
        report = self._reports.get(boot)
        return report if report and now - report.arrived_seconds <= STALE_SECONDS else None

    def _drop(self, booking_ids: Collection[str]) -> int:
        return sum(self.release(booking_id) for booking_id in booking_ids)

"""How many prompt tokens wait at each prefill replica, right now?"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.prefill_lb.bookings import SETTLE_SECONDS, STALE_SECONDS, Booking, Bookings
from services.prefill_lb.policy import Candidate, Prompt, pick

A, B = ("a", "boot-a"), ("b", "boot-b")


def booking(number=1, boot=A, tokens=100, made=0.0, deadline=1000.0, request=None):
    return Booking(f"booking-{number}", request or f"request-{number}", boot, tokens, made, deadline)


def test_a_booking_counts_at_once_and_ends_with_its_release():
    bookings = Bookings()
    bookings.book(booking(1, tokens=100))
    bookings.book(booking(2, tokens=50))

    assert 150 == bookings.queued_tokens(A, 0.0)
    assert bookings.release("booking-1")
    assert 50 == bookings.queued_tokens(A, 0.0)


def test_releasing_twice_is_harmless():
    bookings = Bookings()
    bookings.book(booking())

    assert [True, False] == [bookings.release("booking-1"), bookings.release("booking-1")]


def test_a_report_speaks_for_bookings_that_are_surely_older():
    """Booked and reported work is never counted twice."""
    bookings = Bookings()
    bookings.book(booking(1, tokens=100, made=10.0))
    bookings.report(A, 80, 0.0, 10.0 + SETTLE_SECONDS + 0.01)

    assert 80 == bookings.queued_tokens(A, 10.3)


def test_a_report_does_not_speak_for_bookings_on_their_way():
    """A burst between two reports is seen by the next pick."""
    bookings = Bookings()
    bookings.report(A, 80, 0.0, 10.0)
    bookings.book(booking(1, tokens=100, made=10.0 - SETTLE_SECONDS / 2))
    bookings.book(booking(2, tokens=7, made=10.05))

    assert 187 == bookings.queued_tokens(A, 10.1)


def test_without_fresh_reports_bookings_alone_count():
    """NATS may be away for hours."""
    bookings = Bookings()
    bookings.book(booking(1, tokens=100, made=1.0))
    bookings.report(A, 9000, 500.0, 10.0)

    late = 10.0 + STALE_SECONDS + 0.1
    assert (100, 0.0) == (bookings.queued_tokens(A, late), bookings.tokens_per_second(A, late))


def test_a_booking_ends_with_its_deadline():
    bookings = Bookings()
    bookings.book(booking(1, deadline=5.0))
    bookings.book(booking(2, deadline=6.0))

    assert (0, 1, 1) == (bookings.expire(4.9), bookings.expire(5.0), len(bookings))


def test_a_restarted_replica_starts_without_load():
    bookings = Bookings()
    bookings.book(booking(1, boot=A))
    bookings.book(booking(2, boot=B))
    bookings.report(A, 500, 0.0, 1.0)

    assert 1 == bookings.keep_boots({("a", "another-boot"), B})
    assert (0, 0, 100) == tuple(bookings.queued_tokens(b, 1.0) for b in (A, ("a", "another-boot"), B))


def test_a_request_has_one_booking():
    """A pick whose answer was lost does not leave a second one when it is asked again."""
    bookings = Bookings()
    bookings.book(booking(1, boot=A, request="same"))
    bookings.book(booking(2, boot=B, request="same"))

    assert (0, 100, 1) == (bookings.queued_tokens(A, 0.0), bookings.queued_tokens(B, 0.0), len(bookings))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("book"), st.integers(0, 15), st.integers(0, 30)),
        st.tuples(st.just("release"), st.integers(0, 15), st.just(0)),
        st.tuples(st.just("expire"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 1), st.integers(0, 500)),
    ),
    max_size=40,
)


@given(actions)
@settings(max_examples=25, deadline=None)
def test_no_booking_outlives_release_deadline_and_boot(steps):
    """Whatever happens in whatever order, nothing is left when all is released, and no count goes below zero."""
    bookings, boots, given_ids = Bookings(), [A, B], []
    for now, (act, number, value) in enumerate(steps):
        if act == "book":
            given_ids.append(f"booking-{now}")
            bookings.book(booking(now, boots[number % 2], made=now, deadline=now + value, request=f"r{number}"))
        elif act == "release":
            bookings.release(given_ids[number % len(given_ids)] if given_ids else "none")
        elif act == "expire":
            bookings.expire(now + number)
        elif act == "restart":
            boots[number] = (boots[number][0], f"boot-{now}")
            bookings.keep_boots(set(boots))
        else:
            bookings.report(boots[number], value, 0.0, now)
        assert all(bookings.queued_tokens(boot, now) >= 0 for boot in boots)
    for booking_id in given_ids:
        bookings.release(booking_id)
    assert 0 == len(bookings)
    assert [0, 0] == [bookings.queued_tokens(boot, len(steps) + STALE_SECONDS + 1) for boot in boots]


@given(st.lists(st.integers(1, 15_000), min_size=1, max_size=60), st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_a_burst_is_spread_evenly(prompts, num_replicas):
    """Between two reports, no replica gets ahead of another by more than the longest prompt."""
    bookings = Bookings()
    boots = [(f"r{n}", "boot") for n in range(num_replicas)]
    fleet = [
        Candidate(name, boot, "x:1", ready=True, fingerprint=b"", block_tokens=128, total_blocks=0,
                  tiers=frozenset(), queued_tokens=0, tokens_per_second=0.0)
        for name, boot in boots
    ]  # fmt: skip
    for number, tokens in enumerate(prompts):
        now = number * 0.001
        seen = [replace(c, queued_tokens=bookings.queued_tokens((c.replica, c.boot_id), now)) for c in fleet]
        chosen = pick(seen, Prompt(b"", tokens), max_queued_tokens=1 << 40).candidate
        bookings.book(booking(number, (chosen.replica, chosen.boot_id), tokens, made=now))

    loads = [bookings.queued_tokens(boot, 1.0) for boot in boots]
    assert sum(prompts) == sum(loads)
    assert max(loads) - min(loads) <= max(prompts)

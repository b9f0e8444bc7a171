"""How many sequences, and how much KV, does each decode replica carry right now?"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode_lb.bookings import SETTLE_SECONDS, STALE_SECONDS, Booking, Bookings, Load
from services.decode_lb.policy import Candidate, Sequence, pick

A, B = ("a", "boot-a"), ("b", "boot-b")
NOTHING = Load(0, 0, 0, 0)


def booking(number=1, boot=A, kv_tokens=1000, made=0.0, deadline=1000.0, request=None):
    blocks = kv_tokens // 128 + 1
    request_id = request or f"request-{number}"
    return Booking(f"booking-{number}", request_id, boot, kv_tokens, blocks, blocks + 4, made, deadline)


def test_a_booking_counts_at_once_and_ends_with_its_release():
    bookings = Bookings()
    bookings.book(booking(1))
    bookings.book(booking(2, kv_tokens=128))

    assert Load(2, 1128, 10, 18) == bookings.load(A, 0.0)
    assert [True, False] == [bookings.release("booking-1"), bookings.release("booking-1")]
    assert Load(1, 128, 2, 6) == bookings.load(A, 0.0)


def test_a_running_sequence_is_counted_once():
    """Booked and reported: the report knows how far it has grown."""
    bookings = Bookings()
    bookings.book(booking(made=10.0))
    bookings.report(A, Load(1, 1200, 10, 10), 20.0)

    assert Load(1, 1200, 10, 12) == bookings.load(A, 20.1)


def test_kv_on_its_way_is_not_forgotten():
    """Prefill may need seconds for its last chunk; until the handoff the replica reports nothing of it."""
    bookings = Bookings()
    bookings.book(booking(made=10.0))
    bookings.report(A, NOTHING, 10.0 + SETTLE_SECONDS + 0.5)

    assert Load(1, 1000, 8, 12) == bookings.load(A, 10.7)


def test_a_burst_between_two_reports_adds_up():
    bookings = Bookings()
    bookings.report(A, Load(5, 6000, 50, 50), 10.0)
    bookings.book(booking(1, made=10.01))
    bookings.book(booking(2, made=10.02))

    assert Load(7, 8000, 66, 74) == bookings.load(A, 10.03)


def test_without_fresh_reports_bookings_alone_count():
    bookings = Bookings()
    bookings.report(A, Load(5, 6000, 50, 50), 10.0)
    bookings.book(booking(made=10.0))

    assert Load(1, 1000, 8, 12) == bookings.load(A, 10.0 + STALE_SECONDS + 0.1)


def test_a_reported_queue_counts_while_the_report_does():
    bookings = Bookings()
    bookings.book(booking(made=10.0))
    bookings.report(A, Load(2, 1200, 10, 10, queued=1), 20.0)

    assert [1, 0] == [bookings.load(A, now).queued for now in (20.1, 20.0 + STALE_SECONDS + 0.1)]


def test_bookings_end_with_deadline_or_boot():
    bookings = Bookings()
    bookings.book(booking(1, deadline=5.0))
    bookings.book(booking(2, B))
    bookings.book(booking(3))

    assert (1, 1, 1) == (bookings.expire(5.0), bookings.keep_boots({("a", "next"), B}), len(bookings))
    assert [NOTHING, NOTHING] == [bookings.load(A, 6.0), bookings.load(("a", "next"), 6.0)]


def test_a_request_has_one_booking():
    bookings = Bookings()
    bookings.book(booking(1, A, request="same"))
    bookings.book(booking(2, B, request="same"))

    assert (NOTHING, 1) == (bookings.load(A, 0.0), len(bookings))


actions = st.lists(
    st.tuples(st.sampled_from(["book", "release", "expire", "restart", "report"]), st.integers(0, 15)), max_size=40
)


@given(actions)
@settings(max_examples=25, deadline=None)
def test_no_booking_outlives_release_deadline_and_boot(steps):
    bookings, boots, given_ids = Bookings(), [A, B], []
    for now, (act, number) in enumerate(steps):
        if act == "book":
            given_ids.append(f"booking-{now}")
            bookings.book(booking(now, boots[number % 2], made=now, deadline=now + number, request=f"r{number}"))
        elif act == "release" and given_ids:
            bookings.release(given_ids[number % len(given_ids)])
        elif act == "expire":
            bookings.expire(now + number)
        elif act == "restart":
            boots[number % 2] = (boots[number % 2][0], f"boot-{now}")
            bookings.keep_boots(set(boots))
        elif act == "report":
            bookings.report(boots[number % 2], Load(number, number, number, number), now)
    for booking_id in given_ids:
        bookings.release(booking_id)
    assert 0 == len(bookings)
    assert [NOTHING, NOTHING] == [bookings.load(boot, len(steps) + STALE_SECONDS + 1) for boot in boots]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60), st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_arrivals_are_spread_evenly(kv_lengths, num_replicas):
    """No replica's load gets ahead of another's by more than one sequence of the longest kind."""
    bookings = Bookings()
    boots = [(f"r{n}", "boot") for n in range(num_replicas)]

    def seen(boot, now):
        load = bookings.load(boot, now)
        return Candidate(
            replica=boot[0],
            boot_id=boot[1],
            address="x:1",
            ready=True,
            fingerprint=b"",
            block_tokens=128,
            total_blocks=10_000,
            free_blocks=10_000 - load.kv_blocks,
            free_after_answers=10_000 - load.expected_blocks,
            sequences=load.sequences,
            queued=load.queued,
            kv_tokens=load.kv_tokens,
        )

    for number, kv_tokens in enumerate(kv_lengths):
        now = number * 0.001
        chosen = pick([seen(boot, now) for boot in boots], Sequence(b"", kv_tokens, 100), full_batch=32)
        bookings.book(replace(booking(number, (chosen.replica, chosen.boot_id), kv_tokens), made_seconds=now))

    loads = [bookings.load(boot, 1.0) for boot in boots]
    weights = [load.sequences / 32 + load.kv_tokens / 1_280_000 for load in loads]
    assert len(kv_lengths) == sum(load.sequences for load in loads)
    assert max(weights) - min(weights) <= 1 / 32 + max(kv_lengths) / 1_280_000 + 1e-9

"""Do leases and pins keep exactly what they should, end by themselves, and stay bounded?"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.index import BlockLocation
from services.kvstore.leases import DEFAULT_LEASE_SECONDS, LeaseTable, PinTable

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 4), st.frozensets(st.integers(0, 5), max_size=3)),
        st.tuples(st.just("end"), st.integers(0, 4), st.just(frozenset())),
        st.tuples(st.just("pass"), st.integers(1, 20), st.just(frozenset())),
    ),
    max_size=30,
)


def located(number: int, num_bytes: int = 100) -> BlockLocation:
    return BlockLocation(bytes([number]) * 32, b"f" * 32, 1, number * 4096, num_bytes, 0)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_a_segment_is_held_exactly_while_a_live_lease_names_it(steps: list[tuple[str, int, frozenset[int]]]) -> None:
    """Whatever the order of grants, ends and expiries."""
    table, now = LeaseTable(max_leases=3), 0.0
    model: dict[str, tuple[frozenset[int], float]] = {}
    for what, number, segments in steps:
        name = f"r{number}"
        if what == "grant":
            model.pop(name, None)
            granted = table.grant(name, segments, seconds=10.0, now=now)
            if len(model) >= 3:
                model = {key: one for key, one in model.items() if one[1] > now}
            assert granted == (10.0 if len(model) < 3 else 0.0)
            if granted:
                model[name] = (segments, now + 10.0)
        elif what == "end":
            table.end(table.claim(name))
            model.pop(name, None)
        else:
            now += number
            table.expire(now)
            model = {key: one for key, one in model.items() if one[1] > now}
        held = {segment for names, _ in model.values() for segment in names}
        assert held == {segment for segment in range(6) if table.holds(segment)}
        assert len(model) == len(table)


def test_no_lease_is_longer_than_the_store_allows() -> None:
    """A forgotten lease cannot keep a segment on disk for ever."""
    assert DEFAULT_LEASE_SECONDS == LeaseTable().grant("r", [1], seconds=1e9, now=0.0)
    assert DEFAULT_LEASE_SECONDS == LeaseTable().grant("r", [1], seconds=0.0, now=0.0)


def test_pins_add_up_and_are_taken_back_one_by_one() -> None:
    """Two sessions pin a block: it is free only when both let go; another tenant's session of that name is another."""
    pins = PinTable()
    blocks = [located(n) for n in range(3)]
    assert 3 == pins.pin("a", "s", blocks, seconds=10, now=0, room_bytes=1000)[0]
    assert 2 == pins.pin("b", "s", blocks[:2], seconds=10, now=0, room_bytes=1000)[0]

    assert 1 == pins.release("a", "s", [blocks[0].key])
    assert [True, True, True] == [pins.is_pinned(block) for block in blocks]
    assert 2 == pins.release("a", "s")
    assert [True, True, False] == [pins.is_pinned(block) for block in blocks]
    assert 0 == pins.release("a", "s")
    assert (200, 0) == (pins.held_bytes("b"), pins.held_bytes("a"))


def test_pins_end_by_themselves_and_stop_at_their_room() -> None:
    """The session's time is set anew by each pin; what does not fit is not pinned, nor anything behind it."""
    pins = PinTable()
    assert (2, 10.0) == pins.pin("a", "s", [located(1), located(2), located(3)], seconds=10, now=0, room_bytes=250)
    assert (2, 17.0) == pins.pin("a", "s", [located(1), located(2), located(3)], seconds=10, now=7, room_bytes=50)
    pins.expire(16.0)
    assert 2 == len(pins)
    pins.expire(17.0)
    assert (0, 0) == (len(pins), pins.held_bytes())


def test_the_number_of_sessions_is_bounded() -> None:
    """A caller that never releases cannot fill the memory."""
    pins = PinTable(max_sessions=2)
    assert [1, 1, 0] == [pins.pin("a", f"s{n}", [located(n)], seconds=10, now=0, room_bytes=1000)[0] for n in range(3)]


def test_a_request_id_that_comes_again_has_a_lease_of_its_own() -> None:
    """The end of a cancelled read takes the lease of that read, not of the request that has its id by now."""
    table = LeaseTable()
    table.grant("r", [1], seconds=10.0, now=0.0)
    cancelled = table.claim("r")
    table.grant("r", [2], seconds=10.0, now=0.1)
    assert table.holds(1)
    table.end(cancelled)

    assert not table.holds(1)
    assert table.holds(2)
    table.end(table.claim("r"))
    assert not table.holds(2)
    assert 0 == len(table) == table.claim("r")

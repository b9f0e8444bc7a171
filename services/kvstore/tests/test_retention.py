"""Does eviction take the coldest segments, no more than needed, and never one in use?"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.retention import SegmentUse, victims

USES = st.lists(
    st.builds(
        SegmentUse,
        segment=st.integers(0, 10_000),
        num_bytes=st.integers(0, 100),
        last_hit=st.integers(0, 20),
        evictable=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda use: use.segment,
)


@settings(max_examples=100, deadline=None)
@given(USES, st.integers(0, 600), st.integers(0, 150))
def test_victims_are_coldest_enough_and_necessary(uses: list[SegmentUse], max_bytes: int, needed: int) -> None:
    """The cap holds afterwards, nothing in use is taken, nothing warmer goes before something colder."""
    chosen = victims(uses, max_bytes=max_bytes, needed_bytes=needed)
    total = sum(use.num_bytes for use in uses)
    evictable = {use.segment: use for use in uses if use.evictable}

    if chosen is None:
        assert total - sum(use.num_bytes for use in evictable.values()) + needed > max_bytes
        return
    assert set(chosen) <= set(evictable)
    freed = sum(evictable[number].num_bytes for number in chosen)
    assert total - freed + needed <= max_bytes
    if chosen:
        assert total - freed + evictable[chosen[-1]].num_bytes + needed > max_bytes
    warmest_gone = max((evictable[n].last_hit for n in chosen), default=-1)
    assert all(use.last_hit >= warmest_gone for use in evictable.values() if use.segment not in chosen)


def test_nothing_goes_while_there_is_room() -> None:
    """Eviction is for need, not for tidiness."""
    assert () == victims([SegmentUse(1, 50, 0)], max_bytes=100, needed_bytes=50)


def test_the_older_of_two_equally_cold_goes() -> None:
    """The same state always gives the same victims."""
    uses = [SegmentUse(2, 50, 3), SegmentUse(1, 50, 3)]

    assert (1,) == victims(uses, max_bytes=100, needed_bytes=10)


def test_impossible_room_costs_nothing() -> None:
    """When pinned segments fill the disk, no block is lost in vain."""
    uses = [SegmentUse(1, 10, 0), SegmentUse(2, 90, 0, evictable=False)]

    assert victims(uses, max_bytes=100, needed_bytes=50) is None

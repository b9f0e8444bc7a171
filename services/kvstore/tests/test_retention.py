"""Does each block live as long as its class says, and does room come from the coldest, and from nobody else's share?"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.index import BlockLocation
from services.kvstore.retention import (
    AGENT,
    CHAT,
    FORWARD,
    HIGH,
    LOW,
    UNSPECIFIED,
    RetentionPolicy,
    SegmentUse,
    capacity,
    kept_blocks,
    shares_to_drop,
    victims,
)

DAY = 86_400.0
POLICY = RetentionPolicy()
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


@settings(max_examples=40, deadline=None)
@given(USES, st.integers(1, 600), st.integers(0, 150))
def test_victims_are_coldest_enough_and_necessary(uses: list[SegmentUse], max_bytes: int, needed: int) -> None:
    """The cap holds afterwards, nothing in use is taken, nothing warmer goes before something colder."""
    chosen = victims(uses, max_bytes=max_bytes, needed_bytes=needed)
    total = sum(use.num_bytes for use in uses) + needed
    evictable = {use.segment: use for use in uses if use.evictable}

    if chosen is None:
        assert total - sum(use.num_bytes for use in evictable.values()) > max_bytes * 0.999
        return
    assert set(chosen) <= set(evictable)
    freed = sum(evictable[number].num_bytes for number in chosen)
    assert total - freed <= max_bytes * 1.001
    if total <= max_bytes * HIGH:
        assert chosen == ()
    if chosen:
        assert total - freed + evictable[chosen[-1]].num_bytes > max_bytes * LOW
    warmest_gone = max((evictable[n].last_hit for n in chosen), default=-1)
    assert all(use.last_hit >= warmest_gone for use in evictable.values() if use.segment not in chosen)


def test_nothing_goes_below_the_high_watermark() -> None:
    """Eviction is for need, not for tidiness; above the mark, room is made for many batches at once."""
    uses = [SegmentUse(n, 10, n) for n in range(8)]

    assert () == victims(uses, max_bytes=100, needed_bytes=10)
    assert (0, 1) == victims(uses, max_bytes=100, needed_bytes=11)


def test_the_older_of_two_equally_cold_goes() -> None:
    """The same state always gives the same victims."""
    assert (1,) == victims([SegmentUse(2, 50, 3), SegmentUse(1, 50, 3)], max_bytes=100, needed_bytes=10)


def test_impossible_room_costs_nothing() -> None:
    """When segments in use fill the disk, no block is lost in vain."""
    uses = [SegmentUse(1, 10, 0), SegmentUse(2, 90, 0, evictable=False)]

    assert victims(uses, max_bytes=100, needed_bytes=50) is None


def test_a_full_file_system_lowers_the_cap() -> None:
    """Other files on the disk count: the cap is what can really be had."""
    assert 100 == capacity(100, physical_bytes=60, free_bytes=500, reserve_bytes=10)
    assert 70 == capacity(100, physical_bytes=60, free_bytes=20, reserve_bytes=10)
    assert 0 == capacity(100, physical_bytes=0, free_bytes=5, reserve_bytes=10)


@pytest.mark.parametrize(("retention", "days"), [(AGENT, 3.0), (CHAT, 7.0), (UNSPECIFIED, math.inf)])
def test_each_class_lives_its_days(retention: int, days: float) -> None:
    """Agent loops three days, chat turns seven, the rest until room is needed."""
    assert 5.0 + days * DAY == POLICY.expires_at(retention, 5.0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([CHAT, AGENT]), st.floats(1e9, 2e9), st.floats(0.1, 30 * DAY), st.floats(0, 1))
def test_one_segment_ends_within_a_slot(retention: int, now: float, life: float, part: float) -> None:
    """All blocks of one slot expire within an hour, or a 24th of a short life."""
    policy = RetentionPolicy(agent_seconds=life, chat_seconds=life)
    length = min(3600.0, life / 24)
    later = now + part * length * 2

    if policy.slot(retention, now) == policy.slot(retention, later):
        assert later - now <= length * 1.001


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([UNSPECIFIED, CHAT, AGENT]), st.sampled_from([UNSPECIFIED, CHAT, AGENT]), st.floats(0, 8 * DAY))
def test_a_refresh_always_prolongs_and_is_rare(have: int, wanted: int, age: float) -> None:
    """A copy is made only where it gains a quarter of a life or a longer class, and never shortens a life."""
    again = POLICY.refreshed(have, 0.0, wanted=wanted, now=age)

    if again is None:
        if have != UNSPECIFIED:
            assert age <= POLICY.life_seconds(have) * 0.751
            assert wanted == UNSPECIFIED or POLICY.life_seconds(wanted) <= POLICY.life_seconds(have)
        return
    assert POLICY.expires_at(again, age) > POLICY.expires_at(have, 0.0)
    assert POLICY.refreshed(again, age, wanted=wanted, now=age) is None


@settings(max_examples=40, deadline=None)
@given(USES, st.integers(0, 500), st.integers(0, 200))
def test_a_tenant_gives_up_its_own_coldest(shares: list[SegmentUse], quota: int, new: int) -> None:
    """As much as the quota asks and no more; nothing without a quota."""
    held = sum(share.num_bytes for share in shares)
    chosen = shares_to_drop(shares, quota_bytes=quota, held_bytes=held, new_bytes=new)
    by_number = {share.segment: share for share in shares}
    freed = sum(by_number[number].num_bytes for number in chosen)

    if quota == 0 or held + new <= quota:
        assert () == chosen
        return
    enough = sum(share.num_bytes for share in shares if share.evictable) >= held + new - quota
    assert not enough or held - freed + new <= quota
    if chosen:
        assert held - freed + by_number[chosen[-1]].num_bytes + new > quota
    coldest_left = min((s.last_hit for s in shares if s.evictable and s.segment not in chosen), default=10**9)
    assert all(by_number[number].last_hit <= coldest_left for number in chosen)


def test_named_quotas_win_over_the_rest() -> None:
    """One tenant may be given more, or be without bound."""
    policy = RetentionPolicy(quota_bytes={"*": 10, "big": 100, "free": 0})

    assert (10, 100, 0) == (policy.quota_of("any"), policy.quota_of("big"), policy.quota_of("free"))
    assert 0 == RetentionPolicy().quota_of("any")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.none() | st.floats(0, 100), st.booleans()), max_size=20))
def test_pinned_blocks_and_the_hottest_tenth_are_kept(blocks: list[tuple[int, float | None, bool]]) -> None:
    """Every pin; of the others the latest hit first, at most a tenth of the segment."""
    located = [
        (BlockLocation(bytes([n]) * 32, b"f" * 32, 1, n * 4096, size, 0), hit, pinned)
        for n, (size, hit, pinned) in enumerate(blocks)
    ]
    kept = kept_blocks(located, segment_bytes=5000)
    pinned = [one for one, _, is_pinned in located if is_pinned]
    hits = {one: hit for one, hit, _ in located}

    assert pinned == kept[: len(pinned)]
    hot = kept[len(pinned) :]
    assert sum(one.block_bytes for one in hot) <= 5000 * FORWARD
    times = [hit for one in hot if (hit := hits[one]) is not None]
    assert len(hot) == len(times)
    assert times == sorted(times, reverse=True)


def test_one_hit_saves_a_block_once() -> None:
    """The copy's life begins anew: without a hit of its own it goes with its segment, or one hit were for ever."""
    first = BlockLocation(b"k" * 32, b"f" * 32, 1, 0, 100, 0, created_seconds=10.0)
    again = first._replace(segment=2, created_seconds=30.0)

    assert [first] == kept_blocks([(first, 20.0, False)], segment_bytes=5000)
    assert [] == kept_blocks([(again, 20.0, False)], segment_bytes=5000)
    assert [again] == kept_blocks([(again, 20.0, True)], segment_bytes=5000)

"""Does the index find the longest prefix, and only what is really there?"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.index import BlockIndex, BlockLocation, HitMemory, Use

A, B = b"a" * 32, b"b" * 32
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([A, B]), st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.sampled_from([A, B]), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("move"), st.sampled_from([A, B]), st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("remove_segment"), st.just(A), st.just(0), st.integers(1, 3)),
    ),
    max_size=30,
)


def location(fingerprint: bytes, number: int, segment: int, offset: int = 0) -> BlockLocation:
    return BlockLocation(
        bytes([number]) * 32, fingerprint, segment, offset, 100 + number, 7, number % 3, tenant="ab"[number % 2]
    )


def used(locations, name: str) -> dict[Any, Use]:
    """What each owner holds, added up the slow way."""
    uses: dict[Any, Use] = {}
    for one in locations:
        uses.setdefault(getattr(one, name), Use()).add(one)
    return uses


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_the_index_behaves_like_a_dictionary_of_first_writers(steps: list[tuple[str, bytes, int, int]]) -> None:
    """After any history, exactly the blocks that were added first and not removed are found, per fingerprint."""
    index = BlockIndex()
    model: dict[tuple[bytes, bytes], BlockLocation] = {}
    for offset, (what, fingerprint, number, segment) in enumerate(steps):
        name = fingerprint, bytes([number]) * 32
        if what == "add":
            new = location(fingerprint, number, segment, offset)
            assert (name not in model) == index.add(new)
            model.setdefault(name, new)
        elif what == "remove":
            held = model.pop(name, None)
            assert (held is not None) == index.remove(held or location(fingerprint, number, 9))
        elif what == "move":
            old, new = model.get(name), location(fingerprint, number, segment, offset)
            assert (old is not None) == index.move(old or location(fingerprint, number, 9), new)
            if old is not None:
                model[name] = new
        else:
            gone = [n for n, where in model.items() if where.segment == segment]
            assert len(gone) == index.remove_segment(segment)
            for one in gone:
                del model[one]
        assert len(model) == len(index)
        assert used(model.values(), "tenant") == index.tenants
        assert used(model.values(), "fingerprint") == index.fingerprints
        assert used(model.values(), "retention") == {
            kind: use for kind, use in index.retentions.items() if use != Use()
        }
        for one_segment in (1, 2, 3):
            assert {one for one in model.values() if one.segment == one_segment} == set(index.blocks_of(one_segment))
            assert set(index.blocks_of(one_segment)) <= set(index.records_of(one_segment))

    for fingerprint in (A, B):
        keys = [bytes([n]) * 32 for n in range(7)]
        assert [model.get((fingerprint, k)) for k in keys] == [index.find(fingerprint, k) for k in keys]
        prefix = []
        for k in keys:
            if (fingerprint, k) not in model:
                break
            prefix.append(model[fingerprint, k])
        assert prefix == list(index.longest_prefix(fingerprint, keys))


def test_a_gap_ends_the_prefix() -> None:
    """Blocks behind a missing one are of no use and are not counted."""
    index = BlockIndex()
    for number in (0, 1, 3):
        index.add(location(A, number, 1))

    assert 2 == len(index.longest_prefix(A, [bytes([n]) * 32 for n in range(5)]))


def test_another_fingerprint_never_hits() -> None:
    """A changed model, layout or recipe sees an empty store."""
    index = BlockIndex()
    index.add(location(A, 0, 1))

    assert 0 == len(index.longest_prefix(B, [bytes(32)]))


def test_a_stale_location_cannot_remove_its_successor() -> None:
    """Damage found late must not take away the good copy that was written since."""
    index = BlockIndex()
    old, new = location(A, 0, 1), location(A, 0, 2)
    index.add(old)
    index.remove(old)
    index.add(new)

    assert not index.remove(old)
    assert 0 == index.remove_segment(1)
    assert new == index.find(A, new.key)


def test_records_stay_known_until_their_bytes_are_gone() -> None:
    """A deletion must also erase copies that nothing finds any more."""
    index = BlockIndex()
    old, new = location(A, 0, 1), location(A, 0, 2)
    index.add(old)
    index.move(old, new)
    index.note_stale(location(A, 1, 1, 4096))

    assert [old, location(A, 1, 1, 4096)] == sorted(index.records_of(1))
    assert 0 == index.drop_records(1, [old])
    assert [location(A, 1, 1, 4096)] == index.records_of(1)
    assert new == index.find(A, new.key)


def test_recent_hits_are_remembered_in_bounded_memory() -> None:
    """The latest find counts; what was not found for long is forgotten."""
    hits = HitMemory(max_keys=10)
    blocks = [location(A, number, 1) for number in range(100)]
    hits.note(blocks[:2], 1.0)
    hits.note(blocks[:1], 2.0)
    hits.fold()
    assert (2.0, 1.0, None) == tuple(hits.last(one.key) for one in blocks[:3])
    for one in blocks[1:]:
        hits.note([one], 3.0)
        assert hits._num_fresh <= 6
    hits.fold()
    assert (None, 3.0) == (hits.last(blocks[0].key), hits.last(blocks[99].key))
    assert len(hits._young) + len(hits._old) <= 14

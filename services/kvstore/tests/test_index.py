"""Does the index find the longest prefix, and only what is really there?"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.index import BlockIndex, BlockLocation

A, B = b"a" * 32, b"b" * 32
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([A, B]), st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.sampled_from([A, B]), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("remove_segment"), st.just(A), st.just(0), st.integers(1, 3)),
    ),
    max_size=30,
)


def location(fingerprint: bytes, number: int, segment: int, offset: int = 0) -> BlockLocation:
    return BlockLocation(bytes([number]) * 32, fingerprint, segment, offset, 100, 7)


@settings(max_examples=60, deadline=None)
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
        else:
            gone = [n for n, where in model.items() if where.segment == segment]
            assert len(gone) == index.remove_segment(segment)
            for one in gone:
                del model[one]
        assert len(model) == len(index)

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

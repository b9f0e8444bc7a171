"""Is a remote block found as long as it is listed anywhere, within bounds?"""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.kvstore.manifests import ManifestName
from services.kvstore.remote_index import RemoteIndex
from services.kvstore.tests.objects import (
    AGENT,
)
from services.kvstore.tests.test_manifests import entry, manifest


def test_the_index_is_bounded_and_forgets_what_ends_first():
    """Blocks beyond the bound are not found; what is listed again is not read again."""
    index = RemoteIndex(max_blocks=4)
    names = [ManifestName(AGENT, n, str(n)) for n in range(3)]
    for n, name in enumerate(names):
        index.add(name, manifest(entry(2 * n), entry(2 * n + 1), expires_unix_seconds=2e9 + n))
    fingerprint = b"f" * 32

    assert 4 == index.num_blocks
    assert names[0] in index
    assert index.find(fingerprint, entry(0).key, 1e9) is None
    assert index.find(fingerprint, entry(2).key, 1e9) is not None
    assert names == [name for name in names if name in index.expired(3e9)]
    index.remove(names[1])
    assert index.find(fingerprint, entry(2).key, 1e9) is None
    assert 2 == index.num_blocks


@settings(max_examples=60, deadline=None)
@example([(0, {0}, 0), (1, {0}, 2), (2, {0}, 1), (0, {0}, 1), (1, {0}, 0), (2, {0}, 0)])
@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 6), min_size=1), st.integers(0, 3)), max_size=12))
def test_a_block_is_found_as_long_as_any_manifest_lists_it(steps):
    """Whatever comes and goes in which order: rewritten, doubled and expired objects included."""
    index = RemoteIndex(max_blocks=1000)
    listed: dict[ManifestName, set[int]] = {}
    for number, blocks, life in steps:
        name = ManifestName(AGENT, number, str(number))
        if life == 0:
            index.remove(name)
            listed.pop(name, None)
        else:
            index.add(name, manifest(*(entry(n) for n in blocks), expires_unix_seconds=1e9 + life))
            listed[name] = blocks

        expected = set().union(*listed.values())
        found = {n: index.find(b"f" * 32, entry(n).key, 0.0) for n in range(7)}
        assert expected == {n for n, one in found.items() if one is not None}
        assert all(n in listed[one.name] for n, one in found.items() if one is not None)
        assert len(expected) == index.num_blocks

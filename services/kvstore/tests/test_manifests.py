"""Does a manifest say what was packed, and nothing at all once a byte of it is wrong?"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.manifests import (
    Entry,
    Manifest,
    ManifestName,
    Tombstone,
    pack,
    pack_tombstone,
    parse,
    parse_name,
    parse_tombstone,
    without,
)

KEYS = st.binary(min_size=32, max_size=32)
TENANTS = st.sampled_from(["", "acme", "größe"])


def entry(number: int, **changes) -> Entry:
    known = {
        "key": number.to_bytes(32, "big"), "fingerprint": b"f" * 32, "tenant": "acme", "created_unix_seconds": 9e8,
        "offset_bytes": number * 100,
        "segment_offset_bytes": number * 8192, "block_bytes": 90, "stored_bytes": 100, "crc32": number, "flags": 0,
    }  # fmt: skip
    return Entry(**{**known, **changes})


def manifest(*entries: Entry, **changes) -> Manifest:
    known = {
        "retention": 2, "epoch": 7, "object_bytes": 10_000, "created_unix_seconds": 1e9, "expires_unix_seconds": 2e9,
        "entries": entries,
    }  # fmt: skip
    return Manifest(**{**known, **changes})


ENTRIES = st.builds(
    Entry,
    key=KEYS,
    fingerprint=st.sampled_from([b"f" * 32, b"g" * 32]),
    tenant=TENANTS,
    created_unix_seconds=st.floats(0, 4e9),
    offset_bytes=st.integers(0, 5000),
    segment_offset_bytes=st.integers(0, 2**40),
    block_bytes=st.integers(1, 2**31),
    stored_bytes=st.integers(0, 5000),
    crc32=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 2**16 - 1),
    age_minutes=st.integers(0, 2**16 - 1),
)


@settings(max_examples=25)
@given(st.lists(ENTRIES, max_size=12), st.sampled_from([0, 1, 2, 9]), st.integers(0, 2**64 - 1))
def test_what_was_packed_comes_back(entries, retention, epoch):
    """Every field of every block, in order."""
    packed = manifest(*entries, retention=retention, epoch=epoch)
    found = parse(pack(packed))

    assert found is not None
    assert packed == dataclasses.replace(found, entries=tuple(found.entries))


@settings(max_examples=30)
@given(st.data())
def test_a_changed_byte_is_noticed(data):
    """Any flipped bit, missing tail or added byte leaves a manifest that says nothing."""
    raw = bytearray(pack(manifest(*(entry(n) for n in range(5)))))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))

    assert parse(bytes(raw)) is None
    assert parse(bytes(raw[:place])) is None
    assert parse(bytes(raw) + b"\0") is None


def test_a_manifest_cannot_point_outside_its_object():
    """An entry beyond the object's end would be a read of nothing."""
    assert parse(pack(manifest(entry(1, offset_bytes=9_901)))) is None
    assert parse(pack(manifest(entry(1, offset_bytes=9_900)))) is not None


def test_too_many_blocks_are_refused():
    """A manifest's size is bounded before it is written."""
    with pytest.raises(ValueError, match="too large"):
        pack(manifest(*[entry(1)] * 100_001))


@settings(max_examples=30)
@given(st.sampled_from([0, 1, 2, 17]), st.integers(0, 10**8 - 1), st.from_regex(r"[0-9a-f-]{1,80}", fullmatch=True))
def test_names_are_found_again_by_their_paths(retention, hour, name):
    """A listing tells class, hour and object of each manifest."""
    expected = ManifestName(retention, hour, name)

    assert expected == parse_name(expected.path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "manifest/chat/1/a",
        "manifest/class1/00000001/a",
        "seg/chat/a",
        "manifest/chat/00000001/a/b",
        "manifest/x/00000001/a",
    ],
)
def test_paths_of_others_are_left_alone(path):
    """Whatever else lies in the bucket is not ours."""
    assert parse_name(path) is None


def test_paths_sort_by_time_within_a_class():
    """What was published lately is listed from a place onwards."""
    early, late = ManifestName(2, 99_999, "z"), ManifestName(2, 100_000, "a")

    assert "manifest/agent/00099999/z" == early.path < late.path
    assert "seg/agent/z" == early.object_path


@settings(max_examples=25)
@given(
    st.builds(
        Tombstone,
        before_unix_seconds=st.floats(0, 4e9),
        tenant=st.none() | TENANTS,
        fingerprint=st.none() | KEYS,
        retention=st.none() | st.integers(0, 2),
    )
)
def test_a_deletion_is_remembered_as_it_was_said(tombstone):
    """Tombstones survive packing."""
    assert tombstone == parse_tombstone(pack_tombstone(tombstone))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b'{"version": 2}', pack_tombstone(Tombstone(1.0))[:-1]])
def test_a_broken_tombstone_says_nothing(raw):
    """It deletes neither everything nor by guess."""
    assert parse_tombstone(raw) is None


@pytest.mark.parametrize(
    ("tombstone", "expected"),
    [
        (Tombstone(9e8, tenant="acme"), [2]),
        (Tombstone(9e8, tenant=""), [1]),
        (Tombstone(9e8), []),
        (Tombstone(9e8, fingerprint=b"g" * 32), [1, 2]),
        (Tombstone(9e8, retention=1), [1, 2]),
        (Tombstone(9e8, tenant="acme", retention=2), [2]),
        (Tombstone(9e8 - 1, tenant="acme"), [1, 2]),
    ],
    ids=["tenant", "anonymous", "all", "other model", "other class", "both", "before"],
)
def test_a_tombstone_covers_what_matches_and_is_older(tombstone, expected):
    """Every field that is set must match; what was written later stays."""
    packed = parse(pack(manifest(entry(1), entry(2, tenant=""))))
    assert packed is not None
    for given_two in (packed, dataclasses.replace(packed, entries=tuple(packed.entries))):
        kept = without(given_two, [tombstone])
        assert expected == [{"acme": 1, "": 2}[one.tenant] for one in kept.entries]
        assert (kept is given_two) == (expected == [1, 2])

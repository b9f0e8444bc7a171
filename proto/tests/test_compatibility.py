"""Can a peer of the last version still talk to us, and does every field say what it is?"""

import json

import pytest

from proto.tests import snapshot
from proto.tests.snapshot import broken, extended, missing

BEFORE = {"v1.M": {"1": "string a", "2": "uint32 b"}, "v1.E": {"0": "NONE"}, "v1.S": {"Get": ".v1.M -> .v1.M"}}


@pytest.fixture(scope="module")
def files() -> object:
    return snapshot.compile_sources()


def test_no_number_is_reused_retyped_or_dropped(files) -> None:
    """The committed snapshot of every field, enum value and method still holds."""
    before = json.loads(snapshot.SNAPSHOT.read_text())

    assert [] == broken(before, snapshot.promises(files), snapshot.reserved(files))


def test_the_snapshot_knows_every_field(files) -> None:
    """What is new is promised from now on: run `python -m proto.tests.snapshot`."""
    before = json.loads(snapshot.SNAPSHOT.read_text())

    assert [] == missing(before, snapshot.promises(files))


def test_everything_has_a_comment(files) -> None:
    """Messages, fields, enums, values, services and methods; with the unit where there is one."""
    assert [] == snapshot.uncommented(files)


def test_the_generated_stubs_have_the_sources_fields(files) -> None:
    """What Python serialises is what the sources say."""
    from proto import common_pb2, decode_pb2

    promised = snapshot.promises(files)
    for message in (common_pb2.Request, decode_pb2.CommitRequest):
        fields = {str(field.number): field.name for field in message.DESCRIPTOR.fields}
        assert {key: value.split()[-1] for key, value in promised[message.DESCRIPTOR.full_name].items()} == fields


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"v1.M": {"1": "string a", "2": "uint32 c"}}, "was `uint32 b` and is `uint32 c`"),
        ({"v1.M": {"1": "string a", "2": "uint64 b"}}, "was `uint32 b` and is `uint64 b`"),
        ({"v1.M": {"1": "repeated string a", "2": "uint32 b"}}, "was `string a`"),
        ({"v1.M": {"1": "string a"}}, "reserved 2;"),
        ({"v1.E": {}}, "0 (NONE) was removed"),
        ({"v1.S": {}}, "Get"),
        ({"v1.M": None}, "is gone"),
    ],
)
def test_each_way_to_break_a_peer_is_seen(change: dict[str, dict[str, str] | None], word: str) -> None:
    now = {name: entries for name, entries in {**BEFORE, **change}.items() if entries is not None}

    (problem,) = broken(BEFORE, now, {})

    assert word in problem


def test_adding_and_reserving_are_allowed() -> None:
    """A new field breaks nothing; a removed one may go when its number is reserved, and stays taken in the snapshot."""
    now = {**BEFORE, "v1.M": {"1": "string a", "3": "bytes c"}}

    assert [] == broken(BEFORE, now, {"v1.M": {2}})
    assert ["v1.M: 3"] == missing(BEFORE, now)
    assert {"1", "2", "3"} == set(extended(BEFORE, now)["v1.M"])

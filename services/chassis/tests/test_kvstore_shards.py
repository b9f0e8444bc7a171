"""Does every process place blocks alike, evenly, and with little to move when a replica goes?"""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.kvstore_shards import (
    GROUP_BLOCKS,
    StoreReplica,
    group_key,
    keys_of,
    order,
    parse_replicas,
    split,
    stitch,
    without,
)

NAMES = st.lists(st.sampled_from([f"kvstore-{n}" for n in range(8)]), min_size=1, max_size=8, unique=True)


def chain(num_blocks: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed}:{n}".encode()).digest() for n in range(num_blocks)]


def owners(keys, names, first_index=0):
    """Block index -> replica, of every block that is placed."""
    return {
        index: run.replica
        for run in split(keys, first_index, names)
        for index in range(run.first_index, run.first_index + run.num_blocks)
    }


@settings(max_examples=25)
@given(NAMES, st.integers(0, 300), st.integers(0, 300), st.integers(0, 5))
def test_every_block_has_one_place_whoever_asks_for_which_part(names, num_blocks, first_index, seed):
    """Runs are in order and without gap; a part of a chain is placed like the whole; the list's order is no matter."""
    keys = chain(num_blocks, seed)
    whole = owners(keys, names)

    assert list(range(num_blocks)) == list(whole)
    assert {i: name for i, name in whole.items() if i >= first_index} == owners(keys, names[::-1], first_index)
    assert all(order(group_key(keys, i), names)[0] == name for i, name in whole.items())


@settings(max_examples=10)
@given(NAMES.filter(lambda names: len(names) > 1), st.integers(0, 5))
def test_only_the_groups_of_a_lost_replica_move(names, seed):
    """Each goes to the second in its own order; nobody else's blocks change places."""
    keys, lost = chain(20 * GROUP_BLOCKS, seed), names[0]
    before, after = owners(keys, names), owners(keys, names[1:])

    for index, name in before.items():
        expected = name if name != lost else order(group_key(keys, index), names)[1]
        assert expected == after[index]


def test_groups_are_spread_evenly():
    """Of 3,000 groups over five replicas, none has a tenth more or less than its share."""
    names = [f"kvstore-{n}" for n in range(5)]
    firsts = [order(group, names)[0] for group in chain(3000)]

    assert all(540 < firsts.count(name) < 660 for name in names), [firsts.count(name) for name in names]


def test_one_long_prompt_is_not_pinned_to_one_replica():
    """A hot prompt of 50,000 tokens is on all three replicas."""
    assert {"a", "b", "c"} == set(owners(chain(390), ["a", "b", "c"]).values())


def test_groups_stay_together():
    """Blocks of one group are one run: one replica, one range of the disk."""
    placed = owners(chain(10 * GROUP_BLOCKS), ["a", "b", "c"])

    assert all(placed[index] == placed[index - index % GROUP_BLOCKS] for index in placed)


def test_another_process_places_alike():
    """Nothing of it depends on the interpreter's hash seed."""
    here = split(chain(200), 7, ["a", "b", "c"])
    code = (
        "import hashlib; from services.chassis.kvstore_shards import split;"
        "keys = [hashlib.sha256(f'0:{n}'.encode()).digest() for n in range(200)];"
        "print(split(keys, 7, {'c', 'b', 'a'}))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout

    assert f"{here}\n" == there


@settings(max_examples=30)
@given(NAMES, st.integers(0, 200), st.integers(0, 100), st.sets(st.integers(0, 199), max_size=5))
def test_the_prefix_ends_before_the_first_block_that_anyone_lacks(names, num_blocks, first_index, missing):
    """One count from each replica is enough to know the longest prefix of all."""
    keys = chain(num_blocks)
    runs = split(keys, first_index, names)
    stored = {key for index, key in enumerate(keys) if index not in missing}
    found = {}
    for name in names:
        asked = keys_of(name, runs, keys)
        found[name] = next((n for n, key in enumerate(asked) if key not in stored), len(asked))

    gap = min((index for index in missing if index >= first_index), default=num_blocks)
    assert max(0, min(gap, num_blocks) - first_index) == stitch(runs, found)


def test_a_lost_replica_s_blocks_are_asked_of_those_next_in_order():
    """Its groups, and only those, are shared out among the others, where writers put them meanwhile."""
    keys, names = chain(40 * GROUP_BLOCKS), ["a", "b", "c"]
    runs = split(keys, 5, names)
    moved = {run.first_index: run for run in without(runs, "a", keys, ["b", "c"])}
    after = owners(keys, ["b", "c"], 5)

    assert {index for index, name in owners(keys, names, 5).items() if name == "a"} == {
        index for run in moved.values() for index in range(run.first_index, run.first_index + run.num_blocks)
    }
    assert all(after[run.first_index] == run.replica for run in moved.values())
    assert () == without(runs, "a", keys, [])


def test_a_silent_replica_ends_the_prefix_at_its_first_block():
    """Whoever is left out of the answers has nothing."""
    keys = chain(10 * GROUP_BLOCKS)
    runs = split(keys, 0, ["a", "b"])
    found = {"a": len(keys_of("a", runs, keys))}

    assert next(run.first_index for run in runs if run.replica == "b") == stitch(runs, found)
    assert 0 == stitch((), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("store:50051", (StoreReplica("store:50051", "store:50051"),)),
        ("a=h:1, b=[::1]:2", (StoreReplica("a", "h:1"), StoreReplica("b", "[::1]:2"))),
    ],
    ids=["none", "one", "named"],
)
def test_the_setting_names_the_replicas(text, expected):
    """One address, or several with names that outlive the addresses."""
    assert expected == parse_replicas(text)


@pytest.mark.parametrize("text", ["store", "a=,b=h:1", "a=h:1,a=h:2", "h:1,x=h:1", "a=b=h:1", ",", "h:1 h:2"])
def test_a_setting_that_is_no_list_of_replicas_is_refused(text):
    """Neither half an address nor two replicas of one name get through."""
    with pytest.raises(ValueError, match=r"KV store replicas|host:port"):
        parse_replicas(text)

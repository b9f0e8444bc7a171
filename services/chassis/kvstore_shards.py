"""Which KV store replica keeps which blocks of a prompt?

Every process places blocks alike, from nothing but the replicas' names and the block keys: groups of consecutive blocks
go to the replica with the highest score for the group (rendezvous hashing). A replica that leaves takes only its own
groups along, each to the next in that group's own order; one that comes back gets exactly those again.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

GROUP_BLOCKS = 32
"""Blocks that stay together: few enough that a long prompt, however hot, is spread over all replicas, and enough that
an object store reads megabytes at once (3.5 MiB for V4.1)."""

_ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9_-]+)=)?(?P<address>[^\s,=:]+:\d{1,5}|\[[0-9a-fA-F:.%]+\]:\d{1,5})")


@dataclass(frozen=True, slots=True)
class StoreReplica:
    """One replica of the KV store as its callers are told of it."""

    name: str
    """What placement goes by. It must outlive restarts; the address need not."""
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a chain that one replica keeps."""

    replica: str
    first_index: int
    """Place of the first one in the chain."""
    num_blocks: int


def parse_replicas(text: str) -> tuple[StoreReplica, ...]:
    """Return the replicas that a `kvstore_address` names: "host:port", or "name=host:port" several times with commas.

    An address without a name is its own name. Empty text is no store. Raises ValueError for anything else.
    """
    replicas = []
    for entry in text.split(",") if text else ():
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"{entry!r} is not host:port or name=host:port")
        replicas.append(StoreReplica(match["name"] or match["address"], match["address"]))
    for what in ("name", "address"):
        if len({getattr(replica, what) for replica in replicas}) < len(replicas):
            raise ValueError(f"two KV store replicas have the same {what} in {text!r}")
    return tuple(replicas)


def group_key(keys: Sequence[bytes], index: int) -> bytes:
    """Return the key that places block `index` of a chain: the one of its group's first block. keys: from block 0."""
    return keys[index - index % GROUP_BLOCKS]


def order(group: bytes, names: Collection[str]) -> tuple[str, ...]:
    """Return all replicas, the one that keeps the group first, then those to ask in its stead."""
    # A hash of both: block keys are uniform, and yet no replica may come out the same for two groups.
    return tuple(sorted(names, key=lambda name: (hashlib.sha256(group + name.encode()).digest(), name), reverse=True))


def split(keys: Sequence[bytes], first_index: int, names: Collection[str]) -> tuple[Run, ...]:
    """Return who keeps the blocks from `first_index` on, in the chain's order; nothing when there are no replicas.

    keys: of the whole chain, from block 0: a group is named by its first block whatever part of it is asked for.
    """
    runs: list[Run] = []
    if not names:
        return ()
    for start, end in _groups(first_index, len(keys)):
        replica = next(iter(order(group_key(keys, start), names))) if len(names) > 1 else next(iter(names))
        if runs and runs[-1].replica == replica:
            runs[-1] = Run(replica, runs[-1].first_index, runs[-1].num_blocks + end - start)
        else:
            runs.append(Run(replica, start, end - start))
    return tuple(runs)


def keys_of(replica: str, runs: Sequence[Run], keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys to ask one replica for, in one call: those of all its runs, in the chain's order."""
    return [keys[index] for index in _indices(replica, runs)]


def first_missing(replica: str, runs: Sequence[Run], num_found: int) -> int | None:
    """Return the place in the chain of the first block that a replica lacks; None when it has all of its runs.

    num_found: how many of `keys_of` it has without a gap. So one call a replica is enough: the first block that any of
    them lacks ends the prefix.
    """
    return next((index for n, index in enumerate(_indices(replica, runs)) if n >= num_found), None)


def stitch(runs: Sequence[Run], num_found: Mapping[str, int]) -> int:
    """Return how many blocks from the first run on are there without a gap; num_found: 0 for who is left out."""
    if not runs:
        return 0
    replicas = {run.replica for run in runs}
    gaps = [first_missing(replica, runs, num_found.get(replica, 0)) for replica in replicas]
    end = runs[-1].first_index + runs[-1].num_blocks
    return min([end, *(gap for gap in gaps if gap is not None)]) - runs[0].first_index


def without(runs: Sequence[Run], gone: str, keys: Sequence[bytes], names: Collection[str]) -> tuple[Run, ...]:
    """Return who keeps a lost replica's runs in its stead: for each group the next in its order. names: who is left."""
    moved: list[Run] = []
    for run in runs:
        if run.replica == gone:
            moved += split(keys[: run.first_index + run.num_blocks], run.first_index, names)
    return tuple(moved)


def _groups(first_index: int, end_index: int) -> Iterator[tuple[int, int]]:
    start = first_index
    while start < end_index:
        end = min(end_index, start - start % GROUP_BLOCKS + GROUP_BLOCKS)
        yield start, end
        start = end


def _indices(replica: str, runs: Sequence[Run]) -> Iterator[int]:
    for run in runs:
        if run.replica == replica:
            yield from range(run.first_index, run.first_index + run.num_blocks)

"""What would a KV store have hit, given a trace of requests, a capacity and lives of blocks?

The store's own decisions (services.kvstore: index, catalog, retention) run on simulated time and no disk: which segment
a block goes to, when a segment ends, which are dropped for room, what of them is copied forward, what a hit refreshes.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.catalog import Catalog
from services.kvstore.directory import SegmentFile
from services.kvstore.format import record_bytes
from services.kvstore.index import BlockIndex, BlockLocation
from services.kvstore.log import SegmentSize
from services.kvstore.retention import CHAT, HIGH, RetentionPolicy, kept_blocks, victims

FINGERPRINT = b"f" * 32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: when it came, and the chain of blocks of its prompt."""

    seconds: float
    blocks: Sequence[int]
    """Ids of the prompt's blocks in order; equal ids are equal prefixes up to there."""


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace with the fields timestamp (milliseconds) and hash_ids (one per 512 tokens)."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            yield TraceRequest(request["timestamp"] / 1000, request["hash_ids"])


@dataclass(slots=True)
class Outcome:
    """What a run counted. Unit of all but peak_bytes: blocks."""

    asked: int = 0
    hit: int = 0
    written: int = 0
    copied: int = 0
    evicted: int = 0
    expired: int = 0
    peak_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit / max(self.asked, 1)


@dataclass(slots=True)
class _OpenSegment:
    file: SegmentFile
    slot: int
    num_bytes: int = 0


class SimulatedStore:
    """A store without a disk: the real index, segment table and decisions, on the trace's clock."""

    def __init__(self, policy: RetentionPolicy, *, max_bytes: float, block_bytes: int, segment_bytes: int) -> None:
        """max_bytes: infinity never evicts."""
        self.outcome = Outcome()
        self._policy = policy
        self._catalog = Catalog(BlockIndex(), (), policy)
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._segment_bytes = segment_bytes
        self._open: dict[int, _OpenSegment] = {}
        self._next_segment = 1
        self._used_bytes = 0

    def serve(self, request: TraceRequest, *, retention: int = CHAT) -> int:
        """Look a prompt up, store what was missing; return how many leading blocks were hit."""
        now = request.seconds + 1.0  # a record's birth at 0 would mean that nobody knows it
        self._end_lives(now)
        keys = [number.to_bytes(32, "little") for number in request.blocks]
        hit = self._catalog.lookup(FINGERPRINT, keys, wanted=retention, now=now)
        num_hit = len(hit.locations)
        self._catalog.hits.note(hit.locations, now)
        for location, wanted in hit.stale:
            self.outcome.copied += self._write(location.key, wanted, now, replaced=location)
        for key in keys[num_hit:]:
            if self._catalog.find(FINGERPRINT, key, now) is None:
                self.outcome.written += self._write(key, retention, now)
        self.outcome.asked += len(keys)
        self.outcome.hit += num_hit
        return num_hit

    def _write(self, key: bytes, retention: int, now: float, replaced: BlockLocation | None = None) -> bool:
        size = record_bytes(self._block_bytes)
        if not self._make_room(size, now):
            return False
        return self._catalog.publish(self._append(key, retention, now, size), replaced)

    def _append(self, key: bytes, retention: int, now: float, size: int) -> BlockLocation:
        one = self._segment_for(retention, now, size)
        location = BlockLocation(
            key, FINGERPRINT, one.file.number, one.num_bytes, self._block_bytes, 0, retention, created_seconds=now
        )
        one.num_bytes += size
        self._used_bytes += size
        self.outcome.peak_bytes = max(self.outcome.peak_bytes, self._used_bytes)
        self._note(one, is_active=True)
        return location

    def _segment_for(self, retention: int, now: float, size: int) -> _OpenSegment:
        slot = self._policy.slot(retention, now)
        one = self._open.get(retention)
        if one is None or one.slot != slot or one.num_bytes + size > self._segment_bytes:
            if one is not None:
                self._note(one, is_active=False)
            number, self._next_segment = self._next_segment, self._next_segment + 1
            one = self._open[retention] = _OpenSegment(SegmentFile(number, 0, retention, Path(str(number))), slot)
        return one

    def _note(self, one: _OpenSegment, *, is_active: bool) -> None:
        self._catalog.note_sizes([SegmentSize(one.file, one.num_bytes, one.num_bytes, is_active)])

    def _make_room(self, size: int, now: float) -> bool:
        if self._used_bytes + size <= self._max_bytes * HIGH:
            return True
        chosen = victims(self._catalog.uses(), max_bytes=int(self._max_bytes), needed_bytes=size)
        if chosen is None:
            return False
        self._catalog.hits.fold()
        for number in chosen:
            blocks = [(one, self._catalog.hits.last(one.key), False) for one in self._catalog.index.blocks_of(number)]
            for one in kept_blocks(blocks, segment_bytes=self._catalog.segments[number].num_bytes):
                copy = self._append(one.key, one.retention, now, record_bytes(self._block_bytes))
                self.outcome.copied += self._catalog.publish(copy, one)
            self.outcome.evicted += self._drop(number)
        return True

    def _end_lives(self, now: float) -> None:
        for retention, one in list(self._open.items()):
            if one.slot != self._policy.slot(retention, now):
                self._note(one, is_active=False)
                del self._open[retention]
        for number in self._catalog.expired(now):
            self.outcome.expired += self._drop(number)

    def _drop(self, number: int) -> int:
        num_blocks = self._catalog.doom(number)
        gone = self._catalog.doomed.pop(number)
        self._used_bytes -= gone.num_bytes
        return num_blocks


def simulate(
    requests: Iterable[TraceRequest],
    *,
    max_bytes: float = math.inf,
    block_bytes: int,
    life_seconds: float = math.inf,
    segment_bytes: int = 256 << 20,
) -> Outcome:
    """Replay a trace against a store that starts empty; all blocks live as long."""
    policy = RetentionPolicy(agent_seconds=life_seconds, chat_seconds=life_seconds)
    store = SimulatedStore(policy, max_bytes=max_bytes, block_bytes=block_bytes, segment_bytes=segment_bytes)
    for request in requests:
        store.serve(request)
    return store.outcome


def infinite_hit_rate(requests: Iterable[TraceRequest]) -> float:
    """Return the share of blocks that an endless cache would have hit, counted without any store."""
    seen: set[int] = set()
    asked = hit = 0
    for request in requests:
        asked += len(request.blocks)
        hit += next((n for n, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return hit / max(asked, 1)


def lru_hit_rate(requests: Iterable[TraceRequest], *, max_blocks: int) -> float:
    """Return the share of blocks that a cache of single blocks, least recently used out first, would have hit.

    No disk works that way (a block would be a file, or a hole); it shows what dropping whole segments costs.
    """
    held: OrderedDict[int, None] = OrderedDict()
    asked = hit = 0
    for request in requests:
        asked += len(request.blocks)
        hit += next((n for n, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        for block in reversed(request.blocks):  # the first ones are worth most: they go last
            held[block] = None
            held.move_to_end(block)
        while len(held) > max_blocks:
            held.popitem(last=False)
    return hit / max(asked, 1)

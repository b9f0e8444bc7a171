"""How much of a prompt does the KV store hold, whichever of its replicas hold it?

Every replica is asked once, at the same time, for the groups of blocks that are its own; the first block that any of
them lacks ends the prefix. One that does not answer is asked no more for a while; those next in its groups' order are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proto.kvstore_pb2 import LookupReply, LookupRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError
from services.chassis.kvstore_shards import Run, first_missing, keys_of, split, without
from services.chassis.telemetry import log

if TYPE_CHECKING:
    from grpc import aio

    from services.chassis.kvstore_shards import StoreReplica

AWAY_SECONDS = 2.0
"""How long a replica that failed is passed over; then one request tries it at a time: a lost host is slow to tell."""
FIRST_SHARE = 0.6
"""Of a lookup's time, what the first round may take; the rest is for those who stand in."""
PENDING_SECONDS = 0.25
"""Blocks that will be written within this time count as there: computing even one takes about as long."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found."""

    num_blocks: int
    """Leading blocks that are stored, or nearly."""
    num_pending: int
    """The last ones of those, which are still being written."""
    num_failed: int
    """Replicas that did not answer."""


class KvstoreReplicas:
    """The replicas of the KV store as this process knows them."""

    def __init__(self, replicas: Iterable[StoreReplica], channel: Callable[[str], aio.Channel]) -> None:
        self._stubs = {replica.name: KvstoreStub(channel(replica.address)) for replica in replicas}
        self._away_until: dict[str, float] = {}

    async def look_up(self, keys: Sequence[bytes], ask: LookupRequest, *, seconds: float) -> Hit:
        """Find the longest stored prefix of a chain within a time. ask: what to send beside the keys.

        Never raises: a replica that is away, or slow, holds nothing.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        names = self._present(deadline)
        runs: Sequence[Run] = split(keys, 0, names)
        stored_end = pending_end = len(keys)
        num_failed = 0
        while runs:
            is_last = len(names) == 1 or num_failed > 0
            left = deadline - clock()
            answers = await self._ask_all(keys, runs, ask, seconds=left if is_last else left * FIRST_SHARE)
            failed = [name for name, reply in answers.items() if reply is None]
            for name, reply in answers.items():
                if reply is not None:
                    stored_end = min(stored_end, _end(name, runs, reply.num_blocks, len(keys)))
                    is_soon = reply.pending_seconds <= PENDING_SECONDS
                    num_blocks = reply.num_blocks + (reply.num_pending if is_soon else 0)
                    pending_end = min(pending_end, _end(name, runs, num_blocks, len(keys)))
            num_failed += len(failed)
            names -= set(failed)
            lost = [run for run in runs if run.replica in failed and run.first_index < pending_end]
            if lost and (is_last or not names):
                stored_end = min(stored_end, lost[0].first_index)
                pending_end = min(pending_end, lost[0].first_index)
                break
            runs = sorted(
                (run for name in failed for run in without(lost, name, keys, names)), key=lambda run: run.first_index
            )
        num_stored = min(stored_end, pending_end)
        return Hit(pending_end, pending_end - num_stored, num_failed)

    def _present(self, deadline: float) -> set[str]:
        """Return the replicas to ask: all but those that failed lately, or all when there would be none."""
        now = asyncio.get_running_loop().time()
        present = {name for name in self._stubs if self._away_until.get(name, now) <= now}
        for name in present & self._away_until.keys():
            self._away_until[name] = deadline  # until this request knows, the others go on without it
        return present or set(self._stubs)

    async def _ask_all(
        self, keys: Sequence[bytes], runs: Sequence[Run], ask: LookupRequest, *, seconds: float
    ) -> dict[str, LookupReply | None]:
        """Return each asked replica's reply; None where there was none."""
        names = sorted({run.replica for run in runs})
        replies = await asyncio.gather(
            *(self._ask(name, keys_of(name, runs, keys), ask, seconds=seconds) for name in names)
        )
        return dict(zip(names, replies, strict=True))

    async def _ask(self, name: str, keys: Sequence[bytes], ask: LookupRequest, *, seconds: float) -> LookupReply | None:
        request = LookupRequest(block_keys=keys)
        request.MergeFrom(ask)
        try:
            reply: LookupReply = await self._stubs[name].Lookup(request, timeout=max(0.0, seconds))
        except FathomError as error:
            log.warning("entrypoint.lookup.failed", replica=name, error=error.kind)
            self._away_until[name] = asyncio.get_running_loop().time() + AWAY_SECONDS
            return None
        self._away_until.pop(name, None)
        return reply


def _end(name: str, runs: Sequence[Run], num_found: int, num_keys: int) -> int:
    missing = first_missing(name, runs, num_found)
    return num_keys if missing is None else missing

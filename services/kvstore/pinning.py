"""How is a session's KV pinned, wherever it lies?

What is on the disk is pinned there. What only the tier behind has is copied to the disk first: its own copies end with
their lives and with whoever tidies up, and nobody there knows of pins.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.catalog import Catalog
from services.kvstore.reading import MAX_GAPS
from services.kvstore.retention import UNSPECIFIED
from services.kvstore.tiers import RemoteBlocks, RemoteLocation

_AT_ONCE = 8
"""Copies under way: they share one sync, and the store's budget bounds their bytes."""


@dataclass(frozen=True, slots=True)
class Session:
    """Whose blocks are to be kept, which, and for how long from now (0: the default)."""

    tenant: str
    session_id: str
    fingerprint: bytes
    keys: Sequence[bytes]
    hold_seconds: float


async def pin(catalog: Catalog, remote: RemoteBlocks | None, session: Session, *, most_bytes: int) -> tuple[int, float]:
    """Pin the leading blocks that can be had; return how many are pinned, and until when (Unix seconds).

    most_bytes: for all pins together; the tenant's quota bounds its own.
    """
    # What is here first: nothing may evict it while the rest is fetched.
    pinned = _pin_local(catalog, session, most_bytes)
    if remote is not None and pinned[0] < len(session.keys):
        room_bytes = _room(catalog, session.tenant, most_bytes)
        if await _bring(catalog, remote, session, pinned[0], room_bytes):
            pinned = _pin_local(catalog, session, most_bytes)
    return pinned


def _pin_local(catalog: Catalog, session: Session, most_bytes: int) -> tuple[int, float]:
    now = time.time()
    hit = catalog.lookup(session.fingerprint, session.keys, wanted=UNSPECIFIED, now=now)
    return catalog.pins.pin(
        session.tenant,
        session.session_id,
        hit.locations,
        seconds=session.hold_seconds,
        now=now,
        room_bytes=_room(catalog, session.tenant, most_bytes),
    )


def _room(catalog: Catalog, tenant: str, most_bytes: int) -> int:
    room = most_bytes - catalog.pins.held_bytes()
    quota = catalog.policy.quota_of(tenant)
    return min(room, quota - catalog.pins.held_bytes(tenant)) if quota else room


async def _bring(catalog: Catalog, remote: RemoteBlocks, session: Session, start: int, room_bytes: int) -> bool:
    """Copy what follows and is not here, up to the first block that cannot be had; return whether anything came."""
    place, has_come = start, False
    for _ in range(MAX_GAPS):
        while place < len(session.keys) and _is_here(catalog, session, place):
            place += 1
        behind = await remote.longest(session.fingerprint, session.keys[place:])
        fitting: list[RemoteLocation] = []
        for one in behind:
            room_bytes -= one.location.block_bytes
            if room_bytes < 0:
                break
            fitting.append(one)
        for first in range(0, len(fitting), _AT_ONCE):
            group = fitting[first : first + _AT_ONCE]
            lacking = [one for number, one in enumerate(group, place) if not _is_here(catalog, session, number)]
            found = await asyncio.gather(*(remote.bring(one) for one in lacking))
            has_come |= any(found)
            if not all(found):
                return has_come
            place += len(group)
        if not behind or len(fitting) < len(behind) or place == len(session.keys):
            break
    return has_come


def _is_here(catalog: Catalog, session: Session, place: int) -> bool:
    return catalog.find(session.fingerprint, session.keys[place], time.time()) is not None

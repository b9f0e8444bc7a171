"""How does one keep every block of a session, each on the KV store replica that it belongs to?

All or nothing: a session of which a part may be evicted is worth as little as one that is not pinned at all.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from proto.kvstore_pb2 import PinReply, PinRequest, ReleaseReply, ReleaseRequest
from proto.kvstore_pb2_grpc import KvstoreStub
from services.chassis.errors import FathomError, NoReplica
from services.chassis.kvstore_shards import Run, first_missing, keys_of, split

_FAILURES = (FathomError, grpc.aio.AioRpcError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Session:
    """Blocks to keep, and for whom."""

    session_id: str
    tenant: str
    fingerprint: bytes
    """32 bytes."""
    keys: Sequence[bytes]
    """Of the whole chain, from block 0: a block's replica follows from its chain."""
    hold_seconds: float = 0.0
    """0 takes the store's default."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of it."""

    num_pinned: int
    """All blocks of the session, or none."""
    expires_at_unix_seconds: float = 0.0
    """When the first of the pins ends by itself; 0 without any."""
    first_missing: int | None = None
    """Place in the chain of the first block that its replica lacks or may not pin (a quota, the pins' own share)."""


async def pin(channels: Mapping[str, grpc.aio.Channel], session: Session, *, seconds: float) -> Pinned:
    """Pin every block of a session, or none: what one replica cannot pin is released on the others.

    channels: by the names that placement goes by. Raises NoReplica, after the release, when one does not answer within
    `seconds`. Blocks that the session had pinned before are released with the rest.
    """
    runs = split(session.keys, 0, sorted(channels))
    asked = sorted({run.replica for run in runs})
    replies = await asyncio.gather(
        *(_pin(channels[name], session, keys_of(name, runs, session.keys), seconds) for name in asked),
        return_exceptions=True,
    )
    found = dict(zip(asked, replies, strict=True))
    gap = _first_gap(found, runs)
    lost = [name for name, reply in found.items() if isinstance(reply, BaseException)]
    if gap is None and not lost:
        ends = [reply.expires_at_unix_seconds for reply in found.values() if isinstance(reply, PinReply)]
        return Pinned(len(session.keys), min(ends, default=0.0))
    # One that did not answer may have pinned all the same.
    await asyncio.gather(
        *(_release(channels[name], session, keys_of(name, runs, session.keys), seconds) for name in asked),
        return_exceptions=True,
    )
    if lost:
        strange = [reply for reply in replies if isinstance(reply, BaseException) and not isinstance(reply, _FAILURES)]
        for reply in strange:
            raise reply
        raise NoReplica(f"nothing is pinned: {', '.join(lost)} did not answer; try again, or with a longer time")
    return Pinned(0, first_missing=gap)


async def release(
    channels: Mapping[str, grpc.aio.Channel], session_id: str, tenant: str, keys: Sequence[bytes], *, seconds: float
) -> int:
    """Take a session's pins back (of these keys; without any, all) on every replica; return how many there were.

    All replicas are asked before NoReplica is raised for those that did not answer: their pins end with their time.
    """
    session = Session(session_id, tenant, b"", keys)
    names = sorted(channels)
    replies = await asyncio.gather(
        *(_release(channels[name], session, keys, seconds) for name in names), return_exceptions=True
    )
    lost = []
    for name, reply in zip(names, replies, strict=True):
        if isinstance(reply, _FAILURES):
            lost.append(name)
        elif isinstance(reply, BaseException):
            raise reply
    if lost:
        raise NoReplica(f"{', '.join(lost)} did not answer: what is pinned there ends with its time, or release again")
    return sum(reply.num_released for reply in replies if isinstance(reply, ReleaseReply))


def _first_gap(found: Mapping[str, PinReply | BaseException], runs: Sequence[Run]) -> int | None:
    gaps = [first_missing(name, runs, reply.num_pinned) for name, reply in found.items() if isinstance(reply, PinReply)]
    return min((gap for gap in gaps if gap is not None), default=None)


async def _pin(channel: grpc.aio.Channel, session: Session, keys: Sequence[bytes], seconds: float) -> PinReply:
    request = PinRequest(
        session_id=session.session_id,
        tenant=session.tenant,
        fingerprint=session.fingerprint,
        block_keys=keys,
        hold_seconds=session.hold_seconds,
    )
    reply: PinReply = await KvstoreStub(channel).Pin(request, timeout=seconds)
    return reply


async def _release(channel: grpc.aio.Channel, session: Session, keys: Sequence[bytes], seconds: float) -> ReleaseReply:
    request = ReleaseRequest(session_id=session.session_id, tenant=session.tenant, block_keys=keys)
    reply: ReleaseReply = await KvstoreStub(channel).Release(request, timeout=seconds)
    return reply

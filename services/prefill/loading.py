"""How does a prefix hit get from the KV store into the pool?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import grpc.aio

from services.chassis.kvstore_client import read_blocks

_GROUP_BYTES = 32 << 20
"""Held on the host before the engine takes it: enough for few hand-overs, too little to matter."""
_LEAST_SECONDS = 2.0
"""A load may always take this long, or a busy machine would recompute small hits at random."""
_ASSUMED_TOKENS_PER_SECOND = 500.0
"""Before the first step was measured."""


def allowed_seconds(num_tokens: int, *, tokens_per_second: float, seconds_left: float) -> float:
    """Return how long a load may take: not longer than computing the same tokens, for then the hit is no gain."""
    recompute = num_tokens / (tokens_per_second or _ASSUMED_TOKENS_PER_SECOND)
    return min(seconds_left, max(_LEAST_SECONDS, recompute))


async def load_hit(
    channel: grpc.aio.Channel,
    keys: Sequence[bytes],
    store: Callable[[list[bytes]], Awaitable[None]],
    *,
    fingerprint: bytes,
    block_bytes: int,
    timeout_seconds: float,
) -> int:
    """Read the leading `keys` and hand verified payloads to `store`, in order; return how many there were.

    Fewer than asked for is no error: the first block that is missing, damaged or late ends the hit.
    """
    num_loaded = 0
    group: list[bytes] = []
    blocks = read_blocks(
        channel, keys, fingerprint=fingerprint, block_bytes=block_bytes, timeout_seconds=timeout_seconds
    )
    async with aclosing(blocks):
        async for payload in blocks:
            group.append(payload)
            num_loaded += 1
            if len(group) * block_bytes >= _GROUP_BYTES:
                await store(group)
                group = []
    if group:
        await store(group)
    return num_loaded

"""How does a prefix hit get from the KV store into the pool?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from services.chassis.kvstore_client import Stores, Wanted, read_blocks

_GROUP_BYTES = 32 << 20
"""Held on the host before the engine takes it: enough for few hand-overs, too little to matter."""
_LEAST_SECONDS = 2.0
"""A load may always take this long, or a busy machine would recompute small hits at random."""
_MOST_PENDING_SECONDS = 1.0
"""The turn before this one is written within tens of milliseconds."""
_ASSUMED_TOKENS_PER_SECOND = 500.0
"""Before the first step was measured."""


def recompute_seconds(num_tokens: int, *, tokens_per_second: float) -> float:
    """Return how long computing that many prompt tokens would take, at the speed measured so far."""
    return num_tokens / (tokens_per_second or _ASSUMED_TOKENS_PER_SECOND)


def allowed_seconds(num_tokens: int, *, tokens_per_second: float, seconds_left: float) -> float:
    """Return how long a load may take: not longer than computing the same tokens, for then the hit is no gain."""
    recompute = recompute_seconds(num_tokens, tokens_per_second=tokens_per_second)
    return min(seconds_left, max(_LEAST_SECONDS, recompute))


def pending_seconds(allowed: float) -> float:
    """Return how long to wait for blocks that are just being written: what then is left must suffice to read them."""
    return min(_MOST_PENDING_SECONDS, allowed / 2)


async def load_hit(
    stores: Stores,
    wanted: Wanted,
    store: Callable[[Sequence[bytes | memoryview]], Awaitable[None]],
    *,
    timeout_seconds: float,
) -> int:
    """Read the leading wanted blocks and hand verified payloads to `store`, in order; return how many there were.

    Fewer than asked for is no error: the first block that is missing, damaged or late ends the hit.
    """
    num_loaded = 0
    group: list[bytes | memoryview] = []
    blocks = read_blocks(stores, wanted, timeout_seconds=timeout_seconds)
    async with aclosing(blocks):
        async for payload in blocks:
            group.append(payload)
            num_loaded += 1
            if len(group) * wanted.block_bytes >= _GROUP_BYTES:
                await store(group)
                group = []
    if group:
        await store(group)
    return num_loaded

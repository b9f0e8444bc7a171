"""Does a store keep its cap, its memory and its descriptors for a day? `python -m services.kvstore.tests.soak`.

Random writes of every class and size, hits, pins, quotas and expiry against a small store, whose cap is checked after
each step. Prints a JSON line now and then, and ends with exit code 1 at the first promise that is broken.
"""

import argparse
import asyncio
import gc
import json
import mmap
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from services.kvstore.disk import physical_bytes
from services.kvstore.retention import RetentionPolicy
from services.kvstore.store import Store
from services.kvstore.tests.blocks import FINGERPRINT, MEBIBYTE, block, key, open_store, payload, segments, served

CAP_BYTES = 8 * MEBIBYTE
GROWTH_BYTES = 64 * MEBIBYTE
"""Of resident memory, over what a store has after its first seconds: buffers and the allocator's own."""
_NUM_KEYS = 4000
_FIRST_SECONDS = 10.0


async def soak(
    folder: Path, seconds: float, each: Callable[[Store, int], None] = lambda _store, _number: None
) -> Store:
    """Work on a store for so long and return it, still open.  each: hears of every step and the blocks offered so far.

    Raises AssertionError for a wrong byte or a cap that was passed.
    """
    policy = RetentionPolicy(agent_seconds=0.5, chat_seconds=2.0, quota_bytes={"b": MEBIBYTE})
    store = await open_store(folder, max_bytes=CAP_BYTES, segment_bytes=512 << 10, policy=policy)
    rng = random.Random(6)
    sizes = {number: rng.choice([1, 5000, 60_000, 130_000]) for number in range(_NUM_KEYS)}
    ended = time.monotonic() + seconds
    number = 0
    while time.monotonic() < ended:
        batch = [(number + n) % _NUM_KEYS for n in range(rng.randrange(1, 12))]
        number += len(batch)
        blocks = [block(n, sizes[n], retention=rng.randrange(3), tenant=rng.choice("abc")) for n in batch]
        await asyncio.gather(*(store.write(one) for one in blocks), return_exceptions=True)
        wanted = [rng.randrange(max(0, number - 200), number) % _NUM_KEYS for _ in range(4)]
        for n, data in (await served(store, wanted)).items():
            assert payload(n, sizes[n]) == data
        if rng.random() < 0.2:
            await store.pin(rng.choice("abc"), "s", FINGERPRINT, [key(n) for n in wanted], hold_seconds=0.3)
        on_disk = sum(map(physical_bytes, segments(folder)))
        assert on_disk <= CAP_BYTES
        # What is just being written or unlinked may be known a moment later.
        assert on_disk <= store.catalog.physical_bytes + MEBIBYTE
        each(store, number)
    return store


def resident_bytes() -> int:
    """Return how much memory this process has, garbage not counted."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Watch:
    """Looks at memory and descriptors now and then, and says how it goes."""

    def __init__(self, every_seconds: float, resident: int, descriptors: int) -> None:
        """resident, descriptors: what a store of the same kind took after its first seconds, closed again."""
        self._every_seconds = every_seconds
        self._resident = resident
        self._descriptors = descriptors
        self._began = self._said = time.monotonic()

    def __call__(self, store: Store, num_offered: int) -> None:
        if time.monotonic() - self._said < self._every_seconds:
            return
        self._said = time.monotonic()
        resident, descriptors = resident_bytes(), num_descriptors()
        said = {
            "seconds": round(self._said - self._began),
            "offered_blocks": num_offered,
            "stored_blocks": store.counts.stored_blocks,
            "evicted": dict(store.counts.evictions),
            "physical_mebibytes": round(store.catalog.physical_bytes / MEBIBYTE, 1),
            "resident_mebibytes": round(resident / MEBIBYTE, 1),
            "descriptors": descriptors,
        }
        print(json.dumps(said), flush=True)  # noqa: T201 - a program's own output
        assert resident < self._resident + GROWTH_BYTES, "memory grows"
        assert descriptors <= self._descriptors + 40, "descriptors grow"
        assert 0 == store.counts.damaged_blocks


async def soak_for(folder: Path, seconds: float, *, every_seconds: float) -> None:
    """Soak, and check at the end, too, that nothing has grown. Raises AssertionError."""
    await (await soak(folder / "first", _FIRST_SECONDS)).close()
    descriptors, resident = num_descriptors(), resident_bytes()
    store = await soak(folder / "second", seconds, Watch(every_seconds, resident, descriptors))
    await store.close()
    assert num_descriptors() <= descriptors + 2
    assert resident_bytes() < resident + GROWTH_BYTES


def main() -> None:
    """Soak for as long as asked, a day if nothing is said."""
    parser = argparse.ArgumentParser(description="Soak a KV store.")
    parser.add_argument("--minutes", type=float, default=1440.0)
    parser.add_argument("--say-minutes", type=float, default=10.0, help="how often to say how it goes")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    with tempfile.TemporaryDirectory(prefix="fathom-soak-", dir="/var/tmp") as folder:
        asyncio.run(soak_for(Path(folder), asked.minutes * 60, every_seconds=asked.say_minutes * 60))


if __name__ == "__main__":
    main()

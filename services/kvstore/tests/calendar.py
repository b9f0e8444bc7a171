"""What happens to a small store in weeks of simulated time, and which promises must hold after every step of them?

Lives are the real ones, days long; the clock is one that moves in leaps of minutes and hours. Writes of every class and
size, hits, reads, leases that nobody ends, pins, quotas, deletions, restarts and lower caps come in an order that
follows from a seed. The bytes that count are those that the file system says it gave, not those that the store believes.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from services.chassis.errors import Overloaded
from services.kvstore.disk import Disk, physical_bytes
from services.kvstore.retention import AGENT, CHAT, UNSPECIFIED, RetentionPolicy
from services.kvstore.store import Store
from services.kvstore.tests.blocks import FINGERPRINT, MEBIBYTE, block, key, open_store, payload, segments, served
from services.kvstore.tests.objects import Clock
from services.kvstore.tiers import Selection

HOUR, DAY = 3600.0, 86_400.0
POLICY = RetentionPolicy(quota_bytes={"b": MEBIBYTE, "c": 2 * MEBIBYTE})
"""Lives as a deployment has them."""
_CAPS = (8 * MEBIBYTE, 6 * MEBIBYTE)
_NUM_KEYS = 1200
_SIZES = (1, 5000, 60_000, 130_000)
_BURSTS = (5, 12, 70)
"""Of the longest no batch holds all: several are on their way to the disk at once."""
_TENANTS = ("a", "b", "c")
_CLASSES = (UNSPECIFIED, CHAT, AGENT)


def on_disk(folder: Path) -> int:
    """Return what the file system gave to all segment files."""
    return sum(map(physical_bytes, segments(folder)))


class WatchedDisk(Disk):
    """Looks at the file system in the middle of every write as well: between two steps a store could hide much."""

    peak_bytes = 0

    def preallocate(self, fd: int, start_bytes: int, num_bytes: int) -> None:
        super().preallocate(fd, start_bytes, num_bytes)
        self._look()

    def _write_piece(
        self,
        fd: int,
        parts: Sequence[bytes | bytearray | memoryview],
        ends: Sequence[int],
        span: tuple[int, int],
        offset: int,
    ) -> None:
        super()._write_piece(fd, parts, ends, span, offset)
        self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, on_disk(self.folder))


class Calendar:
    """One store, what was done to it, and what must be true because of it."""

    def __init__(self, folder: Path, clock: Clock, seed: int) -> None:
        self.clock = clock
        self.store: Store
        self.num_steps = 0
        self.evicted = dict.fromkeys(("ttl", "capacity", "quota", "tenant"), 0)
        """By reason, over all lives of the store; how many were written again beside it."""
        self.refreshed_blocks = 0
        self.most_bytes = 0
        """That the file system ever gave, of the cap of that moment in _CAPS[0]."""
        self._folder = folder
        self._random = random.Random(seed)
        self._cap_bytes = _CAPS[0]
        self._sizes = [self._random.choice(_SIZES) for _ in range(_NUM_KEYS)]
        self._ends: dict[int, float] = {}
        """Until when each block may be found at most."""
        self._pinned: dict[str, set[int]] = {tenant: set() for tenant in _TENANTS}
        self._next = 0

    async def open(self) -> None:
        """Begin a life of the store, whose upkeep is done by hand: at its time, and at no other."""
        self.store = await open_store(self._folder, max_bytes=self._cap_bytes, segment_bytes=512 << 10, policy=POLICY)
        await self.store._upkeep.close()

    async def close(self) -> None:
        counts = self.store.counts
        for reason in self.evicted:
            self.evicted[reason] += counts.evictions[reason]
        self.refreshed_blocks += counts.refreshed_blocks
        await self.store.close()

    async def play(self, days: float, minutes: float) -> None:
        """Live through so many days, a step every so many minutes on average. Raises AssertionError."""
        end = self.clock.now + days * DAY
        await self.open()
        while self.clock.now < end:
            self.clock.now += self._random.expovariate(1 / (60 * minutes))
            if self._random.random() < 0.01:
                self.clock.now += self._random.uniform(1, 12) * HOUR  # a night
            await self._step()
            await self.store._upkeep._tick(self.clock.now)
            await self.check()
            self.num_steps += 1

    async def _step(self) -> None:
        await self._write()
        await self._hit()
        chance = self._random.random()
        if chance < 0.05:
            await self._pin()
        elif chance < 0.08:
            tenant = self._random.choice(_TENANTS)
            self.store.release(tenant, "s")
            self._pinned[tenant].clear()
        elif chance < 0.09:
            await self._delete()
        elif chance < 0.12:
            await self._restart()

    async def _write(self) -> None:
        """Blocks come at once: new ones, or such as were here long ago."""
        num_blocks = self._random.randrange(1, self._random.choice(_BURSTS))
        numbers = [(self._next + n) % _NUM_KEYS for n in range(num_blocks)]
        self._next += len(numbers)
        blocks = [
            block(n, self._sizes[n], retention=_CLASSES[n % 3], tenant=self._random.choice(_TENANTS)) for n in numbers
        ]
        for outcome in await asyncio.gather(*map(self.store.write, blocks), return_exceptions=True):
            assert not isinstance(outcome, BaseException) or isinstance(outcome, Overloaded), outcome
        for number in numbers:
            self._may_live(number, POLICY.expires_at(_CLASSES[number % 3], self.clock.now))

    async def _hit(self) -> None:
        """What came lately, or is just over, is asked for, by any class, and mostly read; a lease that nobody ends runs out by itself."""
        for _ in range(3):
            number = (self._next - self._random.randrange(1, self._random.choice((30, 300)))) % _NUM_KEYS
            if over := [one for one, end in self._ends.items() if self.clock.now - DAY < end <= self.clock.now]:
                number = self._random.choice((number, self._random.choice(over)))
            wanted = self._random.choice(_CLASSES)
            found = await self.store.find(
                FINGERPRINT, [key(number)], request_id="r", lease_seconds=1e-6, retention=wanted
            )
            if found.num_blocks:
                assert self.clock.now < self._ends[number], f"block {number} is over and was found"
                # At most: what class it is of by now, and whether it was written again, is the store's own affair.
                # It may be copied to make room until its life ends, and once for this hit: that gives it another one.
                self._may_live(number, POLICY.expires_at(CHAT, POLICY.expires_at(CHAT, self.clock.now)))
            if self._random.random() < 0.8:
                read = await served(self.store, [number])
                assert read in ({}, {number: payload(number, self._sizes[number])})

    async def _pin(self) -> None:
        number = (self._next - self._random.randrange(1, 100)) % _NUM_KEYS
        hold_seconds = self._random.uniform(HOUR, 9 * DAY)
        tenant = self._random.choice(_TENANTS)
        num_pinned, _ = await self.store.pin(tenant, "s", FINGERPRINT, [key(number)], hold_seconds=hold_seconds)
        if num_pinned:
            self._pinned[tenant].add(number)
        for one in self._pinned[tenant]:  # a session's time is set anew for all that it has pinned
            self._may_live(one, POLICY.expires_at(CHAT, self.clock.now + hold_seconds))

    async def _delete(self) -> None:
        tenant = self._random.choice(_TENANTS)
        await self.store.evict(Selection(tenant=tenant))
        assert tenant not in self.store.holders()

    async def _restart(self) -> None:
        """As after an update, now and then with less room."""
        await self.close()
        assert on_disk(self._folder) <= self._cap_bytes
        self._cap_bytes = self._random.choice(_CAPS)
        await self.open()

    def _may_live(self, number: int, end: float) -> None:
        self._ends[number] = max(self._ends.get(number, 0.0), end)

    async def check(self) -> None:
        """What is promised at every moment."""
        disk = self.store.disk
        assert isinstance(disk, WatchedDisk)
        now_bytes = on_disk(self._folder)
        peak, disk.peak_bytes = max(disk.peak_bytes, now_bytes), now_bytes
        assert peak <= self._cap_bytes, f"{peak} bytes on the disk, after {self.num_steps} steps"
        assert now_bytes == self.store.catalog.physical_bytes
        self.most_bytes = max(self.most_bytes, peak)
        for tenant, quota in POLICY.quota_bytes.items():
            use = self.store.catalog.index.tenants.get(tenant)
            assert use is None or use.num_bytes <= quota
        assert 0 == self.store.counts.damaged_blocks

    async def fall_silent(self) -> None:
        """Nobody comes for as long as the longest life and pin: what has an end is gone from the disk, the rest stays."""
        for days in (10, 8):
            self.clock.now += days * DAY
            for _ in range(2):  # what was pinned for longer than it lived may just have been written again
                await self.store._upkeep._tick(self.clock.now)
            await self.check()
        assert {"any"} >= {path.stem.rsplit("-", 1)[1] for path in segments(self._folder)}

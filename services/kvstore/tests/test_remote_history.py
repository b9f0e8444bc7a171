"""Whatever replicas do in whatever order: is what they serve right, is nothing lost, and does nothing stay for ever?"""

import contextlib
import random
from dataclasses import dataclass

import pytest

from services.chassis.errors import NoReplica
from services.kvstore import uploads
from services.kvstore.blobs import BlobBackend, BlobError
from services.kvstore.manifests import DELETION_SECONDS
from services.kvstore.remote import RemoteTier
from services.kvstore.tests.blocks import FINGERPRINT, key, payload
from services.kvstore.tests.objects import AGENT, CHAT, LIFE_SECONDS, Bucket, SameClock, sealed_segment, upload
from services.kvstore.tiers import Selection

TENANTS = ("acme", "zeta", "")
NUM_BYTES = 600


@dataclass
class Written:
    """One block that was uploaded."""

    number: int
    tenant: str
    created: float
    is_deleted: bool = False


class Unreliable(BlobBackend):
    """An object store that now and then does not do what it is told, or does it and says that it did not."""

    def __init__(self, bucket: Bucket, chance: random.Random) -> None:
        super().__init__(bucket.store, bucket.options)
        self.time = SameClock(bucket.clock)
        self._chance = chance
        self.is_reliable = False

    async def _call(self, breaker, work, patience_seconds, *, slow_seconds=None):
        fate = 1.0 if self.is_reliable else self._chance.random()
        if fate < 0.05:
            raise BlobError("not done")
        result = await super()._call(breaker, work, patience_seconds, slow_seconds=slow_seconds)
        if fate < 0.1:
            raise BlobError("done, and the answer was lost")
        return result


class History:
    """Three replicas of one bucket, what was done to them, and what must be true because of it."""

    def __init__(self, folder, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.bucket = Bucket()
        self.replicas: list[RemoteTier] = [self.new_replica() for _ in range(3)]
        self.written: list[Written] = []
        self.num_segments = 0

    def new_replica(self) -> RemoteTier:
        return RemoteTier(Unreliable(self.bucket, self.random), now=self.bucket.clock)

    @property
    def replica(self) -> RemoteTier:
        return self.random.choice(self.replicas)

    async def step(self) -> None:
        does = [self.write, self.write, self.write, self.look, self.look, self.tidy, self.wait, self.delete, self.lose]
        with contextlib.suppress(BlobError):  # whoever did it hears of it, and it is left half done
            await self.random.choice(does)()

    async def write(self) -> None:
        """A segment of new blocks, and some that are there already, is uploaded."""
        numbers = [len(self.written) + n for n in range(self.random.randrange(1, 6))]
        tenants = [self.random.choice(TENANTS) for _ in numbers]
        known = self.random.sample(self.written, min(len(self.written), self.random.randrange(3)))
        segment = sealed_segment(
            self.folder,
            [*numbers, *(one.number for one in known)],
            number=self.num_segments,
            tenants=[*tenants, *(one.tenant for one in known)],
            retention=self.random.choice([CHAT, AGENT]),
            num_bytes=NUM_BYTES,
            created=self.bucket.clock.now,
        )
        replica = self.replica
        await replica.catalog.refresh(is_full=True)
        self.num_segments += 1
        await upload(replica, segment)
        segment.path.unlink()
        self.written += [
            Written(number, tenant, self.bucket.clock.now) for number, tenant in zip(numbers, tenants, strict=True)
        ]
        truth = (await self.bucket.fresh()).catalog.index
        for one in known:
            found = truth.find(FINGERPRINT, key(one.number), self.bucket.clock.now)
            if found is not None and found.entry.created_unix_seconds == self.bucket.clock.now:
                one.created, one.is_deleted = self.bucket.clock.now, False

    async def look(self) -> None:
        await self.replica.catalog.refresh(is_full=self.random.random() < 0.3)

    async def tidy(self) -> None:
        replica = self.replica
        await replica.catalog.refresh(is_full=True)
        await replica.catalog.tidy()
        if self.random.random() < 0.3:
            await replica.catalog.sweep()

    async def wait(self) -> None:
        self.bucket.clock.now += self.random.choice([1.0, 100.0, DELETION_SECONDS + 1, 400.0])

    async def delete(self) -> None:
        """A tenant is deleted at one replica; the minute after it counts as before it, so it passes."""
        tenant = self.random.choice(TENANTS)
        replica = self.replica
        try:
            await replica.evict(Selection(tenant=tenant))
        except NoReplica:  # "delete again"
            assert isinstance(replica.blobs, Unreliable)
            replica.blobs.is_reliable = True
            await replica.evict(Selection(tenant=tenant))
            replica.blobs.is_reliable = False
        for one in self.written:
            one.is_deleted |= one.tenant == tenant
        self.bucket.clock.now += DELETION_SECONDS + 1

    async def lose(self) -> None:
        """A replica is replaced by one that knows nothing."""
        self.replicas[self.random.randrange(3)] = self.new_replica()

    async def check(self, replica: RemoteTier, *, is_fresh: bool) -> None:
        """What a replica serves is right; a fresh one serves all there is, and nothing that was deleted."""
        for one in self.written:
            found = await replica.longest(FINGERPRINT, [key(one.number)])
            try:
                served = [bytes(await replica.read(place)) for place in found]
            except BlobError:
                assert not is_fresh
                continue
            assert served in ([], [payload(one.number, NUM_BYTES)])
            if one.is_deleted:
                assert not (is_fresh and served), one
            elif is_fresh and self.bucket.clock.now < one.created + LIFE_SECONDS:
                assert served, one

    async def end(self) -> None:
        """Long after, nothing is left but what says that something was deleted."""
        self.bucket.clock.now += LIFE_SECONDS + 400
        replica = await self.bucket.fresh()
        await replica.catalog.tidy()
        await replica.catalog.sweep()
        assert {"tombstone"} >= {one.path.split("/")[0] for one in await replica.blobs.list("", max_blobs=10_000)}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(uploads, "FIRST_RETRY_SECONDS", 0.001)


async def play(folder, seed: int, num_steps: int) -> None:
    history = History(folder, seed)
    for _ in range(num_steps):
        await history.step()
        await history.check(history.replica, is_fresh=False)
    await history.check(await history.bucket.fresh(), is_fresh=True)
    await history.end()


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_history_serves_only_what_is_right(tmp_path, seed):
    """Uploads, deletions, expiry and replaced replicas, in any order."""
    await play(tmp_path, seed, num_steps=25)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
async def test_many_random_histories_serve_only_what_is_right(tmp_path, seed):
    """As above, for many more and longer ones."""
    await play(tmp_path, seed, num_steps=80)

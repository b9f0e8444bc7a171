"""Which blocks are stored, and how do they get in and out?

The event loop owns the index, the segment table, leases and pins (catalog.py); one writer thread and a few reader
threads own the files. This class is the door; the rooms are reading.py, writing.py, upkeep.py and removal.py.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from isal.isal_zlib import crc32 as checksum

from services.chassis.errors import InvalidRequest, Overloaded
from services.kvstore.admission import ByteBudget, Deletions
from services.kvstore.catalog import Catalog, Hit
from services.kvstore.disk import Disk
from services.kvstore.encryption import Keyring
from services.kvstore.format import MAX_RECORD_OVERHEAD_BYTES, TENANT_BYTES
from services.kvstore.index import ENCRYPTED
from services.kvstore.log import SegmentLog
from services.kvstore.meters import Meters, StoreCounts
from services.kvstore.pending import PendingBlocks
from services.kvstore.pinning import Session, pin
from services.kvstore.reading import BlockReader, StoredBlock
from services.kvstore.recovery import Recovered, close_folder, recover
from services.kvstore.removal import remove
from services.kvstore.retention import AGENT, UNSPECIFIED, RetentionPolicy
from services.kvstore.segments import Block
from services.kvstore.tiers import RemoteBlocks, Removed, SegmentListener, Selection
from services.kvstore.upkeep import Upkeep
from services.kvstore.verification import StoreVerification
from services.kvstore.writing import WriteLine

MAX_BLOCK_BYTES = 64 << 20
MAX_WAITING_BYTES = 64 << 20
"""Blocks received and not yet on disk, over all writers."""
SEGMENTS_PER_CAP = 16
"""A segment is at most this part of the cap: one is open for each class, and evictions stay small on small disks."""
_INLINE_BYTES = 4 << 20
"""Checked on the event loop: a thread's round trip costs more than a checksum of this many bytes."""
_PINNED_SHARE = 4  # a quarter of the cap may be pinned where no quota says otherwise

Progress = Callable[[str, int, int], None]


class Outcome(Enum):
    """What became of a block that was written."""

    STORED = "stored"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found."""

    num_blocks: int
    num_pending: int
    pending_seconds: float
    lease_seconds: float


class Store:
    """Blocks of KV under one folder, at most `max_bytes` of disk."""

    def __init__(
        self,
        disk: Disk,
        recovered: Recovered,
        *,
        max_bytes: int,
        segment_bytes: int,
        policy: RetentionPolicy,
        keyring: Keyring | None,
    ) -> None:
        self.max_bytes = max_bytes
        # One block must fit beside the active segments whatever the cap is.
        self.max_block_bytes = min(MAX_BLOCK_BYTES, max_bytes // 2 - MAX_RECORD_OVERHEAD_BYTES)
        self.room = ByteBudget(MAX_WAITING_BYTES)
        self.counts = StoreCounts(damaged_blocks=recovered.num_damaged)
        self.meters = Meters()
        self.deletions = Deletions()
        self.pending = PendingBlocks()
        self.disk = disk
        self.catalog = Catalog(recovered.index, recovered.segments, policy)
        self._lock = recovered.lock
        self._keyring = keyring
        self._log = SegmentLog(
            disk,
            policy,
            next_number=recovered.next_number,
            segment_bytes=min(segment_bytes, max_bytes // SEGMENTS_PER_CAP),
        )
        self.reader = BlockReader(disk, self.catalog, self.pending, keyring, counts=self.counts, meters=self.meters)
        self._line = WriteLine(
            disk, self._log, self.catalog, self.reader, max_bytes=max_bytes, counts=self.counts, meters=self.meters
        )
        shortest = min(policy.agent_seconds, policy.chat_seconds)
        self._upkeep = Upkeep(
            self.catalog, self._log, self._line, self.reader, counts=self.counts, period_seconds=shortest / 20
        )
        self._in_flight: dict[tuple[bytes, bytes], asyncio.Future[str]] = {}
        self._is_closing = False

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        max_bytes: int,
        segment_bytes: int,
        policy: RetentionPolicy | None = None,
        encryption_key_file: Path | None = None,
        progress: Progress | None = None,
    ) -> "Store":
        """Lock the folder and rebuild the index from its segments.

        Raises StoreLockedError when another store has it, MasterKeyError for a key file that cannot be used.
        """
        policy = policy or RetentionPolicy()
        keyring = None
        if encryption_key_file is not None:
            keyring = await asyncio.to_thread(Keyring.load, folder / "keys", encryption_key_file)
        recovered = await asyncio.to_thread(recover, folder, policy, time.time(), progress)
        store = cls(
            Disk(folder), recovered, max_bytes=max_bytes, segment_bytes=segment_bytes, policy=policy, keyring=keyring
        )
        await store._line.run(store._line.settle_in)
        return store

    @property
    def num_blocks(self) -> int:
        return len(self.catalog.index)

    @property
    def num_segments(self) -> int:
        return len(self.catalog.segments)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all segment files, the footers that the active ones will get included."""
        return self.catalog.disk_bytes

    def connect(self, *, listener: SegmentListener | None = None, remote: RemoteBlocks | None = None) -> None:
        """Put a tier behind the store. The listener hears of every sealed segment, those of earlier lives first."""
        self.reader.remote = remote
        self._line.listener = listener
        if listener is None:
            return
        for number, one in self.catalog.segments.items():
            locations = sorted(self.catalog.index.blocks_of(number), key=lambda location: location.offset_bytes)
            if not one.is_active and locations:
                listener.sealed(self.catalog.sealed(number, locations))

    def lookup(self, fingerprint: bytes, keys: Collection[bytes], *, retention: int = UNSPECIFIED) -> int:
        """Return how many leading keys are stored under this fingerprint. In memory, no lease."""
        return len(self._find(fingerprint, keys, retention).locations)

    async def find(
        self,
        fingerprint: bytes,
        keys: Sequence[bytes],
        *,
        request_id: str = "",
        lease_seconds: float = 0.0,
        retention: int = UNSPECIFIED,
    ) -> Found:
        """Return how many leading keys are stored here or behind, and how many of the next are being written.

        With a request id the segments of the found blocks stay readable until the read of that request, or for the
        lease's time.
        """
        hit = self._find(fingerprint, keys, retention)
        granted = 0.0
        if request_id and hit.segments:
            now = time.monotonic()  # a clock that is set back must not hold segments for days
            granted = self.catalog.leases.grant(request_id, hit.segments, seconds=lease_seconds, now=now)
        num_blocks = len(hit.locations)
        num_pending = self._num_pending(fingerprint, keys, num_blocks)
        if self.reader.remote is not None and not num_pending and num_blocks < len(keys):
            num_behind = await self.reader.num_remote(fingerprint, keys[num_blocks:])
            self.counts.remote_hit_by_class[_known(retention)] += num_behind
            num_blocks += num_behind
        self.counts.pending_blocks += num_pending
        return Found(num_blocks, num_pending, self.pending.lag_seconds if num_pending else 0.0, granted)

    def has(self, fingerprint: bytes, key: bytes) -> bool:
        return self.catalog.find(fingerprint, key, time.time()) is not None

    def announce(self, fingerprint: bytes, key: bytes) -> AbstractContextManager[None]:
        """Count a block as coming while its bytes arrive."""
        return self.pending.announce((fingerprint, key))

    async def read(
        self, fingerprint: bytes, keys: Iterable[bytes], *, pending_seconds: float = 0.0, request_id: str = ""
    ) -> AsyncGenerator[StoredBlock]:
        """Yield the blocks in order, each verified; stop before the first that is missing or damaged.

        Blocks that are being written are waited for, at most `pending_seconds` in all. The next runs of blocks are read
        from disk while the caller sends the last one. The lease of `request_id` ends with this.
        """
        lease = self.catalog.leases.claim(request_id)
        try:
            async for block in self.reader.read(fingerprint, list(keys), pending_seconds=pending_seconds):
                yield block
        finally:
            self.catalog.leases.end(lease)

    async def write(self, block: Block) -> Outcome:
        """Store a block and return once it is durable and findable, or was there already (first writer wins).

        The caller holds `room` for the payload. Raises InvalidRequest for a wrong CRC-32, size or tenant, Overloaded
        when the disk or the tenant's quota cannot take it; then nothing was published.
        """
        self._check(block)
        if await _checksum(block) != block.crc32:
            self.counts.write_drops["crc"] += 1
            raise InvalidRequest("block_crc32 is not the CRC-32 of the block's bytes", field="block_crc32")
        name = (block.fingerprint, block.key)
        started = time.monotonic()
        with self.pending.announce(name):
            while name in self._in_flight:
                await asyncio.wait([self._in_flight[name]])  # then it is either findable or this copy's turn
            if self.has(*name):
                self.counts.duplicate_blocks += 1
                return Outcome.DUPLICATE
            if self._is_closing:
                self.counts.write_drops["stopping"] += 1
                raise Overloaded("the KV store is stopping")
            done = self._in_flight[name] = self._put(block)
            done.add_done_callback(partial(self._settle, name))
            # Shielded: a writer that goes away must not undo what other writers of the same key wait for.
            refusal = await asyncio.shield(done)
        if refusal:
            raise Overloaded(f"the KV store cannot take the block: {refusal}", retry_after=5.0)
        self.pending.note_lag(time.monotonic() - started)
        return Outcome.STORED

    async def pin(
        self, tenant: str, session_id: str, fingerprint: bytes, keys: Sequence[bytes], *, hold_seconds: float
    ) -> tuple[int, float]:
        """Keep the leading stored blocks from eviction; return how many are pinned, and until when (Unix seconds).

        Blocks that only the tier behind has are first copied to the disk here.
        """
        session = Session(tenant, session_id, fingerprint, keys, hold_seconds)
        return await pin(self.catalog, self.reader.remote, session, most_bytes=self.max_bytes // _PINNED_SHARE)

    def release(self, tenant: str, session_id: str, keys: Iterable[bytes] = ()) -> int:
        """Take back a session's pins (of these keys); return how many there were."""
        return self.catalog.pins.release(tenant, session_id, keys)

    async def evict(self, selection: Selection) -> Removed:
        """Remove what matches, for good, here and behind; return once its bytes are gone."""
        removed = await self.evict_local(selection, math.inf)
        if self._line.listener is not None:
            behind = await self._line.listener.evict(selection)
            # Until now blocks could still be read from there, and were kept here too.
            again = await self.evict_local(selection, math.inf)
            parts = (removed, behind, again)
            removed = Removed(sum(one.num_blocks for one in parts), sum(one.num_bytes for one in parts))
        return removed

    def holders(self) -> Collection[str]:
        """Return the tenants whose blocks can be found here."""
        return self.catalog.index.tenants.keys()

    async def evict_local(self, selection: Selection, before_unix_seconds: float) -> Removed:
        """Remove what matches and was written before that moment, here only."""
        job = partial(
            remove,
            selection,
            self._line,
            self._log,
            self.catalog,
            self._keyring,
            counts=self.counts,
            before_unix_seconds=before_unix_seconds,
        )
        async with self.deletions.alone():
            removed: Removed = await self._line.run(job)
        return removed

    async def seal_older_than(self, seconds: float) -> None:
        """Seal every open segment that was opened longer ago."""
        await self._line.run(lambda: self._line.seal(self._log.seal_older, self._line.clock.now() - seconds))

    def verify(self, *, max_bytes_per_second: int, remote_bytes: int = 0) -> StoreVerification:
        """Return a reading of every block that reports as it goes; bad ones are quarantined.

        remote_bytes: how much is read back from the object store too. Raises InvalidRequest when there is none.
        """
        return StoreVerification(
            self.catalog, self.reader, max_bytes_per_second=max_bytes_per_second, remote_bytes=remote_bytes
        )

    async def close(self) -> None:
        """Write what waits, seal the active segments, release the folder."""
        self._is_closing = True
        await self._upkeep.close()
        await self._line.close()
        await self.reader.close()
        await asyncio.to_thread(self.disk.close)
        close_folder(self._lock)

    def _find(self, fingerprint: bytes, keys: Collection[bytes], retention: int) -> Hit:
        started = time.perf_counter()
        now = time.time()
        retention = _known(retention)
        hit = self.catalog.lookup(fingerprint, keys, wanted=retention, now=now)
        num_found = len(hit.locations)
        if num_found:
            deepest = hit.locations[-1]
            last = self.catalog.hits.last(deepest.key) or deepest.created_seconds
            self.meters.hit_age_seconds.observe(max(0.0, now - last))
            self.catalog.hits.note(hit.locations, now)
            if hit.stale:
                self._upkeep.refresh(hit.stale)
        self.counts.lookups += 1
        self.counts.lookup_blocks += len(keys)
        self.counts.hit_blocks += num_found
        self.counts.eligible_by_class[retention] += len(keys)
        self.counts.hit_by_class[retention] += num_found
        self.meters.lookup_seconds.observe(time.perf_counter() - started)
        return hit

    def _num_pending(self, fingerprint: bytes, keys: Sequence[bytes], start: int) -> int:
        if not len(self.pending):
            return 0
        count = start
        while count < len(keys) and (fingerprint, keys[count]) in self.pending:
            count += 1
        return count - start

    def _check(self, block: Block) -> None:
        if not 0 < len(block.payload) <= self.max_block_bytes:
            self.counts.write_drops["size"] += 1
            raise InvalidRequest(
                f"block has {len(block.payload)} bytes; this store takes 1 to {self.max_block_bytes}",
                field="block_bytes",
            )
        if len(block.tenant.encode()) > TENANT_BYTES or "\0" in block.tenant:
            raise InvalidRequest(f"a tenant's name has at most {TENANT_BYTES} bytes, none of them 0", field="tenant")

    def _put(self, block: Block) -> "asyncio.Future[str]":
        """Queue a block; the future says why it was refused, or nothing."""
        if block.retention != _known(block.retention):
            block = replace(block, retention=UNSPECIFIED)
        if self._keyring is None:
            return self._line.put(block)
        return asyncio.ensure_future(self._seal_and_put(self._keyring, block))

    async def _seal_and_put(self, keyring: Keyring, block: Block) -> str:
        stored = await asyncio.to_thread(keyring.seal, block.tenant, block.key + block.fingerprint, block.payload)
        return await self._line.put(replace(block, payload=stored, crc32=checksum(stored), flags=ENCRYPTED))

    def _settle(self, name: tuple[bytes, bytes], done: "asyncio.Future[str]") -> None:
        del self._in_flight[name]
        self.pending.settle(name)
        self.counts.stored_blocks += not done.cancelled() and done.exception() is None and not done.result()


async def _checksum(block: Block) -> int:
    if len(block.payload) <= _INLINE_BYTES:
        return checksum(block.payload)
    return await asyncio.to_thread(checksum, block.payload)


def _known(retention: int) -> int:
    """Return the class, or none for one that a newer peer knows."""
    return retention if retention in range(AGENT + 1) else UNSPECIFIED

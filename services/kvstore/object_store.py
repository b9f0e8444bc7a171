"""How is an object store put behind a store when the service starts, and what of it comes to the local disk?"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.chassis.errors import FathomError
from services.chassis.service import Service
from services.kvstore.index import ENCRYPTED, BlockLocation
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_metrics import register
from services.kvstore.segments import Block
from services.kvstore.store import MAX_WAITING_BYTES, Store
from services.kvstore.tiers import RemoteLocation

_BUSY_BYTES = MAX_WAITING_BYTES // 4
"""While more waits for the disk, blocks from the object store are not written to it: computed ones go first."""

_log = structlog.get_logger()


class AdmittingTier:
    """The object store's blocks, kept on the local disk too once read: they are likely to be read again."""

    def __init__(self, tier: RemoteTier, store: Store) -> None:
        self._tier = tier
        self._store = store
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def breaker(self) -> str:
        """State for the stats: "closed" while the object store is in use, else "open"."""
        return self._tier.breaker

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found in the object store."""
        return self._tier.num_blocks

    async def longest(self, fingerprint: bytes, keys: Sequence[bytes]) -> Sequence[RemoteLocation]:
        """Return where the leading keys are."""
        return await self._tier.longest(fingerprint, keys)

    async def read(self, location: RemoteLocation) -> memoryview:
        """Return a block's stored bytes, verified, and keep a copy of it if there is time for that."""
        stored = await self._tier.read(location)
        block = location.location
        if not block.flags & ENCRYPTED and self._store.room.used_bytes + len(stored) <= _BUSY_BYTES:
            write = asyncio.create_task(self._keep(block, stored), name="kvstore-keep-remote")
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
        return stored

    async def _keep(self, location: BlockLocation, stored: memoryview) -> None:
        block = Block(location.key, location.fingerprint, stored, location.crc32, location.retention, location.tenant)
        try:
            await self._store.room.take(len(stored), timeout_seconds=0.0)
            try:
                # It may have been deleted while it was read: here it would outlive its deletion.
                if await self._tier.longest(location.fingerprint, [location.key]):
                    await self._store.write(block)
            finally:
                self._store.room.give_back(len(stored))
        except FathomError as exc:
            _log.info("kvstore.remote.not_kept", reason=exc.message)


def attach(service: Service, store: Store, *, url: str, options_file: str) -> None:
    """Connect the store to the object store at `url`; raise ValueError when the URL or the options are wrong.

    Nothing waits for the object store: while it is away the service starts and serves what is local.
    """
    tier = RemoteTier.open(url, Path(options_file) if options_file else None)
    register(tier, service.metrics)
    store.connect(listener=tier, remote=AdmittingTier(tier, store))
    background = service.spawn(tier.run(store), "kvstore object store")

    async def stop() -> None:
        await tier.drain(store)
        background.cancel()

    service.on_stop(stop)

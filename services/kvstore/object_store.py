"""How is an object store put behind a store when the service starts, and what of it comes to the local disk?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import structlog
from isal.isal_zlib import crc32 as checksum

from services.chassis.errors import FathomError
from services.chassis.service import Service
from services.kvstore.blobs import BlobError
from services.kvstore.encryption import Keyring, SealedAwayError
from services.kvstore.index import BlockLocation
from services.kvstore.remote import RemoteTier
from services.kvstore.remote_metrics import register
from services.kvstore.segments import Block
from services.kvstore.store import MAX_WAITING_BYTES, Store
from services.kvstore.tiers import RemoteChecked, RemoteLocation, SealedSegment

_BUSY_BYTES = MAX_WAITING_BYTES // 4
"""While more waits for the disk, blocks from the object store are not written to it: computed ones go first."""
_ROOM_SECONDS = 5.0
"""But those that somebody asked to keep wait for room."""

_TIME_SECONDS = 2.0
"""How long a start may wait for the object store's clock."""

_log = structlog.get_logger()


class AdmittingTier:
    """The object store's blocks, kept on the local disk too once read: they are likely to be read again."""

    def __init__(self, tier: RemoteTier, store: Store) -> None:
        self._tier = tier
        self._store = store
        self._writes: set[asyncio.Task[bool]] = set()

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
        if self._store.room.used_bytes + len(stored) <= _BUSY_BYTES:
            self._start_keeping(block, stored)
        return stored

    def verify(self, *, max_bytes: int) -> AsyncIterator[RemoteChecked]:
        """Read back what the object store has."""
        return self._tier.verify(max_bytes=max_bytes)

    async def bring(self, location: RemoteLocation) -> bool:
        """Put a block on the local disk, and wait for that; False when it cannot be had, or not written."""
        try:
            stored = await self._tier.read(location)
        except (BlobError, OSError) as exc:
            _log.info("kvstore.remote.missed", reason=str(exc), error_kind=type(exc).__name__)
            return False
        # Shielded: its caller may leave, but what is on its way to the disk must not be out of a deletion's sight.
        return await asyncio.shield(self._start_keeping(location.location, stored, room_seconds=_ROOM_SECONDS))

    def _start_keeping(
        self, location: BlockLocation, stored: memoryview, *, room_seconds: float = 0.0
    ) -> asyncio.Task[bool]:
        write = asyncio.create_task(self._keep(location, stored, room_seconds=room_seconds), name="kvstore-keep-remote")
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _keep(self, location: BlockLocation, stored: memoryview, *, room_seconds: float = 0.0) -> bool:
        try:
            await self._store.room.take(len(stored), timeout_seconds=room_seconds)
            try:
                # It may have been deleted while it was read: here it would outlive its deletion. One that comes while
                # it is written waits, and then finds it here.
                async with self._store.deletions.held_off():
                    if not await self._tier.longest(location.fingerprint, [location.key]):
                        return False
                    await self._store.write(await self._opened(location, stored))
            finally:
                self._store.room.give_back(len(stored))
        except (FathomError, SealedAwayError) as exc:
            _log.info("kvstore.remote.not_kept", reason=str(exc))
            return False
        return True

    async def _opened(self, location: BlockLocation, stored: memoryview) -> Block:
        """Return the block as its writer gave it: the store seals it again."""
        payload: memoryview | bytes = stored
        crc32 = location.crc32
        if location.is_encrypted:
            keyring, name = self._tier.keys.keyring, location.key + location.fingerprint
            if keyring is None:
                raise SealedAwayError("the store has no master key")
            payload = await asyncio.to_thread(keyring.unseal, location.tenant, name, stored)
            crc32 = checksum(payload)
        return Block(
            location.key,
            location.fingerprint,
            payload,
            crc32,
            location.retention,
            location.tenant,
            first_created_seconds=location.first_created_seconds,
        )


def opened(store: Store) -> list[SealedSegment]:
    """Return the store's open segments with the blocks that are durable in them."""
    catalog = store.catalog
    segments = []
    for number, one in list(catalog.segments.items()):
        if one.is_active:
            found = sorted(catalog.index.blocks_of(number), key=lambda location: location.offset_bytes)
            if found:
                segments.append(catalog.sealed(number, found))
    return segments


async def attach(service: Service, store: Store, *, url: str, options_file: str) -> None:
    """Connect the store to the object store at `url`; raise ValueError when the URL or the options are wrong.

    Nothing waits for the object store: while it is away the service starts and serves what is local, but for what may
    have been deleted while this replica was away for very long.
    """
    settings = service.settings
    keyring = None
    if settings.encryption_key_file:  # the one that the store has
        keyring = Keyring.load(settings.path / "keys", Path(settings.encryption_key_file))
    tier = RemoteTier.open(url, Path(options_file) if options_file else None, settings.path, keyring=keyring)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TIME_SECONDS):
            await tier.ask_time()
    try:
        await tier.forget_doubtful(store)
    except (FathomError, OSError) as exc:  # what is in doubt is out of the index; its bytes go with the next refresh
        _log.warning("kvstore.remote.doubt_stays", reason=str(exc), error_kind=type(exc).__name__)
    register(tier, service.metrics)
    store.connect(listener=tier, remote=AdmittingTier(tier, store))
    background = service.spawn(tier.run(store, lambda: opened(store)), "kvstore object store")

    async def stop() -> None:
        await tier.drain(store)
        background.cancel()

    service.on_stop(stop)

"""How does every replica come by the keys of the tenants' blocks that others sealed, and how do all of them lose them?

A replica that encrypts puts each tenant's wrapped key into the object store before the first block that it seals; the
others fetch it and seal with it too. Only the operator's master key, which never leaves its file, opens it. A deletion
of a tenant is a tombstone: whoever reads it destroys the keys that are older, here and there.

    key/<SHA-256 of the tenant>.<milliseconds>-<random>     a wrapped key
    master.mark                                             opens with the right master key only
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import structlog

from services.kvstore.blobs import BlobBackend, BlobMissingError
from services.kvstore.encryption import WRAPPED_BYTES, KeyName, Keyring, parse_key_name, tenant_hash
from services.kvstore.index import ENCRYPTED
from services.kvstore.manifests import Manifest, PackedEntries, Tombstone

MAX_KEYS = 100_000
_MARK_PATH = "master.mark"
_PREFIX = "key"

_log = structlog.get_logger()


@dataclass(slots=True)
class KeyCounts:
    """Counted since boot."""

    published: int = 0
    fetched: int = 0
    destroyed: int = 0
    """Here or in the object store, because their tenants were deleted."""


class TenantKeys:
    """Keeps the keyring of a store and the wrapped keys in the object store the same. Without a keyring: does nothing.

    Methods that call the object store raise BlobError.
    """

    def __init__(self, blobs: BlobBackend, keyring: Keyring | None) -> None:
        self.counts = KeyCounts()
        self.keyring = keyring
        self.is_refused = False
        """The keys over there are wrapped by another master key: sealed blocks stay at home, and none are taken."""
        self._blobs = blobs
        self._is_agreed = False
        self._published: set[KeyName] = set()
        self._gone: set[KeyName] = set()
        """Destroyed here, and perhaps still over there."""
        self._doubted_before = 0.0
        self._holders: Callable[[], Collection[str]] = tuple
        self._is_first = False
        self._one_at_a_time = asyncio.Lock()

    def can_open(self, tenant: str) -> bool:
        """Say whether a sealed block of this tenant can be opened, and may be shared."""
        return self.keyring is not None and not self.is_refused and self.keyring.has(tenant)

    def doubt(self, before_unix_seconds: float, holders: Callable[[], Collection[str]]) -> None:
        """Take older keys for deleted unless the object store has them: a deletion may have been forgotten there.

        0 doubts nothing.  holders: returns the tenants that have blocks here which are not in doubt. Those were there
        after any deletion that is forgotten, and an older key seals them as well: it stays.
        """
        self._doubted_before = before_unix_seconds
        self._holders = holders

    def lacks_key_for(self, manifest: Manifest) -> bool:
        """Say whether a manifest holds sealed blocks of a tenant that has no key here yet."""
        if self.keyring is None or self.is_refused:
            return False
        entries = manifest.entries
        tenants = entries.tenants if isinstance(entries, PackedEntries) else {entry.tenant for entry in entries}
        strangers = {tenant for tenant in tenants if not self.keyring.has(tenant)}
        return bool(strangers) and any(one.flags & ENCRYPTED and one.tenant in strangers for one in entries)

    async def refresh(self, tombstones: Sequence[Tombstone]) -> None:
        """Destroy the keys of deleted tenants, fetch what others published, publish what only this replica has."""
        await self.obey(tombstones)
        await self.share()

    async def obey(self, tombstones: Sequence[Tombstone]) -> None:
        """Destroy the keys of deleted tenants here and fetch what others published: needs no writing over there."""
        keyring = self.keyring
        async with self._one_at_a_time:
            if keyring is not None and await self._agree(keyring):
                await self._obey(keyring, tombstones)

    async def share(self) -> None:
        """Delete over there what was destroyed, and publish what only this replica has."""
        keyring = self.keyring
        async with self._one_at_a_time:
            if keyring is not None and self._is_agreed:
                for name in sorted(self._gone):
                    await self._blobs.delete(_path(name))
                    self._published.discard(name)
                    self._gone.discard(name)
                await self._publish(keyring, keyring.names - self._published)

    async def publish(self, tenants: Iterable[str]) -> None:
        """See to it that whoever finds blocks of these tenants can open them: to be called before they are uploaded."""
        keyring = self.keyring
        async with self._one_at_a_time:
            if keyring is not None and await self._agree(keyring):
                owners = {tenant_hash(tenant) for tenant in tenants}
                mine = {name for name in keyring.names if name.tenant_hash in owners}
                await self._publish(keyring, mine - self._published - self._old(mine))

    async def _obey(self, keyring: Keyring, tombstones: Sequence[Tombstone]) -> None:
        listed = await self._listed()
        self._published = set(listed)
        gone = _shredded(listed | keyring.names, tombstones)
        if gone:  # here first: a key that is gone over there and not here would be published again
            await asyncio.to_thread(keyring.destroy, list(gone))
            self.counts.destroyed += len(gone - self._gone)
            self._gone |= gone
        held = {tenant_hash(tenant) for tenant in self._holders()}
        doubtful = {name for name in self._old(keyring.names - listed) if name.tenant_hash not in held}
        if doubtful and len(listed) < MAX_KEYS:
            await asyncio.to_thread(keyring.destroy, list(doubtful))
            self.counts.destroyed += len(doubtful)
        self._doubted_before = 0.0
        for name in sorted(listed - keyring.names - gone):
            await self._fetch(keyring, name)

    async def _agree(self, keyring: Keyring) -> bool:
        """Find out whether all replicas have the same master key: the first one's mark decides."""
        if not self._is_agreed:
            mark = await self._agreed_mark(keyring)
            self._is_agreed = keyring.has_same_master(mark)
            self.is_refused = not self._is_agreed
        if self.is_refused:
            _log.error(
                "kvstore.keys.refused",
                reason="the tenants' keys in the object store are wrapped by another master key: encrypted blocks are "
                "neither uploaded nor found there. Give every replica the same encryption_key_file, or this one "
                "another object_store_url",
            )
        return self._is_agreed

    async def _agreed_mark(self, keyring: Keyring) -> bytes:
        try:  # first, for a replica that may only read
            return await self._blobs.get(_MARK_PATH, max_bytes=4096)
        except BlobMissingError:
            mark = keyring.mark()
        if await self._blobs.put_if_absent(_MARK_PATH, mark):
            self._is_first = True  # ever: nobody can have deleted anything there
            return mark
        return await self._blobs.get(_MARK_PATH, max_bytes=4096)

    def _old(self, names: Iterable[KeyName]) -> set[KeyName]:
        if self._is_first:
            return set()
        return {name for name in names if name.created_unix_seconds < self._doubted_before}

    async def _listed(self) -> set[KeyName]:
        blobs = await self._blobs.list(_PREFIX, max_blobs=MAX_KEYS)
        found = {parse_key_name(blob.path.removeprefix(f"{_PREFIX}/")) for blob in blobs}
        return {name for name in found if name is not None}

    async def _fetch(self, keyring: Keyring, name: KeyName) -> None:
        try:
            wrapped = await self._blobs.get(_path(name), max_bytes=WRAPPED_BYTES)
        except BlobMissingError:
            return
        if len(wrapped) == WRAPPED_BYTES:
            await asyncio.to_thread(keyring.take, name, wrapped)
            self.counts.fetched += 1

    async def _publish(self, keyring: Keyring, names: Collection[KeyName]) -> None:
        for name in sorted(names):
            wrapped = await asyncio.to_thread(keyring.wrapped, name)
            if wrapped is not None:
                self.counts.published += await self._blobs.put_if_absent(_path(name), wrapped)
                self._published.add(name)


def _shredded(names: Iterable[KeyName], tombstones: Sequence[Tombstone]) -> set[KeyName]:
    tenants = {tenant_hash(one.tenant): one.tenant for one in tombstones if one.tenant is not None}
    return {
        name
        for name in names
        if (tenant := tenants.get(name.tenant_hash)) is not None
        and any(one.shreds(tenant, name.created_unix_seconds) for one in tombstones)
    }


def _path(name: KeyName) -> str:
    return f"{_PREFIX}/{name}"

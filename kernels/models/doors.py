"""How do blocks and windows enter and leave a model, as opaque bytes? For every kind through its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.kv.block_bytes import BlockBytes, Fetched
    from kernels.kv.cache import KvCache
    from kernels.models.v41.cache import V41Cache
    from kernels.models.v41.slots import WindowSlots


class BlockDoor:
    """Blocks of a model with a cache. What the methods promise: `kernels.models.model.Model`."""

    cache: BlockBytes

    @property
    def is_on_host(self) -> bool:
        return self.cache.is_on_host

    def read_block(self, block_id: int) -> bytes:
        return self.cache.read_block(block_id)

    def fetch_block(self, block_id: int) -> Fetched:
        return self.cache.fetch_block(block_id)

    def copy_block(self, block_id: int, place: memoryview) -> None:
        self.cache.copy_block(block_id, place)

    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        self.cache.write_block(block_id, payload)

    def take_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> int:
        return self.cache.take_block(block_id, payload)


class BlockOnlyDoor(BlockDoor):
    """Of a model without windows."""

    cache: KvCache

    def read_window(self, slot: int, *, encoder_only: bool) -> bytes:  # noqa: ARG002 - there is nothing in either
        return b""

    def write_window(self, slot: int, payload: bytes | bytearray | memoryview) -> None:  # noqa: ARG002 - no slots
        if payload:
            raise ValueError(f"a window of this model has 0 bytes, the payload {len(payload)}")

    def reset_window(self, slot: int) -> None:
        """Nothing to forget."""


class WindowDoor(BlockDoor):
    """Of a model whose cache holds windows too; its slots remember what each one holds."""

    cache: V41Cache
    _slots: WindowSlots

    def read_window(self, slot: int, *, encoder_only: bool) -> bytes:
        return self.cache.read_window(slot, encoder_only=encoder_only)

    def write_window(self, slot: int, payload: bytes | bytearray | memoryview) -> None:
        self.cache.write_window(slot, payload)
        self._slots.restored(slot, len(payload))

    def reset_window(self, slot: int) -> None:
        self.cache.reset_window(slot)
        self._slots.reset(slot)

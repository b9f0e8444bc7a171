"""Which computed blocks go to the KV store, and when is one given up instead?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.chassis.kvstore_client import BlockWriter, StoredBlock

if TYPE_CHECKING:
    from kernels.executor import Executor


class Writeback:
    """Copies full blocks off the device for the store while the queue to it has room.

    Called in the engine thread, with blocks that this replica computed: what came from the store is not offered.
    """

    def __init__(self, executor: Executor, writer: BlockWriter | None) -> None:
        """Without a writer nothing is kept: the replica runs without a KV store."""
        self._executor = executor
        self._writer = writer

    def offer(self, key: bytes, block_id: int) -> None:
        """Copy one full block, or drop it (counted) when the store cannot keep up: the engine never waits for it."""
        if self._writer is not None and self._writer.has_room(self._executor.layout.block_bytes):
            self._writer.put(StoredBlock(key, self._executor.read_block(block_id)))

"""Which computed blocks go to the KV store, and when is one given up instead?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.chassis.kvstore_writer import BlockWriter, Origin, StoredBlock

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

    def offer(self, origin: Origin, keys: Sequence[bytes], block: int, block_id: int) -> None:
        """Copy one full block of a chain; the queue drops its oldest (counted) when the store cannot keep up."""
        if self._writer is not None and self._writer.has_room(self._executor.layout.block_bytes):
            self._writer.put(StoredBlock.of_chain(keys, block, self._executor.read_block(block_id), origin))

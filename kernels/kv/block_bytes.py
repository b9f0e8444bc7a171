"""How do whole blocks get from the device to the host and back, as opaque bytes?"""

from __future__ import annotations

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from kernels.kv.layout import KvLayout


class BlockBytes:
    """The part of a cache that moves blocks. Block 0 is the null block, which nobody may read or write."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """num_blocks: the null block counted."""
        self.layout = layout
        self.num_blocks = num_blocks
        self._blocks: Tensor = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)

    def read_block(self, block_id: int) -> bytes:
        """The block's bytes as the layout describes them."""
        self._check_block(block_id)
        return self._blocks[block_id].cpu().numpy().tobytes()

    def copy_block(self, block_id: int, place: memoryview) -> None:
        """Copy the block to writable host memory, with nothing in between; ValueError for a place of another size."""
        self._check_block(block_id)
        if len(place) != self.layout.block_bytes:
            raise ValueError(f"a block has {self.layout.block_bytes} bytes, the place {len(place)}")
        torch.frombuffer(place, dtype=torch.uint8).copy_(self._blocks[block_id])

    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a block; ValueError unless the payload is layout.block_bytes long."""
        self._blocks[block_id].copy_(self._checked(block_id, payload))

    def take_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> int:
        """As `write_block`, from memory that others may write meanwhile; return the XXH3 (64 bits) of what it holds.

        On a CPU the block itself is summed, while it is still in cache; for a GPU the copy that is sent there.
        """
        taken = self._checked(block_id, payload)
        if self._blocks.is_cpu:
            self._blocks[block_id].copy_(taken)
            return xxh3_64_intdigest(self._blocks[block_id].numpy().data)
        taken = taken.clone()
        self._blocks[block_id].copy_(taken)
        return xxh3_64_intdigest(taken.numpy().data)

    def _checked(self, block_id: int, payload: bytes | bytearray | memoryview) -> Tensor:
        self._check_block(block_id)
        if len(payload) != self.layout.block_bytes:
            raise ValueError(f"a block has {self.layout.block_bytes} bytes, the payload {len(payload)}")
        if memoryview(payload).readonly:  # torch takes writable memory only
            payload = bytearray(payload)
        return torch.frombuffer(payload, dtype=torch.uint8)

    def _check_block(self, block_id: int) -> None:
        if not 0 < block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not one of 1..{self.num_blocks - 1}")

"""How do whole blocks get from the device to the host and back, as opaque bytes?"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from kernels.kv.crossing import Crossing
from kernels.kv.layout import KvLayout

_FETCHING_BYTES = 64 << 20
_LEAST_FETCHING, _MOST_FETCHING = 2, 64
"""Host buffers of a GPU's cache, for blocks on their way."""


class Fetched:
    """A block on its way to the host."""

    def __init__(self, held: Tensor, arrived: torch.cuda.Event | None, buffers: list[Tensor] | None = None) -> None:
        """held: [block_bytes] uint8, of the host.  arrived: None when it is there.  buffers: where `held` goes back."""
        self._held, self._arrived, self._buffers = held, arrived, buffers

    def is_there(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call] # torch's stub

    def payload(self) -> bytes:
        """Its bytes, once; waits for this copy and nothing else."""
        if self._arrived is not None:
            self._arrived.synchronize()
        copied = self._held.numpy().tobytes()
        if self._buffers is not None:
            self._buffers.append(self._held)
            self._buffers = None  # whoever asks again must not hand it back twice
        return copied


class BlockBytes:
    """The part of a cache that moves blocks. Block 0 is the null block, which nobody may read or write."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """num_blocks: the null block counted."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.crossing = Crossing.of(device)
        self._blocks = _zeros(num_blocks, layout.block_bytes, device)
        self._buffers: list[Tensor] = []
        if device.type == "cuda":
            count = min(max(_FETCHING_BYTES // layout.block_bytes, _LEAST_FETCHING), _MOST_FETCHING)
            self._buffers += [torch.empty(layout.block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    @property
    def is_on_host(self) -> bool:
        """Whether the blocks lie in memory that any thread can read."""
        return self._blocks.is_cpu

    def read_block(self, block_id: int) -> bytes:
        """The block's bytes as the layout describes them."""
        self._check_block(block_id)
        with self.crossing.copying(block_id):
            return self._blocks[block_id].cpu().numpy().tobytes()

    def fetch_block(self, block_id: int) -> Fetched:
        """Begin to read a block, as it is after all that was asked for so far; nobody waits for it."""
        self._check_block(block_id)
        if self._blocks.is_cpu:
            return Fetched(self._blocks[block_id].clone(), None)
        buffer = self._buffers.pop() if self._buffers else None
        held = torch.empty(self.layout.block_bytes, dtype=torch.uint8, pin_memory=True) if buffer is None else buffer
        with self.crossing.copying(block_id):
            held.copy_(self._blocks[block_id], non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's stub
            arrived.record()
        return Fetched(held, arrived, None if buffer is None else self._buffers)

    def copy_block(self, block_id: int, place: memoryview) -> None:
        """Copy the block to writable host memory, with nothing in between; ValueError for a place of another size."""
        self._check_block(block_id)
        if len(place) != self.layout.block_bytes:
            raise ValueError(f"a block has {self.layout.block_bytes} bytes, the place {len(place)}")
        if self._blocks.is_cpu:
            # Not torch's copy: in a thread that is not the engine's it would start threads of its own.
            np.copyto(np.frombuffer(place, np.uint8), self._blocks[block_id].numpy())
            return
        with self.crossing.copying(block_id):
            torch.frombuffer(place, dtype=torch.uint8).copy_(self._blocks[block_id])

    def write_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a block; ValueError unless the payload is layout.block_bytes long."""
        checked = self._checked(block_id, payload)
        with self.crossing.copying(block_id):
            self._blocks[block_id].copy_(checked)

    def take_block(self, block_id: int, payload: bytes | bytearray | memoryview) -> int:
        """As `write_block`, from memory that others may write meanwhile; return the XXH3 (64 bits) of what it holds.

        On a CPU the block itself is summed, while it is still in cache; for a GPU the copy that is sent there.
        """
        if self._blocks.is_cpu:
            self._check_payload(block_id, payload)
            held = self._blocks[block_id].numpy()
            np.copyto(held, np.frombuffer(payload, np.uint8))
            return xxh3_64_intdigest(held.data)
        taken = self._checked(block_id, payload).clone()
        with self.crossing.copying(block_id):
            self._blocks[block_id].copy_(taken)
        return xxh3_64_intdigest(taken.numpy().data)

    def _check_payload(self, block_id: int, payload: bytes | bytearray | memoryview) -> None:
        self._check_block(block_id)
        if len(payload) != self.layout.block_bytes:
            raise ValueError(f"a block has {self.layout.block_bytes} bytes, the payload {len(payload)}")

    def _checked(self, block_id: int, payload: bytes | bytearray | memoryview) -> Tensor:
        self._check_payload(block_id, payload)
        if memoryview(payload).readonly:  # torch takes writable memory only
            payload = bytearray(payload)
        return torch.frombuffer(payload, dtype=torch.uint8)

    def _check_block(self, block_id: int) -> None:
        if not 0 < block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not one of 1..{self.num_blocks - 1}")


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """[num_blocks, block_bytes] uint8. On a CPU in huge pages where the kernel grants them: blocks are read whole."""
    if device.type != "cpu":
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    mapped = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(num_blocks, block_bytes)

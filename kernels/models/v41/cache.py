"""Where do blocks and window states live, and how do records of them get in and out?

Every access names its slots: what it costs depends on what is read, never on how large the pool is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv.block_bytes import BlockBytes
from kernels.kv.crossing import window_name
from kernels.kv.layout import KvLayout
from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import FORMATS, Codecs, paired_sources, window_spec
from kernels.ops.numerics import Numerics

_UNITS = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))


class Records:
    """An array of `count` equal records in every slot of a pool."""

    def __init__(self, pool: Tensor, offset: int, count: int, record_bytes: int) -> None:
        """pool: [slots, slot_bytes] uint8.  offset: bytes from a slot's start."""
        # Copied in the widest unit that fits: an index copies unit by unit.
        unit, size = next(
            (unit, size) for unit, size in _UNITS if not (offset % size or record_bytes % size or pool.shape[1] % size)
        )
        wide = pool.view(unit)
        self._unit = unit
        mine = wide[:, offset // size : (offset + count * record_bytes) // size]
        self._view: Tensor = torch.unflatten(mine, 1, (count, -1))

    def read(self, slots: Tensor, entries: Tensor) -> Tensor:
        """slots, entries: [n] int64.  Returns [n, record_bytes] uint8, new."""
        return self._view[slots, entries].view(torch.uint8)

    def read_slots(self, slots: Tensor) -> Tensor:
        """All records of some slots: [n] int64 -> [n * count, record_bytes] uint8, new."""
        return self._view[slots].flatten(0, 1).view(torch.uint8)

    def write(self, slots: Tensor, entries: Tensor, records: Tensor) -> None:
        """slots, entries: [n] int64, no pair twice.  records: [n, record_bytes] uint8."""
        # Cloned, not only contiguous: a slice of one row counts as that, with a stride no wider unit can take.
        self._view[slots, entries] = records.clone(memory_format=torch.contiguous_format).view(self._unit)


class EntryCache:
    """The compressed entries of one KV source: index keys and main records in blocks."""

    def __init__(self, blocks: Tensor, layout: KvLayout, source: int, codecs: Codecs, suffix: str) -> None:
        def records(name: str) -> Records:
            stream = layout.stream(source, f"{name}.{suffix}")
            return Records(blocks, stream.offset, *stream.shape)

        self._codecs = codecs
        self._index_data = records("index.data")
        self._index_scale = records("index.scale") if codecs.index.scale_bytes else None
        self._main = records("main")
        self.entries_per_block = layout.stream(source, f"main.{suffix}").shape[0]

    def write(self, blocks: Tensor, places: Tensor, main: Tensor, index: Tensor) -> None:
        """Store entries.  blocks, places: [n] int64.  main: [n, head_dim] fp32.  index: [n, index_dim] fp32."""
        self._main.write(blocks, places, self._codecs.main.encode(main))
        records = self._codecs.index.encode(index)
        data_bytes = self._codecs.index.data_bytes
        self._index_data.write(blocks, places, records[:, :data_bytes])
        if self._index_scale:
            self._index_scale.write(blocks, places, records[:, data_bytes:])

    def main(self, blocks: Tensor, places: Tensor) -> Tensor:
        """What attention sees of some entries: [n], [n] int64 -> [n, head_dim] fp32."""
        return self._codecs.main.decode(self._main.read(blocks, places))

    def index_keys(self, blocks: Tensor) -> Tensor:
        """What the scorer sees of whole blocks: [n] int64 -> [n * entries_per_block, index_dim] fp32."""
        records = self._index_data.read_slots(blocks)
        if self._index_scale:
            records = torch.cat([records, self._index_scale.read_slots(blocks)], dim=1)
        return self._codecs.index.decode(records)


class Ring:
    """One layer's windows: the newest keys of each sequence, at position % ring_tokens."""

    def __init__(self, records: Records, codecs: Codecs) -> None:
        self._records, self._codec = records, codecs.window

    def encode(self, keys: Tensor) -> Tensor:
        """[n, head_dim] fp32 -> [n, record_bytes] uint8."""
        return self._codec.encode(keys)

    def decode(self, records: Tensor) -> Tensor:
        return self._codec.decode(records)

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """[n], [n] int64 -> records [n, record_bytes] uint8."""
        return self._records.read(slots, places)

    def write(self, slots: Tensor, places: Tensor, records: Tensor) -> None:
        self._records.write(slots, places, records)


class V41Cache(BlockBytes):
    """All blocks and window states of one model on one device. Block 0 and window 0 stay zero."""

    def __init__(
        self,
        config: V41Config,
        layout: KvLayout,
        numerics: Numerics,
        *,
        num_blocks: int,
        num_windows: int,
        device: torch.device,
    ) -> None:
        """num_blocks, num_windows: null block and null window counted."""
        super().__init__(layout, num_blocks, device)
        self.spec = window_spec(config, layout)
        self.num_windows = num_windows
        self._windows = torch.zeros(num_windows, layout.window_bytes, dtype=torch.uint8, device=device)
        codecs, suffix = Codecs.of(config, numerics), FORMATS[numerics.name]
        self.entries = {
            source: EntryCache(self._blocks, layout, source, codecs, suffix) for source in config.kv_sources
        }
        num_rings = config.num_layers + config.drafter.num_layers
        streams = layout.window_streams
        self.rings = tuple(
            Ring(Records(self._windows, stream.offset, *stream.shape), codecs) for stream in streams[:num_rings]
        )
        """Of main layers, then of drafter layers."""
        self.pairs = {
            source: Records(self._windows, stream.offset, stream.shape[0], stream.num_bytes // stream.shape[0])
            for source, stream in zip(paired_sources(config), streams[num_rings:], strict=True)
        }
        """Score and latent of the newest tokens: records of [2, head_dim] fp32 at position % ring."""

    @property
    def blocks(self) -> Tensor:
        """[num_blocks, block_bytes] uint8, for kernels that read and write records where they lie."""
        return self._blocks

    @property
    def windows(self) -> Tensor:
        """[num_windows, window_bytes] uint8."""
        return self._windows

    def begin(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that get their first token, so that their bytes depend on their own tokens only."""
        for block_id in block_ids:
            self._blocks[block_id].zero_()

    def read_window(self, slot: int, *, encoder_only: bool) -> bytes:
        """A state's bytes, or those of its encoder part."""
        self._check_window(slot)
        end = self.spec.encoder_bytes if encoder_only else self.spec.state_bytes
        with self.crossing.copying(window_name(slot)):
            return self._windows[slot, :end].cpu().numpy().tobytes()

    def write_window(self, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a state by a whole one, or by an encoder part with everything else empty."""
        self._check_window(slot)
        if len(payload) not in {self.spec.state_bytes, self.spec.encoder_bytes}:
            raise ValueError(
                f"a window state has {self.spec.state_bytes} bytes, its encoder part {self.spec.encoder_bytes},"
                f" the payload {len(payload)}"
            )
        with self.crossing.copying(window_name(slot)):
            self._windows[slot, : len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._windows[slot, len(payload) :].zero_()

    def reset_window(self, slot: int) -> None:
        """Make a state empty."""
        self._check_window(slot)
        with self.crossing.copying(window_name(slot)):
            self._windows[slot].zero_()

    def _check_window(self, slot: int) -> None:
        if not 0 < slot < self.num_windows:
            raise ValueError(f"window {slot} is not one of 1..{self.num_windows - 1}")

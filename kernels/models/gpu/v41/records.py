"""Where are a V4.1 model's records in its caches, as kernels read and write them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.kv.layout import KvLayout, Stream
from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import FORMATS, paired_sources
from kernels.ops.gpu_index import Keys
from kernels.ops.gpu_records import Section
from kernels.ops.numerics import QUANT


@dataclass(frozen=True, slots=True)
class SourceRecords:
    """The compressed entries of one KV source."""

    keys: Keys
    main: Section
    pairs: Section | None
    """Score and latent of the newest tokens, in the windows; of a ratio-2 source."""


class Pools(Protocol):
    """Where blocks and windows live."""

    @property
    def blocks(self) -> Tensor:
        """[num_blocks, block_bytes] uint8."""

    @property
    def windows(self) -> Tensor:
        """[num_windows, window_bytes] uint8."""


class Records:
    """All of one model's."""

    def __init__(self, config: V41Config, layout: KvLayout, cache: Pools, tables: Tensor) -> None:
        """tables: [lines, blocks] int32."""
        suffix = FORMATS[QUANT.name]

        def block(source: int, name: str) -> Section:
            stream = layout.stream(source, f"{name}.{suffix}")
            return Section(cache.blocks, stream.offset, stream.num_bytes // stream.shape[0])

        def window(stream: Stream) -> Section:
            return Section(cache.windows, stream.offset, stream.num_bytes // stream.shape[0])

        num_rings = config.num_layers + config.drafter.num_layers
        self.rings = tuple(window(stream) for stream in layout.window_streams[:num_rings])
        """Of main layers, then of drafter layers."""
        pairs = dict(zip(paired_sources(config), map(window, layout.window_streams[num_rings:]), strict=True))
        self.sources = {
            source: SourceRecords(
                keys=Keys(
                    block(source, "index.data"),
                    block(source, "index.scale"),
                    tables,
                    config.block_tokens // config.compress_ratios[source],
                ),
                main=block(source, "main"),
                pairs=pairs.get(source),
            )
            for source in config.kv_sources
        }

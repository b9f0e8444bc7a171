"""Which bytes make up a V4.1 block, and a window state?

A block holds, for each KV source, the index keys and the main records of its tokens' compressed entries. A window
state holds a ring of records per layer: encoder layers first, since bounded replay starts from their part alone, then
decoder layers, drafter layers, and the rings of the ratio-2 compressors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.kv.layout import KvLayout, place
from kernels.kv.window import WindowSpec
from kernels.models.v41.config import V41Config
from kernels.ops.numerics import Numerics
from kernels.ops.quant import Codec

FORMATS = {"exact": "fp32", "kvq": "fp8-fp4", "quant": "fp8-fp4"}
"""Part of a stream's name, so that the layout's digest covers the codecs."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """The three formats of cache records of one model."""

    window: Codec
    main: Codec
    index: Codec

    @classmethod
    def of(cls, config: V41Config, numerics: Numerics) -> Codecs:
        return cls(numerics.window(config.head_dim), numerics.main(config.head_dim), numerics.index(config.index_dim))


def compressor_ring_tokens(config: V41Config) -> int:
    """Newest tokens whose scores and latents are kept: a pair's first, however many drafts are taken back."""
    return config.backtrack_tokens + 1


def paired_sources(config: V41Config) -> tuple[int, ...]:
    """The KV sources that pool two tokens into an entry."""
    return tuple(source for source in config.kv_sources if config.compress_ratios[source] == 2)


def v41_layout(config: V41Config, numerics: Numerics) -> KvLayout:
    """Streams of a block and of a window state; drafter layers are numbered behind the main ones."""
    codecs = Codecs.of(config, numerics)
    suffix = FORMATS[numerics.name]
    return KvLayout(
        config.block_tokens,
        place(_block_sections(config, codecs, suffix)),
        place(_window_sections(config, codecs, suffix)),
    )


def window_spec(config: V41Config, layout: KvLayout) -> WindowSpec:
    """What the engines know of the windows."""
    encoder = config.num_encoder_layers
    return WindowSpec(
        window_tokens=config.window_tokens,
        backtrack_tokens=config.backtrack_tokens,
        num_layers=config.num_layers,
        num_encoder_layers=encoder,
        state_bytes=layout.window_bytes,
        encoder_bytes=layout.window_streams[encoder].offset,
    )


_Section = tuple[int, str, tuple[int, ...], str]


def _block_sections(config: V41Config, codecs: Codecs, suffix: str) -> Iterator[_Section]:
    for source in config.kv_sources:
        entries = config.block_tokens // config.compress_ratios[source]
        yield source, f"index.data.{suffix}", (entries, codecs.index.data_bytes), "uint8"
        if codecs.index.scale_bytes:
            yield source, f"index.scale.{suffix}", (entries, codecs.index.scale_bytes), "uint8"
        yield source, f"main.{suffix}", (entries, codecs.main.record_bytes), "uint8"


def _window_sections(config: V41Config, codecs: Codecs, suffix: str) -> Iterator[_Section]:
    for layer in range(config.num_layers + config.drafter.num_layers):
        yield layer, f"window.{suffix}", (config.ring_tokens, codecs.window.record_bytes), "uint8"
    for source in paired_sources(config):
        yield source, "compressor", (compressor_ring_tokens(config), 2, config.head_dim), "fp32"

"""Where does each token of a V4.1 step stand, what may it see, and where is what it leaves stored, on the device?

The host says a few numbers of each sequence; the device makes of them everything a kernel wants to know of a token, in
shapes that depend on the step's size alone. So a captured step serves every batch of its size, and padding (tokens of
no sequence) has slot, line and block -1, which kernels leave alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.models.v41.config import V41Config
from kernels.models.v41.layout import compressor_ring_tokens
from kernels.ops.gpu_grouped import Groups, interleaved
from kernels.ops.gpu_index import QUERIES
from kernels.ops.gpu_launch import runs_kernels
from kernels.ops.gpu_sparse import Windows
from kernels.ops.gpu_step import move_back
from kernels.ops.gpu_told import Completed, Given, Numbers, OfHalf, Say, tell_half, tell_step
from kernels.ops.gpu_varlen import Layout, lay_out
from kernels.ops.gpu_verify import Standing

IS_TOLD_AT_ONCE = True
"""On a GPU: by `gpu_told`, and not by some 130 launches of torch's."""
Turn = tuple[Tensor, Tensor]
"""Cosine and sine, [n, rope dims / 2] fp32 each."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the host sends for a step; views of one staged copy."""

    sequences: Tensor
    """[Say, sequences] int32."""
    token_ids: Tensor
    """[tokens] int32; below 0 it is -1 - place in the step before of the token that it draws."""
    preceding: Tensor
    """[sequences, reach] int32: the tokens before each sequence's first, the newest last; the vocabulary's size where
    there is none."""
    earlier: Tensor
    """[sequences] int32: place in the step before of those planned as if its drafts were accepted, else -1. They are
    moved back by those that were not, here and now: END and `preceding` are written."""
    wanted: Tensor
    """[wanted] int64: tokens of the decoder half whose logits are wanted."""
    stored: Tensor
    """[n] int64: tokens that may go to encoder rings: the last ones of each sequence."""
    decoder_stored: Tensor
    """The same of the decoder half."""
    kept: Tensor | None = None
    """[decoder's tokens] int64: which of the encoder's tokens go on; None = all."""
    images: tuple[Tensor, Tensor] | None = None
    """Tokens [n] int64 that are parts of images and their embeddings [n, hidden] bf16."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Tokens whose entries are scored at a time."""

    tiles: slice
    """Of the layout's tiles."""
    tokens: slice
    end: int
    """No token of it sees beyond this position."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A half's size, which the host knows."""

    num_tokens: int
    slabs: tuple[Slab, ...]

    @property
    def end(self) -> int:
        """No token sees beyond this position."""
        return max(slab.end for slab in self.slabs)


@dataclass(frozen=True, slots=True)
class Half:
    """The tokens that the layers of one half compute."""

    extent: Extent
    positions: Tensor
    """[tokens] int64."""
    lines: Tensor
    """[tokens] int32 rows of the block tables; -1 for padding."""
    tiles: Tensor
    """[tiles, 3] int32: first token, tokens, row of the block tables."""
    windows: Windows
    seen: dict[int, Tensor]
    """By ratio: [tokens] int32, compressed entries that a token sees; 0 for padding."""
    turns: dict[bool, Turn]
    """Of layers that read compressed entries, and of those that do not."""
    stored: Tensor
    """[n] int64 tokens whose window keys go to rings."""
    stored_slots: Tensor
    """[n] int64, -1 where the key is not stored after all."""
    stored_places: Tensor
    groups: Groups
    """Of the tokens' rows of heads, before the attention's output."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A step on the device."""

    token_ids: Tensor
    """[tokens] int64, of the vocabulary; 0 at images."""
    history: Tensor
    """[tokens, reach + 1] int64: each token's id and those before it, the newest first."""
    encoder: Half
    decoder: Half
    entries: dict[int, Completed]
    """By ratio."""
    pair_slots: Tensor
    """[sequences] int64: window slots whose compressor rings hold the token before each sequence's first."""
    pair_places: Tensor
    pair_stored_slots: Tensor
    """[tokens] int64: of tokens that go to the compressors' rings, else -1."""
    pair_stored_places: Tensor
    told: Told
    is_image: Tensor | None
    """[tokens] bool; None = no image in this step."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotations of every position the caches have room for: they never move, so captured steps can name them."""

    plain: Turn
    compressed: Turn

    def at(self, positions: Tensor, *, compressed: bool) -> Turn:
        cos, sin = self.compressed if compressed else self.plain
        return cos[positions], sin[positions]


class Layouter:
    """Lays steps out for one model."""

    def __init__(self, config: V41Config, turns: Turns, tables: Tensor, standing: Standing, named: Tensor) -> None:
        """tables: [lines, blocks] int32.  standing: how far the step before has got.  named: its tokens, by name."""
        self._config, self._turns, self._tables, self._standing = config, turns, tables, standing
        self._named = named
        self._pair_ring = compressor_ring_tokens(config)
        self._ratios = sorted({config.compress_ratios[source] for source in config.kv_sources})
        self._numbers = Numbers(
            vocab_size=config.vocab_size,
            window_tokens=config.window_tokens,
            ring_tokens=config.ring_tokens,
            pair_ring_tokens=self._pair_ring,
            block_tokens=config.block_tokens,
            ratios=tuple(self._ratios),
            groups=config.o_groups,
        )

    def lay(self, told: Told, encoder: Extent, decoder: Extent) -> Laid:
        """Nothing is waited for.  decoder: `encoder` itself where both halves compute the same tokens."""
        standing = self._standing
        move_back(told.sequences[Say.END], told.preceding, told.earlier, standing.rejected, standing.before)
        if IS_TOLD_AT_ONCE and runs_kernels(told.sequences):
            return self._told_at_once(told, encoder, decoder)
        ids = self._known(told.token_ids)
        layout = self._layout(told, Say.COUNT, encoder)
        span = _owners(layout)
        said = told.sequences[:, span]
        first = self._half(told, encoder, layout, said, is_decoder=False)
        last = self._decoder(told, encoder, decoder, layout, said, first)
        slots = told.sequences[Say.WINDOW].long()
        begins = (told.sequences[Say.END] - told.sequences[Say.COUNT]).long()
        position = layout.positions
        pair_slots = torch.where(position >= said[Say.END] - self._pair_ring, first.windows.slots, -1)
        return Laid(
            token_ids=torch.where(ids < self._config.vocab_size, ids, 0),
            history=self._history(told, ids, layout, span),
            encoder=first,
            decoder=last,
            entries={ratio: self._entries(ratio, layout, first, said, span, len(slots)) for ratio in self._ratios},
            pair_slots=slots,
            pair_places=(begins - 1) % self._pair_ring,
            pair_stored_slots=pair_slots,
            pair_stored_places=position % self._pair_ring,
            told=told,
            is_image=_images_of(told),
        )

    def _told_at_once(self, told: Told, encoder: Extent, decoder: Extent) -> Laid:
        """The same by one launch, or one for each half where these compute other tokens."""
        turns, is_same = self._turns, decoder is encoder
        given = Given(
            told.sequences, told.token_ids, self._named, told.preceding, self._tables, (*turns.plain, *turns.compressed)
        )
        layout = self._layout(told, Say.COUNT, encoder)
        half, step = tell_step(given, layout, self._numbers, told.stored, told.decoder_stored if is_same else None)
        first = self._half_of(half, layout, encoder, told.stored)
        if step.decoder_stored is not None:
            last = replace(
                first,
                windows=replace(first.windows, lowest=step.decoder_lowest),
                stored=told.decoder_stored,
                stored_slots=step.decoder_stored.slots,
                stored_places=step.decoder_stored.places,
            )
        else:
            layout = self._layout(told, Say.DECODER_COUNT, decoder)
            half = tell_half(given, layout, self._numbers, told.decoder_stored, is_decoder=True)
            last = self._half_of(half, layout, decoder, told.decoder_stored)
        return Laid(
            token_ids=step.token_ids,
            history=step.history,
            encoder=first,
            decoder=last,
            entries=step.entries,
            pair_slots=step.pair_slots,
            pair_places=step.pair_places,
            pair_stored_slots=step.pair_stored.slots,
            pair_stored_places=step.pair_stored.places,
            told=told,
            is_image=_images_of(told),
        )

    def _half_of(self, half: OfHalf, layout: Layout, extent: Extent, stored: Tensor) -> Half:
        return Half(
            extent=extent,
            positions=layout.positions,
            lines=half.lines,
            tiles=half.tiles,
            windows=self._windows(layout, half.slots, half.lowest),
            seen=half.seen,
            turns={False: half.plain, True: half.compressed},
            stored=stored,
            stored_slots=half.stored.slots,
            stored_places=half.stored.places,
            groups=half.groups,
        )

    def _windows(self, layout: Layout, slots: Tensor, lowest: Tensor) -> Windows:
        return Windows(
            positions=layout.positions,
            lowest=lowest,
            begins=layout.begins,
            starts=layout.starts,
            slots=slots,
            window_tokens=self._config.window_tokens,
            ring_tokens=self._config.ring_tokens,
        )

    def _known(self, token_ids: Tensor) -> Tensor:
        drawn = self._named[(-1 - token_ids).clamp_min(0).long()].clamp_min(0)
        return torch.where(token_ids < 0, drawn, token_ids).long()

    def _layout(self, told: Told, count: Say, extent: Extent) -> Layout:
        ends = told.sequences[Say.END]
        return lay_out(told.sequences[count], ends, num_tokens=extent.num_tokens, tile_tokens=QUERIES)

    def _decoder(self, told: Told, encoder: Extent, decoder: Extent, layout: Layout, said: Tensor, first: Half) -> Half:
        if decoder is not encoder:
            layout = self._layout(told, Say.DECODER_COUNT, decoder)
            return self._half(told, decoder, layout, told.sequences[:, _owners(layout)], is_decoder=True)
        windows = replace(first.windows, lowest=self._lowest(layout, said, is_decoder=True))
        stored = told.decoder_stored
        slots = self._stored_slots(stored, layout, said, windows.slots, is_decoder=True)
        places = layout.positions[stored] % self._config.ring_tokens
        return replace(first, windows=windows, stored=stored, stored_slots=slots, stored_places=places)

    def _half(self, told: Told, extent: Extent, layout: Layout, said: Tensor, *, is_decoder: bool) -> Half:
        """said: [Say, tokens], of each token's sequence."""
        config, is_real, position = self._config, layout.spans >= 0, layout.positions
        slots = torch.where(is_real, said[Say.WINDOW], -1).long()
        lines = told.sequences[Say.LINE]
        tiles = layout.tiles.clone()
        tiles[:, 2] = lines[layout.tiles[:, 2].long()]
        stored = told.decoder_stored if is_decoder else told.stored
        return Half(
            extent=extent,
            positions=position,
            lines=torch.where(is_real, said[Say.LINE], -1),
            tiles=tiles,
            windows=self._windows(layout, slots, self._lowest(layout, said, is_decoder=is_decoder)),
            seen={ratio: torch.where(is_real, (position + 1) // ratio, 0).int() for ratio in self._ratios},
            turns={compressed: self._turns.at(position, compressed=compressed) for compressed in (False, True)},
            stored=stored,
            stored_slots=self._stored_slots(stored, layout, said, slots, is_decoder=is_decoder),
            stored_places=position[stored] % config.ring_tokens,
            groups=interleaved(extent.num_tokens, config.o_groups, position.device),
        )

    def _lowest(self, layout: Layout, said: Tensor, *, is_decoder: bool) -> Tensor:
        """The oldest position each token sees."""
        shown = said[Say.WINDOW_FROM]
        if is_decoder:
            shown = torch.maximum(shown, said[Say.KEEP_FROM])
        return torch.maximum(layout.positions - (self._config.window_tokens - 1), shown.long())

    def _stored_slots(self, stored: Tensor, layout: Layout, said: Tensor, slots: Tensor, *, is_decoder: bool) -> Tensor:
        """Ring slots are written once a step: by the newest tokens; what decoder replay hides is not stored either."""
        position = layout.positions
        is_stored = position >= said[Say.END] - self._config.ring_tokens
        if is_decoder:
            is_stored &= position >= said[Say.KEEP_FROM]
        return torch.where(is_stored, slots, -1)[stored]

    def _history(self, told: Told, ids: Tensor, layout: Layout, span: Tensor) -> Tensor:
        reach = told.preceding.shape[1]
        older = torch.arange(reach + 1, device=ids.device)
        token = torch.arange(len(ids), device=ids.device)[:, None]
        place = token - layout.starts[:, None] - older
        before = told.preceding[span[:, None], (reach + place).clamp(0, reach - 1)].long()
        return torch.where(place >= 0, ids[(token - older).clamp_min(0)], before)

    def _entries(
        self, ratio: int, layout: Layout, half: Half, said: Tensor, span: Tensor, num_sequences: int
    ) -> Completed:
        position = layout.positions
        entry = position // ratio
        first = entry * ratio
        lowest = torch.maximum(said[Say.WRITE_FROM], said[Say.WINDOW_FROM])
        is_made = (half.lines >= 0) & ((position + 1) % ratio == 0) & (first >= lowest)
        block = self._tables[half.lines.clamp_min(0).long(), position // self._config.block_tokens]
        token = torch.arange(len(position), device=position.device)
        sources = token[:, None]
        if ratio > 1:
            # The earlier token of a pair is the one before, or the last of the sequence's step before this one.
            earlier = torch.where(token > layout.starts, num_sequences + token - 1, span)
            sources = torch.stack([earlier, num_sequences + token], dim=1)
        return Completed(
            sources=sources,
            blocks=torch.where(is_made, block, -1).long(),
            places=entry % (self._config.block_tokens // ratio),
            turn=self._turns.at(first, compressed=True),
        )


def _owners(layout: Layout) -> Tensor:
    """The sequence of each token, 0 for padding."""
    return layout.spans.clamp_min(0).long()


def _images_of(told: Told) -> Tensor | None:
    if told.images is None:
        return None
    is_image = torch.zeros(len(told.token_ids), dtype=torch.bool, device=told.token_ids.device)
    return is_image.index_fill_(0, told.images[0], 1)

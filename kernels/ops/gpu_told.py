"""What does each token of a V4.1 step know of itself, all of it by one launch?

Where it stands is laid out first (`gpu_varlen.lay_out`). From that, and from the few numbers that the host says of each
sequence, follow some forty vectors: what a token may see, where what it leaves is stored, how it is turned. Each is a
few instructions a token and would be three launches, and a step begins with all of them.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_grouped import Groups
from kernels.ops.gpu_launch import check, power_of_two, tiles
from kernels.ops.gpu_varlen import Layout


class Say(IntEnum):
    """What the host says of each sequence; rows of an int32 table with a column for each."""

    COUNT = 0
    """Tokens in this step; 0 for a column that is not used."""
    DECODER_COUNT = 1
    """Of those, the last ones that the decoder half computes."""
    END = 2
    """Position after the last token."""
    LINE = 3
    """Row of the device's block tables."""
    WINDOW = 4
    """Window slot."""
    WINDOW_FROM = 5
    WRITE_FROM = 6
    KEEP_FROM = 7
    """As in `kernels.batch.Replay`."""


_COUNT, _END = tl.constexpr(int(Say.COUNT)), tl.constexpr(int(Say.END))
_LINE, _WINDOW = tl.constexpr(int(Say.LINE)), tl.constexpr(int(Say.WINDOW))
_WINDOW_FROM, _WRITE_FROM = tl.constexpr(int(Say.WINDOW_FROM)), tl.constexpr(int(Say.WRITE_FROM))
_KEEP_FROM = tl.constexpr(int(Say.KEEP_FROM))
_BLOCK = 16
"""Tokens of a program: a verification step's 256 are as many programs, each of which waits for a few loads only."""
_SLOTS, _LOWEST, _DECODER_LOWEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_IDS, _PAIR_SLOTS, _PAIR_PLACES = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_FIRST = tl.constexpr(6)
"""Rows of 64-bit numbers: those of both halves, of the whole step, and then of each ratio."""
_ALIGNED = 4
"""Rows begin at whole 16 bytes, as memory of their own would: kernels are compiled for that."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of a model and its caches."""

    vocab_size: int
    window_tokens: int
    ring_tokens: int
    pair_ring_tokens: int
    block_tokens: int
    ratios: tuple[int, ...]
    groups: int
    """Of heads, whose rows are multiplied group after group."""


@dataclass(frozen=True, slots=True)
class Given:
    """What tokens are told from, beside their layout."""

    sequences: Tensor
    """[Say, sequences] int32, rows apart."""
    token_ids: Tensor
    """[tokens] int32; below 0 it is -1 - place in `named`."""
    named: Tensor
    """[places] int32."""
    preceding: Tensor
    """[sequences, reach] int32."""
    tables: Tensor
    """[lines, blocks] int32."""
    turns: tuple[Tensor, Tensor, Tensor, Tensor]
    """[positions, pairs] fp32: cosine and sine of layers without compressed entries, and of those with them."""

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """As the kernel takes them."""
        said, tables = self.sequences, self.tables
        return (
            *(said, said.stride(0), self.token_ids, self.named, self.preceding, tables, tables.stride(0)),
            *self.turns,
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """Of tokens that may go to rings: [n] int64 each."""

    slots: Tensor
    """-1 where it does not after all."""
    places: Tensor


@dataclass(frozen=True, slots=True)
class Completed:
    """The compressed entries that tokens complete, one for each token that might."""

    sources: Tensor
    """[tokens, ratio] int64, as `compress_entries` takes them."""
    blocks: Tensor
    """[tokens] int64; -1 where none is completed, or it is shared already."""
    places: Tensor
    """[tokens] int64, in their blocks."""
    turn: tuple[Tensor, Tensor]
    """Cosine and sine of their first positions, [tokens, pairs] fp32 each."""


@dataclass(frozen=True, slots=True)
class OfHalf:
    """What the tokens of one half know; the fields of `tokens.Half` and of its windows."""

    lines: Tensor
    tiles: Tensor
    slots: Tensor
    lowest: Tensor
    seen: dict[int, Tensor]
    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    stored: Stored
    groups: Groups


@dataclass(frozen=True, slots=True)
class OfStep:
    """What they know beside that in the encoder half, and in the decoder's where it has the same tokens."""

    token_ids: Tensor
    history: Tensor
    pair_slots: Tensor
    pair_places: Tensor
    pair_stored: Stored
    entries: dict[int, Completed]
    decoder_lowest: Tensor
    decoder_stored: Stored | None


def tell_half(given: Given, layout: Layout, numbers: Numbers, stored: Tensor, *, is_decoder: bool) -> OfHalf:
    """Of one half alone.  stored: [n] int64, tokens that may go to rings."""
    return _tell(given, layout, numbers, stored, None, is_decoder=is_decoder, is_whole=False)[0]


def tell_step(
    given: Given, layout: Layout, numbers: Numbers, stored: Tensor, decoder_stored: Tensor | None
) -> tuple[OfHalf, OfStep]:
    """Of the encoder half, and of the step.  decoder_stored: where the decoder half has the same tokens."""
    half, step = _tell(given, layout, numbers, stored, decoder_stored, is_decoder=False, is_whole=True)
    assert step is not None, "told of the whole step"
    return half, step


def _tell(
    given: Given,
    layout: Layout,
    numbers: Numbers,
    stored: Tensor,
    decoder_stored: Tensor | None,
    *,
    is_decoder: bool,
    is_whole: bool,
) -> tuple[OfHalf, OfStep | None]:
    check(given.sequences.stride(1) == 1 and given.sequences.dtype == torch.int32, "what is said lies in rows of int32")
    check(given.preceding.is_contiguous() and given.tables.stride(1) == 1, "tokens and tables lie end to end")
    check(all(ratio in {1, 2} for ratio in numbers.ratios), "an entry stands for one token or for two")
    is_both, others = decoder_stored is not None, stored if decoder_stored is None else decoder_stored
    tokens, sequences = len(layout.positions), given.sequences.shape[1]
    rooms = _Rooms(given, layout, numbers, (len(stored), len(others)), is_whole=is_whole)
    counts = tokens, sequences, len(layout.tiles), len(stored), len(others)
    _tell_kernel[(tiles(max(counts), _BLOCK),)](
        *given.arguments,
        layout.spans,
        layout.positions,
        layout.starts,
        layout.tiles,
        stored,
        others,
        *rooms.arguments,
        *counts,
        VOCAB=numbers.vocab_size,
        WINDOW_TOKENS=numbers.window_tokens,
        RING=numbers.ring_tokens,
        PAIR_RING=numbers.pair_ring_tokens,
        BLOCK_TOKENS=numbers.block_tokens,
        RATIOS=numbers.ratios,
        REACH=given.preceding.shape[1],
        PAIRS=given.turns[0].shape[1],
        PAIRS_BLOCK=power_of_two(given.turns[0].shape[1]),
        GROUPS=numbers.groups,
        IS_DECODER=is_decoder,
        IS_BOTH=is_both,
        IS_WHOLE=is_whole,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return rooms.half(), rooms.step(is_both=is_both) if is_whole else None


def _rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of at least this width."""
    return torch.empty(count, tiles(width, _ALIGNED) * _ALIGNED, dtype=dtype, device=device)


class _Rooms:
    """Where a launch writes: rows of a few rooms, of which each vector is one."""

    def __init__(
        self, given: Given, layout: Layout, numbers: Numbers, stored: tuple[int, int], *, is_whole: bool
    ) -> None:
        """stored: how many tokens may go to rings, of this half and, where it is told too, of the decoder's."""
        tokens, device, ratios = len(layout.positions), layout.positions.device, numbers.ratios
        self._tokens, self._ratios, self._stored = tokens, ratios, stored
        self._sequences, reach = given.preceding.shape
        rows = int(_FIRST) + sum(ratio + 2 for ratio in ratios) if is_whole else int(_DECODER_LOWEST) + 1
        self._longs = _rows(rows, tokens, torch.int64, device)
        self._ints = _rows(1 + len(ratios), tokens, torch.int32, device)
        pairs = given.turns[0].shape[1]
        self._turns = torch.empty(4 + 2 * len(ratios) * is_whole, tokens, pairs, device=device)
        self._history = torch.empty(tokens, reach + 1 if is_whole else 0, dtype=torch.int64, device=device)
        ends, sources = (
            torch.empty(n, dtype=torch.int32, device=device) for n in (numbers.groups, numbers.groups * tokens)
        )
        self._groups = Groups(ends, sources, sources)
        self._tiles = torch.empty_like(layout.tiles)
        self._kept, self._decoder_kept = (_rows(2, count, torch.int64, device) for count in stored)
        self._of_sequences = _rows(2, self._sequences, torch.int64, device)

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """As the kernel takes them."""
        lined = (self._kept, self._decoder_kept, self._of_sequences)
        return (
            *(self._longs, self._longs.stride(0), self._ints, self._ints.stride(0), self._turns, self._history),
            *(self._groups.ends, self._groups.sources, self._tiles),
            *(each for rows in lined for each in (rows, rows.stride(0))),
        )

    def half(self) -> OfHalf:
        lines, *seen = (row[: self._tokens] for row in self._ints)
        cos, sin, compressed_cos, compressed_sin = self._turns[:4]
        return OfHalf(
            lines=lines,
            tiles=self._tiles,
            slots=self._row(_SLOTS),
            lowest=self._row(_LOWEST),
            seen=dict(zip(self._ratios, seen, strict=True)),
            plain=(cos, sin),
            compressed=(compressed_cos, compressed_sin),
            stored=Stored(*self._kept[:, : self._stored[0]]),
            groups=self._groups,
        )

    def step(self, *, is_both: bool) -> OfStep:
        entries, row = {}, int(_FIRST)
        for index, ratio in enumerate(self._ratios):
            sources = self._longs[row + 2 : row + 2 + ratio].view(-1)[: self._tokens * ratio].view(-1, ratio)
            cos, sin = self._turns[4 + 2 * index], self._turns[5 + 2 * index]
            entries[ratio] = Completed(sources, self._row(row), self._row(row + 1), (cos, sin))
            row += 2 + ratio
        pair_slots, pair_places = self._of_sequences[:, : self._sequences]
        return OfStep(
            token_ids=self._row(_IDS),
            history=self._history,
            pair_slots=pair_slots,
            pair_places=pair_places,
            pair_stored=Stored(self._row(_PAIR_SLOTS), self._row(_PAIR_PLACES)),
            entries=entries,
            decoder_lowest=self._row(_DECODER_LOWEST),
            decoder_stored=Stored(*self._decoder_kept[:, : self._stored[1]]) if is_both else None,
        )

    def _row(self, index: int) -> Tensor:
        return self._longs[int(index)][: self._tokens]


@triton.jit
def _id(token_ids: tl.tensor, named: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Of each token, the one that was drawn in its place included."""
    told = tl.load(token_ids + at, mask=mask, other=0)
    drawn = tl.load(named + tl.where(told < 0, -1 - told, 0), mask=mask & (told < 0), other=0)
    return tl.where(told < 0, tl.maximum(drawn, 0), told).to(tl.int64)


@triton.jit
def _said(said: tl.tensor, stride: tl.tensor, field: tl.constexpr, owner: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(said + field * stride + owner, mask=mask, other=0).to(tl.int64)


@triton.jit
def _turn(
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    position: tl.tensor,
    at: tl.tensor,
    num_tokens: tl.tensor,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
) -> None:
    """A position's cosines and sines to a token's rows of two matrices, one behind the other."""
    pair = tl.arange(0, PAIRS_BLOCK)
    inside = (at < num_tokens)[:, None] & (pair < PAIRS)[None, :]
    source, target = position[:, None] * PAIRS + pair[None, :], at[:, None] * PAIRS + pair[None, :]
    tl.store(out + target, tl.load(cos + source, mask=inside), mask=inside)
    tl.store(out + num_tokens * PAIRS + target, tl.load(sin + source, mask=inside), mask=inside)


@triton.jit
def _store(
    said: tl.tensor,
    said_stride: tl.tensor,
    spans: tl.tensor,
    positions: tl.tensor,
    stored: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    count: tl.tensor,
    at: tl.tensor,
    RING: tl.constexpr,
    IS_DECODER: tl.constexpr,
) -> None:
    """Slots and places of some tokens in rings, which are written once a step: by the newest tokens.

    What decoder replay hides is not stored either.
    """
    inside = at < count
    token = tl.load(stored + at, mask=inside, other=0)
    span = tl.load(spans + token, mask=inside, other=-1)
    position = tl.load(positions + token, mask=inside, other=0)
    is_real = inside & (span >= 0)
    is_stored = is_real & (position >= _said(said, said_stride, _END, span, is_real) - RING)
    if IS_DECODER:
        is_stored = is_stored & (position >= _said(said, said_stride, _KEEP_FROM, span, is_real))
    slot = tl.where(is_stored, _said(said, said_stride, _WINDOW, span, is_real), -1)
    tl.store(out + at, slot, mask=inside)
    tl.store(out + out_stride + at, position % RING, mask=inside)


@triton.jit
def _complete(
    tables: tl.tensor,
    table_stride: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    position: tl.tensor,
    line: tl.tensor,
    lowest: tl.tensor,
    start: tl.tensor,
    owner: tl.tensor,
    at: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    RATIO: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Blocks, places and sources of the entries that tokens complete, in rows from `row` on."""
    inside = at < num_tokens
    entry = position // RATIO
    is_made = inside & (line >= 0) & ((position + 1) % RATIO == 0) & (entry * RATIO >= lowest)
    block = tl.load(tables + line * table_stride + position // BLOCK_TOKENS, mask=is_made, other=-1)
    tl.store(row + at, block.to(tl.int64), mask=inside)
    tl.store(row + stride + at, entry % (BLOCK_TOKENS // RATIO), mask=inside)
    source = row + 2 * stride + at * RATIO
    if RATIO == 2:
        # The earlier token of a pair is the one before, or the last of the sequence's step before this one.
        earlier = tl.where(at > start, (num_sequences + at - 1).to(tl.int64), owner.to(tl.int64))
        tl.store(source, earlier, mask=inside)
        tl.store(source + 1, (num_sequences + at).to(tl.int64), mask=inside)
    else:
        tl.store(source, at.to(tl.int64), mask=inside)


# A step of one token must not make a number of it: what is counted is counted by the same code.
@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_tiles", "num_stored", "num_decoder_stored"])
def _tell_kernel(  # noqa: PLR0915 - one launch is what it is for
    said: tl.tensor,
    said_stride: tl.tensor,
    token_ids: tl.tensor,
    named: tl.tensor,
    preceding: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    plain_cos: tl.tensor,
    plain_sin: tl.tensor,
    compressed_cos: tl.tensor,
    compressed_sin: tl.tensor,
    spans: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    tiles_laid: tl.tensor,
    stored: tl.tensor,
    decoder_stored: tl.tensor,
    longs: tl.tensor,
    longs_stride: tl.tensor,
    ints: tl.tensor,
    ints_stride: tl.tensor,
    turns: tl.tensor,
    history: tl.tensor,
    group_ends: tl.tensor,
    group_rows: tl.tensor,
    tiles_told: tl.tensor,
    kept: tl.tensor,
    kept_stride: tl.tensor,
    decoder_kept: tl.tensor,
    decoder_kept_stride: tl.tensor,
    of_sequences: tl.tensor,
    sequences_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    num_tiles: tl.tensor,
    num_stored: tl.tensor,
    num_decoder_stored: tl.tensor,
    VOCAB: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
    RING: tl.constexpr,
    PAIR_RING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    RATIOS: tl.constexpr,
    REACH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_DECODER: tl.constexpr,
    IS_BOTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    span = tl.load(spans + at, mask=inside, other=-1)
    is_real, owner = span >= 0, tl.maximum(span, 0)  # padding reads what is said of the first sequence
    position = tl.load(positions + at, mask=inside, other=0)
    line = tl.where(is_real, _said(said, said_stride, _LINE, owner, inside), -1)
    slot = tl.where(is_real, _said(said, said_stride, _WINDOW, owner, inside), -1)
    window_from = _said(said, said_stride, _WINDOW_FROM, owner, inside)
    keep_from = tl.maximum(window_from, _said(said, said_stride, _KEEP_FROM, owner, inside))
    oldest = position - (WINDOW_TOKENS - 1)
    tl.store(longs + _SLOTS * longs_stride + at, slot, mask=inside)
    shown = tl.maximum(oldest, keep_from if IS_DECODER else window_from)
    tl.store(longs + _LOWEST * longs_stride + at, shown, mask=inside)
    tl.store(longs + _DECODER_LOWEST * longs_stride + at, tl.maximum(oldest, keep_from), mask=inside)
    tl.store(ints + at, line.to(tl.int32), mask=inside)
    _turn(plain_cos, plain_sin, turns, position, at, num_tokens, PAIRS, PAIRS_BLOCK)
    size = num_tokens.to(tl.int64) * PAIRS
    _turn(compressed_cos, compressed_sin, turns + 2 * size, position, at, num_tokens, PAIRS, PAIRS_BLOCK)
    _store(said, said_stride, spans, positions, stored, kept, kept_stride, num_stored, at, RING, IS_DECODER)
    if IS_BOTH:
        _store(
            said, said_stride, spans, positions, decoder_stored, decoder_kept, decoder_kept_stride, num_decoder_stored,
            at, RING, True,
        )  # fmt: skip
    for index in tl.static_range(len(RATIOS)):
        seen = tl.where(is_real, (position + 1) // RATIOS[index], 0).to(tl.int32)
        tl.store(ints + (1 + index) * ints_stride + at, seen, mask=inside)
    for group in tl.static_range(GROUPS):
        tl.store(group_rows + group * num_tokens + at, at * GROUPS + group, mask=inside)
        tl.store(group_ends + at * 0 + group, at * 0 + (group + 1) * num_tokens, mask=at == 0)
    for field in tl.static_range(3):
        mine = at < num_tiles
        number = tl.load(tiles_laid + at * 3 + field, mask=mine, other=0)
        if field == 2:
            number = tl.load(said + _LINE * said_stride + number, mask=mine, other=0)
        tl.store(tiles_told + at * 3 + field, number, mask=mine)

    if IS_WHOLE:
        start = tl.load(starts + at, mask=inside, other=0)
        for older in tl.static_range(REACH + 1):
            place = at - start - older
            mine = inside & (place >= 0)
            own = _id(token_ids, named, at - older, mine)
            before = owner * REACH + tl.maximum(REACH + place, 0)
            token = tl.where(mine, own, tl.load(preceding + before, mask=inside & (place < 0), other=0).to(tl.int64))
            tl.store(history + at * (REACH + 1) + older, token, mask=inside)
            if older == 0:
                tl.store(longs + _IDS * longs_stride + at, tl.where(token < VOCAB, token, 0), mask=inside)
        is_stored = position >= _said(said, said_stride, _END, owner, inside) - PAIR_RING
        tl.store(longs + _PAIR_SLOTS * longs_stride + at, tl.where(is_stored, slot, -1), mask=inside)
        tl.store(longs + _PAIR_PLACES * longs_stride + at, position % PAIR_RING, mask=inside)

        known = at < num_sequences
        begin = _said(said, said_stride, _END, at, known) - _said(said, said_stride, _COUNT, at, known)
        tl.store(of_sequences + at, _said(said, said_stride, _WINDOW, at, known), mask=known)
        tl.store(of_sequences + sequences_stride + at, (begin - 1 + PAIR_RING) % PAIR_RING, mask=known)

        lowest = tl.maximum(_said(said, said_stride, _WRITE_FROM, owner, inside), window_from)
        row = longs + _FIRST * longs_stride
        for index in tl.static_range(len(RATIOS)):
            out = turns + (4 + 2 * index) * size
            _turn(
                compressed_cos, compressed_sin, out, position // RATIOS[index] * RATIOS[index], at, num_tokens,
                PAIRS, PAIRS_BLOCK,
            )  # fmt: skip
            _complete(
                tables, table_stride, row, longs_stride, position, line, lowest, start, owner, at, num_tokens,
                num_sequences, RATIOS[index], BLOCK_TOKENS,
            )  # fmt: skip
            row += (2 + RATIOS[index]) * longs_stride

"""Attention on a GPU: scores, choices, windows and rows of any length, interpreted, against their twins."""

import pytest
import torch

from kernels.ops.quant import IndexFp4, MainFp4, WindowFp8

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops import gpu_index, gpu_sparse
from kernels.ops.gpu_index import Keys, locate, score, score_candidates, select
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_records import Section
from kernels.ops.gpu_sparse import Chosen, Windows, attend
from kernels.ops.gpu_varlen import lay_out

HEADS, HEAD, PAIRS = 3, 64, 16
WINDOW, RING, PER_BLOCK, MOST = 16, 22, 8, 12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("has_entries", [True, False])
def test_a_token_attends_as_by_the_twin(has_entries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that wraps, a chunk longer than it, a first token, bounded replay, and an inert padding row."""
    monkeypatch.setattr(gpu_sparse, "CUT", gpu_sparse.Cut(keys=16, warps=1, stages=1))
    spans = [(30, 2, 15), (5, 1, -10), (60, 24, 45), (0, 1, -15)]
    positions = torch.cat([torch.arange(at, at + count) for at, count, _ in spans] + [torch.zeros(1).long()])
    slots = torch.cat([torch.full((count,), slot + 1) for slot, (_, count, _) in enumerate(spans)] + [-torch.ones(1)])
    begins = torch.cat([torch.full((count,), at) for at, count, _ in spans] + [torch.zeros(1).long()])
    counts = torch.tensor([count for _, count, _ in spans])
    starts = torch.cat([(counts.cumsum(0) - counts).repeat_interleave(counts), torch.tensor([len(positions) - 1])])
    lowest = positions - WINDOW + 1
    lowest[4:8] = positions[4:8]  # replay: nothing older is seen
    windows = Windows(positions, lowest, begins, starts, slots.long(), WINDOW, RING)
    codec = WindowFp8(HEAD)
    ring = Section(torch.full((5, 64 + RING * codec.record_bytes), 0x7F, dtype=torch.uint8), 64, codec.record_bytes)
    ring.pool[1:4, 64:] = codec.encode(draw(3 * RING, HEAD)).view(3, -1)
    main = Section(torch.zeros(4, 32 + PER_BLOCK * 36, dtype=torch.uint8), 32, MainFp4(HEAD).record_bytes)
    main.pool[:, 32:] = MainFp4(HEAD).encode(draw(4 * PER_BLOCK, HEAD, seed=1)).view(4, -1)
    num = torch.arange(len(positions)) % (MOST + 1)
    where = torch.randint(0, 4 * PER_BLOCK, (len(positions), MOST), generator=torch.Generator().manual_seed(3))
    where = torch.where(torch.arange(MOST) < num[:, None], where, -1)
    chosen = Chosen(where.int(), num.int(), main, PER_BLOCK) if has_entries else None
    queries, sinks = (draw(len(positions), HEADS, HEAD, seed=4) * 2).bfloat16(), draw(HEADS, seed=5)
    angles = draw(len(positions), PAIRS, seed=6)
    own = codec.encode(draw(len(positions), HEAD, seed=7))
    arguments = (queries, angles.cos(), angles.sin(), own, ring, windows, chosen, sinks)
    expected = attend(*arguments, scale=HEAD**-0.5).float()
    few = torch.tensor([0, 2, 3, 7, 26, 27, 28])
    with interpreted():
        got = attend(
            queries[few], angles.cos()[few], angles.sin()[few], own, ring,
            Windows(positions[few], lowest[few], begins[few], starts[few], slots.long()[few], WINDOW, RING),
            None if chosen is None else Chosen(where.int()[few], num.int()[few], main, PER_BLOCK), sinks,
            scale=HEAD**-0.5,
        ).float()  # fmt: skip

    assert (expected[few] - got).norm() / expected[few].norm() < 0.015
    assert torch.equal(torch.zeros(HEADS, HEAD), got[-1])


def index_keys() -> Keys:
    codec, per_block = IndexFp4(64), 16
    pool = torch.zeros(12, 64 + per_block * 34, dtype=torch.uint8)
    records = codec.encode(draw(12 * per_block, 64)).view(12, per_block, 34)
    pool[:, 64 : 64 + per_block * 32] = records[..., :32].flatten(1)
    pool[:, 64 + per_block * 32 :] = records[..., 32:].flatten(1)
    tables = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 1, 2, 0]]).int()
    return Keys(Section(pool, 64, 32), Section(pool, 64 + per_block * 32, 2), tables, per_block)


@pytest.mark.slow
def test_entries_are_scored_and_chosen_as_by_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, a part of a block, candidate blocks and their entries, and where those lie."""
    monkeypatch.setattr(gpu_index, "ENTRIES", 32)
    monkeypatch.setattr(gpu_index, "CANDIDATES", 32)
    monkeypatch.setattr(gpu_index, "UNITS", 1)
    keys, codec = index_keys(), IndexFp4(64)
    queries = codec.decode(codec.encode(draw(7 * 4, 64, seed=1))).view(7, 4, 64).bfloat16()
    weights = draw(7, 4, seed=2)
    tile_table = torch.tensor([[0, 4, 0], [4, 2, 1], [0, 0, 0]]).int()
    seen, spans = torch.tensor([60, 61, 62, 63, 40, 41, 0]).int(), torch.tensor([0, 0, 0, 0, 1, 1, -1]).int()
    expected = score(queries, weights, keys, tile_table, seen, width=64, block_size=8)
    assert expected.blocks is not None
    blocks_seen = (seen + 7) // 8
    candidates = select(expected.blocks, blocks_seen, count=4)
    scored = score_candidates(queries, weights, keys, spans, seen, candidates, block_size=8)
    places = select(scored, torch.full((7,), 32).int(), count=16)
    located = locate(places, keys, spans, candidates, block_size=8)
    with interpreted():
        got = score(queries, weights, keys, tile_table, seen, width=64, block_size=8)
        got_scored = score_candidates(queries, weights, keys, spans, seen, candidates, block_size=8)
        got_located = locate(places, keys, spans, candidates, block_size=8)
    assert got.blocks is not None

    for theirs, ours, limit in (
        (expected.scores, got.scores, seen), (expected.blocks, got.blocks, blocks_seen),
        (scored, got_scored, torch.full((7,), 32)),
    ):  # fmt: skip
        is_seen = torch.arange(theirs.shape[1]) < limit[:, None]
        torch.testing.assert_close(theirs[is_seen], ours[is_seen], rtol=0.01, atol=1e-6)
    for theirs, ours in zip(located, got_located, strict=True):
        assert torch.equal(theirs, ours)
    assert torch.equal(torch.full((16,), -1).int(), got_located[0][6])


@pytest.mark.slow
def test_of_equal_scores_the_lower_index_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All equal, none finite, many ties, NaN, both zeros, denormals, rows that see little or nothing; all of a row."""
    monkeypatch.setattr(gpu_index, "SELECT_STEP", 64)
    scores = (draw(7, 100) * 2).round().bfloat16()
    scores[0], scores[1], scores[1, 70:] = 1.0, float("-inf"), -2.0
    scores[2, 5], scores[3], scores[4] = float("nan"), -0.0, (draw(100, seed=1) * 1e-39).bfloat16()
    scores[3, ::2] = 0.0
    seen = torch.tensor([100, 100, 83, 100, 100, 20, 0]).int()
    expected, everything = select(scores, seen, count=24), select(scores[:2], seen[:2], count=120)
    with interpreted():
        got, got_everything = select(scores, seen, count=24), select(scores[:2], seen[:2], count=120)

    assert torch.equal(expected, got)
    assert list(range(24)) == got[0].tolist()
    assert torch.equal(everything, got_everything)


def test_a_step_is_laid_out_without_the_host() -> None:
    """Sequences of 0 to 6 rows, and padding behind them."""
    counts, ends = torch.tensor([3, 1, 0, 6, 4]).int(), torch.tensor([10, 5, 9, 100, 77]).int()
    expected = lay_out(counts, ends, num_tokens=20, tile_tokens=4)
    with interpreted():
        got = lay_out(counts, ends, num_tokens=20, tile_tokens=4)

    for name in ("spans", "positions", "begins", "starts", "tiles"):
        assert torch.equal(getattr(expected, name), getattr(got, name)), name
    assert [7, 8, 9, 4, 94] == got.positions[:5].tolist()
    assert [-1] * 6 == got.spans[14:].tolist()

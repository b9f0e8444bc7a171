"""The kernels in Gluon, which no interpreter runs: their source, run in Python, against the twins."""

import pytest
import torch

from kernels.ops.quant import IndexFp4, MainFp4, WindowFp8

pytest.importorskip("triton", reason="Triton, in whose language the kernels are written, is not installed")

from kernels.ops import gpu_index, gpu_index_hopper, gpu_sparse, gpu_sparse_hopper
from kernels.ops.gpu_fp8 import span_rows
from kernels.ops.gpu_grouped import interleaved
from kernels.ops.gpu_index import Keys, score, score_candidates
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_records import Section
from kernels.ops.gpu_sparse import Chosen, Windows, attend, attend_groups
from kernels.tests import gluon_alone
from kernels.tests.gluon_alone import Launcher
from kernels.tests.test_gpu_bring import brought_whole

HEADS, HEAD, PAIRS = 64, 256, 16
RING, PER_BLOCK, MOST = 134, 8, 192


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "has_entries", "is_late", "sums_ask"),
    [
        (128, True, False, False),
        (128, True, True, False),
        (131, False, True, True),
        (128, True, False, True),
        (128, True, True, True),
        (131, True, True, True),
    ],
)
def test_a_token_attends_as_by_the_twin(
    window: int, has_entries: bool, is_late: bool, sums_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring that wraps, a window that is not of whole turns, tokens of the same step, bounded replay, few and many entries, and an inert padding row."""
    positions = torch.tensor([300, 301, 5, 60, 0])
    begins, starts = torch.tensor([300, 300, 5, 60, 0]), torch.tensor([0, 0, 2, 3, 4])
    slots, lowest = torch.tensor([1, 1, 2, 3, -1]), positions - window + 1
    lowest[3] = 58  # replay: nothing older is seen
    codec, count = WindowFp8(HEAD), len(positions)
    ring = Section(torch.full((5, 64 + RING * codec.record_bytes), 0x7F, dtype=torch.uint8), 64, codec.record_bytes)
    ring.pool[1:4, 64:] = codec.encode(draw(3 * RING, HEAD)).view(3, -1)
    bytes_each = MainFp4(HEAD).record_bytes
    main = Section(torch.zeros(32, 32 + PER_BLOCK * bytes_each, dtype=torch.uint8), 32, bytes_each)
    main.pool[:, 32:] = MainFp4(HEAD).encode(draw(32 * PER_BLOCK, HEAD, seed=1)).view(32, -1)
    num = torch.tensor([64, 130, 0, 1, 9])
    where = torch.randint(0, 32 * PER_BLOCK, (count, MOST), generator=torch.Generator().manual_seed(3))
    where = torch.where(torch.arange(MOST) < num[:, None], where, -1).int()
    angles = draw(count, PAIRS, seed=6)
    arguments = (
        (draw(count, HEADS, HEAD, seed=4) * 2).bfloat16(), angles.cos(), angles.sin(),
        codec.encode(draw(count, HEAD, seed=7)), ring,
        Windows(positions, lowest, begins, starts, slots, window, RING),
        Chosen(where, num.int(), main, PER_BLOCK) if has_entries else None, draw(HEADS, seed=5),
    )  # fmt: skip
    monkeypatch.setattr(gpu_sparse, "SUMS_ASK", sums_ask)
    brought = torch.zeros(7000, dtype=torch.uint8)
    expected = attend(*arguments, scale=HEAD**-0.5).float()
    launcher = Launcher(gpu_sparse_hopper.attend_kernel, is_late=is_late)
    monkeypatch.setattr(gpu_sparse_hopper, "attend_kernel", launcher)
    monkeypatch.setattr(gpu_sparse, "_fits_hopper", lambda *_: True)
    with interpreted():
        got = attend(*arguments, scale=HEAD**-0.5).float()
        if is_late:  # the last part alone: its values restated, group by group
            groups = interleaved(count, 2, torch.device("cpu"))
            monkeypatch.setattr(gpu_sparse, "multiprocessors", lambda _: 3)
            monkeypatch.setattr(gluon_alone, "BROUGHT", [])
            given = {"scale": HEAD**-0.5, "span": gpu_sparse_hopper.SPAN, "brings": brought}
            restated = attend_groups(*arguments, groups, **given)
            assert brought_whole(gluon_alone.BROUGHT, brought)
            assert {3, 4} == {program for *_, program in gluon_alone.BROUGHT}  # of five, three run at once
            plain = span_rows(got.bfloat16().view(count * 2, -1), groups.sources, span=gpu_sparse_hopper.SPAN)
            assert torch.equal(plain.scale, restated.scale)
            assert torch.equal(plain.data.view(torch.uint8), restated.data.view(torch.uint8))

    assert (expected - got).norm() / expected.norm() < 0.015
    assert torch.equal(torch.zeros(HEADS, HEAD), got[-1])


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_entries_are_scored_as_by_the_twins(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, a part of a block, candidate blocks of which some are none, programs that end beside the width."""
    heads, size, per_block = gpu_index_hopper.HEADS, gpu_index_hopper.SIZE, 16
    codec = IndexFp4(size)
    pool = torch.zeros(26, 64 + per_block * 68, dtype=torch.uint8)
    records = codec.encode(draw(26 * per_block, size)).view(26, per_block, 68)
    pool[:, 64 : 64 + per_block * 64] = records[..., :64].flatten(1)
    pool[:, 64 + per_block * 64 :] = records[..., 64:].flatten(1)
    tables = torch.randperm(26, generator=torch.Generator().manual_seed(2))[:24].view(2, 12).int()
    keys = Keys(Section(pool, 64, 64), Section(pool, 64 + per_block * 64, 4), tables, per_block)
    queries = codec.decode(codec.encode(draw(7 * heads, size, seed=1))).view(7, heads, size).bfloat16()
    weights, seen = draw(7, heads, seed=2), torch.tensor([185, 186, 187, 188, 40, 41, 0]).int()
    tile_table = torch.tensor([[0, 4, 0], [4, 2, 1], [0, 0, 0]]).int()
    spans = torch.tensor([0, 0, 0, 0, 1, 1, -1]).int()
    candidates = torch.arange(16).expand(7, 16).where(torch.arange(16) * 8 < seen[:, None], -1).int()
    expected = score(queries, weights, keys, tile_table, seen, width=192, block_size=8)
    scored = score_candidates(queries, weights, keys, spans, seen, candidates, block_size=8)
    launcher = Launcher(gpu_index_hopper.score_kernel, is_late=is_late)
    monkeypatch.setattr(gpu_index_hopper, "score_kernel", launcher)
    monkeypatch.setattr(gpu_index, "_fits_hopper", lambda _: True)
    monkeypatch.setattr(gpu_index, "HOPPER_UNITS", 2)
    with interpreted():
        got = score(queries, weights, keys, tile_table, seen, width=192, block_size=8)
        got_scored = score_candidates(queries, weights, keys, spans, seen, candidates, block_size=8)
    assert expected.blocks is not None
    assert got.blocks is not None

    torch.testing.assert_close(scored, got_scored, rtol=0.01, atol=1e-6)
    for theirs, ours, limit in (
        (expected.scores, got.scores, seen),
        (expected.blocks, got.blocks, (seen + 7) // 8),
    ):
        is_seen = torch.arange(theirs.shape[1]) < limit[:, None]
        torch.testing.assert_close(theirs[is_seen], ours[is_seen], rtol=0.01, atol=1e-6)

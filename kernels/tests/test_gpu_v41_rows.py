"""Rows and records on a GPU: the kernels, interpreted, write the bytes that their twins write."""

from dataclasses import replace

import pytest
import torch

from kernels.ops.quant import IndexFp4, MainFp4, WindowFp8
from kernels.tests.golden_files import golden

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_quant import norm_fp8, quantise_rows, round_fp8, swiglu_fp8
from kernels.ops.gpu_records import (
    Section,
    compress_entries,
    index_queries,
    store_index,
    store_main,
    store_ring,
    window_records,
)

EPS = 1e-20
HEAD, PAIRS, TOKENS = 128, 32, 5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, size: int) -> torch.Tensor:
    """bf16 rows of different magnitudes; one is zeros."""
    x = draw(count, size) * torch.logspace(-4, 2, count).unsqueeze(1)
    x[count // 2] = 0.0
    return x.bfloat16()


def turn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = draw(count, PAIRS, seed=9)
    return angles.cos(), angles.sin()


@pytest.mark.slow
def test_the_golden_rows_are_rounded_as_their_records_hold_them() -> None:
    """Zeros, values below the floor, ties and saturation."""
    x = golden("codec.x").float()[:, :512].bfloat16()
    codec = WindowFp8(512)
    with interpreted():
        rounded = round_fp8(x)
        data, scales = quantise_rows(x)

    assert torch.equal(codec.decode(codec.encode(x.float())), rounded.float())
    assert torch.equal(codec.encode(x.float()), torch.cat([data.view(torch.uint8), scales], dim=1))


@pytest.mark.parametrize("size", [32, 96])
def test_rows_are_normalised_and_gated_as_by_the_twins(size: int) -> None:
    """Also rows of zeros, rows that lie apart, and sizes that are no power of two."""
    x, weight = rows(TOKENS, 2 * size)[:, :size], draw(size).abs() + 0.5
    both, factors = (draw(TOKENS, 2 * size, seed=3) * 8.0).bfloat16(), draw(TOKENS, seed=4).abs()
    expected = *norm_fp8(x, weight, eps=EPS), swiglu_fp8(both, factors, limit=10.0), swiglu_fp8(both, None, limit=10.0)
    with interpreted():
        got = *norm_fp8(x, weight, eps=EPS), swiglu_fp8(both, factors, limit=10.0), swiglu_fp8(both, None, limit=10.0)

    for theirs, ours in zip(expected, got, strict=True):
        torch.testing.assert_close(theirs.float(), ours.float(), rtol=0.1, atol=1e-6)
        assert (theirs == ours).float().mean() > 0.99


def sections(record_bytes: int, *, offset: int = 64) -> Section:
    """Three poisoned slots of sixteen records."""
    return Section(torch.full((3, 64 + 16 * record_bytes + 32), 0xAA, dtype=torch.uint8), offset, record_bytes)


@pytest.mark.slow
def test_records_are_the_twins_bytes_and_padding_writes_nothing() -> None:
    """Window keys, main entries and index keys; what lies between records stays as it was."""
    x, weight, (cos, sin) = rows(TOKENS, HEAD), draw(HEAD).abs() + 0.5, turn(TOKENS)
    blocks, places = torch.tensor([1, 0, -1, 2, 1]), torch.tensor([15, 3, 7, 0, 4])
    both = []
    for is_kernel in (False, True):
        main = sections(MainFp4(HEAD).record_bytes)
        data, scale = sections(HEAD // 2), sections(HEAD // 32, offset=64 + 16 * HEAD // 2 - 256)
        scale = replace(scale, pool=data.pool)
        with interpreted() if is_kernel else torch.no_grad():
            window = window_records(x, weight, cos, sin, eps=EPS)
            store_main(x, cos, sin, main, blocks, places)
            store_index(x, weight, cos, sin, data, scale, blocks, places, eps=EPS)
            queries = index_queries(x.view(TOKENS, 1, HEAD), cos, sin)
        both.append((window, main.pool, data.pool, queries))

    for theirs, ours in zip(*both, strict=True):
        assert torch.equal(theirs, ours)
    assert 0xAA == both[1][1][2, -1]
    codec = IndexFp4(HEAD)
    assert torch.equal(codec.decode(codec.encode(both[1][3].view(TOKENS, HEAD).float())).bfloat16(), both[1][3][:, 0])


def test_a_ring_takes_records_where_they_belong() -> None:
    """In slots of any order; a padding row's record goes nowhere."""
    records = torch.randint(0, 256, (4, 528), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    tokens, slots, places = torch.tensor([3, 1, 2]), torch.tensor([2, 0, -1]), torch.tensor([15, 0, 3])
    expected, got = sections(528), sections(528)
    store_ring(records, expected, tokens, slots, places)
    with interpreted():
        store_ring(records, got, tokens, slots, places)

    assert torch.equal(expected.pool, got.pool)
    assert torch.equal(records[3], got.get(torch.tensor([2]), torch.tensor([15]))[0])


@pytest.mark.slow
def test_entries_are_pooled_across_steps() -> None:
    """A pair's first token may be one of the step before; a source of ratio 1 takes each token."""
    both, weight = draw(TOKENS, 2 * HEAD), draw(HEAD).abs() + 0.5
    ring = Section(draw(3, 4 * HEAD * 2 + 8).view(torch.uint8), 32, 2 * HEAD * 4)
    pairs, slots, places = torch.tensor([[0, 2], [3, 4], [1, 5]]), torch.tensor([1, 2]), torch.tensor([0, 3])
    alone = both[:, :HEAD].contiguous()
    singles = torch.arange(1, TOKENS)[:, None]
    expected = compress_entries(both, ring, pairs, slots, places, weight, eps=EPS)
    expected_alone = compress_entries(alone, None, singles, slots, places, weight, eps=EPS)
    with interpreted():
        got = compress_entries(both, ring, pairs, slots, places, weight, eps=EPS)
        got_alone = compress_entries(alone, None, singles, slots, places, weight, eps=EPS)

    torch.testing.assert_close(expected, got, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(expected_alone, got_alone, rtol=0.01, atol=1e-6)


def test_a_wrong_shape_is_refused() -> None:
    """A kernel would read beyond its arguments."""
    with pytest.raises(ValueError, match="multiple of 32"):
        round_fp8(torch.zeros(2, 40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bf16"):
        norm_fp8(torch.zeros(2, 32), torch.ones(32), eps=EPS)

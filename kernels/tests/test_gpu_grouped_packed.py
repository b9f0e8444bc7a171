"""fp4 experts multiplied on Hopper's fp8 units without being unpacked into memory: same products, any group."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from kernels.ops import gpu_grouped_packed
from kernels.ops.gpu_fp8 import SpanRows, gathered, span_rows, swiglu_rows, turned_places
from kernels.ops.gpu_grouped import Weights, fp4_weights
from kernels.ops.gpu_grouped_packed import Cut, multiply
from kernels.ops.gpu_grouped_unpack import powers_of, unpack
from kernels.ops.gpu_launch import interpreted
from kernels.tests.gluon_alone import Launcher


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(experts: int, out: int, size: int) -> Weights:
    """Random nibbles under powers up to eleven binades apart."""
    noise = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (experts, out, size // 2), generator=noise, dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(110, 122, (experts, out, size // 32), generator=noise, dtype=torch.uint8)
    return fp4_weights(data, scale.view(torch.float8_e8m0fnu))


def test_turned_places_are_a_permutation_of_words_in_each_tile() -> None:
    """Four columns stay together, and none leaves its 128."""
    places = turned_places(256)

    assert list(range(256)) == sorted(places.tolist())
    assert torch.equal(places[::4] + 3, places[3::4])
    assert torch.equal(places[:128] + 128, places[128:])


@pytest.mark.parametrize("size", [128, 384])
def test_rows_are_turned_where_they_are_gathered_and_gated(size: int) -> None:
    """By kernels as by twins: the same values, columns in the operand's order."""
    rows, sources = draw(5, size).bfloat16(), torch.tensor([4, 0, 0, 2, 1, 3]).int()
    plain = span_rows(rows, rounds=True)
    both = draw(5, 2 * size, seed=2).bfloat16()
    targets, factors = torch.tensor([1, 0, 3, 2, 4]).int(), draw(5, seed=3).abs()
    with interpreted():
        taken = gathered(plain, sources, turns=True)
        gated = swiglu_rows(both, targets, factors, limit=2.0, turns=True)
    in_order = swiglu_rows(both, targets, factors, limit=2.0)

    assert torch.equal(gathered(plain, sources).dense(), taken.dense())
    assert torch.equal(in_order.dense(), gated.dense())
    assert torch.equal(gathered(plain, sources, turns=True).data.view(torch.uint8), taken.data.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(("is_late", "stages", "size"), [(False, 4, 384), (True, 3, 640)], ids=["at once", "late"])
def test_rows_are_multiplied_by_packed_experts_as_by_unpacked_ones(
    stages: int, size: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts without rows, with one, with more than a tile; copies and products made as late as they may be."""
    experts, out = 4, 128
    weights = packed(experts, out, size)
    powers = powers_of(weights)
    ends = torch.tensor([1, 1, 113, 150]).int()
    x = span_rows(draw(153, size).bfloat16(), rounds=True)
    sources = torch.arange(153).flip(0).int()
    expected = torch.cat(
        [
            gathered(x, sources).dense()[begin:end] @ unpack(weights, powers).dense(expert).T
            for expert, (begin, end) in enumerate(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))
        ]
    )
    monkeypatch.setattr(
        gpu_grouped_packed, "packed_kernel", Launcher(gpu_grouped_packed.packed_kernel, is_late=is_late)
    )
    rows = gathered(x, sources, turns=True)
    with interpreted():
        got = multiply(rows, weights, powers, ends, cut=Cut((16, 32, 48, 64), stages, registers=232, sharing_rounds=0))

    assert (expected - got[:150].float()).norm() / expected.norm() < 0.002


def test_rows_in_their_order_are_refused() -> None:
    """The kernel would multiply other columns."""
    weights = packed(1, 128, 128)
    x = span_rows(draw(2, 128).bfloat16(), rounds=True)
    ends = torch.tensor([2]).int()

    with pytest.raises(ValueError, match="turned"):
        multiply(x, weights, powers_of(weights), ends)
    assert multiply(SpanRows(x.data, x.scale, is_turned=True), weights, powers_of(weights), ends).isfinite().all()

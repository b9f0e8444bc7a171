"""Experts on a GPU: the kernels, interpreted, route, sort, multiply and add as their twins do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.ops.quant import (
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    fp8_round_trip,
    quantise_fp4_weight,
    quantise_fp8_weight,
)

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops import gpu_moe
from kernels.ops.gpu_grouped import (
    Tile,
    Weights,
    bf16_weights,
    fp4_weights,
    fp8_weights,
    multiply,
    multiply_gated,
)
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_matmul import Fp8Tile, Matrix, every_row, fp8_product, product
from kernels.ops.gpu_moe import combine, group, route
from kernels.ops.gpu_quant import quantise_rows, round_fp8

EXPERTS, TOP, TOKENS, SIZE, OUT = 3, 2, 7, 128, 64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(kind: str) -> Weights:
    wide = draw(EXPERTS, OUT, SIZE)
    if kind == "fp8":
        parts = [quantise_fp8_weight(each) for each in wide]
        return fp8_weights(torch.stack([data for data, _ in parts]), torch.stack([scale for _, scale in parts]))
    parts = [quantise_fp4_weight(each) for each in wide]
    packed = fp4_weights(torch.stack([data for data, _ in parts]), torch.stack([scale for _, scale in parts]))
    return packed if kind == "fp4" else bf16_weights(packed)


@pytest.mark.slow
def test_tokens_are_routed_as_by_the_twin() -> None:
    """Also where experts are equally good (the lower one first), and image tokens by their own bias."""
    logits = draw(9, 10)
    logits[3] = 0.0
    bias, image_bias = torch.tensor([0.0, 0.5] * 5), draw(10, seed=1)
    images = torch.arange(9) % 4 == 0
    for arguments in ((logits, bias, None, None), (logits, bias, image_bias, images)):
        expected = route(*arguments, top_k=3, scaling=1.5)
        with interpreted():
            got = route(*arguments, top_k=3, scaling=1.5)
        assert torch.equal(expected.experts, got.experts)
        torch.testing.assert_close(expected.weights, got.weights, rtol=1e-5, atol=0)
    assert [1, 3, 5] == route(logits, bias, None, None, top_k=3, scaling=1.5).experts[3].tolist()


@pytest.mark.parametrize(("first", "here"), [(0, 10), (3, 4)])
def test_slots_are_sorted_by_expert_in_the_order_of_tokens(
    first: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts, or a rank's own; padding rows stand behind the last."""
    monkeypatch.setattr(gpu_moe, "CHUNK", 16)
    experts = torch.randint(0, 10, (23, 3), generator=torch.Generator().manual_seed(0)).int()
    experts[5], experts[experts == 4] = -1, 6
    expected = group(experts, num_experts=here, first_expert=first)
    with interpreted():
        got = group(experts, num_experts=here, first_expert=first)

    for name in ("ends", "sources", "targets"):
        assert torch.equal(getattr(expected, name), getattr(got, name)), name


@pytest.mark.parametrize(("kind", "reader"), [("fp4", dequantise_fp4_weight), ("fp8", dequantise_fp8_weight)])
def test_weights_are_repacked_without_loss(kind: str, reader: Callable[..., torch.Tensor]) -> None:
    """What the kernel's layout holds is what the checkpoint held; bf16 copies are exact."""
    wide = draw(EXPERTS, OUT, SIZE)[1]
    quantise = quantise_fp4_weight if kind == "fp4" else quantise_fp8_weight
    made = weights(kind)

    assert torch.equal(reader(*quantise(wide)), made.dense(1))
    assert torch.equal(made.dense(2), bf16_weights(made).dense(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp4", "fp8", "bf16"])
def test_each_row_meets_its_own_expert(kind: str) -> None:
    """Uneven groups, one of them empty, padding rows, tiles larger than a group and than the matrix."""
    experts = torch.tensor([[0, 2], [2, 0], [2, 2], [0, 2], [-1, -1], [2, 0], [2, 2]]).int()
    groups, made = group(experts, num_experts=EXPERTS), weights(kind)
    real = (experts.flatten() >= 0).nonzero().flatten()
    slots, factors = TOKENS * TOP, draw(TOKENS * TOP, seed=5).abs()
    x = fp8_round_trip(draw(TOKENS, SIZE, seed=2)).bfloat16()
    expected = multiply(x, made, groups, num_out=slots)
    expected_gated = multiply_gated(x, made, groups, factors, limit=10.0, num_out=slots)
    tile = Tile(rows=16, outs=64, warps=4, stages=1)
    with interpreted():
        got = multiply(x, made, groups, num_out=slots, tile=tile)
        got_gated = multiply_gated(x, made, groups, factors, limit=10.0, num_out=slots, tile=tile)

    torch.testing.assert_close(expected[real], got[real], rtol=0.01, atol=0.01)
    torch.testing.assert_close(expected_gated[real], got_gated[real], rtol=0.1, atol=0.01)
    alone = replace(
        groups, ends=torch.tensor([0, 0, 1]).int(), sources=groups.sources[5:6], targets=torch.zeros(1).int()
    )
    with interpreted():
        assert torch.equal(got[groups.targets[5].long()], multiply(x, made, alone, num_out=1, tile=tile)[0])


@pytest.mark.slow
def test_a_dense_matrix_is_multiplied_alike_on_both_ways() -> None:
    """In bf16 from fp8 weights, and on the fp8 units with a scale for every 32."""
    matrix = Matrix.of(*quantise_fp8_weight(draw(96, 128)), wide=False)
    x = fp8_round_trip(draw(3, 128, seed=1) * 5.0).bfloat16()
    x[1] = 0.0
    rows = every_row(3, x.device)
    expected = product(x, matrix, rows)
    with interpreted():
        torch.testing.assert_close(expected, product(x, matrix, rows), rtol=0.01, atol=0.01)
        tile = Fp8Tile(rows=16, outs=64, warps=4, stages=1)
        torch.testing.assert_close(
            expected, fp8_product(*quantise_rows(x), matrix.fp8, tile=tile), rtol=0.01, atol=0.01
        )


def test_experts_are_added_in_the_order_of_slots() -> None:
    """Without a padding row's garbage, and with or without a shared expert."""
    by_slot, shared = draw(TOKENS * TOP, 40).bfloat16(), draw(TOKENS, 40, seed=1).bfloat16()
    experts = torch.zeros(TOKENS, TOP).int()
    experts[3], by_slot[6:8] = -1, float("nan")
    expected = combine(by_slot, shared, experts, top_k=TOP)
    with interpreted():
        got = combine(by_slot, shared, experts, top_k=TOP)
        without = combine(by_slot, None, experts, top_k=TOP)

    assert torch.equal(expected, got)
    assert torch.equal(shared[3], got[3])
    assert torch.equal(torch.zeros(40), without[3].float())


def test_sums_can_be_left_unrounded() -> None:
    """For rows that go to fp8 at once: the kernel's fp32, and its rounding, are the twins'."""
    x, rows = draw(4, SIZE, seed=2).bfloat16(), every_row(4, torch.device("cpu"))
    one = Weights("bf16", weights("bf16").data[:1], weights("bf16").scale, SIZE)
    expected = multiply(x, one, rows, num_out=4, wide=True)
    with interpreted():
        got = multiply(x, one, rows, num_out=4, wide=True)
        rounded = round_fp8(got)

    assert torch.float32 == got.dtype == expected.dtype
    torch.testing.assert_close(expected, got, rtol=1e-5, atol=1e-5)
    assert torch.equal(fp8_round_trip(got).bfloat16(), rounded)

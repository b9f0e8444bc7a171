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

from kernels.ops import gpu_fp8, gpu_grouped_fp8, gpu_moe
from kernels.ops.gpu_fp8 import (
    RowScaled,
    SpanRows,
    gathered,
    grouped_product,
    norm_rows,
    restated,
    row_scaled,
    span_rows,
    swiglu_rows,
)
from kernels.ops.gpu_grouped import (
    Tile,
    Weights,
    bf16_weights,
    fp4_weights,
    fp8_weights,
    multiply,
    multiply_gated,
)
from kernels.ops.gpu_grouped_fp8 import Cut
from kernels.ops.gpu_grouped_unpack import powers_of, unpack
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_matmul import Fp8Tile, Matrix, every_row, fp8_product, product
from kernels.ops.gpu_moe import combine, group
from kernels.ops.gpu_quant import quantise_rows, round_fp8
from kernels.ops.gpu_router import Placed, choose

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
    """Also where experts are equally good (the lower one first), image tokens by their own bias; some experts elsewhere."""
    logits = draw(9, 10)
    logits[3] = 0.0
    bias, image_bias = torch.tensor([0.0, 0.5] * 5), draw(10, seed=1)
    images = torch.arange(9) % 4 == 0
    lines, rows = torch.arange(9).int() - 1, torch.tensor([0, -1, 1, 2, -1, 3, 4, 5, 6, -1]).int()
    for arguments in (
        (logits[None], bias, image_bias, images, Placed(None, lines)),
        (logits[None], bias, None, None, Placed(rows, lines)),
        (logits[None], bias, None, None, Placed(None, lines)),
    ):
        expected = choose(*arguments, top_k=3, scaling=1.5)
        with interpreted():
            got = choose(*arguments, top_k=3, scaling=1.5)
        assert torch.equal(expected.experts, got.experts)
        torch.testing.assert_close(expected.weights, got.weights, rtol=1e-5, atol=0)
        assert [-1, -1, -1] == got.experts[0].tolist()
    assert [1, 3, 5] == got.experts[3].tolist()


@pytest.mark.parametrize(("first", "here", "is_one_launch"), [(0, 10, False), (3, 4, False), (3, 4, True)])
def test_slots_are_sorted_by_expert_in_the_order_of_tokens(
    first: int, here: int, is_one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts, or a rank's own; padding rows stand behind the last."""
    monkeypatch.setattr(gpu_moe, "CHUNK", 16)
    monkeypatch.setattr(gpu_moe, "_MOST_AT_ONCE", 69 if is_one_launch else 68)
    experts = torch.randint(0, 10, (23, 3), generator=torch.Generator().manual_seed(0)).int()
    experts[5], experts[experts == 4] = -1, 6
    expected = group(experts, num_experts=here, first_expert=first)
    with interpreted():
        got = group(experts, num_experts=here, first_expert=first)

    for name in ("ends", "sources", "targets", "places"):
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
    """Without a padding row's garbage, with or without a shared expert, wherever the rows lie."""
    by_slot, shared = draw(TOKENS * TOP, 40).bfloat16(), draw(TOKENS, 40, seed=1).bfloat16()
    experts = torch.zeros(TOKENS, TOP).int()
    experts[3], by_slot[6:8] = -1, float("nan")
    expected = combine(by_slot, shared, experts, top_k=TOP)
    with interpreted():
        got = combine(by_slot, shared, experts, top_k=TOP)
        without = combine(by_slot, None, experts, top_k=TOP)
        placed = combine(by_slot.flip(0), shared, experts, top_k=TOP, places=torch.arange(TOKENS * TOP).flip(0).int())

    assert torch.equal(expected, got)
    assert torch.equal(expected, placed)
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


def spread(*shape: int) -> torch.Tensor:
    """What an fp8 product sees of rows whose columns have very different sizes, one row of zeros."""
    x = fp8_round_trip(draw(*shape, seed=2) * torch.logspace(-3, 2, shape[1]))
    x[1] = 0.0
    return x.bfloat16()


def assert_same_rows(expected: SpanRows, got: SpanRows) -> None:
    assert torch.equal(expected.data.view(torch.uint8), got.data.view(torch.uint8))
    assert torch.equal(expected.scale, got.scale)


def test_rows_keep_their_values_under_wider_scales() -> None:
    """All but the last bits of values that are nothing beside their neighbours; the kernel writes its twin's bytes."""
    x, sources = spread(TOKENS, 256), torch.tensor([4, 1, 4, 6]).int()
    for rows in (None, sources):
        expected = span_rows(x, rows, span=128)
        with interpreted():
            assert_same_rows(expected, span_rows(x, rows, span=128))
    wanted = x[sources.long()].float()
    largest = wanted.view(4, 2, 128).abs().amax(2).repeat_interleave(128, dim=1)
    assert bool(((expected.dense() - wanted).abs() <= largest * 2.0**-17).all())


def test_what_the_gate_lets_through_is_restated_in_one_pass() -> None:
    """The same bytes as in two, with a scale for a row's every span and for all of it."""
    both, targets, factors = draw(2, 512).bfloat16(), torch.tensor([1, 0]).int(), draw(2, seed=3).abs()
    for weighed, span in ((factors, 128), (None, 0)):
        placed = None if weighed is None else targets
        expected = swiglu_rows(both, placed, weighed, limit=1.5, span=span)
        with interpreted():
            assert_same_rows(expected, swiglu_rows(both, placed, weighed, limit=1.5, span=span))


def test_rows_leave_under_one_scale_each_from_whatever_makes_them() -> None:
    """Norm, rounding and gathering write their twins' bytes; sizes are no power of two, and rows may lie apart."""
    x, weight = (draw(TOKENS, 192) * torch.logspace(-3, 2, 192)).bfloat16()[:, :96], draw(96).abs() + 0.5
    sources = torch.tensor([4, 1, 4, 6]).int()
    expected = norm_rows(x, weight, eps=1e-6), span_rows(x.float().contiguous(), rounds=True)
    chosen = gathered(expected[0], sources)
    with interpreted():
        assert_same_rows(expected[0], norm_rows(x, weight, eps=1e-6))
        assert_same_rows(expected[1], span_rows(x.float().contiguous(), rounds=True))
        assert_same_rows(chosen, gathered(expected[0], sources))
    assert torch.equal(expected[0].dense()[sources.long()], chosen.dense())
    assert (1, TOKENS) == expected[1].scale.shape


def test_products_of_restated_values_are_as_near_as_bf16() -> None:
    """To fp64 products of the exact values: relative L2 below 0.002, of which rounding to bf16 is 0.0017."""
    matrix = dequantise_fp8_weight(*quantise_fp8_weight(draw(96, 512)))
    x, (made, lost) = spread(TOKENS, 512), row_scaled([matrix])
    exact = x.double() @ matrix.double().T
    expected = (x.float() @ matrix.T).bfloat16().double()
    for got in (gpu_fp8.product(span_rows(x), made), grouped_product(span_rows(x), made, torch.tensor([TOKENS]).int())):
        assert 0.002 > (got.double() - exact).norm() / exact.norm()
        assert 0.0005 > (got.double() - expected).norm() / exact.norm()
    assert 1e-5 > lost


@pytest.mark.slow
@pytest.mark.parametrize("spread_binades", [14, 15])
def test_fp4_is_unpacked_exactly_where_a_row_s_powers_are_near_each_other(spread_binades: int) -> None:
    """Else it says so; the kernel writes its twin's bytes in any case."""
    made = weights("fp4")
    made.scale[:, :, 0], made.scale[1, 5, 1] = 127, 127 - spread_binades
    expected = unpack(made, powers_of(made))
    with interpreted():
        got = unpack(made, powers_of(made))

    assert (spread_binades == 14) is powers_of(made).is_exact
    assert (spread_binades == 14) is all(torch.equal(made.dense(e), got.dense(e)) for e in range(EXPERTS))
    assert torch.equal(expected.data.view(torch.uint8), got.data.view(torch.uint8))


def test_a_matrix_says_what_it_lost() -> None:
    """Nothing, where scales are near each other; and how much, where they are not."""
    near = dequantise_fp8_weight(*quantise_fp8_weight(draw(64, 64)))
    far = near.clone()
    far[:, 32:] *= 2.0**-9

    assert 0.0 == restated(near)[2]
    assert 1e-7 < restated(far)[2] < 1e-4
    data, scale, _ = restated(near)
    assert torch.equal(near, data.float() * scale[:, None])


@pytest.mark.slow
def test_fp8_units_meet_each_row_s_own_expert() -> None:
    """As the bf16 product does: uneven groups, an empty one, padding, and a row's bits whatever stands beside it."""
    experts = torch.tensor([[0, 2], [2, 0], [2, 2], [0, 2], [-1, -1], [2, 0], [2, 2]]).int()
    groups, wide = group(experts, num_experts=EXPERTS), weights("bf16")
    made, lost = row_scaled([wide.dense(expert) for expert in range(EXPERTS)])
    x, factors, end = spread(TOKENS, SIZE), draw(TOKENS * TOP, seed=5).abs(), int(groups.ends[-1])
    targets, slots = groups.targets[:end].long(), TOKENS * TOP
    expected = multiply(x, wide, groups, num_out=slots)[targets]
    gated = multiply_gated(x, wide, groups, factors, limit=10.0, num_out=slots)[targets]
    rows, cut = span_rows(x, groups.sources, span=gpu_grouped_fp8.span_of(SIZE)), Cut(16, 64, 4, 1)
    with interpreted():
        got = gpu_grouped_fp8.multiply(rows, made, groups, num_out=slots, cut=cut)[targets]
        got_gated = gpu_grouped_fp8.multiply_gated(rows, made, groups, factors, limit=10.0, cut=cut)[:end]
        first = SpanRows(rows.data[:1], rows.scale[:, :1].contiguous())
        alone = replace(groups, ends=torch.ones(EXPERTS).int(), targets=torch.zeros(1).int())
        one = gpu_grouped_fp8.multiply(first, RowScaled(made.data, made.scale), alone, num_out=1, cut=cut)

    assert 0.0 == lost
    torch.testing.assert_close(expected, got, rtol=0.01, atol=0.01)
    torch.testing.assert_close(gated, got_gated, rtol=0.13, atol=0.01)  # one step of e4m3
    assert torch.equal(got[0], one[0])

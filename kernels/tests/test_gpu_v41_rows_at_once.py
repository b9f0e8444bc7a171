"""Kernels that move a whole row at once, interpreted: the same as by those that take rows of any length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.models.gpu.v41.layer import _grouped, enter_experts, routed
from kernels.models.gpu.v41.step import Products
from kernels.models.gpu.v41.weights import Loader
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.ops import gpu_fp8, gpu_hyper, gpu_hyper_rows, gpu_moe, gpu_placed_rows, gpu_swiglu_rows
from kernels.ops.gpu_beside import Beside
from kernels.ops.gpu_fp8 import SpanRows, gathered, span_rows
from kernels.ops.gpu_hyper import Entered, MixingWeights, enter, split_weight
from kernels.ops.gpu_launch import interpreted
from kernels.ops.hyper import Coefficients, first_pre
from kernels.tests.shallow_v41 import shallow_v41

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_rows(expected: SpanRows, got: SpanRows) -> None:
    assert torch.equal(expected.data.view(torch.uint8), got.data.view(torch.uint8))
    assert torch.equal(expected.scale, got.scale)
    assert expected.is_turned == got.is_turned


def assert_same_beginning(expected: Entered, got: Entered) -> None:
    """But for sums in another order: interpreted, those of few columns are the same."""
    for name in ("streams", "x", "rounded"):
        assert torch.equal(getattr(expected, name), getattr(got, name)), name
    for name in ("pre", "post", "mix"):
        torch.testing.assert_close(getattr(expected.made, name), getattr(got.made, name), rtol=1e-5, atol=1e-7)
    assert (expected.restated is None) == (got.restated is None)
    if expected.restated is not None and got.restated is not None:
        assert_same_rows(expected.restated, got.restated)


def mixing(hidden: int) -> MixingWeights:
    scale, base = torch.tensor([0.5, 1.0, 2.0]), draw(24)
    return MixingWeights(split_weight(draw(24, 4 * hidden) * 0.1), scale, base, draw(hidden).abs(), 1e-20, 1e-6, 20)


@pytest.mark.slow
@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize("hidden", [96, 320])
def test_a_token_s_row_goes_on_in_one_launch(
    hidden: int, has_output: bool, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three and five turns; a token of zeros; an own `pre`; with and without the rows that fp8 products see."""
    monkeypatch.setattr(gpu_hyper, "SLICE", 32)
    tokens, by_rows = 5, gpu_hyper_rows.takes
    streams, output = draw(tokens, 4, hidden).bfloat16(), draw(tokens, hidden, seed=1).bfloat16()
    streams[4], output[4] = 0.0, 0.0
    pre = first_pre(tokens, CPU) + 0.25 * draw(tokens, 4, seed=4).abs()
    before = Coefficients(pre, draw(tokens, 4, seed=2).abs(), draw(tokens, 4, 4, seed=3).abs())
    given, weights = output if has_output else None, mixing(hidden)
    for named in ({"restates": True}, {"restates": False, "pre": pre.flip(0).contiguous()}):
        made = []
        for takes in (lambda _: False, by_rows):
            monkeypatch.setattr(gpu_hyper_rows, "takes", takes)
            with interpreted():
                made.append(enter(streams, given, before, weights, beside=Beside(CPU) if is_beside else None, **named))
        assert_same_beginning(*made)


def test_the_published_rows_are_a_few_turns() -> None:
    """Of a size that is no such thing, slices go on as before."""
    assert all(gpu_hyper_rows.takes(hidden) for hidden in (5120, 4096, 96))
    assert not gpu_hyper_rows.takes(1024 * 9)
    assert not gpu_hyper_rows.takes(16 * 7)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "here"), [(9, 6, 5), (5, 4, 40), (1, 2, 1), (13, 3, 12)])
def test_rows_are_placed_as_they_are_sorted_and_gathered(tokens: int, top_k: int, here: int, turns: bool) -> None:
    """Experts elsewhere and padding stand behind the last; more experts than tokens; one token; counts of one to three."""
    experts = torch.randint(-1, here + 2, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).int()
    experts[0] = here - 1
    x = span_rows(draw(tokens, 384, seed=1).bfloat16(), rounds=True)
    expected = gpu_moe.group(experts, num_experts=here)
    with interpreted():
        groups, rows = gpu_placed_rows.place_rows(experts, x, num_experts=here, turns=turns)

    for name in ("ends", "sources", "targets", "places"):
        assert torch.equal(getattr(expected, name), getattr(groups, name)), name
    assert_same_rows(gathered(x, expected.sources, turns=turns), rows)


def test_more_slots_than_a_program_counts_are_refused() -> None:
    x = span_rows(draw(700, 128).bfloat16(), rounds=True)
    with pytest.raises(ValueError, match="2048 slots"):
        gpu_placed_rows.place_rows(torch.zeros(700, 3, dtype=torch.int32), x, num_experts=4, turns=False)


@pytest.mark.slow
def test_experts_make_the_same_of_placed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts in e4m3, over rows that one launch places: the same bits."""
    config, tokens = read_v41_config(shallow_v41()), 6
    layer = Loader(config, Checkpoint(shallow_v41(), config), CPU, experts="fp8", is_invariant=False).load().layers[0]
    chosen = torch.Generator().manual_seed(0)
    experts = torch.randint(config.moe.num_experts, (tokens, config.moe.top_k), generator=chosen).int()
    factors, pre, products = torch.rand(experts.numel(), generator=chosen), first_pre(tokens, CPU), Products(False)
    streams = draw(tokens, 4, config.hidden_size).bfloat16()
    entered = enter(streams, None, Coefficients(pre, pre, pre), layer.ffn_mixing)
    entered = enter_experts(products, entered, entered.x, layer.ffn_mixing, layer.moe)
    made, placed = [], []
    for takes in (lambda _: False, gpu_placed_rows.takes):
        monkeypatch.setattr(gpu_placed_rows, "takes", takes)
        with interpreted():
            groups, rows = _grouped(layer.moe, entered, experts)
            limit = config.moe.swiglu_limit
            got = routed(products, layer.moe, entered, groups, factors, limit=limit, placed=rows)[0]
        made.append(got[: int(groups.ends[-1])])
        placed.append(rows is not None)

    assert [False, True] == placed
    assert len(made[0])
    assert torch.equal(*made)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("is_weighed", [False, True])
def test_whole_rows_are_gated_as_in_a_block(is_weighed: bool, turns: bool) -> None:
    """Three turns of 128 columns; a row of zeros; beyond the limit on both sides; the largest value in either end's turn."""
    gate_up = (draw(5, 2 * 384) * 6).bfloat16()
    gate_up[2], gate_up[3, 384 + 128 :], gate_up[4, 384:-128] = 0.0, 0.01, 0.01
    targets, factors = torch.tensor([3, 1, 0, 2, 4]).int(), draw(5, seed=1).abs()
    given = (gate_up, targets, factors) if is_weighed else (gate_up,)
    with interpreted():
        expected = gpu_fp8.swiglu_rows(*given, limit=10.0, turns=turns)
        got = gpu_swiglu_rows.swiglu_rows(*given, limit=10.0, turns=turns)

    assert_same_rows(expected, got)


def test_the_published_experts_are_gated_whole() -> None:
    assert [True, True, False, False] == [gpu_swiglu_rows.takes(width) for width in (2304, 384, 2112, 64)]

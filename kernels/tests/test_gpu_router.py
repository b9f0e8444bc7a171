"""A product whose columns are shared out and a choice that adds the shares, interpreted: as the router's twin does it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops import gpu_router
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_linear import tile_for
from kernels.ops.gpu_router import Placed, choose, logits_of, route_rows, shares_of
from kernels.ops.router import Routes


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(expected: Routes, got: Routes) -> None:
    assert torch.equal(expected.experts, got.experts)
    assert torch.equal(expected.weights, got.weights)


@pytest.mark.parametrize("at_once", [1, 4], ids=["a token", "several"])
@pytest.mark.parametrize(("experts", "top_k", "shares"), [(10, 3, 1), (200, 6, 3), (384, 6, 12)])
def test_a_choice_of_shares_is_that_of_their_sum(
    experts: int, top_k: int, shares: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits; equally good ones, image tokens' bias, experts elsewhere, padding, and logits far from zero."""
    monkeypatch.setattr(gpu_router, "_MANY_TOKENS", 1 if at_once > 1 else 1000)
    tokens = 6
    logits = draw(shares, tokens, experts)
    logits[:, 3] = 0.0
    logits[0, 4, :5], logits[0, 4, 5:9] = 99.0, -200.0
    total = logits[0]
    for each in logits[1:]:
        total = total + each
    bias, image_bias = torch.tensor([0.0, 0.5]).repeat(experts // 2), draw(experts, seed=1)
    bias[0] = -9.0  # below zero, like everything that it is added to
    images, lines = torch.arange(tokens) % 4 == 0, torch.arange(tokens).int() - 1
    rows = torch.where(torch.arange(experts) % 3 == 0, -1, torch.arange(experts) // 2).int()
    for arguments in (
        (bias, image_bias, images, Placed(None, lines)),
        (bias, None, None, Placed(rows, lines)),
    ):
        twin = choose(total[None], *arguments, top_k=top_k, scaling=1.5)
        assert_same(twin, choose(logits, *arguments, top_k=top_k, scaling=1.5))
        with interpreted():
            expected = choose(total[None], *arguments, top_k=top_k, scaling=1.5)
            got = choose(logits, *arguments, top_k=top_k, scaling=1.5)
        assert_same(expected, got)
        assert torch.equal(twin.experts, got.experts)
        torch.testing.assert_close(twin.weights, got.weights, rtol=1e-5, atol=0)


def test_an_expert_that_nobody_may_choose_is_chosen_once_at_most() -> None:
    """Also where others do not suffice, and where logits are no numbers: experts stay within bounds."""
    logits, bias, placed = draw(1, 2, 10), torch.full((10,), float("-inf")), Placed(None, torch.zeros(2).int())
    bias[[2, 7]] = 0.0
    logits[0, 1] = float("nan")
    with interpreted():
        got = choose(logits, bias, None, None, placed, top_k=4, scaling=1.0).experts

    assert {2, 7} == set(got[0, :2].tolist())
    assert 4 == len(set(got[0].tolist()))
    assert ((got >= 0) & (got < 10)).all()


@pytest.mark.parametrize("is_invariant", [True, False])
def test_rows_are_routed_by_either_product(monkeypatch: pytest.MonkeyPatch, is_invariant: bool) -> None:
    """In shares, and many rows of the fastest mode by the library: the same experts."""
    x, router, bias = draw(5, 384).bfloat16(), draw(64, 384, seed=1).bfloat16(), draw(64, seed=2)
    given = x, router, bias, None, None, Placed(None, torch.zeros(5).int())
    expected = choose((x.float() @ router.float().T)[None], *given[2:], top_k=6, scaling=1.5)
    torch.testing.assert_close(expected.weights, route_rows(*given, top_k=6, scaling=1.5).weights, rtol=1e-4, atol=0)
    for few, shares in ((256, 3), (4, 3 if is_invariant else 1)):
        monkeypatch.setattr(gpu_router, "_FEW_TOKENS", few)
        with interpreted():
            assert shares == len(logits_of(x, router, is_invariant=is_invariant))
            got = route_rows(*given, top_k=6, scaling=1.5, is_invariant=is_invariant)

        assert torch.equal(expected.experts, got.experts)
        torch.testing.assert_close(expected.weights, got.weights, rtol=1e-4, atol=0)


def test_shares_are_of_whole_turns_of_every_tile() -> None:
    """So that where they end does not depend on the number of rows; sizes that have none are one share."""
    tiles = {tile_for(rows, 384).depth for rows in (1, 16, 17, 64, 65, 256, 257, 20_000)}
    for size, shares in ((5120, 10), (1280, 10), (384, 3), (128, 1), (64, 1), (5000, 1)):
        assert shares == shares_of(size)
        assert shares == 1 or all(size // shares % each == 0 for each in tiles)

"""Mixture of experts: the golden choices and outputs, and a token's bits in any company."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.models.v41.matrices import product
from kernels.models.v41.moe import Expert, Moe
from kernels.ops.linear import GEMM_FP32, Linear
from kernels.ops.numerics import EXACT, KVQ, QUANT, Numerics
from kernels.ops.router import route, softplus
from kernels.ops.row_tiles import RowTiles, TiledLinear, prove
from kernels.ops.scratch import Scratch
from kernels.tests.golden_files import golden, tiny_v41

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def tiny_moe(layer: int, numerics: Numerics) -> Moe:
    """The checkpoint's layer, every matrix on the plain kernel with the row counts proven for it."""
    config = read_v41_config(tiny_v41())
    checkpoint, prefix = Checkpoint(tiny_v41(), config), f"layers.{layer}.ffn"

    def matrices(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        w1, w2, w3 = (checkpoint.dense(f"{prefix}.{name}.{part}.weight") for part in ("w1", "w2", "w3"))
        return torch.cat([w1, w3]), w2

    experts = [matrices(f"experts.{index}") for index in range(config.moe.num_experts)]
    flat = [weight for pair in (*experts, matrices("shared_experts")) for weight in pair]
    linears = [Linear(GEMM_FP32, weight) for weight in (*flat, checkpoint.dense(f"{prefix}.gate.weight"))]
    tiled = list(map(TiledLinear, linears, prove(GEMM_FP32, linears, limit=64, device=CPU)[1]))
    pairs = [Expert(*pair) for pair in zip(tiled[:-1:2], tiled[1:-1:2], strict=True)]
    return Moe(
        config.moe,
        numerics,
        router=tiled[-1],
        bias=checkpoint.dense(f"{prefix}.gate.bias"),
        image_bias=checkpoint.dense(f"{prefix}.gate.bias_vl"),
        experts=pairs[:-1],
        shared=pairs[-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 6, 11])
@pytest.mark.parametrize(("numerics", "margin"), [(EXACT, 1e-3), (QUANT, 2e-2)])
def test_tokens_go_to_the_golden_experts(layer: int, numerics: Numerics, margin: float) -> None:
    """Choices are equal wherever the reference's margin leaves no doubt, and so are their weights."""
    prefix = f"n48.{numerics.name}.layers.{layer}"
    routes = tiny_moe(layer, numerics).routes(golden(f"{prefix}.ffn_in"), None)
    clear = golden(f"{prefix}.router.margin") > margin

    assert clear.sum() > 10
    assert torch.equal(golden(f"{prefix}.router.experts").long()[clear], routes.experts[clear])
    torch.testing.assert_close(golden(f"{prefix}.router.weights")[clear], routes.weights[clear], atol=1e-4, rtol=0)


@pytest.mark.parametrize("layer", [0, 6, 11])
def test_the_output_is_the_golden_one(layer: int) -> None:
    """Exact: within 1e-4 everywhere. Quant: relative L2 of 0.015 over the rows whose experts agree.

    Half the manifest's tolerance: fed the golden rows, nothing but the order of sums can differ, while products of
    unquantised rows are 0.045 away.
    """
    got = tiny_moe(layer, EXACT)(golden(f"n48.exact.layers.{layer}.ffn_in"), None, Scratch(CPU))
    torch.testing.assert_close(golden(f"n48.exact.layers.{layer}.ffn_out"), got, atol=1e-4, rtol=0)

    prefix, moe = f"n48.quant.layers.{layer}", tiny_moe(layer, QUANT)
    x, expected = golden(f"{prefix}.ffn_in"), golden(f"{prefix}.ffn_out")
    chosen = moe.routes(x, None).experts.sort().values
    agree = (chosen == golden(f"{prefix}.router.experts").long().sort().values).all(1)
    difference = (moe(x, None, Scratch(CPU)) - expected)[agree]

    assert agree.sum() > 40
    assert difference.norm() <= 0.015 * expected[agree].norm()


@pytest.mark.parametrize("numerics", [KVQ, QUANT])
def test_a_token_is_the_same_in_any_company(numerics: Numerics) -> None:
    """Alone, in a chunk of odd length or among others, with images or without: the same bits."""
    moe, scratch = tiny_moe(1, numerics), Scratch(CPU)
    x, images = draw(200, 128), draw(200, seed=1) > 1.0
    whole = moe(x, images, scratch)

    for start, end in ((0, 1), (7, 8), (3, 20), (150, 199), (199, 200), (4, 4)):
        assert torch.equal(whole[start:end], moe(x[start:end].clone(), images[start:end], scratch))
    assert torch.equal(whole[~images], moe(x[~images], None, scratch))


def test_images_are_routed_by_their_own_bias() -> None:
    """An image token's experts follow the image bias, a text token's never do."""
    moe, x = tiny_moe(1, EXACT), draw(300, 128)
    as_text, as_images = (moe.routes(x, torch.full((300,), flag)) for flag in (False, True))

    assert torch.equal(moe.routes(x, None).experts, as_text.experts)
    assert not torch.equal(as_text.experts, as_images.experts)


def test_ties_go_to_the_lower_expert() -> None:
    """Equal affinities are taken from the left, and a token's weights sum to the scaling."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0, 0.0]])
    routes = route(logits, torch.zeros(6), top_k=4, scaling=1.5)
    assert [[1, 2, 3, 0]] == routes.experts.tolist()
    torch.testing.assert_close(torch.tensor([1.5]), routes.weights.sum(1))

    biased = route(logits, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0]), top_k=2, scaling=1.5)
    assert [[5, 1]] == biased.experts.tolist()
    affinity = torch.tensor([0.0, 2.0]).exp().log1p().sqrt()
    torch.testing.assert_close(1.5 * affinity / affinity.sum(), biased.weights[0])


def test_softplus_is_softplus_wherever_an_element_stands() -> None:
    """Within four units in the last place of the exact value, from underflow to where it is the number itself."""
    x = torch.cat([torch.linspace(-110.0, 60.0, 20011), torch.tensor([0.0, -0.0, 1e-30, 300.0, -300.0])])
    exact = torch.nn.functional.softplus(x.double(), threshold=700.0)
    got = softplus(x)

    ordinary = exact > torch.finfo(torch.float32).tiny
    torch.testing.assert_close(exact[ordinary], got[ordinary].double(), rtol=4 * 2.0**-23, atol=0)
    assert torch.equal(x[x > 20], got[x > 20])
    for start, end in ((0, 1), (5, 6), (3, 20), (777, 794), (20010, 20016)):
        assert torch.equal(got[start:end], softplus(x[start:end].clone()))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 40), counts=st.sets(st.sampled_from([1, 3, 4, 8, 16]), min_size=1))
def test_any_number_of_rows_passes_through(rows: int, counts: set[int]) -> None:
    """Whatever was proven, the product has a row for each row, and none of the padding."""
    weight, x = draw(8, 16), draw(rows, 16, seed=1)
    linear = TiledLinear(Linear(GEMM_FP32, weight), RowTiles(tuple(sorted(counts))))

    torch.testing.assert_close(x @ weight.T, product(linear, x))

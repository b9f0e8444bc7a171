"""Hyper-connections: the golden sublayers, the shape of the mixing matrix, and a token's bits in any company."""

from dataclasses import astuple

import pytest
import torch
from safetensors import safe_open

from kernels.ops.hyper import (
    Coefficients,
    _balanced,
    coefficients,
    collapse,
    first_pre,
    mean_square,
    update,
)
from kernels.ops.numerics import EXACT, QUANT, Numerics
from kernels.tests.golden_files import golden, tiny_v41

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(name: str) -> torch.Tensor:
    with safe_open(tiny_v41() / "model.safetensors", "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def sublayer(streams: torch.Tensor, prefix: str) -> Coefficients:
    """The coefficients the checkpoint's sublayer makes of these streams."""
    return coefficients(
        streams.flatten(1) @ read(f"{prefix}_fn").T,
        mean_square(streams),
        scale=read(f"{prefix}_scale"),
        base=read(f"{prefix}_base"),
        eps=1e-20,
        hc_eps=1e-6,
        iterations=20,
    )


@pytest.mark.parametrize("layer", [0, 1, 6])
@pytest.mark.parametrize(("numerics", "tolerance"), [(EXACT, 1e-4), (QUANT, 0.01)])
def test_attention_leaves_the_golden_streams(layer: int, numerics: Numerics, tolerance: float) -> None:
    """From a layer's streams and attention output follow its middle streams, handed-over weights and MoE input.

    Exact: largest difference.  Quant: relative L2, where streams are rounded as production rounds them.  Both tighter
    than the manifest's, because one sublayer adds no noise of others.
    """
    prefix = f"n48.{numerics.name}.layers.{layer}"
    streams, output = golden(f"{prefix}.stream_in"), golden(f"{prefix}.attn_out")
    made = sublayer(streams, f"layers.{layer}.hc_attn")
    middle = numerics.bf16(update(streams, output, made))
    norm = read(f"layers.{layer}.ffn_norm.weight").float()
    entering = numerics.bf16(collapse(middle, made.pre))
    normed = numerics.bf16(torch.nn.functional.rms_norm(entering, (128,), norm, 1e-20))

    for name, got in (("stream_mid", middle), ("pre_mid", made.pre), ("ffn_in", normed)):
        expected = golden(f"{prefix}.{name}")
        difference = (got - expected).abs().max() if numerics is EXACT else (got - expected).norm() / expected.norm()
        assert difference <= tolerance, name


@pytest.mark.slow
def test_the_moe_hands_over_to_the_next_layer() -> None:
    """From the middle streams and the MoE's output follow the next layer's streams and its weights."""
    streams, output = golden("n48.exact.layers.1.stream_mid"), golden("n48.exact.layers.1.ffn_out")
    made = sublayer(streams, "layers.1.hc_ffn")

    torch.testing.assert_close(golden("n48.exact.layers.2.pre_in"), made.pre, atol=1e-5, rtol=0)
    torch.testing.assert_close(golden("n48.exact.layers.2.stream_in"), update(streams, output, made), atol=1e-5, rtol=0)


def random_sublayer(tokens: slice) -> tuple[torch.Tensor, ...]:
    streams, output, product = draw(600, 4, 32)[tokens], draw(600, 32, seed=1)[tokens], draw(600, 24, seed=2)[tokens]
    made = coefficients(
        product.clone(),
        mean_square(streams.clone()),
        scale=torch.tensor([0.5, 1.0, 2.0]),
        base=draw(24, seed=3),
        eps=1e-6,
        hc_eps=1e-6,
        iterations=20,
    )
    return *astuple(made), update(streams.clone(), output.clone(), made), collapse(streams.clone(), made.pre)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (7, 8), (3, 9), (500, 517), (0, 33), (1, 600), (4, 4)])
def test_a_token_is_the_same_in_any_company(start: int, end: int) -> None:
    """Coefficients, input and updated streams of a token have the same bits whoever else is in the step."""
    for whole, part in zip(random_sublayer(slice(0, 600)), random_sublayer(slice(start, end)), strict=True):
        assert torch.equal(whole[start:end], part)


def test_streams_are_mixed_without_gain() -> None:
    """Every column of the matrix sums to one, and every row nearly: 20 iterations keep the streams' size."""
    mix = random_sublayer(slice(0, 600))[2]

    torch.testing.assert_close(torch.ones(600, 4), mix.sum(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.ones(600, 4), mix.sum(2), atol=0.05, rtol=0)


def test_the_first_sublayer_reads_the_first_stream() -> None:
    """Before any sublayer the weights are one-hot."""
    streams = draw(3, 4, 16)
    assert torch.equal(streams[:, 0], collapse(streams, first_pre(3, CPU)))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 100, 513])
def test_four_and_their_least_sum_are_added_in_order(tokens: int) -> None:
    """Every sum of the mixing matrix is (((a + b) + c) + d) + eps, at every token count, in both directions."""
    powers = draw(4, 4, tokens, seed=tokens).exp()
    eps = torch.tensor(1e-6)

    def summed(matrix: torch.Tensor, dim: int) -> torch.Tensor:
        a, b, c, d = matrix.split(1, dim=dim)
        total: torch.Tensor = ((a + b) + c) + d
        return total

    expected = powers / summed(powers, 1) + eps
    expected = expected / (summed(expected, 0) + eps)
    for _ in range(3):
        expected = expected / (summed(expected, 1) + eps)
        expected = expected / (summed(expected, 0) + eps)
    assert torch.equal(expected, torch.from_numpy(_balanced(powers.numpy(), 1e-6, 4)))

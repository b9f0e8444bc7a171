"""V4.1's random weights are those of their names, whoever asks first, and few calls make many of them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: V4.1's benchmark cannot be imported")

from bench.gpu_v41_model import EXPERTS_AT_ONCE, RandomTensors, in_fp8, published_config
from bench.gpu_v41_step import fitting_layers
from kernels.models.v41.config import V41Config
from kernels.ops.quant import dequantise_fp8_weight, quantise_fp8_weight

CPU = torch.device("cpu")


def small() -> V41Config:
    config = published_config(6, 6, table_vocab=97)
    return replace(config, hidden_size=128, moe=replace(config.moe, num_experts=40, width=64))


def stored(tensors: RandomTensors, name: str) -> torch.Tensor:
    return tensors.stored(name).view(torch.uint8).clone()


def test_a_name_has_the_same_values_in_any_order() -> None:
    """Forwards, backwards, and alone: neighbours are drawn together, and forgotten when others are asked for."""
    names = [
        f"layers.{layer}.ffn.experts.{expert}.{part}.{kind}"
        for layer in (0, 3)
        for expert in (0, EXPERTS_AT_ONCE - 1, EXPERTS_AT_ONCE, 39)
        for part in ("w1", "w2", "w3")
        for kind in ("weight", "scale")
    ]
    forwards, backwards = RandomTensors(small(), CPU), RandomTensors(small(), CPU)
    expected = {name: stored(forwards, name) for name in names}
    again = {name: stored(backwards, name) for name in reversed(names)}

    for name in names:
        assert torch.equal(expected[name], again[name])
        assert torch.equal(expected[name], stored(RandomTensors(small(), CPU), name))
    neighbours = [forwards.stored(f"layers.0.ffn.experts.{expert}.w1.weight") for expert in range(EXPERTS_AT_ONCE)]
    assert 1 == len({each.untyped_storage().data_ptr() for each in neighbours})
    weights = [each for name, each in expected.items() if name.endswith("w1.weight")]
    assert (64, 64) == weights[0].shape
    assert all(not torch.equal(a, b) for at, a in enumerate(weights) for b in weights[:at])


def test_formats_are_those_of_a_checkpoint() -> None:
    """Scales around one, bytes of any value, tables of finite ones; a dense tensor is never read as stored."""
    tensors = RandomTensors(small(), CPU)
    scale, weight = (tensors.stored(f"layers.1.ffn.experts.7.w2.{kind}") for kind in ("scale", "weight"))

    assert torch.int8 == weight.dtype
    assert {117, 118, 119} == set(scale.view(torch.uint8).unique().tolist())
    data, exponents = tensors.table(1)
    assert data.shape[0] == exponents.shape[0]
    assert (0, 0x77) == (data.min(), data.max())
    assert (110, 124) == (exponents.min(), exponents.max())
    with pytest.raises(ValueError, match="read it dense"):
        tensors.stored("layers.1.attn.wo_b.weight")


def test_fp8_values_come_back_as_from_a_checkpoint() -> None:
    """To the bit."""
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 96)[:, None]
    assert torch.equal(dequantise_fp8_weight(*quantise_fp8_weight(values)), in_fp8(values))


def test_as_many_layers_as_fit() -> None:
    """All 20 of a large device, most of 141 GB, and never less than one of each kind."""
    layers = {gib: fitting_layers(gib << 30, is_invariant=True) for gib in (1, 80, 139, 200)}

    assert {1: 3, 200: 20} == {gib: layers[gib] for gib in (1, 200)}
    assert 3 < layers[80] < layers[139] < 20

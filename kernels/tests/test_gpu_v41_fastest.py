"""V4.1 where bits may depend on the batch: fp8 products of restated matrices, here by their twins on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.batch import Batch
from kernels.models.gpu.v41 import weights as weights_module
from kernels.models.gpu.v41.expert_weights import ExpertFormat, Tensors, room_bytes
from kernels.models.gpu.v41.layer import enter_experts, routed
from kernels.models.gpu.v41.memory import unpacks, v41_need
from kernels.models.gpu.v41.model import GpuV41
from kernels.models.gpu.v41.step import Products
from kernels.models.gpu.v41.weights import GpuV41Weights, Loader
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.ops import gpu_grouped_unpack
from kernels.ops.gpu_fp8 import RowScaled
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_unpack import Packed
from kernels.ops.gpu_hyper import enter
from kernels.ops.gpu_moe import group
from kernels.ops.hyper import Coefficients, first_pre
from kernels.tests.gpu_v41_rig import PLAIN, SAME, gpu_model, opened, rel
from kernels.tests.shallow_v41 import shallow_v41
from kernels.tests.v41_rig import BLOCKS_EACH, IDS, WINDOWS, row_of, run, start

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def checkpoint() -> Checkpoint:
    return Checkpoint(shallow_v41(), read_v41_config(shallow_v41()))


def loaded(experts: ExpertFormat, tensors: Tensors | None = None, *, has_room: bool = False) -> GpuV41Weights:
    """The shallow model's, for fp8 products."""
    config = read_v41_config(shallow_v41())
    made = Loader(config, tensors or checkpoint(), CPU, experts=experts, is_invariant=False, unpacks=has_room)
    return made.load()


def model_of(weights: GpuV41Weights, *, is_invariant: bool) -> GpuV41:
    folder = opened()
    return GpuV41(
        read_v41_config(shallow_v41()),
        weights,
        folder._compressed_ids,
        folder.layout,
        num_blocks=1 + WINDOWS * BLOCKS_EACH,
        num_windows=1 + WINDOWS,
        device=CPU,
        is_invariant=is_invariant,
    )


class Spread:
    """A checkpoint some of whose matrices have scales that are far apart."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.table = inner.table

    def dense(self, name: str) -> Tensor:
        made = self._inner.dense(name)
        if name == "layers.1.attn.wo_b.weight":
            made = made.clone()
            made[:, :32] *= 2.0**-12
        return made

    def stored(self, name: str) -> Tensor:
        made = self._inner.stored(name)
        if name == "layers.2.ffn.experts.3.w1.scale":
            made = made.clone()
            made.view(torch.uint8)[5, 0] -= 40
        return made


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "has_room"), [("fp8", False), ("fp4", True), ("fp4", False)])
def test_the_fastest_model_computes_the_models_logits(
    experts: ExpertFormat, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk and a step after it, as near to the CPU's as bf16 products are; experts in e4m3, unpacked, or in fp4."""
    monkeypatch.setattr(gpu_grouped_unpack, "MOST_PACKED_ROWS", 0)
    weights = loaded(experts, has_room=has_room)
    kind = {"fp8": RowScaled, "fp4": Packed if has_room else Weights}[experts]
    assert all(isinstance(each, kind) for layer in weights.layers for each in (layer.moe.up, layer.moe.down))
    assert all(isinstance(layer.attention.wq_b, RowScaled) for layer in weights.layers)
    assert () == weights.notes
    model = model_of(weights, is_invariant=False)
    start(PLAIN, 1)
    for begin, end in pairwise((0, 21, 24)):
        row = row_of(IDS, begin, end, sequence=1)
        expected, got = run(PLAIN, row), model.forward(Batch((row,)), every_row=True)
        assert rel(got, expected) < 4 * SAME  # not led layer by layer: flips are handed on


@pytest.mark.slow
def test_fp8_units_of_the_invariant_mode_compute_the_models_logits() -> None:
    """Experts in e4m3, multiplied by our own kernels."""
    config = read_v41_config(shallow_v41())
    model = model_of(Loader(config, checkpoint(), CPU, experts="fp8").load(), is_invariant=True)
    start(PLAIN, 1)
    row = row_of(IDS, 0, 21, sequence=1)
    assert rel(model.forward(Batch((row,)), every_row=True), run(PLAIN, row)) < 4 * SAME


@pytest.mark.slow
def test_what_cannot_be_restated_is_kept_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """And said: a dense matrix in bf16, one layer's experts in fp4."""
    monkeypatch.setattr(weights_module, "MOST_LOST", 1e-6)  # so small a matrix cannot lose more
    made = loaded("fp8", Spread(checkpoint()))

    assert isinstance(made.layers[1].attention.wo_b, Tensor)
    assert isinstance(made.layers[0].attention.wo_b, RowScaled)
    assert isinstance(made.layers[2].moe.up, Weights)
    assert isinstance(made.layers[2].moe.down, Weights)
    assert isinstance(made.layers[1].moe.up, RowScaled)
    assert [True, True] == ["layers.1.attn.wo_b.weight" in made.notes[0], "layers.2.ffn" in made.notes[1]]
    config = gpu_model().info
    unpacked = Loader(config, Spread(checkpoint()), CPU, experts="fp4", is_invariant=False, unpacks=True).load()
    assert isinstance(unpacked.layers[2].moe.up, Weights)
    assert isinstance(unpacked.layers[1].moe.up, Packed)


@pytest.mark.slow
def test_experts_compute_the_same_however_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In e4m3 by the library's and by our fp8 products, unpacked, and in fp4: relative L2 to fp4's exact values."""
    monkeypatch.setattr(gpu_grouped_unpack, "MOST_PACKED_ROWS", 0)
    config, tokens = gpu_model().info, 6
    fp4, e4m3, packed = loaded("fp4"), loaded("fp8"), loaded("fp4", has_room=True)
    draw = torch.Generator().manual_seed(0)
    mixing, pre = fp4.layers[0].ffn_mixing, first_pre(tokens, CPU)
    streams = torch.randn(tokens, 4, config.hidden_size, generator=draw).bfloat16()
    before = enter(streams, None, Coefficients(pre, pre, pre), mixing)
    experts = torch.randint(0, config.moe.num_experts, (tokens, config.moe.top_k), generator=draw).int()
    groups, factors = group(experts, num_experts=config.moe.num_experts), torch.rand(experts.numel(), generator=draw)

    def rows(weights: GpuV41Weights, *, is_invariant: bool) -> Tensor:
        products = Products(is_invariant)
        moe = weights.layers[0].moe
        entered = enter_experts(products, before, before.x, mixing, moe)
        made, is_in_order = routed(products, moe, entered, groups, factors, limit=config.moe.swiglu_limit)
        assert groups.places is not None
        return made if is_in_order else made[groups.places.long()]

    expected = rows(fp4, is_invariant=True).float()
    for weights, is_invariant in ((e4m3, False), (e4m3, True), (packed, False), (fp4, False)):
        got = rows(weights, is_invariant=is_invariant).float()
        assert 0.005 > float((got - expected).norm() / expected.norm())


def test_room_for_unpacked_experts_is_planned_where_steps_are_large() -> None:
    """With 64 rows an expert on the average; not in the invariant mode, and not for experts that are e4m3 already."""
    config, layout = gpu_model().info, gpu_model().layout
    here, enough = config.moe.num_experts, 65 * config.moe.num_experts // config.moe.top_k + 1

    def bytes_of(step_tokens: int, experts: ExpertFormat, *, is_invariant: bool) -> int:
        named = {"step_tokens": step_tokens, "num_windows": 9, "num_sequences": 64}
        modes = {"is_invariant": is_invariant, "dense_in_fp8": not is_invariant}
        return v41_need(config, layout, experts, **modes, **named).weights  # type: ignore[arg-type] # ints

    few = bytes_of(8, "fp4", is_invariant=False)
    assert room_bytes(config, here) == bytes_of(enough, "fp4", is_invariant=False) - few
    for experts, is_invariant in (("fp4", True), ("fp8", False)):
        assert not unpacks(config, experts, step_tokens=enough, experts_here=here, is_invariant=is_invariant)  # type: ignore[arg-type] # formats
    assert few < bytes_of(8, "fp4", is_invariant=True)
    published = replace(config, moe=replace(config.moe, num_experts=384, top_k=6))
    assert unpacks(published, "fp4", step_tokens=16_384, experts_here=384, is_invariant=False)

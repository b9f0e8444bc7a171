"""fp4 experts whose product gates what it makes: as gated after it, whichever rows there are, and restated the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from kernels.models.gpu.v41 import expert_weights
from kernels.models.gpu.v41.expert_weights import Placement
from kernels.models.gpu.v41.layer import routed
from kernels.models.gpu.v41.step import Products
from kernels.ops import gpu_grouped_packed
from kernels.ops.gpu_fp8 import SpanRows, gathered, span_rows
from kernels.ops.gpu_grouped import Weights
from kernels.ops.gpu_grouped_packed import CUT, MANY, Cut, multiply, multiply_gated
from kernels.ops.gpu_grouped_unpack import Packed, apart, powers_of
from kernels.ops.gpu_launch import interpreted
from kernels.ops.gpu_moe import group
from kernels.ops.gpu_quant import swiglu_twin
from kernels.ops.gpu_swiglu_rows import gate_rows, swiglu_rows, weigh_rows
from kernels.ops.quant import GROUP
from kernels.tests.gluon_alone import Launcher
from kernels.tests.test_gpu_compile import ON_SM90, ROOT, SHARED_BYTES
from kernels.tests.test_gpu_grouped_packed import draw, packed
from kernels.tests.test_gpu_grouped_packed_rounds import exact_case
from kernels.tests.test_gpu_v41_loading import CPU, PREFIX, Drawn, Kept, loaded, sources

_LIMIT = 2.5
"""Reached by gates and by ups on both sides."""


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def both_of(weights: Weights) -> tuple[Packed, Packed]:
    """Gate on top of up, and interleaved."""
    plain = Packed(weights, powers_of(weights), None)
    return plain, plain.interleaved()


def test_interleaved_matrices_are_the_same_by_eights() -> None:
    """Rows, their scales and their powers; what they make is put apart again."""
    plain, mixed = both_of(packed(2, 48, 128))
    assert [*range(8), *range(24, 32), *range(8, 16)] == apart(torch.arange(48)[None])[0].argsort()[:24].tolist()
    for expert in range(2):
        gate, up = plain.weights.dense(expert).split(24)
        wide = mixed.weights.dense(expert)
        for eight in range(3):
            assert torch.equal(gate[8 * eight : 8 * eight + 8], wide[16 * eight : 16 * eight + 8])
            assert torch.equal(up[8 * eight : 8 * eight + 8], wide[16 * eight + 8 : 16 * eight + 16])
    fresh = powers_of(mixed.weights)
    assert torch.equal(fresh.largest, mixed.powers.largest)
    assert torch.equal(fresh.scale, mixed.powers.scale)
    with pytest.raises(ValueError, match="on top"):
        mixed.interleaved()


def test_a_product_gates_only_what_is_made_for_it() -> None:
    """Of other matrices it would gate columns that have nothing to do with each other."""
    plain, _ = both_of(packed(1, 128, 128))
    x = span_rows(draw(2, 128).bfloat16(), rounds=True)
    with pytest.raises(ValueError, match="alternate"):
        multiply_gated(SpanRows(x.data, x.scale, is_turned=True), plain, torch.tensor([2]).int(), limit=_LIMIT)


def exact_both(size: int, count: int) -> tuple[SpanRows, Packed, Packed]:
    """Sums that fp32 holds exactly, some beyond the limit, a few rows of zeros."""
    x, weights = exact_case(size, count)
    x.data.view(torch.uint8)[5:8] = 0
    return SpanRows(x.data, x.scale * 4, is_turned=True), *both_of(weights)


@pytest.mark.slow
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    ("widths", "programs", "stages", "size", "is_late"),
    [
        ((16, 32, 48, 64), 7, 4, 640, True),
        ((32, 48, 80, 112, 128), 20, 2, 256, False),
        ((64, 224, 256), 132, 4, 128, False),
        ((64, 272), 3, 3, 256, True),
    ],
    ids=["three quarters, late", "last of seven eighths", "all in one", "past 256, late"],
)
def test_rows_are_gated_in_the_product_as_after_it(
    widths: tuple[int, ...], programs: int, stages: int, size: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every width the same bits, whole and shared; nothing is written behind the last expert's rows."""
    count = 450 if widths[-1] > 256 else 153
    x, plain, mixed = exact_both(size, count)
    ends = torch.tensor([1, 1, count - 40, count - 3]).int()
    kernel = Launcher(gpu_grouped_packed.packed_kernel, is_late=is_late)
    monkeypatch.setattr(gpu_grouped_packed, "packed_kernel", kernel)
    monkeypatch.setattr(gpu_grouped_packed, "multiprocessors", lambda _: programs)
    both = multiply(x, plain.weights, plain.powers, ends)
    twin = multiply_gated(x, mixed, ends, limit=_LIMIT)
    with interpreted():
        whole, shared = (
            multiply_gated(x, mixed, ends, limit=_LIMIT, cut=Cut(widths, stages, 232, sharing_rounds=rounds))
            for rounds in (0, 9)
        )

    assert torch.equal(swiglu_twin(both.float(), None, limit=_LIMIT).bfloat16()[: count - 3], twin[: count - 3])
    assert (both[: count - 3].abs() > _LIMIT).float().mean() > 0.05
    assert not whole[5:8].any()
    torch.testing.assert_close(twin[: count - 3], whole[: count - 3], rtol=2.0**-7, atol=1e-30)  # a bf16's last bit
    assert (twin[: count - 3] == whole[: count - 3]).float().mean() > 0.99
    assert torch.equal(whole[: count - 3], shared[: count - 3])
    assert all(each[count - 3 :].isnan().all() for each in (twin, whole, shared))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("width", [384, 256])
def test_gated_rows_are_weighed_and_restated(width: int, turns: bool) -> None:
    """By the kernel as by its twin, as rows that are gated on the way but for one rounding; one of zeros."""
    both = (draw(5, 2 * width) * 4).bfloat16()
    both[2] = 0.0
    targets, factors = torch.tensor([3, 1, 0, 2, 4]).int(), draw(5, seed=1).abs()
    gated = swiglu_twin(both.float(), None, limit=_LIMIT).bfloat16()
    twin = weigh_rows(gated, targets, factors, turns=turns)
    with interpreted():
        got, early = (
            weigh_rows(gated, targets, factors, turns=turns, follows_product=follows) for follows in (False, True)
        )
    expected = swiglu_rows(both, targets, factors, limit=_LIMIT, turns=turns)
    exact = gated.float() * factors[targets.long()][:, None]

    for each in (twin, early):
        assert torch.equal(each.data.view(torch.uint8), got.data.view(torch.uint8))
        assert torch.equal(each.scale, got.scale)
    assert torch.equal(span_rows(exact, rounds=True).dense(), got.dense())
    assert (expected.dense() - got.dense()).norm() / expected.dense().norm() < 0.02
    assert turns == got.is_turned
    assert not got.dense()[2].any()


def test_rows_that_are_no_whole_turns_are_refused() -> None:
    rows, targets, factors = draw(2, 96).bfloat16(), torch.tensor([0, 1]).int(), draw(2)
    with interpreted(), pytest.raises(ValueError, match="whole turns"):
        weigh_rows(rows, targets, factors, turns=False)
    with interpreted(), pytest.raises(ValueError, match="targets"):
        gate_rows(draw(2, 512).bfloat16(), targets, None, limit=_LIMIT, turns=False)


def test_experts_make_the_same_of_rows_that_their_product_gates() -> None:
    """A layer's, in the order of positions: what fp8 rounds otherwise here and there."""
    plain, mixed = both_of(packed(4, 512, 384))
    down, draws = packed(4, 384, 256), torch.Generator().manual_seed(5)
    experts = torch.randint(0, 4, (9, 2), generator=draws).int()
    groups, factors = group(experts, num_experts=4), torch.rand(18, generator=draws)
    entered: Any = SimpleNamespace(restated=span_rows(draw(9, 384).bfloat16(), rounds=True), rounded=None)
    made: list[Tensor] = []
    for up in (plain, mixed):
        moe: Any = SimpleNamespace(up=up, down=Packed(down, powers_of(down), None))
        rows, is_in_order = routed(Products(True), moe, entered, groups, factors, limit=_LIMIT)
        made.append(rows.float())
        assert not is_in_order

    assert 0.0 < (made[0] - made[1]).norm() / made[0].norm() < 0.02
    few: Any = SimpleNamespace(restated=None, rounded=gathered(entered.restated, torch.arange(9)).dense().bfloat16())
    with pytest.raises(AssertionError, match="fp8 units"):
        routed(Products(True), moe, few, groups, factors, limit=_LIMIT)


@pytest.mark.parametrize("source", ["golden", "whole", "padded"])
def test_experts_are_interleaved_as_they_are_loaded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time, to the byte; down stays as it is; and gate is on top where nothing says otherwise."""
    config, tensors = sources(source)
    monkeypatch.setattr(expert_weights, "in_registers", lambda *_: True)
    monkeypatch.setattr(expert_weights, "_AT_ONCE_BYTES", 3 * config.hidden_size * 128)
    placement = Placement((3, 1, 0, 5))
    plain, down = loaded(config, tensors, "fp4", placement)
    monkeypatch.setattr(expert_weights, "GATES_IN_PRODUCT", True)
    mixed, other = loaded(config, tensors, "fp4", placement)

    assert all(isinstance(each, Packed) for each in (plain, down, mixed, other))
    assert isinstance(plain, Packed)
    assert isinstance(mixed, Packed)
    assert isinstance(down, Packed)
    assert isinstance(other, Packed)
    assert [False, True, False] == [each.is_interleaved for each in (plain, mixed, other)]
    for expected, got in ((plain.interleaved(), mixed), (down, other)):
        assert torch.equal(expected.weights.data, got.weights.data)
        assert torch.equal(expected.weights.scale, got.weights.scale)
        assert torch.equal(expected.powers.largest, got.powers.largest)
        assert torch.equal(expected.powers.scale, got.powers.scale)


class _Far(Drawn):
    """Of one matrix, powers that are too far apart."""

    def stored(self, name: str) -> Tensor:
        made = super().stored(name)
        if name == f"{PREFIX}experts.1.w2.scale":
            made.view(torch.uint8)[0, 0] = 90
        return made


def test_experts_whose_powers_are_far_apart_are_not_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products take gate on top of up."""
    config, _ = sources("whole")
    assert 2 * GROUP <= config.moe.width
    tensors = Kept(_Far(config))
    plain, _ = loaded(config, tensors, "fp4", Placement((0, 1)))
    monkeypatch.setattr(expert_weights, "in_registers", lambda *_: True)
    monkeypatch.setattr(expert_weights, "GATES_IN_PRODUCT", True)
    loader = expert_weights.ExpertLoader(
        config, tensors, CPU, experts="fp4", placement=Placement((0, 1)), unpacks=False
    )
    up, down = loader.load(PREFIX)

    assert [PREFIX] == loader.packed
    assert isinstance(plain, Weights)
    assert isinstance(up, Weights)
    assert isinstance(down, Weights)
    assert torch.equal(plain.data, up.data)
    assert torch.equal(plain.scale, up.scale)


_TELL = """
import json, re
from dataclasses import replace
import triton
from kernels.ops import gpu_grouped_packed
from kernels.ops.gpu_grouped_unpack import Packed
triton.knobs.nvidia.dump_ptxas_log = True
experts, slots, out, size = 7, 1536, 4608, 5120

def up():
    weights = rig.Weights("fp4", rig.u8(experts, out, size // 2), rig.u8(experts, out, size // 32), size)
    powers = rig.Powers(rig.u8(experts, out), rig.fp32(experts, out), rig.i32(64, 2), spread_binades=2)
    rows = rig.SpanRows(torch.empty(slots, size, dtype=torch.float8_e4m3fn), rig.fp32(1, slots), is_turned=True)
    cut = replace(gpu_grouped_packed.CUT, widths=WIDTHS, stages=STAGES)
    both = Packed(weights, powers, None, is_interleaved=True)
    gpu_grouped_packed.multiply_gated(rows, both, rig.i32(experts), limit=10.0, cut=cut)

(launch,) = rig.caught(up)
source, options = rig.source_of(launch)
told = rig.compiled(source, options, "gated")
ptx = triton.compile(source, target=rig.SM90, options=options).asm["ptx"]
counts = [len(re.findall(each, ptx)) for each in (r"stmatrix", r"ex2\\.approx", r"st\\.shared\\.b16", r"launch_dependents")]
print(json.dumps([told.spilled_bytes + told.stack_bytes, told.shared_bytes, counts]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "stages"), [(CUT.widths, CUT.stages), (MANY.widths, MANY.stages), ((16, 288), 4)])
def test_what_is_gated_stays_in_registers(widths: tuple[int, ...], stages: int, tmp_path: Path) -> None:
    """For SM90, at V4.1's dimensions: without spills, on the way to shared memory in whole matrices, in less of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c",
         ON_SM90 + _TELL.replace("WIDTHS", repr(widths)).replace("STAGES", str(stages))],
        env={"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-4000:]
    spilled, shared_bytes, (matrices, exponentials, halves, starts) = json.loads(done.stdout)

    assert 0 == spilled
    assert shared_bytes <= SHARED_BYTES
    # A lane of either group gates a quarter of a number of rows; eight or fewer of those are stored by one instruction.
    assert 2 * sum(widths) // 4 == exponentials
    assert 2 * sum(-(-width // 32) for width in widths) == matrices
    assert 0 == halves
    assert 2 * len(widths) == starts

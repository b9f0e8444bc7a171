"""Kernels of V4.1 that begin while the one before them ends: what that one makes is not touched before it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from triton.runtime.jit import JITFunction

from kernels.ops import gpu_dense_fp8, gpu_grouped_packed, gpu_swiglu_rows
from kernels.ops.gpu_fp8 import SpanRows, row_scaled, span_rows
from kernels.ops.gpu_grouped_unpack import powers_of
from kernels.ops.gpu_launch import interpreted
from kernels.tests.test_gpu_compile import ON_SM90, ROOT
from kernels.tests.test_gpu_dense_fp8 import Ahead, draw
from kernels.tests.test_gpu_grouped_packed import packed


class Early(Ahead):
    """Where a partition may touch rows, their scales and results only after it has waited for what came before."""

    def __init__(self, rows: SpanRows, *, is_late: bool) -> None:
        super().__init__(is_late=is_late)
        self._rows = rows
        self._waited: set[threading.Thread] = set()
        self.copied_ahead = 0

    def _has_waited(self) -> bool:
        return threading.current_thread() in self._waited

    def load(self, at: Any, mask: Any = True, other: Any = 0) -> Any:
        start, past = self._rows.scale.data_ptr(), self._rows.scale.data_ptr() + self._rows.scale.nbytes
        assert self._has_waited() or not ((at.address >= start) & (at.address < past)).any()
        return super().load(at, mask, other)

    def store(self, at: Any, value: Any, mask: Any = True) -> None:
        assert self._has_waited()
        super().store(at, value, mask)

    def names(self) -> dict[str, Any]:
        names = super().names()
        engine = names["tma"]
        copy = engine.async_copy_global_to_shared

        def checked(boxes: Any, *args: Any) -> None:
            if not self._has_waited():
                assert boxes.base.data_ptr() != self._rows.data.data_ptr()
                self.copied_ahead += 1
            copy(boxes, *args)

        engine.async_copy_global_to_shared = checked
        names["gdc_wait"] = lambda: self._waited.add(threading.current_thread())
        names["gdc_launch_dependents"] = lambda: self._has_waited() or pytest.fail("the next would not wait for all")
        return names

    def returned(self, *args: Any) -> Any:
        self._waited.clear()
        made = super().returned(*args)
        assert self._has_waited(), "a program that ends before what it follows"
        return made


class Launched:
    """Launched like a kernel that begins early; its source runs here."""

    def __init__(self, kernel: JITFunction[Any], machine: Early) -> None:
        self._kernel, self._machine = kernel, machine

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **named: Any) -> None:
            assert num_warps == 4
            assert launch_pdl == named["OVERLAP"] is True
            self._machine.run(self._kernel, grid, args, named)

        return launch


def put_early(module: Any, kernel: str, rows: SpanRows, monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> Early:
    """A module whose kernel begins early from now on, on a machine that sees to it that it waits."""
    machine = Early(rows, is_late=is_late)
    monkeypatch.setattr(module, "overlaps", lambda _: True)
    monkeypatch.setattr(module, kernel, Launched(getattr(module, kernel), machine))
    return machine


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("size", "stages"), [(128, 4), (640, 3)])
def test_packed_experts_wait_for_gated_rows(
    size: int, stages: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First turns of the matrix are asked for before, in every program; programs without rows wait as well."""
    weights, ends = packed(4, 256, size), torch.tensor([1, 1, 113, 150]).int()
    x = span_rows(draw(153, size).bfloat16(), rounds=True)
    rows, powers = SpanRows(x.data, x.scale, is_turned=True), powers_of(weights)
    cut = gpu_grouped_packed.Cut((16, 32, 48, 64), stages, 232, sharing_rounds=9)
    monkeypatch.setattr(gpu_grouped_packed, "multiprocessors", lambda _: 7)
    machine = put_early(gpu_grouped_packed, "packed_kernel", rows, monkeypatch, is_late=is_late)
    expected = gpu_grouped_packed.multiply(rows, weights, powers, ends)[:150]
    with interpreted():
        got = gpu_grouped_packed.multiply(rows, weights, powers, ends, cut=cut, follows_gate=True)[:150].float()

    assert (expected - got).norm() / expected.norm() < 0.004
    assert 0 < machine.copied_ahead
    assert 0 == machine.copied_ahead % (2 * min(stages, size // 128))


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("size", "cut"), [(128, gpu_dense_fp8.Cut(programs=2)), (640, gpu_dense_fp8.Cut(stages=3, programs=4))]
)
def test_a_dense_matrix_waits_for_its_rows(
    size: int, cut: gpu_dense_fp8.Cut, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First turns of each program's first tile are asked for before."""
    x, matrix = span_rows(draw(200, size).bfloat16(), rounds=True), row_scaled([draw(384, size, seed=1)])[0]
    given = x.data, x.scale[0], matrix.data[0], matrix.scale[0]
    machine = put_early(gpu_dense_fp8, "dense_kernel", x, monkeypatch, is_late=is_late)
    expected = gpu_dense_fp8.multiply(*given)
    with interpreted():
        got = gpu_dense_fp8.multiply(*given, cut=cut, follows_rows=True).float()

    assert (expected - got).norm() / expected.norm() < 0.004
    assert 0 < machine.copied_ahead
    assert 0 == machine.copied_ahead % min(cut.stages, size // 128)


def test_where_kernels_are_interpreted_none_begins_early() -> None:
    """What callers promise of rows is nothing there: the same bits."""
    both, targets = draw(6, 512).bfloat16(), torch.tensor([5, 3, 0, 2, 4, 1]).int()
    factors = draw(6, 1, seed=3).flatten().abs()
    gated = partial(gpu_swiglu_rows.gate_rows, both, targets, factors, limit=2.0, turns=True)
    with interpreted():
        expected, got = (gated(follows_product=follows) for follows in (False, True))

    assert torch.equal(expected.data.view(torch.uint8), got.data.view(torch.uint8))
    assert torch.equal(expected.scale, got.scale)


_TELL = """
import json, re
import torch, triton
from kernels.ops import gpu_dense_fp8, gpu_grouped_packed, gpu_overlap, gpu_swiglu_rows
from kernels.ops.gpu_grouped_unpack import Packed
from kernels.tests import gpu_compile_rig as rig
triton.knobs.nvidia.dump_ptxas_log = True
kind = torch.float8_e4m3fn

def down(follows):
    weights = rig.Weights("fp4", rig.u8(7, 5120, 1152), rig.u8(7, 5120, 72), 2304)
    powers = rig.Powers(rig.u8(7, 5120), rig.fp32(7, 5120), rig.i32(64, 2), spread_binades=2)
    rows = rig.SpanRows(torch.empty(1536, 2304, dtype=kind), rig.fp32(1, 1536), is_turned=True)
    gpu_grouped_packed.multiply(rows, weights, powers, rig.i32(7), follows_gate=follows)

def gate(follows):
    given = rig.bf16(1536, 4608), rig.i32(1536), rig.fp32(1536)
    gpu_swiglu_rows.gate_rows(*given, limit=10.0, turns=True, follows_product=follows)

def gated(follows):  # what it follows is not promised to it
    weights = rig.Weights("fp4", rig.u8(7, 4608, 2560), rig.u8(7, 4608, 160), 5120)
    powers = rig.Powers(rig.u8(7, 4608), rig.fp32(7, 4608), rig.i32(64, 2), spread_binades=2)
    rows = rig.SpanRows(torch.empty(1536, 5120, dtype=kind), rig.fp32(1, 1536), is_turned=True)
    both = Packed(weights, powers, None, is_interleaved=True)
    gpu_grouped_packed.multiply_gated(rows, both, rig.i32(7), limit=10.0)

def weigh(follows):
    given = rig.bf16(1536, 2304), rig.i32(1536), rig.fp32(1536)
    gpu_swiglu_rows.weigh_rows(*given, turns=True, follows_product=follows)

def dense(follows):
    x, matrix = (torch.empty(rows, 1280, dtype=kind) for rows in (256, 32_768))
    gpu_dense_fp8.multiply(x, rig.fp32(256), matrix, rig.fp32(32_768), follows_rows=follows)

def norm(follows):
    rig.norm_rows(rig.bf16(256, 1280), rig.fp32(1280), eps=1e-20)

can = gpu_overlap._has_dependent_launch
for name, is_here, follows, cases in (
    ("elsewhere", False, True, (down, gate, gated, weigh, dense, norm)),
    ("not promised", True, False, (down, gate, gated, weigh, norm)),  # a dense product as elsewhere: it lets nobody start
    ("promised", True, True, (down, gate, weigh, dense)),  # norms follow nobody
):
    gpu_overlap._has_dependent_launch = can if is_here else lambda _: False
    for case in cases:
        (launch,) = rig.caught(lambda: case(follows))
        source, options = rig.source_of(launch)
        told = rig.compiled(source, options, case.__name__)
        ptx = triton.compile(source, target=rig.SM90, options=options).asm["ptx"]
        steps = re.findall(r"griddepcontrol\\.(\\w+)|(ld\\.global|cp\\.async\\.bulk)", ptx)
        said = [said or "read" for said, _ in steps]
        ahead = said.index("wait") if "wait" in said else 0
        counts = [said.count("wait"), said.count("launch_dependents"), ahead]
        in_order = "launch_dependents" not in said[:ahead]
        spilled = told.spilled_bytes + told.stack_bytes
        print(json.dumps([name, case.__name__, launch.named.get("launch_pdl", False), counts, in_order, spilled]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_for_hopper_wait_where_they_are_to(tmp_path: Path) -> None:
    """Waits are a width's in each group of warps, the feeding warp's, an idle program's; and none without a promise."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_SM90 + _TELL],
        env={"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    counts = {(name, case): (is_early, *counts[:2]) for name, case, is_early, counts, _, _ in told}
    widths = len(gpu_grouped_packed.CUT.widths)

    assert counts == {
        **{("elsewhere", case): (False, 0, 0) for case in ("down", "gate", "gated", "weigh", "dense", "norm")},
        **{("not promised", case): (False, 0, 2 * widths) for case in ("down", "gated")},
        **{("not promised", case): (False, 0, 1) for case in ("gate", "weigh")},
        ("not promised", "norm"): (False, 0, 1),
        ("promised", "down"): (True, 2 * widths + 2, 2 * widths),
        **{("promised", case): (True, 1, 1) for case in ("gate", "weigh")},
        ("promised", "dense"): (True, 3, 0),
    }
    assert all(in_order and not spilled for *_, in_order, spilled in told)
    # Before they wait, those who weigh rows read a target and its factor.
    gates = {("promised", "gate"), ("promised", "weigh")}
    assert [2, 2] == [ahead for name, case, _, (*_, ahead), _, _ in told if (name, case) in gates]

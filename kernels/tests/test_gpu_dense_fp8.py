"""Rows times a dense e4m3 matrix by our own kernel for Hopper: same products, same bits, however it is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from kernels.ops import gpu_dense_fp8
from kernels.ops.gpu_dense_fp8 import Cut, multiply
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, product, row_scaled, span_rows
from kernels.ops.gpu_launch import interpreted
from kernels.tests.gluon_alone import Machine, Pending

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024
"""What one program can have on SM90."""


class Ahead(Machine):
    """Where one product may still be under way when it is waited for those before it."""

    def wait(self, count: int, deps: list[Any]) -> Any:
        if count == 0:
            return super().wait(count, deps)
        assert count == 1
        (newest,) = deps
        if isinstance(newest, Pending):
            a, b, before = newest._operands
            newest._operands = (a, b, before.made() if isinstance(before, Pending) else before)
        return newest


class Launched:
    """Launched like the kernel; its source runs here."""

    def __init__(self, *, is_late: bool) -> None:
        self._kernel, self._is_late = gpu_dense_fp8.dense_kernel, is_late

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **named: Any) -> None:
            assert num_warps == gpu_dense_fp8.WARPS
            Ahead(is_late=self._is_late).run(self._kernel, grid, args, named)

        return launch


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal noise whose rows are up to 2,048 times as large as others."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=noise) * 2.0 ** torch.randint(-6, 6, (shape[0], 1), generator=noise)


def operands(rows: int, out: int, size: int) -> tuple[SpanRows, RowScaled]:
    """What a product is given."""
    return span_rows(draw(rows, size).bfloat16(), rounds=True), row_scaled([draw(out, size, seed=1)])[0]


def by_kernel(x: SpanRows, matrix: RowScaled, cut: Cut) -> Tensor:
    with interpreted():
        return multiply(x.data, x.scale[0], matrix.data[0], matrix.scale[0], cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("rows", "out", "size", "cut"),
    [
        (200, 384, 640, Cut(stages=4, programs=2)),  # two tiles, and one; rows that no tile of theirs has
        (256, 128, 128, Cut(stages=4)),  # a single turn
        (300, 256, 384, Cut(stages=3, programs=1)),  # rows in two tiles; one program for four
        (7, 256, 512, Cut(stages=2)),
    ],
    ids=["decode", "one turn", "two tiles of rows", "few rows"],
)
def test_rows_times_a_matrix_are_its_twins(
    rows: int, out: int, size: int, cut: Cut, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and products made at once, or as late as they may be; each value is as near as bf16 says it, small rows' too."""
    monkeypatch.setattr(gpu_dense_fp8, "dense_kernel", Launched(is_late=is_late))
    x, matrix = operands(rows, out, size)
    rows_of, columns_of = x.dense().double(), matrix.dense(0).double().T
    expected = rows_of @ columns_of
    rounding = expected.abs() / 256 + (rows_of.abs() @ columns_of.abs()) * 1e-6

    got = by_kernel(x, matrix, cut)

    assert (torch.bfloat16, expected.shape) == (got.dtype, got.shape)
    assert ((expected - got).abs() <= rounding).all()


@pytest.mark.slow
def test_bits_depend_neither_on_the_cut_nor_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's sum runs over its own columns in their order, whichever program makes it and whatever is beside it.

    Columns between two that cancel each other out: in another order they would lose other bits.
    """
    monkeypatch.setattr(gpu_dense_fp8, "dense_kernel", Launched(is_late=False))
    rows, columns = draw(150, 128), draw(384, 128, seed=1)
    rows = torch.cat([rows, rows.flip(1) / 1024, rows], dim=1)
    columns = torch.cat([columns, columns.flip(0) / 1024, -columns], dim=1)
    x, matrix = span_rows(rows.bfloat16(), rounds=True), row_scaled([columns])[0]
    alone = SpanRows(x.data[40:50].contiguous(), x.scale[:, 40:50].contiguous())

    once = by_kernel(x, matrix, Cut(programs=2))

    assert torch.equal(once, by_kernel(x, matrix, Cut(stages=2, programs=3)))
    assert torch.equal(once[40:50], by_kernel(alone, matrix, Cut(programs=1)))


def test_on_a_cpu_products_are_the_twins() -> None:
    x, matrix = operands(200, 128, 128)

    assert not gpu_dense_fp8.is_worth(x.data, matrix.out)
    assert torch.equal((x.dense() @ matrix.dense(0).T).bfloat16(), product(x, matrix))
    assert torch.equal(product(x, matrix), multiply(x.data, x.scale[0], matrix.data[0], matrix.scale[0]))


def test_a_matrix_that_tiles_do_not_cover_is_refused() -> None:
    """The kernel would leave its last rows, or columns, out."""
    for out, size in ((192, 128), (128, 160)):
        x, matrix = operands(2, out, size)

        with pytest.raises(ValueError, match="128s"):
            by_kernel(x, matrix, Cut())


COMPILED = """
import json, re, subprocess, tempfile
from dataclasses import asdict
import torch, triton
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
from kernels.ops.gpu_fp8 import RowScaled, SpanRows, product
from kernels.tests import gpu_compile_rig as rig

triton.knobs.nvidia.dump_ptxas_log = True
kind = torch.float8_e4m3fn

def launched(rows, out, size):
    given = [torch.empty(shape, dtype=kind, device="meta") for shape in ((rows, size), (1, out, size))]
    def call():
        x, matrix = (each.as_subclass(rig.OnGpu) for each in given)
        product(SpanRows(x, rig.fp32(1, rows)), RowScaled(matrix, rig.fp32(1, out)))
    return rig.caught(call)

def machine_code(source, options):
    made = triton.compile(source, target=rig.SM90, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        return subprocess.run([tool, file.name], check=True, capture_output=True, text=True).stdout

OURS = [(256, 32_768, 1280), (200, 32_768, 1280), (16_384, 32_768, 1280), (2100, 32_768, 1280)]
LIBRARYS = [(100, 32_768, 1280), (300, 32_768, 1280), (256, 5120, 1280), (256, 32_768, 1408), (16_384, 5120, 8192)]
print(json.dumps([[len(launched(*shape)) for shape in shapes] for shapes in (OURS, LIBRARYS)]))
made = {}
for shape in OURS:
    (launch,) = launched(*shape)
    source, options = rig.source_of(launch)
    made[source.hash()] = source, options
for source, options in made.values():
    said = asdict(rig.compiled(source, options, "wq_b"))
    waits_and_spills = "QGMMA|DEPBAR.LE gsb0, 0x.|LDL|STL"
    said["instructions"] = re.findall(waits_and_spills, machine_code(source, options))
    print(json.dumps(said))
"""

A_GROUP = [*["QGMMA"] * 4, "DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"]
"""Of each group's machine code: a turn's instructions, then the wait for those before them, and one for the last."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernel_compiles_for_hopper_and_its_products_are_under_way_together(tmp_path: Path) -> None:
    """Launched for short sums of rows that fill their tiles; one program for any rows, which spills nothing.

    Nothing waits between a turn's four instructions.
    """
    env = {"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    (ours, librarys), made = [json.loads(line) for line in done.stdout.splitlines()]

    assert [1] * 4 == ours
    assert [0] * 5 == librarys
    assert 0 == made["spilled_bytes"] == made["stack_bytes"]
    assert SHARED_BYTES >= made["shared_bytes"]
    assert A_GROUP * 2 == made["instructions"]

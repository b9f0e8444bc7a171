"""How packed experts' rows are shared out among programs: as wide as they need, a last round by all, the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from kernels.ops import gpu_grouped_packed, gpu_grouped_tiles
from kernels.ops.gpu_fp8 import SpanRows, turned_places
from kernels.ops.gpu_grouped import Weights, fp4_weights
from kernels.ops.gpu_grouped_packed import CUT, OUTS, Cut, multiply
from kernels.ops.gpu_grouped_unpack import powers_of, unpack
from kernels.ops.gpu_launch import interpreted
from kernels.tests.gluon_alone import Launcher, Machine
from kernels.tests.test_gpu_compile import ON_SM90, ROOT, SHARED_BYTES

_ROWS, _LEAST = 256, 64

Part = tuple[int, int, int, int]
"""First row, how many, expert, tile of its matrix."""


def parts_of(ends: list[int], programs: int, num_outs: int, rounds: int) -> list[Part]:
    """What each program of a launch makes, where it makes something."""
    known, machine = torch.tensor(ends).int(), Machine(is_late=False)
    named = {"EXPERTS": len(ends), "EXPERTS_BLOCK": 128, "ROWS": _ROWS, "LEAST": _LEAST, "NUM_OUTS": num_outs}
    most = (ends[-1] + min(len(ends), ends[-1]) * (_ROWS - 1)) // _ROWS * num_outs + 3 * programs // 4
    shared = {"PROGRAMS": programs, "SHARING_ROUNDS": rounds}
    told = [
        machine.returned(gpu_grouped_tiles.tile_of, (program,), (most,), (known,), named | shared)
        for program in range(most)
    ]
    return [(int(first), int(left), int(expert), int(tile)) for first, left, expert, tile in told if left > 0]


@pytest.mark.parametrize("rounds", [0, 1, 4])
@pytest.mark.parametrize(
    ("ends", "programs", "num_outs"),
    [
        ([210, 215, 430, 650, 900, 1120, 1536], 40, 1),  # 8 tiles of 40: quarters
        ([210, 430, 430, 650], 7, 5),  # an expert without rows; two full rounds and one tile
        ([256, 512, 769], 11, 4),  # a last row alone; five of eleven: halves
        ([256, 512, 769], 9, 4),  # seven of nine: whole
        ([1, 3, 4], 4, 2),  # too few rows for parts
        ([0, 0, 0], 4, 2),
        ([7 * (expert + 1) for expert in range(70)], 9, 1),
        ([0] * 40 + [300] * 30, 3, 2),
    ],
)
def test_every_row_of_every_tile_is_made_once(ends: list[int], programs: int, num_outs: int, rounds: int) -> None:
    """By an expert's own program, whether or not a last round is shared."""
    starts = [0, *ends[:-1]]
    expected = [
        (row, expert, out)
        for expert, (begin, end) in enumerate(zip(starts, ends, strict=True))
        for row in range(begin, end)
        for out in range(num_outs)
    ]
    made = parts_of(ends, programs, num_outs, rounds)
    got = [(first + row, expert, out) for first, count, expert, out in made for row in range(count)]

    assert sorted(expected) == sorted(got)
    assert all(count <= _ROWS for _, count, _, _ in made)


def test_a_last_round_is_shared_in_parts_that_fill_it() -> None:
    """A decode step's down product at V4.1's dimensions: 16 of 280 tiles, as 64 quarters. Up: 120 of 252, whole."""
    ends = [219 * expert for expert in range(1, 8)]
    down, up, many = (
        [count for _, count, _, _ in parts_of(ends, 132, outs, rounds)] for outs, rounds in ((40, 3), (36, 3), (40, 2))
    )

    assert [219] * 264 + [64, 64, 64, 27] * 16 == down
    assert [219] * 252 == up
    assert [219] * 280 == many


def exact_case(size: int, count: int = 153) -> tuple[SpanRows, Weights]:
    """Sums that fp32 holds exactly, in whichever order: whole numbers, and powers up to three binades apart."""
    noise = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (4, 2 * OUTS.value, size // 2), generator=noise, dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(118, 122, (4, 2 * OUTS.value, size // 32), generator=noise, dtype=torch.uint8)
    values = torch.randint(-8, 9, (count, size), generator=noise).float()
    turned = torch.empty(count, size, dtype=torch.float8_e4m3fn)
    turned.view(torch.uint8)[:, turned_places(size)] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    powers = 2.0 ** torch.randint(-3, 4, (1, count), generator=noise).float()
    return SpanRows(turned, powers, is_turned=True), fp4_weights(data, scale.view(torch.float8_e8m0fnu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "programs", "stages", "size", "is_late"),
    [
        ((16, 32, 64), 3, 3, 384, False),
        ((16, 32, 48, 64), 7, 4, 640, True),
        ((32, 48, 80, 112, 128), 20, 2, 256, True),
        ((64, 224, 256), 132, 4, 128, False),
        ((64, 272), 3, 3, 256, True),
    ],
    ids=["powers of two", "three quarters, late", "last of seven eighths, late", "all in one", "past 256"],
)
def test_rows_have_the_same_bits_in_every_width(
    widths: tuple[int, ...], programs: int, stages: int, size: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one power of two or several, and in parts of a last round."""
    count = 450 if widths[-1] > 256 else 153
    x, weights = exact_case(size, count)
    powers, ends = powers_of(weights), torch.tensor([1, 1, count - 40, count - 3]).int()
    kernel = Launcher(gpu_grouped_packed.packed_kernel, is_late=is_late)
    monkeypatch.setattr(gpu_grouped_packed, "packed_kernel", kernel)
    monkeypatch.setattr(gpu_grouped_packed, "multiprocessors", lambda _: programs)
    with interpreted():
        whole, shared = (
            multiply(x, weights, powers, ends, cut=Cut(widths, stages, 232, sharing_rounds=rounds)) for rounds in (0, 9)
        )
    rows, wide = x.dense(), unpack(weights, powers)
    bounds = enumerate(pairwise([0, *ends.tolist()]))
    expected = torch.cat([rows[begin:end] @ wide.dense(expert).T for expert, (begin, end) in bounds])

    assert torch.equal(expected.bfloat16(), whole[: count - 3])
    assert torch.equal(whole[: count - 3], shared[: count - 3])


@pytest.mark.parametrize("widths", [(64, 192), (64, 32), (60, 64), (64, 304), (64, 512), ()])
def test_widths_that_no_layout_has_are_refused(widths: tuple[int, ...]) -> None:
    """Each is a sum of powers of two from 16 to 256, the last one of them, and they ascend."""
    x, weights = exact_case(128)

    with pytest.raises(ValueError, match="widths"):
        multiply(x, weights, powers_of(weights), torch.tensor([1, 1, 113, 150]).int(), cut=Cut(widths, 4, 232, 0))


_TELL = """
import json
from dataclasses import replace
import triton
from kernels.ops import gpu_grouped_packed
triton.knobs.nvidia.dump_ptxas_log = True
for launch in rig.caught(lambda: rig.v41_packed(WIDTHS)):
    told = rig.compiled(*rig.source_of(launch), "widths")
    print(json.dumps([told.spilled_bytes, told.stack_bytes, told.shared_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("widths", [CUT.widths, (16, 64, 176, 208, 240, 256), (240, 288)])
def test_no_width_spills(widths: tuple[int, ...], tmp_path: Path) -> None:
    """For SM90, at V4.1's dimensions, for a decode step's experts and for a prefill's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_SM90 + _TELL.replace("WIDTHS", repr(widths))],
        env={"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]

    assert [[0, 0]] * 4 == [each[:2] for each in told]
    assert all(each[2] <= SHARED_BYTES for each in told)

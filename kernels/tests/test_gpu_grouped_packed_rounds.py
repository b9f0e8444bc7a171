"""Programs that stay on their multiprocessors and multiply one tile after the other: the same bits, each tile once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: kernels for GPUs are neither compiled nor interpreted")

from kernels.ops import gpu_grouped_packed
from kernels.ops.gpu_fp8 import SpanRows, turned_places
from kernels.ops.gpu_grouped import Weights, fp4_weights
from kernels.ops.gpu_grouped_packed import OUTS, Cut, multiply
from kernels.ops.gpu_grouped_unpack import powers_of, unpack
from kernels.ops.gpu_launch import interpreted, tiles
from kernels.tests.gluon_alone import Launcher, Machine
from kernels.tests.test_gpu_compile import ON_SM90, ROOT, SHARED_BYTES

_ROWS = 256


Unit = tuple[int, int, int, int]
"""First row, how many, first row in all matrices, first row in its own matrix."""


def units_of(ends: list[int], programs: int, num_outs: int, *, of: Sequence[int] = ()) -> list[list[Unit]]:
    """What the kernel says that each program makes, or each of some."""
    known, machine, grid = torch.tensor(ends).int(), Machine(is_late=False), (programs,)
    shape = {"EXPERTS": len(ends), "ROWS": _ROWS}
    plan = machine.returned(gpu_grouped_packed._plan, (0,), grid, (known,), {**shape, "NUM_OUTS": num_outs})

    def told(unit: int) -> Unit:
        named = {**shape, "WIDTH": num_outs * OUTS.value}
        first, rows, place, column = machine.returned(gpu_grouped_packed._unit, (0,), grid, (unit, plan, known), named)
        return int(first), int(rows), int(place), int(column)

    return [[told(unit) for unit in range(program, int(plan[2]), programs)] for program in of or range(programs)]


@pytest.mark.parametrize(
    ("ends", "programs", "num_outs", "rounds"),
    [
        ([210, 215, 430, 650, 900, 1120, 1536], 40, 1, 1),  # 8 tiles of 40: quarters
        ([210, 430, 430, 650], 7, 5, 3),  # an expert without rows; two full rounds and one tile
        ([256, 512, 769], 11, 4, 2),  # a last row alone; five of eleven: halves
        ([256, 512, 769], 9, 4, 2),  # seven of nine: whole
        ([1, 3, 4], 4, 2, 2),  # pieces without rows
        ([0, 0, 0], 4, 2, 0),
        ([7 * (expert + 1) for expert in range(70)], 9, 1, 8),  # more experts than lanes
        ([0] * 40 + [300] * 30, 3, 2, 2),
    ],
)
def test_every_row_of_every_tile_is_made_once(ends: list[int], programs: int, num_outs: int, rounds: int) -> None:
    """By as few rounds as tiles fill; programs differ by one unit, and a unit's rows are its expert's."""
    made = units_of(ends, programs, num_outs)
    starts = [0, *ends[:-1]]
    expected = {(row, expert * num_outs + out) for expert, (begin, end) in enumerate(zip(starts, ends, strict=True))
                for row in range(begin, end) for out in range(num_outs)}  # fmt: skip
    got = [
        (first + row, place // OUTS.value)
        for units in made
        for first, count, place, _ in units
        for row in range(max(count, 0))
    ]

    assert sorted(expected) == sorted(got)
    assert rounds == max(len(units) for units in made)
    assert all(column == place % (num_outs * OUTS.value) for units in made for _, _, place, column in units)
    assert max(len(units) for units in made) - min(len(units) for units in made) <= 1


def test_a_last_round_is_shared_in_pieces_that_fill_it() -> None:
    """A decode step's down product at V4.1's dimensions: 16 of 280 tiles, as 64 quarters. Up: 120 of 252, whole."""
    ends, of = [219 * expert for expert in range(1, 8)], (0, 2, 3, 63, 64, 119, 120, 131)
    down, up = ([[unit[1] for unit in units] for units in units_of(ends, 132, outs, of=of)] for outs in (40, 36))

    assert [[219, 219, 64]] * 2 + [[219, 219, 27]] * 2 + [[219, 219]] * 4 == down
    assert [[219, 219]] * 6 + [[219]] * 2 == up


def exact_case(size: int) -> tuple[SpanRows, Weights]:
    """Sums that fp32 holds exactly, in whichever order: whole numbers, and powers up to three binades apart."""
    noise = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (4, 2 * OUTS.value, size // 2), generator=noise, dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(118, 122, (4, 2 * OUTS.value, size // 32), generator=noise, dtype=torch.uint8)
    values = torch.randint(-8, 9, (153, size), generator=noise).float()
    turned = torch.empty(153, size, dtype=torch.float8_e4m3fn)
    turned.view(torch.uint8)[:, turned_places(size)] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    powers = 2.0 ** torch.randint(-3, 4, (1, 153), generator=noise).float()
    return SpanRows(turned, powers, is_turned=True), fp4_weights(data, scale.view(torch.float8_e8m0fnu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("programs", "stages", "size", "is_late"),
    [(3, 3, 384, False), (3, 4, 640, True), (7, 5, 128, True), (20, 2, 256, False)],
    ids=["whole", "whole, late", "quarters, late", "halves"],
)
def test_programs_that_stay_make_the_same_bits(
    programs: int, stages: int, size: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a tile go on in the slots, and at the barriers, where the tile before ended.

    Where scales are asked for ahead, no address is beside the matrices.
    """
    x, weights = exact_case(size)
    powers, ends = powers_of(weights), torch.tensor([1, 1, 113, 150]).int()
    cut = Cut(64, stages, 232, scales_ahead=is_late)
    kernel = Launcher(gpu_grouped_packed.packed_kernel, is_late=is_late)
    monkeypatch.setattr(gpu_grouped_packed, "packed_kernel", kernel)
    monkeypatch.setattr(gpu_grouped_packed, "multiprocessors", lambda _: programs)
    with interpreted():
        each = multiply(x, weights, powers, ends, cut=cut)
        monkeypatch.setattr(gpu_grouped_packed, "MOST_ROUNDS", 99)
        stayed = multiply(x, weights, powers, ends, cut=cut)
    rows, wide = x.dense(), unpack(weights, powers)
    bounds = enumerate(pairwise([0, *ends.tolist()]))
    expected = torch.cat([rows[begin:end] @ wide.dense(expert).T for expert, (begin, end) in bounds])

    assert torch.equal(expected.bfloat16(), stayed[:150])
    assert torch.equal(each[:150], stayed[:150])


def test_who_stays_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a card has shown that it is faster; then for few rounds of tiles, as a decode step has them."""
    grids = []

    class Grids:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_, STAYS, **__: grids.append((grid[0], STAYS))

    x, weights = exact_case(128)
    monkeypatch.setattr(gpu_grouped_packed, "packed_kernel", Grids())
    monkeypatch.setattr(gpu_grouped_packed, "multiprocessors", lambda _: 5)
    most = (tiles(153, 64) + 4) * 2
    with interpreted():
        for rounds in (gpu_grouped_packed.MOST_ROUNDS, 2, 3):
            monkeypatch.setattr(gpu_grouped_packed, "MOST_ROUNDS", rounds)
            multiply(x, weights, powers_of(weights), torch.tensor([1, 1, 113, 150]).int(), cut=Cut(64, 4, 232))

    assert [(most, False), (most, False), (5, True)] == grids


_TELL = """
import json
from dataclasses import replace
import triton
from kernels.ops import gpu_grouped_packed
triton.knobs.nvidia.dump_ptxas_log = True
gpu_grouped_packed.MOST_ROUNDS = 8
gpu_grouped_packed.multiprocessors = lambda _: 132
for launch in rig.caught(lambda: rig.v41_units(400)):
    if launch.kernel is gpu_grouped_packed.packed_kernel:
        for changed in ({}, {"STAGES": 5}, {"SCALES_AHEAD": True}):
            told = rig.compiled(*rig.source_of(replace(launch, named=launch.named | changed)), "stays")
            print(json.dumps([launch.named["STAYS"], told.spilled_bytes, told.stack_bytes, told.shared_bytes]))
"""


@pytest.mark.slow
def test_programs_that_stay_compile_without_spilling(tmp_path: Path) -> None:
    """For SM90, at V4.1's dimensions; also with a stage more, and where scales are asked for ahead."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_SM90 + _TELL],
        env={"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]

    assert [[True, 0, 0]] * 3 == [each[:3] for each in told]
    assert all(each[3] <= SHARED_BYTES for each in told)

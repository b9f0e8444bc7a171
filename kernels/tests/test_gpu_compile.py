"""Every GPU kernel compiles for SM90 as its wrapper launches it, spills no more than it did, and fits a multiprocessor.

Triton's interpreter, which runs the kernels in the other tests, does not find what only the compiler refuses.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be compiled")

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024
"""What one program can have on SM90."""
SPILLED_BYTES = {
    "gpu_hyper._slice_kernel": 256,
    "gpu_layer.layers_kernel": 96,
    "gpu_records._index_kernel": 16,
    "gpu_records._main_kernel": 16,
    "gpu_sparse._attend_kernel": 640,
    "gpu_sparse_hopper.attend_kernel": 64,  # one value of those who score, and only with entries
    "gpu_truncation._cut_kernel": 128,
}
"""Of a thread, in local memory; measured with Triton 3.6.0 (184, 536 and 68), with room for other versions; of the two
small ones only for the tiny model's heads."""

_SECONDS = 570
"""Two minutes when the machine has nothing else to do."""
pytestmark = pytest.mark.timeout(600)

ON_SM90 = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
from kernels.tests import gpu_compile_rig as rig
"""


def told_by(call: str, folder: Path) -> list[dict[str, Any]]:
    """What the rig says, in a process that never interprets and has a cache of its own: the assembler always speaks."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{ON_SM90}\nrig.{call}"],
        env={
            "HOME": str(folder),
            "TRITON_CACHE_DIR": str(folder / "cache"),
            "TRITON_DISABLE_LINE_INFO": "1",  # of use to profilers; a tenth of the compiler's time
            "OMP_NUM_THREADS": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_good(made: list[dict[str, Any]]) -> None:
    for each in made:
        spilled = max(each["spilled_bytes"], each["stack_bytes"])
        assert SPILLED_BYTES.get(each["kernel"], 0) >= spilled, each
        assert SHARED_BYTES >= each["shared_bytes"], each


def kernels_in_files() -> set[str]:
    """Functions for GPUs that are called kernels, or launched like one."""
    found = set()
    for file in (ROOT / "kernels" / "ops").glob("gpu_*.py"):
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+)", text, re.MULTILINE):
            if name.endswith("_kernel") or re.search(rf"\b{name}\[", text):
                found.add(f"{file.stem}.{name}")
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every whole step, and every kernel as the first case that has it launches it: one walk through all cases."""
    return told_by("tell_all()", tmp_path_factory.mktemp("told"))


@pytest.mark.slow
def test_a_whole_v41_step_is_launched_without_a_value_of_it(told: list[dict[str, Any]]) -> None:
    """Captured steps and a chunk, at the published dimensions: on tensors that cannot be asked for values."""
    steps = [each for each in told if "step" in each]

    assert steps
    assert all(len(each["kernels"]) >= 22 and each["launches"] > 300 for each in steps)
    assert set.union(*(set(each["kernels"]) for each in steps)) <= kernels_in_files()


@pytest.mark.slow
def test_every_kernel_compiles(told: list[dict[str, Any]]) -> None:
    """Each as the first case that has it launches it; a kernel without a case fails here: give it one in the rig."""
    made = [each for each in told if "step" not in each]

    assert kernels_in_files() == {each["kernel"] for each in made}
    assert_good(made)


@pytest.mark.long
@pytest.mark.parametrize("family", ["dense", "sampler", "v41 experts", "v41 step", "v41 (?!experts|step)"])
def test_every_specialisation_compiles(family: str, tmp_path: Path) -> None:
    """All shapes, formats, tiles and features that are launched at the real dimensions."""
    made = told_by(f"compile_matching({family!r})", tmp_path)

    assert made
    assert_good(made)

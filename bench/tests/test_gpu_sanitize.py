"""What the sanitizer says of a kernel is found in its words, and every run's inputs fit together."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot be imported")

from bench.gpu_sanitize import ROOT, bounded, kernels_in_files, main, missing, reports_by_kernel, results, sanitizer
from bench.gpu_sanitize_cases import RUNS

# Both modes draw and page alike; every product's own form is in "dense forms".
DENSE = [
    pytest.param(name, marks=[pytest.mark.long] if name == "dense model, invariant" else [])
    for name in RUNS
    if name.startswith("dense ")
]
SAID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _attend_kernel+0x1a0 in /somewhere/gpu_attention.py:210
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
========= Invalid __global__ write of size 2 bytes
=========     at 0x350 in /somewhere/gpu_linear.py:99:_linear_kernel
=========     by thread (0,0,0) in block (1,0,0)
========= Error: Race reported between Write access at _attend_kernel+0x110 in /somewhere/gpu_attention.py:12
=========     and Read access at _attend_kernel+0x150 in /somewhere/gpu_attention.py:13 [64 hazards]
launched {"gpu_attention._attend_kernel": 3, "gpu_norm._norm_kernel": 1}
========= ERROR SUMMARY: 3 errors
"""


def test_errors_are_counted_for_the_kernel_they_are_in() -> None:
    """Whichever way the tool writes its place; an error that is nowhere is one too."""
    found = reports_by_kernel(SAID)
    assert {"_attend_kernel": 2, "_linear_kernel": 1} == {kernel: len(told) for kernel, told in found.items()}
    assert "Write access at _attend_kernel+0x110" in found["_attend_kernel"][1]
    assert "Read access at _attend_kernel+0x150" in found["_attend_kernel"][1]
    assert [""] == list(reports_by_kernel("========= ERROR SUMMARY: 1 error\n"))
    assert {} == reports_by_kernel(
        "========= ERROR SUMMARY: 0 errors\n========= RACECHECK SUMMARY: 0 hazards displayed\n"
    )


def test_each_launched_kernel_has_a_line() -> None:
    """Clean, with errors, not launched by the run but blamed, and a run that did not reach its end."""
    rows = {row["kernel"]: row for row in results("dense forms", "memcheck", SAID, 0)}

    assert {"gpu_attention._attend_kernel": False, "gpu_norm._norm_kernel": True, "_linear_kernel": False} == {
        name: row["passed"] for name, row in rows.items()
    }
    assert 3 == rows["gpu_attention._attend_kernel"]["launches"]
    assert rows["gpu_attention._attend_kernel"]["first"].startswith(
        "Invalid __global__ read of size 4 bytes at _attend"
    )
    assert "ended with 7" in results("dense forms", "memcheck", "Killed", 7)[0]["failed"]


def test_a_run_that_is_ended_tells_what_was_seen_until_then() -> None:
    """Errors that were reported, and that it did not come to its end."""
    cut = SAID.partition("launched ")[0]
    rows = results("dense forms", "racecheck", cut, None)

    assert {"_attend_kernel": 2, "_linear_kernel": 1} == {row["kernel"]: row["errors"] for row in rows[:-1]}
    assert "was ended by its time limit" in rows[-1]["failed"]
    assert not any(row["passed"] for row in rows)


def test_a_command_is_ended_with_its_children() -> None:
    """After so long; what they printed is known. One that ends by itself keeps its status."""
    nested = "import subprocess, sys; print('one', flush=True); subprocess.run([sys.executable, '-c', INNER])"
    inner = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    start = time.monotonic()
    status, said = bounded([sys.executable, "-c", nested.replace("INNER", repr(inner))], 2.0)

    assert status is None
    assert 20 > time.monotonic() - start
    assert ["one", "pid"] == said.split()[:2]
    child = Path(f"/proc/{said.split()[2]}")
    for _ in range(100):
        if not child.exists():
            break
        time.sleep(0.05)
    assert not child.exists()
    assert (3, "x\n") == bounded([sys.executable, "-c", "print('x'); raise SystemExit(3)"], 30.0)


def test_a_kernel_that_no_run_launched_is_said() -> None:
    """For each tool."""
    name = min(kernels_in_files())
    lines = missing([{"tool": "memcheck", "kernel": name}], ("memcheck", "racecheck"))

    assert 2 * len(kernels_in_files()) - 1 == len(lines)


@pytest.mark.skipif(sanitizer() is not None, reason="compute-sanitizer is here")
def test_a_machine_without_the_tool_is_told_so(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """And nothing is called clean."""
    monkeypatch.setattr("sys.argv", ["gpu_sanitize"])

    assert 2 == main()
    assert "compute-sanitizer is not installed" in json.loads(capsys.readouterr().out)["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("run", DENSE)
def test_inputs_of_dense_runs_fit_together(run: str) -> None:
    """By the kernels' twins; V4.1's are those of its own check."""
    RUNS[run]("cpu")


COUNTING = """
import json
import torch
torch.cuda.is_available = lambda: True  # so that Triton does not turn to its interpreter
torch.cuda.get_device_capability = lambda *_: (9, 0)
from collections import Counter
from triton.runtime.jit import JITFunction
launched = Counter()
def note(kernel, *args, grid, warmup, **named):
    launched[f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"] += 1
JITFunction.run = note
from kernels.ops import gpu_launch
from bench.gpu_sanitize_cases import RUNS
torch.cuda.is_available = lambda: False
# No kernel computes: what they would have written is zeros, which are good indices.
torch.empty = lambda *size, pin_memory=False, **named: torch.zeros(*size, **named)
for run in RUNS.values():
    gpu_launch._FORCED[0] = True
    run("cpu")
print(json.dumps(launched))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kernel_is_launched_by_some_run(tmp_path: Path) -> None:
    """Counted without a GPU: a kernel that no run launches would never be looked at."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNTING],
        env={"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},  # Triton tells its children to interpret
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]

    assert set() == kernels_in_files() - set(json.loads(done.stdout))

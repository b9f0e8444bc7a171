"""What V4.1's steps launch is compiled ahead by workers that share it, and found by who launches it afterwards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be compiled")

ROOT = Path(__file__).parents[2]
HASHES = """
import json, sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
from bench import gpu_compile_walk as walk
found = [(each.name, each.source.hash(), repr(each.options)) for each in walk.sources(sys.argv[1:])]
print(json.dumps(found))
"""


def sources(folder: Path, *steps: str) -> list[tuple[str, str, str]]:
    """Name, hash and options of all that they launch."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HASHES, *steps],
        env={"HOME": str(folder), "OMP_NUM_THREADS": "1"},  # Triton tells its children to interpret
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-3000:]
    return [(name, key, options) for name, key, options in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_walk_names_what_a_step_launches_once(tmp_path: Path) -> None:
    """The same in each process, so that workers share it; the kernels of both modes and of Hopper among them."""
    found, again = (sources(tmp_path, "decode") for _ in range(2))

    assert found == again
    assert len(found) == len(set(found))
    names = {name for name, *_ in found}
    assert {"attend_kernel", "_rows_kernel", "_noise_kernel", "_slice_kernel"} <= names, sorted(names)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_compile_all_of_it_and_the_next_ones_find_it(tmp_path: Path) -> None:
    """Into the cache that the environment names; the second time nothing is compiled."""
    taken, cached = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu_compile", "--workers", "2", "--steps", "prefill", "--seconds", "400"],
            env={"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            cwd=ROOT, capture_output=True, text=True, timeout=420, check=False,
        )  # fmt: skip
        assert 0 == done.returncode, done.stdout + done.stderr[-3000:]
        taken.append(json.loads(done.stdout.splitlines()[-1]))
        cached.append({file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.cubin")})

    assert taken[0]["sources"] == taken[0]["compiled"] == taken[1]["compiled"]
    assert len(cached[0]) >= taken[0]["compiled"]
    assert cached[0] == cached[1]

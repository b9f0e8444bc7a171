"""Run every test, two or three at a time: first those of single services, then those that start whole suites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Tests of single services use the default model where it is, so it is fetched before them.
FETCH_MODEL = ("-m", "services.local", "pull")
# OpenMP threads that spin beside another process's take the cores from whoever has work to do. And bytecode is kept,
# whatever the caller's environment says: without it every worker compiles and rewrites all tests: ten seconds each.
_ENVIRONMENT = ("--unset=PYTHONDONTWRITEBYTECODE", "OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=1000")
PASSES = (
    (
        # Three on two cores: a fifth of a test's time it waits, for records to expire or for a process to end.
        "unit and integration tests",
        (*_ENVIRONMENT, "OMP_NUM_THREADS=1"),
        ("-n", "3", "--dist", "worksteal", "proto", "services", "kernels", "tools", "k8s", "bench"),
    ),
    # A suite that starts, or answers one request, leaves a core idle, so another one runs beside it; tests that measure
    # how soon something happens wait until they are alone (e2e/conftest.py, which also says what shares a worker).
    ("whole-suite tests", _ENVIRONMENT, ("-n", "2", "--no-loadscope-reorder", "e2e")),
)


def main() -> None:
    extra = sys.argv[1:]
    codes = [subprocess.run([sys.executable, *FETCH_MODEL], cwd=ROOT, check=False).returncode]
    for name, environment, words in PASSES:
        print(f"== {name}", flush=True)
        command = [
            "env",
            *environment,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not long",
            "--durations=8",
            *words,
            *extra,
        ]
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    main()

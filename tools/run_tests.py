"""Run every test: those that own the machine one by one, all others two at a time."""

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
        "unit and integration tests",
        (*_ENVIRONMENT, "OMP_NUM_THREADS=1"),
        ("-n", "2", "--dist", "worksteal", "proto", "services", "kernels", "tools", "k8s", "bench"),
    ),
    # Whole suites use every core, and some measure how soon something happens: one at a time.
    ("whole-suite tests", _ENVIRONMENT, ("e2e",)),
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

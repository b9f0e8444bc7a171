"""Run every test: those that own the machine one by one, all others two at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Tests of single services use the default model where it is, so it is fetched before them.
FETCH_MODEL = ("-m", "services.local", "pull")
# Suites that compare tokens use one core at a time and wait for nobody's clock, so two may run beside each other. Those
# that measure how soon something happens have the machine for themselves.
_TOKENS = (
    "e2e/test_same_tokens.py",
    "e2e/test_same_tokens_v41.py",
    "e2e/test_chat_v41.py",
    "e2e/test_structured.py",
    "e2e/test_handoff.py",
    "e2e/test_model.py",
)
# OpenMP threads that spin beside another process's take the cores from whoever has work to do.
_BRIEF_SPINS = ("OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=1000")
PASSES = (
    (
        "unit and integration tests",
        (*_BRIEF_SPINS, "OMP_NUM_THREADS=1"),
        ("-n", "2", "--dist", "worksteal", "proto", "services", "kernels", "tools", "k8s", "bench"),
    ),
    ("whole suites: the same tokens", _BRIEF_SPINS, ("-n", "2", "--dist", "loadfile", *_TOKENS)),
    (
        "whole suites: requests and faults",
        _BRIEF_SPINS,
        ("e2e", *(word for file in _TOKENS for word in ("--ignore", file))),
    ),
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

"""Run every test: those without services two at a time, then those that own the machine, one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Tests of single services use the default model where it is, so it is fetched before them.
FETCH_MODEL = ("-m", "services.local", "pull")
# Whole-suite tests start engines that use every core; beside each other they would only wait.
PASSES = (
    (
        "unit and integration tests",
        ("-n", "2", "--dist", "worksteal", "proto", "services", "kernels", "tools", "k8s", "bench"),
    ),
    ("whole-suite tests", ("e2e",)),
)


def main() -> None:
    extra = sys.argv[1:]
    codes = [subprocess.run([sys.executable, *FETCH_MODEL], cwd=ROOT, check=False).returncode]
    for name, words in PASSES:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "--durations=8", *words, *extra]
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    main()

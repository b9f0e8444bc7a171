"""Is the tree fit to commit? Runs every fast check, three at a time, and says which failed.

Fast tests that cannot have changed since they last passed are not run again; `--all` runs them too, `--no-tests` none.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tools import proven

ROOT = Path(__file__).resolve().parent.parent
_BIN = Path(sys.executable).parent
_DEADLINE_SECONDS = 300
_NO_TESTS = 5
"""What pytest ends with when the files hold slow tests only."""


@dataclass(frozen=True, slots=True)
class Check:
    """One command that must exit with 0."""

    name: str
    command: tuple[str, ...]
    tests: tuple[str, ...] = ()
    """Test files that it proves when it passes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check said, and how long it took."""

    check: Check
    seconds: float
    code: int
    output: str


# The bytecode of our files and of rewritten tests is half the time to collect them: keep it, whatever the caller does.
_ENVIRONMENT = ("env", "--unset=PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE")
# Each library that is slow to import is imported by few runs of pytest: workers that share all tests would all import
# all of them, which takes as long as a quarter of the tests. The longest run decides when the last worker ends.
RECIPE = ("services/recipe",)  # the official clients, SQLAlchemy, FastAPI
KERNELS = ("kernels",)  # torch
ENGINES = ("services/prefill", "services/decode", "services/vision", "bench")  # torch, too
# These import nothing slow, and wait more than they work.
WAITING = ("services/chassis", "services/local")
RUNS = {"recipe": RECIPE, "kernels": KERNELS, "engines": ENGINES, "waiting": WAITING}
_AT_ONCE = 3
"""Two cores are busy while a third check waits: for a timeout that a test is about, or for the disk."""
_ROOTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
# A root that is asked for is not ignored, so those of the other runs are left out.
OTHERS = (
    *(root for root in _ROOTS if not any(root in folders for folders in RUNS.values())),
    *(f"--ignore={folder}" for folders in RUNS.values() for folder in folders),
)


def _python(*words: str) -> tuple[str, ...]:
    return (*_ENVIRONMENT, sys.executable, "-m", *words)


def _fast_tests(tree: proven.Tree, name: str, folders: Sequence[str], *, again: bool) -> Iterator[Check]:
    tests = tree.tests(folders)
    left = tests if again else proven.unproven(tree, tests)
    words = ("-q", "-m", "not slow and not long", "-x", "--no-header", "-p", "no:cacheprovider")
    if left:
        yield Check(
            f"fast tests, {name} ({len(left)} of {len(tests)} files)", _python("pytest", *words, *left), tuple(left)
        )
    else:
        print(f"{f'fast tests, {name}':44} ok      unchanged since they passed")


def fast_tests(tree: proven.Tree, *, again: bool) -> Iterator[Check]:
    """Longest first: the workers then finish at about the same time."""
    for name, folders in (*RUNS.items(), ("others", OTHERS)):
        yield from _fast_tests(tree, name, folders, again=again)


# In a fresh clone, or after a change that many files import, it takes longest of all, and a core to itself: whatever
# begins later fills the other one meanwhile.
TYPES = Check("types", _python("mypy"))
CHECKS = (
    Check("import contracts", (str(_BIN / "lint-imports"),)),
    Check("lint", (str(_BIN / "ruff"), "check", "--quiet")),
    Check("format", (str(_BIN / "ruff"), "format", "--check", "--quiet")),
    Check("sizes", _python("tools.sizes")),
    Check("stubs", _python("tools.stubs", "--check")),
)


def run(check: Check) -> Outcome:
    """Run one check to its end, or to the deadline."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            check.command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Outcome(check, time.monotonic() - begun, 124, f"no end after {_DEADLINE_SECONDS} s")
    has_none = bool(check.tests) and done.returncode == _NO_TESTS
    return Outcome(check, time.monotonic() - begun, 0 if has_none else done.returncode, done.stdout + done.stderr)


def main(words: Sequence[str]) -> None:
    """Run all checks; exit with 1 when one failed."""
    begun = time.monotonic()
    tree = proven.Tree()
    tests = [] if "--no-tests" in words else [*fast_tests(tree, again="--all" in words)]
    checks = [TYPES, *tests, *CHECKS]
    failed = []
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
        for done in as_completed([workers.submit(run, check) for check in checks]):
            outcome = done.result()
            verdict = "ok" if outcome.code == 0 else "FAILED"
            print(f"{outcome.check.name:44} {verdict:7} {outcome.seconds:5.1f} s", flush=True)
            if outcome.code:
                failed.append(outcome)
            else:
                proven.passed(tree, outcome.check.tests)
    for outcome in failed:
        print(f"\n--- {outcome.check.name}: {' '.join(outcome.check.command)}\n{outcome.output[-6000:]}")
    print(f"\n{len(checks) - len(failed)} of {len(checks)} checks passed in {time.monotonic() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

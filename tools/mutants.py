"""Does every promise have a test that goes red when the promise is broken?

Each mutant of `e2e/mutants.toml` replaces a few words in a copy of the tree and runs one test there, which must fail.
The copy is a folder of its own: the checkout is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "e2e" / "mutants.toml"
_DEADLINE_SECONDS = 420
_NO_TESTS_RAN = (4, 5)  # pytest's exit codes for a usage error and for nothing collected


@dataclass(frozen=True, slots=True)
class Mutant:
    """One promise, the edit that breaks it, and the test that must notice."""

    name: str
    promise: str
    file: str
    find: str
    replace: str
    test: str


def load(table: Path = TABLE) -> list[Mutant]:
    """Read the table; refuse a mutant whose text is not found exactly once: it would test nothing."""
    mutants = [Mutant(name, **fields) for name, fields in tomllib.loads(table.read_text(encoding="utf-8")).items()]
    for mutant in mutants:
        found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.find)
        if found != 1:
            raise SystemExit(f"mutant {mutant.name}: its text stands {found} times in {mutant.file}, must be once")
    return mutants


def copy_tree(target: Path) -> None:
    """Copy what git knows or would add, and lend the model cache."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    models = ROOT / ".fathom" / "models"
    if models.exists():
        (target / ".fathom").mkdir()
        (target / ".fathom" / "models").symlink_to(models)


def survives(mutant: Mutant) -> str:
    """Return why the mutant was not caught; an empty string when its test went red as it must."""
    with tempfile.TemporaryDirectory(prefix="fathom-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        path = tree / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.find, mutant.replace), encoding="utf-8")
        # PYTHONPATH goes before the editable install, in this process and in every service it starts.
        env = {**os.environ, "PYTHONPATH": str(tree)}  # noqa: TID251 - a child's whole environment, not a setting
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=_DEADLINE_SECONDS
        )
    if done.returncode in _NO_TESTS_RAN:
        return f"its test did not run:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
    return "" if done.returncode else "its test stayed green"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    names = set(parser.parse_args().names)
    mutants = [m for m in load() if not names or m.name in names]
    alive = 0
    for mutant in mutants:
        begun = time.monotonic()
        why = survives(mutant)
        alive += bool(why)
        print(
            f"{'ALIVE' if why else 'caught'}  {mutant.name:32} {time.monotonic() - begun:4.0f} s  {mutant.promise}",
            flush=True,
        )
        if why:
            print(f"        {why}")
    print(f"\n{len(mutants) - alive} of {len(mutants)} mutants caught")
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()

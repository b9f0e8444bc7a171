"""Are the generated stubs beside proto/*.proto the ones that the sources give?"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_KINDS = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")


def generate(target: Path) -> list[Path]:
    """Write all stubs below `target`; return their paths relative to it."""
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"--{kind}={target}" for kind in _KINDS), *sources]
    # protoc finds its plugins on PATH; they are installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    done = subprocess.run(command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed:\n{done.stderr}")
    return sorted(p.relative_to(target) for p in (target / "proto").glob("*_pb2*"))


def stale() -> list[str]:
    """Name each committed stub that differs from a fresh one, or is missing or left over."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
        committed = {p.relative_to(ROOT) for p in (ROOT / "proto").glob("*_pb2*")}
        wrong = [
            str(p) for p in fresh if p not in committed or not filecmp.cmp(Path(folder) / p, ROOT / p, shallow=False)
        ]
        return wrong + [str(p) for p in sorted(committed - set(fresh))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a stub is stale")
    if parser.parse_args().check:
        if wrong := stale():
            raise SystemExit(f"stale stubs (run `make proto`): {', '.join(wrong)}")
        return
    print(f"{len(generate(ROOT))} stubs written")


if __name__ == "__main__":
    main()

"""Does any GPU kernel read or write where it must not, or race with itself?

    python -m bench.gpu_sanitize                     # memcheck and racecheck over a small run of every kernel
    python -m bench.gpu_sanitize --only "v41 index" --only "v41 streams" --tools racecheck --seconds 120
    python -m bench.gpu_sanitize --list              # the runs

All runs take three minutes by memcheck and more than three by racecheck; one takes 8 to 40 seconds. A run that has not
ended after --seconds is ended, said, and the next begins. Needs NVIDIA's compute-sanitizer (part of the CUDA toolkit)
and a GPU; says so where one is missing. One JSON line for each kernel and tool, and, where all runs are asked for, one
for each kernel that no run launched. Exit status 0: every kernel ran, and is clean.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
_LAUNCHED = "launched "
_RUN_SECONDS = 300.0
_ABSENT = 2
_WORDS = 400
"""Of a report, that are kept."""
_PLACES = "/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer"


def sanitizer() -> str | None:
    """Where the tool is."""
    places = (shutil.which("compute-sanitizer"), *(place for place in _PLACES if Path(place).exists()))
    return next((place for place in places if place), None)


def kernels_in_files() -> set[str]:
    """Every function that is launched as a kernel: file.function."""
    found = set()
    for file in sorted((ROOT / "kernels" / "ops").glob("gpu_*.py")):
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+)", text, re.MULTILINE):
            if name.endswith("_kernel") or re.search(rf"\b{name}\[", text):
                found.add(f"{file.stem}.{name}")
    return found


def reports_by_kernel(said: str) -> dict[str, list[str]]:
    """What the tool reports of each kernel: by function names, and by "" what it does not place.

    An error is a headline ("Invalid __global__ read of size 4 bytes", "Error: Race reported between ...") whose first
    line with " at " names the kernel, as `_kernel+0x1a0` or as `0x1a0 in file.py:12:_kernel`.
    """
    found: dict[str, list[str]] = {}
    last: list[str] = []
    is_open, headline = False, ""
    for line in said.splitlines():
        text = line.removeprefix("=========").strip()
        if not line.startswith("========="):
            continue
        if re.match(r"(Invalid|Error: |Warning: Race|Program hit|Misaligned|Potential)", text):
            is_open, headline = True, text
        place = re.search(r"\bat (?:(\w+)\+0x|0x[0-9a-f]+ in (?:\S+:)?(\w+))", text)
        if is_open and place:
            last = found.setdefault(place[1] or place[2], [])
            last.append(headline if headline == text else f"{headline} {text}")
            is_open = False
        elif last and text.startswith("and "):  # a race's other side
            last[-1] = f"{last[-1]} {text}"
    summary = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", said)
    if sum(int(a or b) for a, b in summary) > 0 and not found:
        found[""] = ["not placed"]
    return found


def results(run: str, tool: str, said: str, status: int | None) -> list[dict[str, Any]]:
    """A line for each kernel that a run launched, from all that was printed.  status: None where it was ended."""
    launched = next((line for line in said.splitlines() if line.startswith(_LAUNCHED)), None)
    reports = reports_by_kernel(said)
    common = {"run": run, "tool": tool}
    if launched is None:
        tail = said.strip()[-800:]
        why = "was ended by its time limit" if status is None else f"ended with {status} before its end"
        named = [common | _blamed(name, told) for name, told in reports.items()]
        return [*named, common | {"kernel": "", "passed": False, "failed": f"{why}: {tail}"}]
    rows: list[dict[str, Any]] = []
    for kernel, count in sorted(json.loads(launched.removeprefix(_LAUNCHED)).items()):
        told = reports.pop(kernel.partition(".")[2], [])
        clean = {"kernel": kernel, "errors": 0, "passed": True}
        rows.append(common | {"launches": count} | (_blamed(kernel, told) if told else clean))
    # Kernels of torch or of the library, and what the tool did not place.
    rows += [common | _blamed(name, told) for name, told in reports.items()]
    return rows


def _blamed(kernel: str, told: list[str]) -> dict[str, Any]:
    """How many reports, and the first of them in words: what is to be looked for."""
    return {"kernel": kernel, "errors": len(told), "passed": False, "first": told[0][:_WORDS]}


def sanitize(tool_path: str, run: str, tool: str, seconds: float) -> list[dict[str, Any]]:
    """One run in a process of its own, under one tool, for so long at most."""
    # Without torch's cache of freed memory, what lies behind a tensor belongs to nobody: reading it is found.
    caching = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"] if tool == "memcheck" else []
    start = time.monotonic()
    status, said = bounded(
        [*caching, tool_path, "--tool", tool, "--print-limit", "1000", "--target-processes", "application-only",
         sys.executable, "-u", "-m", "bench.gpu_sanitize", "--inside", run],
        seconds,
    )  # fmt: skip
    rows = results(run, tool, said, status)
    taken = round(time.monotonic() - start, 1)
    return [row | {"run_seconds": taken} for row in rows]


def bounded(words: list[str], seconds: float) -> tuple[int | None, str]:
    """A command's exit status, None where it was ended after so long, and all that it and its children printed."""
    status: int | None = None
    with tempfile.TemporaryFile() as said:
        running = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            status = running.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:  # the tool's own child is not ended by the tool's end
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        said.seek(0)
        return status, said.read().decode(errors="replace")


def inside(run: str) -> None:
    """The run itself; prints which kernels it launched, and how often."""
    import torch
    from triton.runtime.jit import JITFunction

    from bench.gpu_sanitize_cases import RUNS

    launched: Counter[str] = Counter()
    launch = JITFunction.run

    def counted(kernel: JITFunction[Any], *args: Any, **named: Any) -> Any:
        launched[f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"] += 1
        return launch(kernel, *args, **named)

    JITFunction.run = counted
    RUNS[run]("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(_LAUNCHED + json.dumps(launched), flush=True)


def missing(rows: Iterable[dict[str, Any]], tools: Iterable[str]) -> list[dict[str, Any]]:
    """A line for each kernel that a tool never saw."""
    seen = {(row["tool"], row["kernel"]) for row in rows}
    return [
        {"tool": tool, "kernel": kernel, "passed": False, "failed": "no run launched it"}
        for tool in tools
        for kernel in sorted(kernels_in_files())
        if (tool, kernel) not in seen
    ]


def why_not() -> str | None:
    """What this machine lacks."""
    import torch

    if sanitizer() is None:
        return "compute-sanitizer is not installed here: it is part of NVIDIA's CUDA toolkit"
    return None if torch.cuda.is_available() else "there is no GPU here"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a run of bench/gpu_sanitize_cases.py; all of them otherwise")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=_RUN_SECONDS, help="of a run under one tool, at most")
    parser.add_argument("--out", type=Path, help="folder for gpu_sanitize.json, which is written after each run")
    parser.add_argument("--list", action="store_true", help="say the runs and do none")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        inside(asked.inside)
        return 0
    if not asked.list and (lacking := why_not()):
        print(json.dumps({"bench": "gpu_sanitize", "passed": None, "skipped": lacking}))
        return _ABSENT
    from bench.gpu_sanitize_cases import RUNS

    if unknown := set(asked.only or ()) - set(RUNS):
        parser.error(f"no run {', '.join(map(repr, sorted(unknown)))}: there are {', '.join(map(repr, RUNS))}")
    if asked.list:
        print("\n".join(RUNS))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a run is a group of its own: it must not outlive this
    return check_all(asked.only or list(RUNS), asked.tools, asked.seconds, asked.out, is_whole=not asked.only)


def check_all(runs: Sequence[str], tools: Sequence[str], seconds: float, out: Path | None, *, is_whole: bool) -> int:
    """is_whole: kernels that no run launches are said."""
    rows: list[dict[str, Any]] = []

    def say(more: Iterable[dict[str, Any]]) -> None:
        for row in more:
            rows.append(row)
            print(json.dumps({"bench": "gpu_sanitize"} | row), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "gpu_sanitize.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")

    tool_path = sanitizer() or ""
    for tool in tools:
        for run in runs:
            say(sanitize(tool_path, run, tool, seconds))
    say(missing(rows, tools) if is_whole else [])
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

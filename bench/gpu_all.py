"""Which benches are worth a GPU's time, in which order, and what did each of them find?

    python -m bench.gpu_all --minutes 25 --out DIR        # all parts, most worth first
    python -m bench.gpu_all --list                        # parts, their time limits, and what each is for
    python -m bench.gpu_all --minutes 9 --out DIR         # goes on behind what ended in DIR: nothing is run twice
    python -m bench.gpu_all --minutes 9 --out DIR --only "sanitize.*" --again

Each part is a process of its own that ends by its limit, or with the minutes. What it prints goes to DIR/PART.txt as it
is printed, its JSON documents to DIR/PART/; DIR/summary.json is written after each part. So a run that is cut has lost
nothing but what it was doing. One JSON line a part, and one at the end: what passed, failed, was cut, was not reached.
Exit status 0: every part asked for passed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_parts import PARTS, Part

ROOT = Path(__file__).resolve().parent.parent
_ABSENT = 2
_LEAST_SECONDS = 15.0
"""With less left a part is not begun: starting Python with a GPU takes five."""
_GRACE_SECONDS = 5.0
_LAST_WORDS = 1500
ENDED = ("passed", "failed")
"""What is not run again."""


def run_part(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """One part, at most so long.  What became of it, and the figures it said."""
    said, files = folder / f"{part.name}.txt", folder / part.name
    files.mkdir(parents=True, exist_ok=True)
    words = [each.replace("{out}", str(files)) for each in part.words]
    start = time.monotonic()
    with said.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            status: int | None = running.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(running)
    figures = figures_in(said)
    wrong = [each for each in figures if "failed" in each or is_bad(each)]
    became = "cut" if status is None else "failed" if status or wrong else "passed"
    if status == _ABSENT and any("skipped" in each for each in figures):  # bad arguments end with 2, too
        became = "skipped"
    made: dict[str, Any] = {
        "part": part.name,
        "became": became,
        "seconds": round(time.monotonic() - start, 1),
        "limit": round(seconds, 1),
        "status": status,
        "figures": len(figures),
        "not_passed": wrong[:8],
    }
    if became != "passed":
        made["last_words"] = said.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
    return made


def _end(running: subprocess.Popen[bytes]) -> None:
    """The part, and whatever it left behind in its own session."""
    for number, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        try:
            os.killpg(running.pid, number)
        except ProcessLookupError:
            break
        try:
            running.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    running.wait()


def is_bad(figure: Mapping[str, Any]) -> bool:
    """By whichever word a bench has for it."""
    return any(figure.get(word) is False for word in ("passed", "ok", "same"))


def figures_in(said: Path) -> list[dict[str, Any]]:
    """The JSON lines among what was printed; one that is cut in the middle is none."""
    found = []
    for line in said.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return found


class Summary:
    """What became of each part, in a file that is whole after each of them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "summary.json"
        self.parts: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            try:
                parts = json.loads(self._path.read_text(encoding="utf-8"))["parts"]
            except (ValueError, KeyError, TypeError):  # of a machine that went away while it was written
                self._path.replace(self._path.with_suffix(".damaged"))
            else:
                self.parts = {each["part"]: each for each in parts}

    def add(self, made: dict[str, Any]) -> None:
        """Keep it, in the file too unless that cannot be written: the other parts are worth running all the same."""
        self.parts[made["part"]] = made
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"parts": list(self.parts.values())}, indent=1) + "\n", encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            print(json.dumps({"bench": "gpu_all", "not kept": made["part"], "because": str(error)}), flush=True)

    def has_ended(self, part: Part) -> bool:
        return self.parts.get(part.name, {}).get("became") in ENDED


def run_all(parts: Sequence[Part], folder: Path, seconds: float, *, again: bool = False) -> dict[str, list[str]]:
    """Parts in order while there is time.  again: also those that ended before.  Returns names by outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    summary, end = Summary(folder), time.monotonic() + seconds
    became: dict[str, list[str]] = {}
    for part in parts:
        left = end - time.monotonic() - _GRACE_SECONDS
        if summary.has_ended(part) and not again:
            outcome = summary.parts[part.name]["became"]
        elif left < min(_LEAST_SECONDS, part.seconds):
            outcome = "not reached"
        else:
            made = run_part(part, folder, min(part.seconds, left))
            summary.add(made)
            print(json.dumps({"bench": "gpu_all"} | made), flush=True)
            outcome = made["became"]
        became.setdefault(outcome, []).append(part.name)
    print(json.dumps({"bench": "gpu_all", "end": became}), flush=True)
    return became


def chosen(only: Sequence[str], skip: Sequence[str], model: Path | None) -> list[Part]:
    """Parts whose whole names match one of `only`, and none of `skip`; those that want a model folder with one."""

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    parts = [each for each in PARTS if (not only or matches(each.name, only)) and not matches(each.name, skip)]
    return [each.on(model and model.resolve()) for each in parts if model is not None or not each.wants_model]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="of all parts together")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".bench" / "gpu_all", help="folder of what is found; .bench/gpu_all"
    )
    parser.add_argument("--only", nargs="*", default=[], help="regular expressions of whole names")
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--model", type=Path, help="a folder of a small dense model, for the parts that want one")
    parser.add_argument("--again", action="store_true", help="also what ended in this folder before")
    parser.add_argument("--list", action="store_true", help="say the parts and run none")
    asked = parser.parse_args()
    parts = chosen(asked.only, asked.skip, asked.model)
    if asked.list:
        for part in parts:
            print(f"{part.name:24} {part.seconds:4} s  {part.why}\n{'':31}python {shlex.join(part.words)}")
        return 0
    if not _has_gpu():
        print(json.dumps({"bench": "gpu_all", "skipped": "there is no GPU here"}))
        return _ABSENT
    for number in (signal.SIGTERM, signal.SIGHUP):  # a part has a session of its own, and is ended on the way out
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    became = run_all(parts, asked.out.resolve(), asked.minutes * 60, again=asked.again)
    return int(set(became) != {"passed"})


def _has_gpu() -> bool:
    """Asked late: whoever wants the list needs no torch."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())

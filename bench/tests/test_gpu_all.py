"""A run over all parts ends in time, keeps what each part said, and goes on where it was cut."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_all
from bench.gpu_all import chosen, figures_in, run_all
from bench.gpu_parts import PARTS, Part

GOOD = """
import json, pathlib, sys
print(json.dumps({"figure": "a", "passed": True}))
pathlib.Path(sys.argv[1], "a.json").write_text("{}")
"""
BAD = """
print('{"figure": "b", "ok": false}')
raise SystemExit(1)
"""
CHATTY = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
print('{"figure": "first", "passed": true}')
print('{"figure": "second", "passed"', end="")
time.sleep(600)
"""
LEAVES = CHATTY.rpartition("time.sleep(600)")[0]
WRONG = """
print('{"figure": "c", "same": false}')
"""
ABSENT = """
print('{"skipped": "there is no GPU here"}')
raise SystemExit(2)
"""


def part(name: str, code: str, seconds: float = 20.0) -> Part:
    return Part(name, ("-c", code, "{out}"), seconds, "")


def summary(folder: Path) -> dict[str, dict[str, object]]:
    parts = json.loads((folder / "summary.json").read_text())["parts"]
    return {each["part"]: each for each in parts}


def assert_ends(pid: int) -> None:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    pytest.fail(f"{pid} still runs")


def test_each_part_is_said_and_none_hides_another(tmp_path: Path) -> None:
    """Passed, failed and skipped ones, in order; what they wrote lies in folders of their own."""
    became = run_all([part("bad", BAD), part("none", ABSENT), part("wrong", WRONG), part("good", GOOD)], tmp_path, 60)

    assert {"failed": ["bad", "wrong"], "skipped": ["none"], "passed": ["good"]} == became
    made = summary(tmp_path)
    assert ["bad", "none", "wrong", "good"] == list(made)
    assert [{"figure": "b", "ok": False}] == made["bad"]["not_passed"]
    assert 1 == made["bad"]["status"]
    assert (tmp_path / "good" / "a.json").exists()
    assert "last_words" not in made["good"]


def test_a_part_ends_by_its_limit_with_all_it_started(tmp_path: Path) -> None:
    """What it said stays; the next part runs."""
    start = time.monotonic()
    became = run_all([part("slow", CHATTY, 1.5), part("good", GOOD)], tmp_path, 60)

    assert {"cut": ["slow"], "passed": ["good"]} == became
    assert 15 > time.monotonic() - start
    assert [{"figure": "first", "passed": True}] == figures_in(tmp_path / "slow.txt")
    assert_ends(int((tmp_path / "slow" / "child").read_text()))


def test_what_a_part_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """A part that passes may have forgotten a process that holds the GPU."""
    assert {"passed": ["leaves"]} == run_all([part("leaves", LEAVES)], tmp_path, 60)
    assert_ends(int((tmp_path / "leaves" / "child").read_text()))


def test_minutes_bound_all_parts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part gets what is left; with too little left none begins."""
    monkeypatch.setattr(gpu_all, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(gpu_all, "_LEAST_SECONDS", 1.0)
    start = time.monotonic()
    became = run_all([part("slow", CHATTY), part("never", GOOD)], tmp_path, 3)

    assert {"cut": ["slow"], "not reached": ["never"]} == became
    assert 8 > time.monotonic() - start
    assert ["slow"] == list(summary(tmp_path))


def test_a_second_run_goes_on_where_the_first_was_cut(tmp_path: Path) -> None:
    """What passed or failed is not run again, unless it is asked for."""
    run_all([part("good", GOOD), part("slow", CHATTY, 1.0)], tmp_path, 60)
    (tmp_path / "good.txt").write_text("kept")
    became = run_all([part("good", GOOD), part("slow", GOOD), part("bad", BAD)], tmp_path, 60)

    assert {"passed": ["good", "slow"], "failed": ["bad"]} == became
    assert "kept" == (tmp_path / "good.txt").read_text()
    assert ["passed", "passed", "failed"] == [each["became"] for each in summary(tmp_path).values()]
    run_all([part("good", GOOD)], tmp_path, 60, again=True)
    assert "kept" != (tmp_path / "good.txt").read_text()


def test_parts_are_chosen_by_name_and_model() -> None:
    """Names are whole and unique; a part that wants a model runs with one only."""
    names = [each.name for each in PARTS]

    assert len(names) == len(set(names))
    assert [] == chosen(["sanitize"], [], None)
    assert 14 == len(chosen(["sanitize-.*"], [], None))
    assert 7 == len(chosen(["sanitize-.*"], ["sanitize-memcheck-.*"], None))
    with_model = {each.name: each for each in chosen([], [], Path("m"))}
    assert {"services-dense"} == set(with_model) - {each.name for each in chosen([], [], None)}
    assert str(Path("m").resolve()) in with_model["services-dense"].words


@pytest.mark.slow
@pytest.mark.parametrize("each", [part for part in PARTS if part.name != "compile"], ids=lambda each: each.name)
def test_every_part_names_a_bench_that_takes_its_words(each: Part, tmp_path: Path) -> None:
    """On a machine without a GPU it ends soon and says why, never with a traceback of its own arguments."""
    made = gpu_all.run_part(each.on(tmp_path), tmp_path, 60)
    said = (tmp_path / f"{each.name}.txt").read_text()

    assert "cut" != made["became"], said
    assert "unrecognized arguments" not in said
    assert "Traceback" not in said, said


def test_a_run_that_is_told_to_end_takes_its_part_along(tmp_path: Path) -> None:
    """A part left behind would share the GPU with whatever is measured next."""
    begin = "from bench import gpu_all; from bench.gpu_parts import Part; gpu_all._has_gpu = lambda: True; "
    begin += f"gpu_all.PARTS = (Part('chatty', ('-c', {CHATTY!r}, '{{out}}'), 60.0, ''),); import sys; "
    words = [sys.executable, "-c", f"{begin}sys.exit(gpu_all.main())", "--out", str(tmp_path)]
    with subprocess.Popen(words, cwd=gpu_all.ROOT) as running:
        child = tmp_path / "chatty" / "child"
        give_up = time.monotonic() + 20
        while not (child.exists() and child.read_text()) and time.monotonic() < give_up:
            time.sleep(0.05)
        running.terminate()
        assert 128 + signal.SIGTERM == running.wait(20)
    assert_ends(int(child.read_text()))


def test_a_damaged_summary_is_set_aside(tmp_path: Path) -> None:
    """Of a machine that went away while it was written: all parts run again."""
    (tmp_path / "summary.json").write_text("")

    assert {"passed": ["good"]} == run_all([part("good", GOOD)], tmp_path, 60)
    assert (tmp_path / "summary.damaged").exists()

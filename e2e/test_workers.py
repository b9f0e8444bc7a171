"""Does a run of the whole-suite tests go on when one of its workers crashes?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.conftest import ROOT

pytestmark = pytest.mark.slow

SECONDS = 60
FIRST = """
import time
from pathlib import Path

def test_goes_on_until_the_other_is_about_to_crash():
    give_up = time.monotonic() + 20
    while not Path("begun").exists() and time.monotonic() < give_up:
        time.sleep(0.02)

def test_is_held_until_there_is_another_or_none():
    pass
"""
DONE_BEFORE = "def test_quick(): pass\n"
LAST = """
import os
from pathlib import Path
import pytest

def test_begins():
    Path("begun").touch()

@pytest.mark.alone
def test_keeps_its_turn():
    pass

@pytest.mark.alone
def test_crashes():
    os._exit(3)

@pytest.mark.alone
def test_measures():
    pass

def test_comes_last():
    pass
"""


def test_a_crash_fails_one_test_and_no_other_waits_for_it(tmp_path: Path) -> None:
    """The turn that the worker held is free, its other tests run elsewhere, and groups that it had done do not."""
    files = {"a": FIRST, **dict.fromkeys("bcdef", DONE_BEFORE), "g": LAST}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    words = ["-p", "e2e.conftest", "-n", "2", "--no-loadscope-reorder", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--basetemp", str(tmp_path / "scratch"), *words],
        cwd=tmp_path,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )

    assert "1 failed, 11 passed in " in done.stdout.splitlines()[-1], done.stdout
    assert 1 == done.stdout.count("crashed while running 'test_g.py::test_crashes'\n"), done.stdout

"""Is a crashed process started again, later each time, and stopped for good in the end?"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.local import state
from services.local.plan import ProcessPlan
from services.local.supervisor import WELL_SECONDS, Child, backoff_seconds


@pytest.mark.parametrize(
    ("num_failures", "expected"), [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (6, 10.0), (1000, 10.0)]
)
def test_waits_double_up_to_ten_seconds(num_failures: int, expected: float) -> None:
    """A service that keeps crashing is tried less and less often, but always again."""
    assert expected == backoff_seconds(num_failures)


def child(tmp_path: Path, code: str) -> Child:
    plan = ProcessPlan(
        "vision", "vision", (sys.executable, "-S", "-c", code), "127.0.0.1:1", "127.0.0.1:2", {"replica": "v"}, {}
    )
    return Child(plan, tmp_path / "log")


def test_an_end_is_noted_with_its_status(tmp_path: Path, capsys) -> None:
    """The log says which process ended, how, and when it starts again."""
    crashing = child(tmp_path, "import sys; sys.exit(3)")
    crashing.start()
    assert crashing.process is not None
    crashing.process.wait(10)
    now = time.monotonic()

    assert crashing.look(now)
    assert (3, now + 0.5) == (crashing.exit_code, crashing.due)
    assert '"launcher.service.ended"' in capsys.readouterr().out
    assert crashing.record().identity is None


def test_a_long_good_life_starts_the_waits_anew(tmp_path: Path) -> None:
    """Last week's crashes do not delay today's restart."""
    crashing = child(tmp_path, "")
    crashing.num_failures = 6
    crashing.start()
    assert crashing.process is not None
    crashing.process.wait(10)

    crashing.look(crashing.started + WELL_SECONDS + 1)

    assert 1 == crashing.num_failures


def test_a_child_is_told_its_settings_and_no_others(tmp_path: Path, monkeypatch) -> None:
    """The plan's settings arrive under the service's prefix; the caller's own FATHOM_ names do not."""
    monkeypatch.setenv("FATHOM_VISION_LISTEN", "elsewhere:1")
    telling = child(tmp_path, "import os; print({k: v for k, v in os.environ.items() if k.startswith('FATHOM_')})")
    telling.start()
    assert telling.process is not None
    telling.process.wait(30)

    assert "{'FATHOM_VISION_REPLICA': 'v'}\n" == (tmp_path / "log").read_text()


def test_a_running_child_is_recorded_by_pid_and_birth(tmp_path: Path) -> None:
    """What the state file says of a child is enough to find it, and only it."""
    running = child(tmp_path, "import time; time.sleep(30)")
    running.start()
    assert isinstance(running.process, subprocess.Popen)
    try:
        record = running.record()

        assert record.identity is not None
        assert running.process.pid == record.identity.pid
        assert record.identity.process() is not None
        assert state.Identity.of(os.getpid()) != record.identity
        assert (0, None) == (record.restarts, record.exit_code)
    finally:
        running.process.kill()
        running.process.wait()

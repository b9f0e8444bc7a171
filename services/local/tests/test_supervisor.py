"""Is a crashed process started again, later each time, and stopped for good in the end?"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.chassis.testing import free_port
from services.local import state
from services.local.children import PYTHON_VARIABLES
from services.local.home import Home
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


SUPERVISOR = """
import os, sys
from pathlib import Path
from services.local import children
from services.local.home import Home
from services.local.plan import Options, ProcessPlan
from services.local.supervisor import Supervisor

home = Home.of(Path(sys.argv[1]))
lock = home.lock()
home.prepare()
nats = (children.nats_server(), "--addr", "127.0.0.1", "--port", sys.argv[2], "--jetstream", "--store_dir", str(home.nats))
plans = (
    ProcessPlan("nats-0", "nats", nats, f"127.0.0.1:{sys.argv[2]}", "", {}, {}),
    ProcessPlan("vision-0", "vision", (sys.executable, "-S", "-c", "import time; time.sleep(60)"), "a:1", "a:2", {}, {}),
)
Supervisor(Options(model=Path("/m")), home, lock, plans).run()
"""


@contextlib.contextmanager
def supervising(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[state.Identity]]]:
    """A supervisor with two children; yields it, and all three."""
    command = [sys.executable, "-P", "-c", SUPERVISOR, str(folder), str(free_port())]
    supervisor = subprocess.Popen(command, env=PYTHON_VARIABLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        give_up = time.monotonic() + 30
        while len(running := left_running(Home.of(folder))) < 3 and time.monotonic() < give_up:
            time.sleep(0.05)
        assert 3 == len(running)
        yield supervisor, running
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.slow
def test_signals_that_come_at_once_do_not_hold_it_up(tmp_path: Path) -> None:
    """Children that end together, say: it still restarts what ends, and ends when it is told."""
    with supervising(tmp_path) as (supervisor, running):
        ended = time.monotonic() + 3
        while time.monotonic() < ended:
            os.kill(supervisor.pid, signal.SIGCHLD)  # `send_signal` would take its time
        running[-1].send(signal.SIGKILL)
        give_up = time.monotonic() + 30
        while [] == (again := [one for one in left_running(Home.of(tmp_path)) if one not in running]):
            assert time.monotonic() < give_up, "it was not started again"
            time.sleep(0.05)
        supervisor.terminate()
        said, _ = supervisor.communicate(timeout=30)

    assert 0 == supervisor.returncode, said
    assert [] == state.wait_ended([*running, *again], 0.0)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_suite_whose_folder_is_removed_ends(is_made_anew: bool, tmp_path: Path) -> None:
    """Nobody could find it any more. Within a second or two, all its processes; whatever stands there now is left."""
    home = Home.of(tmp_path)
    with supervising(tmp_path) as (supervisor, running):
        home.root.rename(tmp_path / "aside")
        if is_made_anew:
            home.prepare()
            home.lock_file.touch()
        said, _ = supervisor.communicate(timeout=30)

    assert b"is gone" in said
    assert [] == state.wait_ended(running, 0.0)
    assert is_made_anew == home.root.exists()
    assert not home.state.exists()


def left_running(home: Home) -> list[state.Identity]:
    suite = state.read(home.state)
    return suite.left_running() if suite is not None else []

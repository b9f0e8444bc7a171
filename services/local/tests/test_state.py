"""Is what we started told apart from what we did not?"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.local import state
from services.local.down import end
from services.local.home import Home

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def suite(supervisor: state.Identity, *processes: state.Identity) -> state.SuiteState:
    return state.SuiteState(
        supervisor=supervisor,
        url="http://127.0.0.1:1",
        model="m",
        processes=tuple(
            state.ProcessState(name=f"p{n}", service="p", address="", health_url="", log="", identity=identity)
            for n, identity in enumerate(processes)
        ),
    )


def test_a_state_file_reads_back_as_written(tmp_path: Path) -> None:
    """Writing and reading a state changes nothing."""
    written = suite(state.Identity.of(os.getpid()), state.Identity.of(os.getppid()))

    state.write(tmp_path / "state.json", written)

    assert written == state.read(tmp_path / "state.json")
    assert [tmp_path / "state.json"] == list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_damaged_state_file_is_no_state(tmp_path: Path, text: str) -> None:
    """Half a file, or another version's, counts as none."""
    (tmp_path / "state.json").write_text(text)

    assert state.read(tmp_path / "state.json") is None


def test_a_later_process_with_our_pid_is_left_alone(tmp_path: Path, sleeper) -> None:
    """`down` after a reboot must not end whoever has the recorded pid now."""
    real = state.Identity.of(sleeper.pid)
    stale = real.model_copy(update={"created_unix_seconds": real.created_unix_seconds - 100})
    home = Home.of(tmp_path)
    home.prepare()
    state.write(home.state, suite(stale, stale))

    assert 0 == end(home)
    assert sleeper.poll() is None


def test_what_a_dead_supervisor_left_is_ended(tmp_path: Path, sleeper) -> None:
    """`down` finds the processes by pid and creation time when nobody else can stop them."""
    gone = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    dead = state.Identity.of(gone.pid)
    gone.kill()
    gone.wait()
    home = Home.of(tmp_path)
    home.prepare()
    state.write(home.state, suite(dead, state.Identity.of(sleeper.pid)))

    assert 1 == end(home, told_seconds=0.1)
    assert -signal.SIGTERM == sleeper.wait(30)


def test_the_console_is_ended_with_the_suite(tmp_path: Path, sleeper) -> None:
    """It is none of the processes that serve, and yet ours to end."""
    console = state.ProcessState(
        name="console",
        service="console",
        address="",
        health_url="http://h:1/healthz",
        log="",
        identity=state.Identity.of(sleeper.pid),
    )
    written = suite(state.Identity.of(os.getpid())).model_copy(update={"console": console})

    assert console.identity in written.left_running()
    assert (*written.processes, console) == written.everyone
    assert "http://h:1" == written.console_url
    assert "" == suite(state.Identity.of(os.getpid())).console_url


def test_a_zombie_counts_as_ended(sleeper) -> None:
    """A process nobody has waited for yet is not alive."""
    identity = state.Identity.of(sleeper.pid)
    sleeper.kill()

    assert [] == state.wait_ended([identity], 5.0)
    assert sleeper.returncode is None

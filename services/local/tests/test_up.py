"""Does `fathom up` end its own suite, and no other one?"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.chassis.testing import free_port
from services.local import state
from services.local.home import Home
from services.local.starting import NotStarted
from services.local.up import Claim, _check_supervisor, _stop, claim


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Run what stands for a supervisor."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        try:
            yield process
        finally:
            process.kill()


def record(home: Home, supervisor: subprocess.Popen[bytes]) -> None:
    home.prepare()
    state.write(home.state, state.SuiteState(supervisor=state.Identity.of(supervisor.pid), url="", model=""))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Claim]:
    """A start's claim, left to its supervisor."""
    claimed = claim(Home.of(tmp_path), free_port())
    claimed.hand_over()
    yield claimed
    os.close(claimed.mark)


@pytest.mark.parametrize("is_moved", [True, False], ids=["moved", "taken-over"])
def test_another_suite_in_this_directory_is_left_running(is_moved: bool, own: Claim) -> None:
    """A command that slept while its folder was moved away, or its suite ended, wakes beside a stranger."""
    home = own.home
    with sleeper() as ours, sleeper() as other:
        record(home, ours)
        if is_moved:
            home.root.rename(home.root.with_name("aside"))
            home.prepare()
            home.lock_file.touch()
            with pytest.raises(NotStarted, match="was removed or moved away"):
                _check_supervisor(own, ours)
        record(home, other)

        _stop(own, ours)

        assert ours.returncode is not None
        assert other.poll() is None
        assert not (is_moved and own.is_here)


def test_our_own_suite_is_ended(own: Claim) -> None:
    """Whether or not its folder is still there."""
    for is_removed in (False, True):
        with sleeper() as ours:
            record(own.home, ours)
            if is_removed:
                shutil.rmtree(own.home.root)

            _stop(own, ours)

            assert ours.returncode is not None


def test_a_second_start_on_one_port_is_refused(tmp_path: Path) -> None:
    """At once, though nothing listens there while the first one prepares its model."""
    port = free_port()
    first = claim(Home.of(tmp_path / "first"), port)
    second = Home.of(tmp_path / "second")

    with pytest.raises(NotStarted, match=f"port {port} is in use by another suite; choose another one with --port"):
        claim(second, port)

    first.hand_over()
    again = claim(second, port)  # and its folder was left free
    again.hand_over()
    os.close(first.mark)
    os.close(again.mark)

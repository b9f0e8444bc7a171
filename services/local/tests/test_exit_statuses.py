"""Does every command end with the status that docs/operations.md gives it?"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.chassis.testing import free_port
from services.local import starting, state
from services.local.children import PYTHON_VARIABLES
from services.local.commands import app
from services.local.home import Home
from services.local.tests.test_starting import UP

FATHOM = (sys.executable, "-P", "-m", "services.local")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["up", "--model", "nowhere"], 1),
        (["up", "--set", "decode.max_bath=8"], 1),
        (["up", "--dtype", "int9"], 2),
        (["up", "--kv-bytes", "much"], 2),
        (["up", "--prefil", "2"], 2),
        (["down"], 0),
        (["status"], 1),
        (["chat", "hi"], 1),
        (["chat"], 2),
        (["logs"], 1),
        (["trace"], 1),
        (["keys", "list"], 1),
        (["tiny-model"], 2),
    ],
)
def test_where_nothing_runs(words: list[str], expected: int, tmp_path: Path, monkeypatch) -> None:
    """0 is for what was done, 1 for what could not be, 2 for what could not be understood."""
    monkeypatch.chdir(tmp_path)

    assert expected == CliRunner().invoke(app, words).exit_code


@contextmanager
def running(tmp_path: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process, killed in the end if it must be."""
    with subprocess.Popen(command, cwd=tmp_path, env=PYTHON_VARIABLES, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_stopped_before_it_was_ready(number: int, tmp_path: Path) -> None:
    """130, as a shell says of what Ctrl-C ended. (By `fathom down`: test_starting.py.)"""
    with running(tmp_path, sys.executable, "-P", "-c", UP, str(tmp_path), str(free_port())) as up:
        until(lambda: "43%" in starting.reason_to_wait(Home.of(tmp_path)))
        up.send_signal(number)

        assert 130 == up.wait(30)


def test_chat_stopped_before_its_answer(tmp_path: Path) -> None:
    """130."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with running(tmp_path, *FATHOM, "chat", "--url", url, "hi") as chat:
            mute.settimeout(30)
            asked, _ = mute.accept()
            chat.send_signal(signal.SIGINT)

            assert 130 == chat.wait(30)
            asked.close()


def test_logs_stopped_while_they_follow(tmp_path: Path) -> None:
    """0: it is how one ends them."""
    home = Home.of(tmp_path)
    home.prepare()
    home.log("decode-0").write_text("a line\n")
    with running(tmp_path, sys.executable, "-S", "-c", "import time; time.sleep(60)") as supervisor:
        suite = state.SuiteState(supervisor=state.Identity.of(supervisor.pid), url="", model="m")
        state.write(home.state, suite)
        with running(tmp_path, *FATHOM, "logs") as logs:
            assert logs.stdout is not None
            assert "decode-0 | a line\n" == logs.stdout.readline()
            logs.send_signal(signal.SIGINT)

            assert 0 == logs.wait(30)

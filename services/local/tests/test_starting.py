"""Does everybody know of a start that has not come far, and does `fathom down` end it?"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.chassis.testing import free_port
from services.local import starting, state
from services.local.children import PYTHON_VARIABLES
from services.local.commands import app
from services.local.down import GIVE_UP
from services.local.home import Home
from services.local.interrupts import ENDS, Ears, Interrupted
from services.local.progress import LineDisplay
from services.local.starting import NotStarted, announced

UP = """
import sys, time
from pathlib import Path
from services.local.home import Home
from services.local.plan import Options
from services.local.progress import LineDisplay
from services.local.up import up

def prepare(show):
    for _ in range(600):
        show.install("convert weights", 43, 100)
        time.sleep(0.1)

sys.exit(up(Home.of(Path(sys.argv[1])), Options(model=Path("/m"), port=int(sys.argv[2])), LineDisplay(), prepare, detach=False))
"""


def fathom(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_a_start_is_known_until_it_ends(tmp_path: Path, capsys) -> None:
    """What it is at and how far; nothing of it is left behind, and what is shown stays as it was."""
    home = Home.of(tmp_path)
    lock = home.lock()
    assert lock is not None
    with announced(home, LineDisplay(), lock) as show, show:
        show.install("convert weights", 43, 100)
        begun = starting.read(home)

    assert begun is not None
    assert "preparing the model: convert weights 43%" == begun.words
    assert "model: convert weights 43%\n" == capsys.readouterr().out
    assert starting.read(home) is None
    assert not home.starting.exists()
    os.close(lock)


def test_the_start_of_another_suite_in_our_folders_place_is_left_alone(tmp_path: Path) -> None:
    """A start that slept while its folder was moved away neither overwrites nor removes what stands there now."""
    home = Home.of(tmp_path)
    lock = home.lock()
    assert lock is not None
    with pytest.raises(NotStarted, match="was removed or moved away"), announced(home, LineDisplay(), lock) as show:
        home.root.rename(tmp_path / "aside")
        home.prepare()
        home.lock_file.touch()
        home.starting.write_text("another's")
        show.install("convert weights", 43, 100)

    assert "another's" == home.starting.read_text()
    os.close(lock)


def test_the_next_start_in_our_folder_is_left_alone(tmp_path: Path) -> None:
    """The folder is free for it a moment before our own words are removed."""
    home = Home.of(tmp_path)
    lock = home.lock()
    assert lock is not None
    following = starting.Starting(command=state.Identity.of(os.getppid()), phase="beginning")
    with announced(home, LineDisplay(), lock):
        home.starting.write_text(following.model_dump_json())

    assert following == starting.read(home)
    os.close(lock)


def test_what_a_killed_start_left_counts_as_none(tmp_path: Path) -> None:
    """Its pid is somebody else's by now, or nobody's; half a file is none."""
    home = Home.of(tmp_path)
    home.prepare()
    gone = starting.Starting(command=state.Identity(pid=1, created_unix_seconds=1.0), phase="beginning")
    for text in (gone.model_dump_json(), "{", ""):
        home.starting.write_text(text)
        assert starting.read(home) is None
        assert "nothing is running here: run fathom up" == starting.reason_to_wait(home)


def test_every_command_knows_of_a_start_and_down_ends_it(tmp_path: Path, monkeypatch) -> None:
    """While the model is made: no second start, no question, and an end that says whose it was."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-P", "-c", UP, str(tmp_path), str(free_port())]
    begun = subprocess.Popen(command, env=PYTHON_VARIABLES, stdout=subprocess.PIPE, text=True)
    try:
        give_up = time.monotonic() + 30
        while "43%" not in starting.reason_to_wait(Home.of(tmp_path)) and time.monotonic() < give_up:
            time.sleep(0.05)

        assert (1, "starting: preparing the model: convert weights 43%\n") == fathom("status")
        for words in (["chat", "hi"], ["trace"], ["up", "--port", str(free_port())]):
            code, said = fathom(*words)
            assert (1, True) == (code, "convert weights 43%" in said), said
        assert (0, "ending a start: preparing the model: convert weights 43%\nstopped\n") == fathom("down")
        said, _ = begun.communicate(timeout=30)
    finally:
        begun.kill()
        begun.wait()
    assert (130, ["model: convert weights 43%", "stopping", "stopped by fathom down"]) == (
        begun.returncode,
        said.splitlines(),
    )
    assert (0, "nothing was running here\n") == fathom("down")


def test_a_start_whose_folder_is_removed_says_so(tmp_path: Path) -> None:
    """While the model is made: at once, and not in the words of a write that failed."""
    home = Home.of(tmp_path)
    command = [sys.executable, "-P", "-c", UP, str(tmp_path), str(free_port())]
    begun = subprocess.Popen(command, env=PYTHON_VARIABLES, stderr=subprocess.PIPE, text=True)
    try:
        give_up = time.monotonic() + 30
        while "43%" not in starting.reason_to_wait(home) and time.monotonic() < give_up:
            time.sleep(0.05)
        shutil.rmtree(home.root)
        _, said = begun.communicate(timeout=30)
    finally:
        begun.kill()
        begun.wait()

    assert f"{home.root} was removed or moved away" in said
    assert 1 == begun.returncode
    assert not home.root.exists()


@pytest.fixture
def ears() -> Iterator[Ears]:
    """Hears this process's signals; afterwards they do what they did."""
    before = {number: signal.getsignal(number) for number in ENDS}
    made = Ears()
    made.listen()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "farewell"), [(GIVE_UP, "stopped by fathom down"), (signal.SIGINT, "stopped")], ids=["down", "ctrl-c"]
)
def test_an_end_waits_for_what_must_not_be_torn_apart(ears: Ears, number: int, farewell: str) -> None:
    """It comes when that is done, once, and a second signal changes nothing."""
    is_done = False
    with pytest.raises(Interrupted, match=f"^{farewell}$"), ears.held():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        is_done = True

    assert is_done
    signal.raise_signal(signal.SIGTERM)

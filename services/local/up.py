"""What happens between `fathom up` and the ready line, and until its end?"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services.chassis.config import EXIT_CONFIG, child_environment
from services.local import children, starting, state
from services.local.down import STOPPING, SUPERVISOR_SECONDS, end
from services.local.health import Health, ask_all
from services.local.home import Home
from services.local.interrupts import Ears, Interrupted, StoppedByDown
from services.local.plan import CONSOLE, Options
from services.local.ports import holder_of, is_free, reserve
from services.local.progress import Display
from services.local.starting import NotStarted, announced
from services.local.talk import KeyNeeded, Unanswered, one_token

POLL_SECONDS = 0.3
# A stage that moves neither forward nor on for this long hangs; loading a large model from a slow disk still moves.
STALL_SECONDS = 300.0
# The balancers learn of the engines through NATS within a second or two of their being ready.
FIRST_TOKEN_SECONDS = 30.0
# Ends before the suite is ready: more are not bad luck.
MOST_ENDS = 3
TAIL_LINES = 15
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
BAD_SETTINGS = "bad settings\n"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a start owns, until its supervisor does."""

    home: Home
    lock: int
    mark: int
    """Another descriptor of the lock's file, which owns nothing: we keep it to know our folder from a later one."""
    port: socket.socket

    @property
    def is_here(self) -> bool:
        """Whether the folder is still where it was claimed, and not another suite's by now."""
        return self.home.is_held_by(self.mark)

    def hand_over(self) -> None:
        """Leave it to the supervisor, which has its own descriptors: when it ends, folder and port are free."""
        os.close(self.lock)
        self.port.close()


def up(home: Home, options: Options, display: Display, prepare: Callable[[Display], Options], *, detach: bool) -> int:
    """Start a suite, wait for its first real token, and stay with it unless detached. Return the exit status.

    prepare: returns `options` with a model that is there, or raises; it may take minutes, and others see it starting.
    Raises NotStarted after everything was stopped again.
    """
    began = time.monotonic()
    own, ears = claim(home, options.port), Ears()
    supervisor: subprocess.Popen[bytes] | None = None
    is_ready = False
    try:
        ears.listen()
        with announced(home, display, own.mark) as show:
            try:
                options = prepare(show)
                with ears.held():  # or an interruption leaves a supervisor that nobody knows of
                    supervisor = _start_supervisor(own, options, bound=not detach)
            finally:
                own.hand_over()
            with show:
                suite = _wait_ready(own, supervisor, show, ears)
                model = _first_token(suite.url, lambda: _check_supervisor(own, supervisor))
        is_ready = True
        print(ready_lines(suite.url, model, time.monotonic() - began, console_url=suite.console_url), flush=True)
        if not detach:
            _stay(own, supervisor)
    except NotStarted as reason:
        if supervisor is None:
            raise
        _stop(own, supervisor)
        kept = f"; the logs are in {home.logs}" if own.is_here and home.logs.exists() else ""
        raise NotStarted(f"{reason}\nEverything was stopped again{kept}") from None
    except Interrupted as how:
        if supervisor is None or supervisor.poll() is None:
            print(STOPPING if is_ready else "stopping", flush=True)
        if supervisor is not None:
            _stop(own, supervisor)
        print(how, flush=True)
        return 0 if is_ready else INTERRUPTED
    return 0


def claim(home: Home, port: int) -> Claim:
    """Own this directory and the port, once what a killed suite left has ended; raise NotStarted if one is taken."""
    lock = home.lock()
    suite = state.read(home.state)
    if lock is None:
        raise NotStarted(f"{_owner(home, suite)}; stop it with: fathom down")
    if suite is not None:
        end(home)
    with ExitStack() as undo:
        undo.callback(os.close, lock)
        _check_port(port)
        reserved = reserve(port)
        if reserved is None:
            raise NotStarted(f"port {port} is in use by another suite; choose another one with --port")
        undo.enter_context(reserved)
        mark = _mark(home)
        undo.pop_all()
    return Claim(home, lock, mark, reserved)


def _mark(home: Home) -> int:
    try:
        return os.open(home.lock_file, os.O_RDONLY)
    except FileNotFoundError:
        raise NotStarted(starting.gone(home)) from None


def _owner(home: Home, suite: state.SuiteState | None) -> str:
    """Return who has this directory, in words."""
    begun = starting.read(home)
    if begun is not None:
        return f"fathom up is already starting in this directory (pid {begun.command.pid}; {begun.words})"
    where = f" at {suite.url} (pid {suite.supervisor.pid})" if suite is not None else ""
    return f"a suite already runs in this directory{where}"


def _check_port(port: int) -> None:
    if not is_free(port):
        holder = holder_of(port)
        raise NotStarted(f"port {port} is in use{f' by {holder}' if holder else ''}; choose another one with --port")


def ready_lines(url: str, model: str, seconds: float, *, console_url: str = "") -> str:
    """Return the ready line and a request to paste. model: "" when it could not be asked for without an API key."""
    docs = f"every endpoint and field: {url}/docs\n"
    if console_url:
        docs += f"the services, and each request's way through them: {console_url}\n"
    if not model:
        return f"ready: {url} ({seconds:.1f} s)\n\n  fathom chat --key sk-... 'Count from one to ten.'\n\n{docs}"
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        # A small model that samples, or has no limit, may go on for minutes.
        "temperature": 0,
        "max_tokens": 100,
        "stream": True,
    }
    curl = f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(question)}'"
    return f"ready: {model} at {url} ({seconds:.1f} s)\n\n  {curl}\n\n{docs}"


def fault(health: Sequence[Health]) -> Health | None:
    """Return the process that will not come up by itself, if there is one."""
    for one in health:
        ended = one.process.restarts + (1 if one.process.identity is None and one.process.exit_code is not None else 0)
        # Bad settings stay bad; anything else gets a second chance, as the supervisor's restarts would give it later.
        if ended >= MOST_ENDS or (ended and one.process.exit_code == EXIT_CONFIG):
            return one
    return None


def _start_supervisor(own: Claim, options: Options, *, bound: bool) -> subprocess.Popen[bytes]:
    home = own.home
    # The model may have taken minutes.
    _check_port(options.port)
    if not (home.is_held_by(own.lock) and own.is_here):
        raise NotStarted(starting.gone(home))
    home.prepare()
    # The state of an earlier suite must not be taken for this one's.
    home.state.unlink(missing_ok=True)
    module = (sys.executable, "-P", "-m", "services.local.supervisor")
    return children.start(
        (*module, str(home.root.parent), options.model_dump_json(), str(own.lock)),
        log=home.supervisor_log,
        environment=child_environment("local", {}, extra=children.PYTHON_VARIABLES),
        bound=bound,
        keep=(own.lock, own.port.fileno()),
    )


def _wait_ready(own: Claim, supervisor: subprocess.Popen[bytes], display: Display, ears: Ears) -> state.SuiteState:
    home = own.home
    last_change = time.monotonic()
    last: list[tuple[str, str, int]] = []
    while True:
        suite = state.read(home.state)
        _check_supervisor(own, supervisor)
        if suite is not None and suite.processes:
            with ears.held():
                everyone = asyncio.run(ask_all(suite, and_console=True))
            display.services(everyone)
            health = [one for one in everyone if one.process.service != CONSOLE]  # for that one nobody waits
            if (bad := fault(health)) is not None:
                raise NotStarted(
                    f"{bad.process.name} ended with status {bad.process.exit_code}:\n{last_words(bad.process)}"
                )
            if all(one.ready for one in health):
                return suite
            now = [(one.process.name, one.stage, one.done) for one in health]
            if now != last:
                last, last_change = now, time.monotonic()
            if time.monotonic() - last_change > STALL_SECONDS:
                slow = next(one for one in health if not one.ready)
                raise NotStarted(
                    f"{slow.process.name} made no progress for {STALL_SECONDS:.0f} s (stage: {slow.stage}):\n"
                    f"{tail(Path(slow.process.log))}"
                )
        elif time.monotonic() - last_change > STALL_SECONDS:
            raise NotStarted(f"{home.state} was not written for {STALL_SECONDS:.0f} s:\n{tail(home.supervisor_log)}")
        time.sleep(POLL_SECONDS)


def _first_token(url: str, check: Callable[[], None] = lambda: None) -> str:
    """Return the model's name; "" where the suite asks for a key. check: raises when there is nothing to wait for."""
    give_up = time.monotonic() + FIRST_TOKEN_SECONDS
    while True:
        try:
            return one_token(url)
        except KeyNeeded:
            return ""  # we have none; that it asks is as good a sign of life
        except Unanswered as reason:
            check()
            if time.monotonic() > give_up:
                raise NotStarted(f"all services are ready, but a one-token request failed: {reason}") from None
        time.sleep(POLL_SECONDS)


def _stay(own: Claim, supervisor: subprocess.Popen[bytes]) -> None:
    """Say what the supervisor does, until it ends or we are interrupted."""
    with own.home.supervisor_log.open(encoding="utf-8") as log:
        while True:
            _check_supervisor(own, supervisor)
            for line in console_lines(log.read().splitlines()):
                print(line, flush=True)
            time.sleep(POLL_SECONDS)


def _check_supervisor(own: Claim, supervisor: subprocess.Popen[bytes]) -> None:
    """Raise NotStarted when it has failed or will (its folder is gone), StoppedByDown when it was told to end."""
    status = supervisor.poll()
    if status == 0:
        raise StoppedByDown
    if not own.is_here:
        raise NotStarted(starting.gone(own.home))
    if status is not None:
        raise NotStarted(f"the supervisor ended with status {status}:\n{tail(own.home.supervisor_log)}")


def console_lines(journal: Sequence[str]) -> Iterator[str]:
    """Yield what a person should hear of the supervisor's log."""
    for line in journal:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "launcher.service.ended":
            name, wait = entry["process"], entry["restart_in_seconds"]
            yield f"{name} ended with status {entry['exit_code']}; next start in {wait} s (see: fathom logs {name})"


def last_words(process: state.ProcessState) -> str:
    """Return what the log of an ended process says about why: the refused settings, or the end of the log."""
    log = Path(process.log)
    if process.exit_code != EXIT_CONFIG:
        return tail(log)
    # Exit 78 prints the problems and then, at length, what is allowed.
    problems = log.read_text(encoding="utf-8", errors="replace").rpartition(BAD_SETTINGS)[2].partition("\nallowed:")[0]
    return f"    {problems.strip()}\n    (python -m services.{process.service} --help lists what is allowed)"


def tail(log: Path, num_lines: int = TAIL_LINES) -> str:
    """Return the end of a log, indented; a note when there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    except FileNotFoundError:
        lines = []
    return "\n".join(f"    {line}" for line in lines) or "    (its log is empty)"


def _stop(own: Claim, supervisor: subprocess.Popen[bytes]) -> None:
    """End our suite, and no other one that runs in this directory by now."""
    recorded = state.read(own.home.state) if own.is_here else None
    if recorded is not None and recorded.supervisor.pid == supervisor.pid:
        end(own.home)
    if supervisor.poll() is None:  # it had not written its state yet, or its folder is gone
        supervisor.terminate()
    try:
        supervisor.wait(SUPERVISOR_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()

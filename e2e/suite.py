"""How does a test start a whole suite, look into it, break it and end it?"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import httpx

from proto.decode_pb2 import DecodeLoad, GetDecodeLoadRequest
from proto.decode_pb2_grpc import DecodeStub
from proto.kvstore_pb2 import GetStatsRequest, KvstoreStats
from proto.kvstore_pb2_grpc import KvstoreStub
from proto.prefill_pb2 import GetPrefillLoadRequest, PrefillLoad
from proto.prefill_pb2_grpc import PrefillStub
from services.chassis.config import SERVICES, child_environment, prefix
from services.local import state
from services.local.children import PYTHON_VARIABLES, start
from services.local.health import ask_all
from services.local.home import Home
from services.local.ports import free_ports
from services.local.talk import Unanswered, one_token

START_SECONDS = 240.0
STOP_SECONDS = 90.0
# Of a machine that others use: a process may be away for seconds, and what is asked of it is no measurement.
CALL_SECONDS = 30.0
# Enough for eight long prompts of the default model in fp32, small enough for two suites on a laptop.
POOL_BYTES = str(512 << 20)

T = TypeVar("T")


class Suite:
    """All services of one directory, started by the same `fathom up` that people use.

    They end with pytest's main thread, so a test run that is killed leaves no suite behind.

    Nothing in it is tied to an event loop: a fixture may start it in one loop and a test use it in another.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        dtype: str = "fp32",
        prefill: int = 1,
        decode: int = 1,
        kv_bytes: str = "2G",
        otlp_endpoint: str = "",
        has_console: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """kv_bytes: disk of the KV store.  has_console: a start takes two seconds of a core more with it.
        env: further settings, for example {"FATHOM_PREFILL_CHUNK_TOKENS": "128"}.
        """
        self.folder = folder
        self.home = Home.of(folder)
        self.port = next(free_ports())
        self.base_url = f"http://127.0.0.1:{self.port}"
        chosen = {"FATHOM_PREFILL_KV_BYTES": POOL_BYTES, "FATHOM_DECODE_KV_BYTES": POOL_BYTES} | dict(env or {})
        self._running: subprocess.Popen[bytes] | None = None
        self.up_words = (
            *("up", "--model", str(model), "--dtype", dtype, "--port", str(self.port)),
            *("--prefill", str(prefill), "--decode", str(decode)),
            *("--kv-bytes", kv_bytes, "--otlp-endpoint", otlp_endpoint, *(() if has_console else ("--no-console",))),
            *(word for name, value in chosen.items() for word in ("--set", f"{setting_of(name)}={value}")),
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        folder: Path,
        *,
        model: Path,
        dtype: str = "fp32",
        prefill: int = 1,
        decode: int = 1,
        kv_bytes: str = "2G",
        otlp_endpoint: str = "",
        has_console: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator["Suite"]:
        """Start a suite and end it; print the ends of its logs when the block fails."""
        suite = cls(
            folder,
            model=model,
            dtype=dtype,
            prefill=prefill,
            decode=decode,
            kv_bytes=kv_bytes,
            otlp_endpoint=otlp_endpoint,
            has_console=has_console,
            env=env,
        )
        await suite.start()
        try:
            yield suite
        except BaseException:
            print(suite.log_tails())
            raise
        finally:
            await suite.stop()

    async def start(self) -> None:
        """Start it, or start it again; return when a one-token request succeeded."""
        log = self.folder / "console.txt"
        log.write_text("")
        environment = child_environment("local", {}, extra=PYTHON_VARIABLES)
        up = start(fathom(*self.up_words), log=log, environment=environment, bound=True, cwd=self.folder)
        self._running = up
        await wait_for(lambda: "ready: " in log.read_text() or up.poll() is not None, START_SECONDS, "the ready line")
        assert up.poll() is None, f"{log.read_text()}\n{self.log_tails()}"

    async def stop(self) -> None:
        """End it; every process is gone afterwards."""
        done = await self.console("down", timeout=STOP_SECONDS)
        assert 0 == done.returncode, f"{done.stdout}\n{done.stderr}"
        if self._running is not None:
            await asyncio.to_thread(self._running.wait, 30)
            self._running = None

    async def console(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a `fathom` command in this suite's directory."""
        return await asyncio.to_thread(
            subprocess.run,
            fathom(*words),
            cwd=self.folder,
            env=child_environment("local", {}, extra=PYTHON_VARIABLES),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    async def until_all_ready(self) -> subprocess.CompletedProcess[str]:
        """Return what `fathom status` says once it finds all ready: of a process it waits a second for a word."""
        give_up = time.monotonic() + 30
        while (done := await self.console("status")).returncode:
            assert time.monotonic() < give_up, done.stdout
        return done

    def begin(self, *words: str, stdin: int | None, output: int, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        """Begin a `fathom` command and leave it running; the caller waits for it. stdin, output: descriptors."""
        return subprocess.Popen(
            fathom(*words),
            cwd=self.folder,
            env=child_environment("local", {}, extra=PYTHON_VARIABLES),
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=keep,
        )

    def recorded(self) -> state.SuiteState:
        """What the supervisor recorded just now."""
        suite = state.read(self.home.state)
        assert suite is not None, f"no state in {self.folder}"
        return suite

    def state(self) -> dict[str, state.ProcessState]:
        """Every process by name ("decode-0", "nats-0"): address, identity, restarts."""
        return {process.name: process for process in self.recorded().processes}

    def log(self, name: str) -> Path:
        """Log of a process, or of the "supervisor"."""
        return self.home.log(name)

    def names(self, service: str) -> list[str]:
        """Process names of a service, for example ["decode-0", "decode-1"]."""
        return [process.name for process in self.recorded().processes if process.service == service]

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return self.state()[name].address

    async def pid(self, name: str) -> int:
        """Pid of a process; waits while it is being started again."""
        return await wait_for(lambda: self._pid(name), 60, f"{name} to run")

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process of this suite, checked to be the one that was started; its restart is the supervisor's."""
        identity = self.state()[name].identity
        assert identity is not None, f"{name} does not run"
        identity.send(number)

    async def restart(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal a process and return when its successor is ready."""
        old_pid = await self.pid(name)
        await self.kill(name, number)
        await wait_for(lambda: self._pid(name) not in {None, old_pid}, 60, f"{name} to be started again")
        await self.wait_ready(name)

    async def restart_engines(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End all engines and return when their successors answer: their pools are empty, the KV store is not.

        meanwhile: called once all have ended; the next ones open nothing before they have imported torch.
        """
        await self.stores_settle()
        engines = [*self.names("prefill"), *self.names("decode")]
        ended = [self.state()[name].identity for name in engines]
        for name in engines:
            await self.kill(name, signal.SIGTERM)
        left = await asyncio.to_thread(state.wait_ended, [each for each in ended if each is not None], STOP_SECONDS)
        assert [] == left
        meanwhile()
        for name, old in zip(engines, ended, strict=True):
            await wait_for(partial(self._successor, name, old), 60, f"{name} to be started again")
        await self.wait_ready(*engines)
        await self.wait_served()

    async def stores_settle(self) -> None:
        """Wait until no more blocks are stored: engines that end have five seconds for those, and a disk may take more."""
        give_up, num_blocks, unchanged_since = time.monotonic() + 60, -1, 0.0
        while num_blocks < 0 or time.monotonic() < unchanged_since + 2:
            assert time.monotonic() < give_up, f"{num_blocks} blocks, and still more"
            stats = await self.kvstore_stats()
            if stats.num_blocks != num_blocks:
                num_blocks, unchanged_since = stats.num_blocks, time.monotonic()
            await asyncio.sleep(0.1)

    def num_late(self) -> int:
        """How often a store has not answered in its half a second: its blocks were computed, and are no hit."""
        logs = [
            self.log(name).read_text(errors="replace") for name in (*self.names("entrypoint"), *self.names("prefill"))
        ]
        return sum(log.count("entrypoint.lookup.failed") + log.count("kvstore.read.late") for log in logs)

    async def from_stores(self, ask: Callable[[], Awaitable[T]], forget: Callable[[], Awaitable[object]]) -> T:
        """Ask engines that know nothing; where a store was late, have them `forget` and ask again.

        A machine that others use makes it so; a store that holds nothing is not late.
        """
        for _ in range(3):
            num_late = self.num_late()
            answer = await ask()
            if num_late == self.num_late():
                break
            await forget()
        return answer

    async def wait_served(self, seconds: float = 60.0) -> None:
        """Wait until a one-token request succeeds: balancers learn of a replica a moment after it is ready."""
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(Unanswered):
                    await asyncio.to_thread(one_token, self.base_url)
                    return
                await asyncio.sleep(0.2)

    async def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C where `fathom up` runs; return its exit status and all that it printed."""
        assert self._running is not None, "started in the background"
        self._running.send_signal(signal.SIGINT)
        status = await asyncio.to_thread(self._running.wait, STOP_SECONDS)
        return status, (self.folder / "console.txt").read_text()

    def shared_memory(self, name: str) -> Path:
        """Folder in which this boot of a decode replica takes KV in."""
        boot_id = httpx.get(self.state()[name].health_url, timeout=CALL_SECONDS).json()["boot_id"]
        return Path("/dev/shm") / f"fathom-{boot_id}"

    async def wait_ready(self, *names: str, seconds: float = 120.0) -> None:
        """Wait until these processes, or all, say they are ready."""
        give_up = time.monotonic() + seconds
        while True:
            health = [one for one in await ask_all(self.recorded()) if not names or one.process.name in names]
            if all(one.ready for one in health):
                return
            assert time.monotonic() < give_up, f"not ready: {[one for one in health if not one.ready]}"
            await asyncio.sleep(0.2)

    async def decode_loads(self) -> list[DecodeLoad]:
        """Block and batch counts of every decode replica."""
        loads = []
        for name in self.names("decode"):
            async with grpc.aio.insecure_channel(self.address(name)) as channel:
                loads.append(await DecodeStub(channel).GetLoad(GetDecodeLoadRequest(), timeout=CALL_SECONDS))
        return loads

    async def prefill_loads(self) -> list[PrefillLoad]:
        """Block and queue counts of every prefill replica."""
        loads = []
        for name in self.names("prefill"):
            async with grpc.aio.insecure_channel(self.address(name)) as channel:
                loads.append(await PrefillStub(channel).GetLoad(GetPrefillLoadRequest(), timeout=CALL_SECONDS))
        return loads

    async def kvstore_stats(self) -> KvstoreStats:
        """Counts of the KV store."""
        async with grpc.aio.insecure_channel(self.address("kvstore-0")) as channel:
            stats: KvstoreStats = await KvstoreStub(channel).GetStats(GetStatsRequest(), timeout=CALL_SECONDS)
        return stats

    def log_tails(self, num_lines: int = 15) -> str:
        """Return the end of every log, for the report of a failed test."""
        logs = sorted(self.home.logs.glob("*.log"))
        tails = [
            (log.stem, log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]) for log in logs
        ]
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in tails)

    def _successor(self, name: str, old: object) -> bool:
        return self.state()[name].identity not in {None, old}

    def _pid(self, name: str) -> int | None:
        identity = self.state()[name].identity
        return identity.pid if identity is not None else None


def fathom(*words: str) -> list[str]:
    """Return the command line of a `fathom` command."""
    return [sys.executable, "-P", "-m", "services.local", *words]


def setting_of(name: str) -> str:
    """Return "decode_lb.log_level" for FATHOM_DECODE_LB_LOG_LEVEL."""
    owners = [service for service in SERVICES if name.startswith(prefix(service))]
    assert owners, name
    owner = max(owners, key=len)
    return f"{owner}.{name.removeprefix(prefix(owner)).lower()}"


async def wait_for(condition: Callable[[], T | None], seconds: float, what: str) -> T:
    """Return the condition's first true value; fail the test when there is none in time."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {seconds} s in vain for {what}"
        await asyncio.sleep(0.05)
    return value

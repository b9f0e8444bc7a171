"""What does a look at the suite show right now?"""

import asyncio
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from services.local import state
from services.local.health import Health, ask_all
from services.local.plan import CONSOLE
from services.local.state import SuiteState

FRESH_SECONDS = 1.0
"""Many who look at once are one question to the services."""
ASK_SECONDS = 1.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
GAUGES = frozenset({
    "fathom_recipe_open_requests", "fathom_entrypoint_in_flight", "fathom_kvstore_blocks", "fathom_kvstore_disk_bytes",
    "fathom_kvstore_max_bytes",
    *(f"fathom_{engine}_{what}" for engine in ("prefill", "decode")
      for what in ("running_sequences", "queued_sequences", "used_blocks", "cached_blocks", "total_blocks")),
})  # fmt: skip
_SAMPLE = re.compile(rf"^({'|'.join(sorted(GAUGES))}) ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the suite."""

    service: str
    replica: str
    is_ready: bool
    stage: str
    uptime_seconds: float | None
    """None: it does not run."""
    restarts: int
    resident_bytes: int | None
    metrics_url: str
    """Empty for NATS and the console."""
    gauges: Mapping[str, float]
    """What it says of its load, by metric name."""


@dataclass(frozen=True, slots=True)
class View:
    """The suite as it stands."""

    url: str
    model: str
    processes: tuple[Process, ...]


class Watch:
    """Looks at the suite when somebody asks, at most once a second."""

    def __init__(self, state_file: Path) -> None:
        self._state_file = state_file
        self._lock = asyncio.Lock()
        self._seen: View | None = None
        self._seen_at = float("-inf")

    async def look(self) -> View | None:
        """Return the suite as it stands; None before its supervisor has written down what it started."""
        async with self._lock:
            if time.monotonic() - self._seen_at >= FRESH_SECONDS:
                suite = state.read(self._state_file)
                self._seen = await _look(suite) if suite is not None else None
                self._seen_at = time.monotonic()
            return self._seen


async def _look(suite: SuiteState) -> View:
    async with httpx.AsyncClient(timeout=ASK_SECONDS, trust_env=False, verify=_NO_TLS) as client:
        health, gauges = await asyncio.gather(
            ask_all(suite, and_console=True),
            asyncio.gather(*(_gauges(client, _metrics_url(each)) for each in suite.everyone)),
        )
    return View(suite.url, Path(suite.model).name, _processes(health, gauges))


def _processes(health: Sequence[Health], gauges: Sequence[Mapping[str, float]]) -> tuple[Process, ...]:
    return tuple(_process(one, load) for one, load in zip(health, gauges, strict=True))


def _process(one: Health, gauges: Mapping[str, float]) -> Process:
    identity = one.process.identity
    live = identity.process() if identity is not None else None
    try:
        resident = live.memory_info().rss if live is not None else None
    except psutil.NoSuchProcess:
        live = resident = None
    uptime = time.time() - identity.created_unix_seconds if identity is not None and live is not None else None
    return Process(
        service=one.process.service,
        replica=one.process.name,
        is_ready=one.ready,
        stage=one.stage,
        uptime_seconds=uptime,
        restarts=one.process.restarts,
        resident_bytes=resident,
        metrics_url=_metrics_url(one.process),
        gauges=gauges,
    )


def _metrics_url(process: state.ProcessState) -> str:
    """Return where a process shows its metrics; empty for those that have none."""
    return process.health_url.replace("/healthz", "/metrics") if process.service != CONSOLE else ""


async def _gauges(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Return the load that a process reports; nothing when it does not answer in time."""
    if not url:
        return {}
    try:
        return read_gauges((await client.get(url)).text)
    except httpx.HTTPError:
        return {}


def read_gauges(text: str) -> dict[str, float]:
    """Return the gauges that matter here, of a page of Prometheus text."""
    return {name: float(value) for name, value in _SAMPLE.findall(text)}

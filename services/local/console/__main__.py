"""How does the console process live? It takes in spans and serves the page, and nothing waits for it.

`python -m services.local.console DIRECTORY SPANS_ADDRESS PAGE_ADDRESS [OTLP_ENDPOINT]`: a process of its own, so that
whatever goes wrong here ends neither a service nor the supervisor, whose end would end them all.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from opentelemetry.util.re import parse_env_headers

from services.chassis.config import child_environment
from services.local.console.collector import Collector, Counts, Forwarder
from services.local.console.site import Site
from services.local.console.traces import TraceStore
from services.local.console.view import Watch
from services.local.console.web import WebServer
from services.local.home import Home


async def run(directory: Path, spans_address: str, page_address: str, forward_to: str) -> None:
    """Serve until SIGTERM."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    store, counts = TraceStore(), Counts()
    forwarder = Forwarder(forward_to, _headers(), counts) if forward_to else None
    collector = Collector(store, counts, forwarder)
    web = WebServer(Site(store, counts, Watch(Home.of(directory).state)).answer)
    await collector.start(spans_address)
    await web.start(page_address)
    forwarding = asyncio.create_task(forwarder.run(), name="forward spans") if forwarder is not None else None
    await stopping.wait()
    await web.stop()
    await collector.stop()
    if forwarder is not None and forwarding is not None:
        await forwarder.drain()
        forwarding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await forwarding


def _headers() -> Mapping[str, str]:
    """Return what a hosted collector wants with every call, from the variables that OpenTelemetry's SDKs read."""
    inherited = child_environment("local", {})
    chosen = inherited.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or inherited.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    return parse_env_headers(chosen, liberal=True)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *sys.argv[4:5] or [""]))

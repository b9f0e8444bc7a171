"""How often does a replica say how busy it is?"""

import asyncio
from collections.abc import Awaitable, Callable

from proto.events_pb2 import LoadReport

CHANGING_SECONDS = 0.2
QUIET_SECONDS = 1.0


async def report_load(publish: Callable[[LoadReport], Awaitable[None]], read: Callable[[], LoadReport]) -> None:
    """Publish (`bus.publish_load`) what `read` gives: every 200 ms while it changes, else every second."""
    loop = asyncio.get_running_loop()
    last: LoadReport | None = None
    sent = 0.0
    while True:
        report = read()
        if report != last or loop.time() - sent >= QUIET_SECONDS:
            await publish(report)
            last, sent = report, loop.time()
        await asyncio.sleep(CHANGING_SECONDS)

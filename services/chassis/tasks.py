"""How does a background task end for certain?"""

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_SECONDS = 0.1
END_SECONDS = 2.0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, seconds: float = END_SECONDS) -> set[asyncio.Task[Any]]:
    """Cancel tasks until all have ended; return those that had not after `seconds`.

    Once is not always enough: a cancellation that arrives together with a result is swallowed by asyncio.wait_for of
    Python 3.11, which libraries use in their loops, and the task then goes on for ever.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    running = {task for task in tasks if not task.done()}
    while running and loop.time() < deadline:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=AGAIN_SECONDS)
    return running

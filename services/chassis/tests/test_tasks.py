"""A background task that is told to end, ends."""

import asyncio
import contextlib

from services.chassis.tasks import end_tasks


async def test_a_swallowed_cancellation_is_repeated() -> None:
    """A loop that loses one cancellation, as asyncio.wait_for may, ends all the same."""
    swallowed = 0

    async def loop() -> None:
        nonlocal swallowed
        while True:
            if swallowed:
                await asyncio.sleep(60)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            swallowed += 1

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)

    assert set() == await end_tasks([task])
    assert (True, 1) == (task.cancelled(), swallowed)


async def test_a_task_that_will_not_end_is_named_in_time() -> None:
    """Stopping is never held up for ever."""

    async def stubborn() -> None:
        while not given_up:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    given_up = False
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)

    assert {task} == await end_tasks([task], seconds=0.15)
    given_up = True
    assert set() == await end_tasks([task])

"""How do asyncio and the one engine thread talk?"""

import asyncio
import threading
import time

import pytest

from services.chassis.engine_thread import EngineThread, Reply
from services.chassis.errors import BlocksLost, InternalError
from services.chassis.testing import until


@pytest.fixture
async def thread():
    engine = EngineThread("engine under test")
    engine.start()
    yield engine
    await engine.stop()


def refuse():
    raise BlocksLost("gone")


async def test_calls_answer_from_the_engine_thread(thread):
    """What a job returns or raises reaches the coroutine that asked."""
    assert "engine under test" == await thread.call(lambda: threading.current_thread().name)
    with pytest.raises(BlocksLost, match="gone"):
        await thread.call(refuse)


async def test_jobs_keep_their_order(thread):
    """A start posted after a write runs after it."""
    seen: list[int] = []
    for number in range(50):
        thread.post(seen.append, number)
    await thread.call(lambda: None)

    assert list(range(50)) == seen


async def test_an_idle_engine_turns_once_per_job(thread):
    """An engine without work sleeps: it does not poll."""
    turns = []

    def turn():
        turns.append(1)
        return False

    thread.drive(turn)
    await until(lambda: bool(turns))
    await asyncio.sleep(0.05)
    assert 1 == len(turns)
    await thread.call(lambda: None)
    await until(lambda: len(turns) > 1)
    await asyncio.sleep(0.02)

    assert 2 == len(turns)


async def test_an_idle_engine_wakes_at_once(thread):
    """A call into a sleeping engine takes well under a millisecond of its own; thirty allow for a busy machine."""
    await thread.call(lambda: None)
    spent = []
    for _ in range(20):
        started = time.perf_counter()
        await thread.call(lambda: None)
        spent.append(time.perf_counter() - started)

    assert sorted(spent)[10] < 0.03


async def test_a_busy_engine_still_hears_jobs(thread):
    """Jobs run between two turns, however much work there is."""
    thread.drive(lambda: True)

    assert 7 == await asyncio.wait_for(thread.call(lambda: 7), 30)
    thread.drive(lambda: False)


async def test_a_promise_is_kept_in_a_later_turn(thread):
    """A job may take the reply along and answer when it can."""
    kept: list[Reply[int]] = []
    reply = thread.reply()
    thread.post(kept.append, reply)
    await thread.call(lambda: None)
    thread.post(lambda: kept[0].set(3))

    assert 3 == await reply


async def test_results_reach_the_loop_in_order(thread):
    """Events are delivered on the loop's thread, in the order told."""
    seen: asyncio.Queue[int] = asyncio.Queue()
    thread.post(lambda: [thread.tell(seen.put_nowait, n) for n in range(5)])

    assert list(range(5)) == [await asyncio.wait_for(seen.get(), 30) for _ in range(5)]


async def test_a_failing_turn_ends_the_thread_and_says_so():
    """An engine that fails must not be taken for one that is busy: run() raises, waiting jobs fail."""
    engine = EngineThread("failing")
    engine.start()

    def turn():
        raise RuntimeError("device lost")

    engine.drive(turn)
    with pytest.raises(RuntimeError, match="device lost"):
        await asyncio.wait_for(engine.run(), 30)
    with pytest.raises(InternalError):
        await asyncio.wait_for(engine.call(lambda: None), 30)
    await engine.stop()

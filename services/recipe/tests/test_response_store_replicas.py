"""Can one replica follow, cancel and bury what another generates? Two stores, and two processes, on one database."""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.process import BaseProcess

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.chassis.errors import InternalError
from services.recipe.response_state import UNFINISHED, StoredConversation, StoredEvent
from services.recipe.response_store import ResponseStore
from services.recipe.response_store_room import StoreLimits
from services.recipe.tests.response_rig import age, message, response, work_as_owner

Two = tuple[ResponseStore, ResponseStore]


@pytest_asyncio.fixture
async def two(state_url: str) -> AsyncIterator[Two]:
    """Two replicas' stores on one database, which give an owner up after fifteen seconds."""
    stores = ResponseStore(state_url), ResponseStore(state_url)
    yield stores
    for store in stores:
        await store.close()


def events(*numbers: int) -> list[StoredEvent]:
    return [StoredEvent(number, f'{{"sequence_number":{number}}}'.encode()) for number in numbers]


async def follow(store: ResponseStore, response_id: str, *, after: int = -1) -> AsyncIterator[StoredEvent]:
    """Yield a response's events, to its end."""
    while True:
        # Asked for first: what it wrote before it ended is then surely read.
        stored = await store.get("acme", response_id)
        found = await store.events("acme", response_id, after=after, limit=7)
        for event in found:
            assert after + 1 == event.number
            after = event.number
            yield event
        if not found:
            if stored is None or stored.status not in UNFINISHED:
                return
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def owner_process(state_url: str, num_events: int) -> Iterator[BaseProcess]:
    """Run another process that generates `resp_1` until it is told to stop or has made `num_events`."""
    process = multiprocessing.get_context("spawn").Process(target=work_as_owner, args=(state_url, num_events))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)


async def appears(store: ResponseStore, num_events: int) -> None:
    """Return when the other process has written so many events."""
    async with asyncio.timeout(30):
        while len(await store.events("acme", "resp_1", after=-1, limit=1000)) < num_events:  # noqa: ASYNC110 - elsewhere
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_another_process_follows_to_the_end(state_url: str) -> None:
    """Every event arrives in order while the other process writes, then the finished response."""
    store = ResponseStore(state_url)
    with owner_process(state_url, num_events=60):
        await appears(store, 1)
        async with asyncio.timeout(30):
            seen = [event.number async for event in follow(store, "resp_1")]
        stored = await store.get("acme", "resp_1")

    assert list(range(60)) == seen
    assert stored is not None
    assert ("completed", "completed") == (stored.status, stored.body["status"])
    assert [59] == [event.number async for event in follow(store, "resp_1", after=58)]
    await store.close()


@pytest.mark.slow
async def test_another_process_cancels(state_url: str) -> None:
    """The owner hears of it by its heartbeat and finishes the response as cancelled."""
    store = ResponseStore(state_url)
    with owner_process(state_url, num_events=1_000_000) as process:
        await appears(store, 5)
        assert await store.cancel("acme", "resp_1")
        async with asyncio.timeout(30):
            seen = [event.number async for event in follow(store, "resp_1")]
        await asyncio.to_thread(process.join, 30)
        assert 0 == process.exitcode
    stored = await store.get("acme", "resp_1")

    assert stored is not None
    assert "cancelled" == stored.status
    assert list(range(len(seen))) == seen
    assert not await store.cancel("acme", "resp_1")
    await store.close()


@pytest.mark.slow
async def test_a_killed_owner_is_noticed(state_url: str) -> None:
    """Its response ends as failed with an honest error, and its events can still be read."""
    store = ResponseStore(state_url, StoreLimits(lost_seconds=0.5))
    with owner_process(state_url, num_events=1_000_000) as process:
        await appears(store, 5)
        process.kill()
        async with asyncio.timeout(30):
            seen = [event.number async for event in follow(store, "resp_1")]
    stored = await store.get("acme", "resp_1")

    assert stored is not None
    assert ("failed", "failed", "server_error") == (stored.status, stored.body["status"], stored.body["error"]["code"])
    assert "gone" in stored.body["error"]["message"]
    assert len(seen) >= 5
    await store.close()


async def test_a_silent_owner_is_fenced(two: Two) -> None:
    """One that comes back is told to stop, and nothing it writes changes what others were shown."""
    mine, other = two
    await mine.add_conversation(StoredConversation("conv_1", "acme", 1.0), [])
    await mine.add(response(status="in_progress", owner="boot", keeps_events=True, conversation_id="conv_1"))
    await mine.add_events("acme", "resp_1", events(0))
    await age(mine, 16)
    shown = await other.get("acme", "resp_1")

    assert shown is not None
    assert "failed" == shown.status
    assert frozenset({"resp_1"}) == await mine.beat("boot", ["resp_1"])
    assert not await mine.finish("acme", "resp_1", "completed", {"status": "completed", "output": [message("late")]})
    await mine.add_events("acme", "resp_1", events(1))
    assert events(0) == await other.events("acme", "resp_1", after=-1, limit=9)
    assert shown == await other.get("acme", "resp_1")
    assert await other.conversation_item("acme", "conv_1", "late") is None


async def test_a_beating_owner_is_left_alone(two: Two) -> None:
    """However long the answer takes, as long as its owner is heard of; and who has no owner is not waited for."""
    mine, other = two
    await mine.add(response(status="in_progress", owner="boot"))
    await mine.add(response("resp_2", status="in_progress"))
    for _ in range(3):
        assert frozenset() == await mine.beat("boot", ["resp_1"])
        await age(mine, 10)
        found = await other.get("acme", "resp_1")
        assert found is not None
        assert "in_progress" == found.status
    assert not await other.cancel("acme", "resp_2")
    assert frozenset() == await mine.beat("boot", [])


async def test_the_heartbeat_says_what_to_stop(two: Two) -> None:
    """Cancelled, deleted, finished and other owners' responses; never one that goes on."""
    mine, other = two
    for name in ("on", "cancelled", "deleted", "finished"):
        await mine.add(response(name, status="in_progress", owner="boot"))
    await other.add(response("theirs", status="in_progress", owner="other"))
    assert await other.cancel("acme", "cancelled")
    assert await other.delete("acme", "deleted")
    assert await other.finish("acme", "finished", "completed", {})

    told = await mine.beat("boot", ["on", "cancelled", "deleted", "finished", "theirs", "unknown"])
    assert frozenset({"cancelled", "deleted", "finished", "theirs", "unknown"}) == told


async def test_events_go_on_where_they_ended(two: Two) -> None:
    """A repeated batch changes nothing, a gap is refused, and a deleted response swallows what comes late."""
    mine, other = two
    await mine.add(response(status="in_progress", keeps_events=True))
    await mine.add_events("acme", "resp_1", events(0, 1))
    await other.add_events("acme", "resp_1", events(1, 2))
    with pytest.raises(InternalError):
        await mine.add_events("acme", "resp_1", events(4))
    await mine.add_events("acme", "resp_1", [])

    assert events(0, 1, 2) == await other.events("acme", "resp_1", after=-1, limit=9)
    assert events(2) == await other.events("acme", "resp_1", after=1, limit=9)
    assert events(0) == await other.events("acme", "resp_1", after=-1, limit=1)
    assert await other.delete("acme", "resp_1")
    await mine.add_events("acme", "resp_1", events(3))
    assert [] == await other.events("acme", "resp_1", after=-1, limit=9)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_events_have_no_gaps_whatever_the_interleaving(state_url: str, data: st.DataObject) -> None:
    """Two readers that start anywhere, while batches of any size are written and some twice, see every event once."""
    batches = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    repeats = data.draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches)))
    pauses = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.01]), min_size=len(batches), max_size=len(batches)))
    starts = data.draw(st.tuples(st.integers(-1, 3), st.integers(-1, 3)))
    name = f"resp_{time.monotonic_ns()}"
    total = sum(batches)

    async def write(store: ResponseStore) -> None:
        first = 0
        for size, is_repeated, pause in zip(batches, repeats, pauses, strict=True):
            batch = events(*range(first, first + size))
            again = [store.add_events("acme", name, batch)] if is_repeated else []
            await asyncio.gather(store.add_events("acme", name, batch), *again)
            first += size
            await asyncio.sleep(pause)
        await store.finish("acme", name, "completed", {})

    async def read(store: ResponseStore, after: int) -> list[int]:
        return [event.number async for event in follow(store, name, after=min(after, total - 1))]

    async def run() -> list[list[int]]:
        writer, reader = ResponseStore(state_url), ResponseStore(state_url)
        await writer.add(response(name, status="in_progress", keeps_events=True))
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read(reader, after)) for after in starts]
            await write(writer)
        await writer.close()
        await reader.close()
        return [task.result() for task in readers]

    wanted = [list(range(min(after, total - 1) + 1, total)) for after in starts]
    assert wanted == asyncio.run(asyncio.wait_for(run(), 30))

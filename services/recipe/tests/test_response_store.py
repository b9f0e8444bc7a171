"""Is what callers stored there until it is deleted, expires, or makes room, and nobody else's? On both databases."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from services.chassis.errors import InvalidRequest, Overloaded
from services.recipe.response_state import MAX_LINEAGE, StoredConversation, StoredEvent
from services.recipe.response_store import ResponseStore
from services.recipe.response_store_room import Held, StoreLimits, rows_to_drop
from services.recipe.response_store_tables import RESPONSES
from services.recipe.tests.response_rig import age, message, response


@pytest_asyncio.fixture
async def store(state_url: str) -> AsyncIterator[ResponseStore]:
    """An empty store."""
    store = ResponseStore(state_url, query_seconds=60)
    yield store
    await store.close()


async def test_a_response_comes_back_as_it_was(store: ResponseStore) -> None:
    """Text of every kind, and fields we know nothing of, survive."""
    body = {
        "id": "resp_1",
        "status": "completed",
        "output": [],
        "odd": {"\u0000": ["\U0001f600", 1.5, None, "\\u0000"]},
    }
    items = [message("b", "zweitens"), message("a", "\u0000 first \U00020000")]
    stored = response(body=body, input_items=items, keeps_events=True, owner="boot", previous_response_id="gone")
    await store.add(stored)

    assert stored == await store.get("acme", "resp_1")


async def test_other_tenants_see_nothing(store: ResponseStore) -> None:
    """Whose key differs finds no response, item, event or conversation, and changes none."""
    await store.add(response(status="in_progress", owner="boot"))
    await store.add_events("acme", "resp_1", [StoredEvent(0, b"{}")])
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [message("a")])

    assert await store.get("other", "resp_1") is None
    assert await store.lineage("other", "resp_1") is None
    assert await store.input_items("other", "resp_1", after="", limit=5, is_ascending=True) is None
    assert [] == await store.events("other", "resp_1", after=-1, limit=9)
    assert not await store.cancel("other", "resp_1")
    assert not await store.finish("other", "resp_1", "completed", {})
    assert not await store.delete("other", "resp_1")
    await store.add_events("other", "resp_1", [StoredEvent(1, b"{}")])
    assert 1 == len(await store.events("acme", "resp_1", after=-1, limit=9))
    assert await store.conversation("other", "conv_1") is None
    assert await store.set_metadata("other", "conv_1", {}) is None
    assert await store.conversation_items("other", "conv_1", after="", limit=5, is_ascending=True) is None
    assert await store.conversation_item("other", "conv_1", "a") is None
    assert not await store.add_items("other", "conv_1", [message("b")])
    assert not await store.delete_item("other", "conv_1", "a")
    assert not await store.delete_conversation("other", "conv_1")
    assert (await store.conversation_item("acme", "conv_1", "a")) is not None


async def test_a_response_is_finished_once(store: ResponseStore) -> None:
    """The first end counts; going on from queued to in_progress is none."""
    await store.add(response(status="queued", owner="boot"))

    assert await store.finish("acme", "resp_1", "in_progress", {"status": "in_progress"})
    assert await store.finish("acme", "resp_1", "completed", {"status": "completed", "output": []})
    assert not await store.finish("acme", "resp_1", "failed", {"status": "failed"})
    found = await store.get("acme", "resp_1")
    assert found is not None
    assert ("completed", {"status": "completed", "output": []}) == (found.status, found.body)


async def test_finishing_appends_to_the_conversation_once(store: ResponseStore) -> None:
    """What was said and answered stands in the conversation in order, after what was there."""
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [message("old")])
    await store.add(response(status="in_progress", conversation_id="conv_1", input_items=[message("said")]))
    body = {"status": "completed", "output": [message("answered", "hi", "assistant")]}

    assert await store.finish("acme", "resp_1", "in_progress", body)
    assert await store.finish("acme", "resp_1", "completed", body)
    assert not await store.finish("acme", "resp_1", "completed", body)
    page = await store.conversation_items("acme", "conv_1", after="", limit=9, is_ascending=True)
    assert page is not None
    assert ["old", "said", "answered"] == [item["id"] for item in page.items]


async def test_a_lineage_is_whole_or_nothing(store: ResponseStore) -> None:
    """Oldest first with everybody's items; None as soon as one is deleted, or they are too many."""
    await store.add(response("resp_0"))
    for index in range(1, 4):
        await store.add(response(f"resp_{index}", previous_response_id=f"resp_{index - 1}"))

    line = await store.lineage("acme", "resp_2")
    assert line is not None
    assert ["resp_0", "resp_1", "resp_2"] == [stored.id for stored in line]
    assert ["in_resp_0", "in_resp_1", "in_resp_2"] == [stored.input_items[0]["id"] for stored in line]
    assert await store.delete("acme", "resp_1")
    assert await store.lineage("acme", "resp_3") is None
    assert await store.lineage("acme", "unknown") is None


@pytest.mark.slow
async def test_a_lineage_has_a_longest(store: ResponseStore) -> None:
    """A chain of MAX_LINEAGE is followed, one more is refused, and a circle, which nobody can make, ends too."""
    await store.add(response("resp_0"))
    first = await store._link.read(lambda connection: connection.execute(RESPONSES.select()))
    row = dict(first.mappings().one())
    numbers = range(1, MAX_LINEAGE + 1)
    rows = [row | {"id": f"resp_{n}", "previous_response_id": f"resp_{n - 1}"} for n in numbers]
    await store._link.write(lambda connection: connection.execute(RESPONSES.insert(), rows))
    line = await store.lineage("acme", f"resp_{MAX_LINEAGE - 1}")

    assert line is not None
    assert MAX_LINEAGE == len(line)
    assert await store.lineage("acme", f"resp_{MAX_LINEAGE}") is None
    change = RESPONSES.update().where(RESPONSES.c.id == "resp_0").values(previous_response_id="resp_9")
    await store._link.write(lambda connection: connection.execute(change))
    assert await store.lineage("acme", "resp_9") is None


@settings(max_examples=5, deadline=None)
@given(names=st.lists(st.integers(0, 9), unique=True), limit=st.integers(1, 4), ascending=st.booleans())
def test_pages_add_up_to_the_list(tmp_path_factory: pytest.TempPathFactory, names, limit, ascending) -> None:
    """Following `after` to the end gives every item once, in order, whatever the page size; then there are no more."""

    async def follow() -> list[str]:
        store = ResponseStore(f"sqlite:///{tmp_path_factory.mktemp('pages') / 's.sqlite3'}")
        await store.add(response(input_items=[message(str(name)) for name in names]))
        seen: list[str] = []
        has_more = True
        while has_more:
            after = seen[-1] if seen else ""
            page = await store.input_items("acme", "resp_1", after=after, limit=limit, is_ascending=ascending)
            assert page is not None
            seen += [item["id"] for item in page.items]
            has_more = page.has_more
        await store.close()
        return seen

    wanted = [str(name) for name in names]
    assert (wanted if ascending else wanted[::-1]) == asyncio.run(follow())


async def test_pages_start_after_a_known_item(store: ResponseStore) -> None:
    """An `after` that is not in the list is told from an end of the list."""
    await store.add(response(input_items=[message("a"), message("b")]))
    last = await store.input_items("acme", "resp_1", after="b", limit=5, is_ascending=True)

    assert last is not None
    assert ([], False) == (list(last.items), last.has_more)
    assert await store.input_items("acme", "resp_1", after="x", limit=5, is_ascending=True) is None
    assert await store.input_items("acme", "nothing", after="", limit=5, is_ascending=True) is None


async def test_conversations_keep_their_items(store: ResponseStore) -> None:
    """Items are added, read, and deleted one by one; metadata is replaced; the end deletes all."""
    await store.add_conversation(
        StoredConversation("conv_1", "acme", 7.5, {"topic": "a"}), [message("a"), message("b")]
    )
    assert await store.delete_item("acme", "conv_1", "a")
    assert not await store.delete_item("acme", "conv_1", "a")
    assert await store.add_items("acme", "conv_1", [message("c")])
    page = await store.conversation_items("acme", "conv_1", after="", limit=9, is_ascending=False)

    assert page is not None
    assert ["c", "b"] == [item["id"] for item in page.items]
    assert StoredConversation("conv_1", "acme", 7.5, {"topic": "a"}) == await store.conversation("acme", "conv_1")
    assert StoredConversation("conv_1", "acme", 7.5, {}) == await store.set_metadata("acme", "conv_1", {})
    assert StoredConversation("conv_1", "acme", 7.5, {}) == await store.conversation("acme", "conv_1")
    assert await store.delete_conversation("acme", "conv_1")
    assert await store.conversation_item("acme", "conv_1", "b") is None
    assert not await store.add_items("acme", "conv_1", [message("d")])


async def test_concurrent_appends_keep_every_item(store: ResponseStore) -> None:
    """Whoever appends at the same time, no item is lost and none takes another's place."""
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [])
    batches = [[message(f"{batch}-{index}") for index in range(3)] for batch in range(12)]
    await asyncio.gather(*(store.add_items("acme", "conv_1", batch) for batch in batches))
    page = await store.conversation_items("acme", "conv_1", after="", limit=99, is_ascending=True)

    assert page is not None
    seen = [item["id"] for item in page.items]
    assert {item["id"] for batch in batches for item in batch} == set(seen)
    assert all(seen[i : i + 3] == [f"{seen[i].split('-')[0]}-{k}" for k in range(3)] for i in range(0, 36, 3))


@pytest.mark.parametrize("odd", ["nul\u0000", "\u00e9", "x" * 10_000, "", "%00", "a b\n"])
async def test_ids_may_be_anything(store: ResponseStore, odd: str) -> None:
    """Callers name their items, and ask for ids, as they like: found or not found, never an error."""
    await store.add(response(input_items=[message("first"), message(odd), message("last")]))
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [message(odd)])
    page = await store.input_items("acme", "resp_1", after=odd, limit=5, is_ascending=True)

    assert page is not None
    assert (["last"] if odd else ["first", "", "last"]) == [item["id"] for item in page.items]
    assert message(odd) == await store.conversation_item("acme", "conv_1", odd)
    assert await store.delete_item("acme", "conv_1", odd)
    odd += "\ud800"  # no JSON holds it, but a path may
    assert await store.get("acme", odd) is None
    assert await store.lineage("acme", odd) is None
    assert await store.conversation("acme", odd) is None
    assert await store.conversation_item("acme", "conv_1", odd) is None
    assert not await store.delete("acme", odd)
    assert not await store.cancel("acme", odd)
    assert not await store.delete_conversation("acme", odd)


async def test_what_expired_is_gone(state_url: str) -> None:
    """Nobody sees it from that moment on; the sweep deletes it."""
    store = ResponseStore(state_url, StoreLimits(keep_seconds=60))
    await store.add(response())
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [])
    await age(store, 61)

    assert await store.get("acme", "resp_1") is None
    assert await store.conversation("acme", "conv_1") is None
    await store.sweep()
    rows = await store._link.read(lambda connection: connection.execute(RESPONSES.select()))
    assert [] == list(rows)
    await store.close()


async def test_a_chain_in_use_does_not_expire(state_url: str) -> None:
    """Answering to the newest renews the oldest."""
    store = ResponseStore(state_url, StoreLimits(keep_seconds=60))
    await store.add(response("resp_0"))
    await store.add(response("resp_x"))
    await age(store, 40)
    await store.add(response("resp_1", previous_response_id="resp_0"))
    await age(store, 40)

    assert await store.get("acme", "resp_x") is None
    assert await store.lineage("acme", "resp_1") is not None
    await store.close()


async def test_the_least_recently_used_make_room(state_url: str) -> None:
    """At most so many rows: the next to expire goes first, what was used stays, other tenants lose nothing."""
    store = ResponseStore(state_url, StoreLimits(max_rows=3))
    await store.add(response("theirs", tenant="other"))
    await store.add(response("resp_0"))
    await store.add(response("resp_1"))
    await age(store, 3600)
    await store.add(response("resp_2", previous_response_id="resp_0"))
    await store.add_conversation(StoredConversation("conv_1", "acme", 1.0), [])

    assert await store.get("acme", "resp_1") is None
    assert await store.lineage("acme", "resp_2") is not None
    assert await store.get("other", "theirs") is not None
    await store.close()


async def test_bytes_make_room_too(state_url: str) -> None:
    """Bodies, items and events count; what can never fit is refused and pushes nothing out."""
    store = ResponseStore(state_url, StoreLimits(max_bytes=4000))
    await store.add(response("resp_0", keeps_events=True))
    await store.add_events("acme", "resp_0", [StoredEvent(0, b"x" * 3000)])
    with pytest.raises(InvalidRequest, match="4000"):
        await store.add(response("huge", input_items=[message("a", "x" * 5000)]))
    assert await store.get("acme", "resp_0") is not None
    await store.add(response("resp_1", input_items=[message("a", "x" * 2000)]))

    assert await store.get("acme", "resp_0") is None
    assert await store.get("acme", "resp_1") is not None
    await store.close()


async def test_running_responses_are_not_pushed_out(state_url: str) -> None:
    """A tenant with only such is told to wait; an owner that is gone protects nothing."""
    store = ResponseStore(state_url, StoreLimits(max_rows=2, lost_seconds=30))
    for index in range(2):
        await store.add(response(f"resp_{index}", status="in_progress", owner="boot"))
    with pytest.raises(Overloaded):
        await store.add(response("resp_2"))
    await age(store, 40)
    await store.add(response("resp_2"))

    assert await store.get("acme", "resp_2") is not None
    await store.close()


async def test_concurrent_additions_stay_within_the_limit(state_url: str) -> None:
    """Two replicas that add at the same time do not both find room for one."""
    stores = [ResponseStore(state_url, StoreLimits(max_rows=5), query_seconds=60) for _ in range(2)]
    await asyncio.gather(*(stores[index % 2].add(response(f"resp_{index}")) for index in range(20)))
    found = [await stores[0].get("acme", f"resp_{index}") for index in range(20)]

    assert 5 == sum(stored is not None for stored in found)
    for store in stores:
        await store.close()


async def test_the_count_of_bytes_is_true(state_url: str) -> None:
    """After every kind of change, the row knows what it holds: drift would push out too much or too little."""
    store = ResponseStore(state_url)
    await store.add(response(status="in_progress", keeps_events=True, input_items=[message("a", "\u00e9")]))
    await store.add_events("acme", "resp_1", [StoredEvent(0, b"abc"), StoredEvent(1, b"d")])
    await store.finish("acme", "resp_1", "completed", {"output": ["\u00e9\u00e9"]})
    column = select(RESPONSES.c.held_bytes)
    held = await store._link.read(lambda connection: connection.scalar(column))

    body, item = '{"output":["\u00e9\u00e9"]}', '{"id":"a","type":"message","role":"user","content":"\u00e9"}'
    assert len(body.encode()) + len(item.encode()) + 4 == held
    await store.close()


async def test_deleted_text_is_in_no_file(tmp_path: Path) -> None:
    """Delete means delete: after the sweep neither the database nor its journal holds the words."""
    store = ResponseStore(f"sqlite:///{tmp_path / 'state.sqlite3'}")
    await store.add(response(input_items=[message("a", "the secret word is rhubarb " * 500)]))
    await store.add(response("resp_2"))
    assert any(b"rhubarb" in path.read_bytes() for path in tmp_path.iterdir())
    assert await store.delete("acme", "resp_1")
    await store.sweep()

    assert not any(b"rhubarb" in path.read_bytes() for path in tmp_path.iterdir())
    await store.close()


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 50)), rows=st.integers(-3, 9), held_bytes=st.integers(-100, 300))
def test_no_more_is_dropped_than_needed(sizes: list[int], rows: int, held_bytes: int) -> None:
    """The oldest go, they free enough or are all, and one fewer would not do."""
    oldest = [Held(RESPONSES, str(index), size) for index, size in enumerate(sizes)]
    dropped, is_enough = rows_to_drop(iter(oldest), rows=rows, held_bytes=held_bytes)

    def frees(some: list[Held]) -> bool:
        return len(some) >= rows and sum(row.held_bytes for row in some) >= held_bytes

    assert oldest[: len(dropped)] == dropped
    assert is_enough == frees(dropped)
    assert is_enough or len(dropped) == len(oldest)
    assert not dropped or not frees(dropped[:-1])

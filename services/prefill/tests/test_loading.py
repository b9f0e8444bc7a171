"""How does a prefix hit get from the KV store into the pool, and computed blocks into the store?"""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from proto.common_pb2 import RETENTION_CLASS_AGENT, RETENTION_CLASS_CHAT
from services.chassis import telemetry
from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores
from services.chassis.kvstore_writer import Origin
from services.chassis.testing import OtlpReceiver
from services.chassis.tests.memory_kvstore import memory_kvstore
from services.prefill.loading import allowed_seconds, pending_seconds, recompute_seconds
from services.prefill.metrics import PrefillMetrics
from services.prefill.tests.rig import BLOCK, keys_of, prefill_replica, request, until


@pytest.fixture
async def store():
    async with memory_kvstore() as memory:
        yield memory


@pytest.fixture
async def filled(folder, store):
    """The store after one replica computed a prompt of five full blocks."""
    async with prefill_replica(folder, kvstore=store.stores) as rig:
        await rig.serve(request("prompt", 5 * BLOCK + 4))
        await asyncio.wait_for(rig.writer.flush(), 20)
    return store


async def first_of(rig, wanted, hit_tokens):
    events = await rig.serve(wanted, hit_tokens=hit_tokens)
    return next(event.first_token for event in events if event.HasField("first_token"))


async def test_full_prompt_blocks_are_written(filled):
    """Under the chained keys of the prompt; the partial block stays here."""
    assert set(keys_of(request("prompt", 5 * BLOCK + 4))) == set(filled.blocks)


@pytest.mark.parametrize(("asked", "kept"), [(RETENTION_CLASS_AGENT,) * 2, (0, RETENTION_CLASS_CHAT)])
async def test_blocks_are_written_with_tenant_and_class(folder, store, asked, kept):
    """As the request says; one without a class is a chat's."""
    async with prefill_replica(folder, kvstore=store.stores) as rig:
        await rig.serve(request("prompt", 2 * BLOCK + 4, tenant="acme", retention=asked))
        await asyncio.wait_for(rig.writer.flush(), 20)

    assert ({Origin("acme", kept)}, 2) == (set(store.origins.values()), len(store.blocks))


async def test_a_turn_that_comes_while_the_last_one_is_written_hits(folder, filled):
    """The block that is on its way to the store is waited for, in less time than computing it takes."""
    wanted = request("prompt", 5 * BLOCK + 4)
    ready = filled.pending[keys_of(wanted)[4]] = asyncio.Event()
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        asyncio.get_running_loop().call_later(0.05, ready.set)
        assert 5 * BLOCK == (await first_of(rig, wanted, 5 * BLOCK)).cached_tokens
    assert ["prompt"] == [asked.request_id for asked in filled.reads]


async def test_a_hit_is_loaded_and_not_written_again(folder, filled):
    """Another replica computes only the rest, gives the same token, and writes only what it computed."""
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        wanted = request("prompt", 6 * BLOCK + 1)
        written = filled.num_written
        first = await first_of(rig, wanted, 5 * BLOCK)
        await asyncio.wait_for(rig.writer.flush(), 20)

        assert (5 * BLOCK, BLOCK + 1) == (first.cached_tokens, first.computed_tokens)
        assert 5 * BLOCK == rig.registry.get_sample_value("fathom_prefill_loaded_tokens_total")
        assert [rig.source.prompt(wanted)[1]] == list(first.token.token_ids)
        assert 1 == filled.num_written - written
        await rig.idle()


async def test_the_own_pool_comes_first(folder, filled):
    """What is here already is not asked of the store."""
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        await first_of(rig, request("prompt", 5 * BLOCK + 4), 5 * BLOCK)
        filled.blocks.clear()
        assert 5 * BLOCK == (await first_of(rig, request("prompt", 5 * BLOCK + 4), 5 * BLOCK)).cached_tokens


async def test_a_trace_tells_what_came_from_the_own_pool(folder, filled):
    """Apart from what the store gave: of two blocks found here and three loaded, two; the next time, all five."""
    async with OtlpReceiver() as receiver, prefill_replica(folder, kvstore=filled.stores) as rig:
        telemetry.setup("prefill", "prefill-0", receiver.endpoint)
        for num_tokens in (2 * BLOCK + 4, 5 * BLOCK + 4, 5 * BLOCK + 4):
            traced = request("prompt", num_tokens, traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
            await first_of(rig, traced, num_tokens // BLOCK * BLOCK)
        await asyncio.to_thread(telemetry.shutdown)
        runs = [span for span in receiver.spans() if span.name == "prefill.run"]

    assert [0, 2 * BLOCK, 5 * BLOCK] == [span.attributes["fathom.memory_tokens"] for span in runs]


@pytest.mark.parametrize("trouble", ["missing", "damaged", "short", "away"])
async def test_what_cannot_be_loaded_is_computed(folder, filled, trouble):
    """The hit ends at the first bad block; the token stays the same."""
    wanted = request("prompt", 5 * BLOCK + 4)
    key = keys_of(wanted)[2]
    payload, crc32 = filled.blocks[key]
    stores, away = filled.stores, open_channel("127.0.0.1:1", peer="kvstore")
    if trouble == "missing":
        del filled.blocks[key]
    elif trouble == "damaged":
        filled.blocks[key] = (payload[:-1] + bytes([payload[-1] ^ 1]), crc32)
    elif trouble == "short":
        filled.blocks[key] = (payload[:-16], crc32)
    else:
        stores = Stores.single(away)
    async with prefill_replica(folder, kvstore=stores) as rig:
        first = await first_of(rig, wanted, 5 * BLOCK)

        assert (0 if trouble == "away" else 2 * BLOCK) == first.cached_tokens
        assert [rig.source.prompt(wanted)[1]] == list(first.token.token_ids)
        await rig.idle()
    await away.close()


async def test_a_false_hint_costs_nothing(folder, store):
    """The entrypoint's lookup may be outdated: the store is asked, has nothing, and the prompt is computed."""
    async with prefill_replica(folder, kvstore=store.stores) as rig:
        assert 0 == (await first_of(rig, request("prompt", 50), 3 * BLOCK)).cached_tokens


async def test_cancel_while_loading_frees_everything(folder, filled):
    """A prompt that waits for the store gives its blocks back as well."""
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        filled.gate.clear()
        await rig.submit(request("prompt", 5 * BLOCK + 4), hit_tokens=5 * BLOCK)
        await until(lambda: rig.replica.engine.load.used_blocks)
        await rig.cancel("prompt")
        await rig.idle()


async def test_loading_holds_nobody_up(folder, filled):
    """While one prompt waits for the store, another is computed."""
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        filled.gate.clear()
        await rig.submit(request("prompt", 5 * BLOCK + 4), hit_tokens=5 * BLOCK)
        assert 0 == (await first_of(rig, request("other", 40), 0)).cached_tokens
        filled.gate.set()


@pytest.mark.slow
async def test_a_late_hit_is_a_miss(folder, filled, monkeypatch):
    """A store that does not answer in the time that computing takes is not waited for."""
    monkeypatch.setattr("services.prefill.loading._LEAST_SECONDS", 0.2)
    async with prefill_replica(folder, kvstore=filled.stores) as rig:
        await first_of(rig, request("speed", 100), 0)  # now the replica knows how fast it is
        filled.gate.clear()
        assert 0 == (await first_of(rig, request("prompt", 5 * BLOCK + 4), 5 * BLOCK)).cached_tokens
        filled.gate.set()


async def test_a_store_that_is_behind_loses_blocks_but_no_time(folder, store):
    """The queue is bounded: prompts go on, and what cannot be written in time is dropped, oldest first."""
    async with prefill_replica(folder, kvstore=store.stores) as rig:
        rig.writer._max_bytes = 2 * rig.replica.engine._executor.layout.block_bytes
        store.gate.clear()
        await asyncio.wait_for(rig.serve(request("prompt", 5 * BLOCK)), 20)
        store.gate.set()
        await asyncio.wait_for(rig.writer.flush(), 20)

        assert 2 == len(store.blocks)


def test_a_load_may_take_as_long_as_computing():
    """Never less than the floor, never past the request's deadline."""
    assert 8.0 == allowed_seconds(16_000, tokens_per_second=2_000, seconds_left=60)
    assert 2.0 == allowed_seconds(128, tokens_per_second=2_000, seconds_left=60)
    assert 1.0 == allowed_seconds(16_000, tokens_per_second=2_000, seconds_left=1)
    assert 4.0 == allowed_seconds(2_000, tokens_per_second=0, seconds_left=60)
    assert [0.25, 1.0] == [pending_seconds(0.5), pending_seconds(60)]


def test_a_load_saves_what_computing_would_have_taken_more() -> None:
    """Operators see what the store is worth in seconds; a load slower than computing is worth nothing."""
    registry = CollectorRegistry()
    metrics = PrefillMetrics(registry)
    expected = recompute_seconds(1000, tokens_per_second=500.0)
    metrics.count_load(1000, seconds=0.5, recompute_seconds=expected)
    metrics.count_load(128, seconds=3.0, recompute_seconds=0.1)

    assert 2.0 == expected
    assert 1128 == registry.get_sample_value("fathom_prefill_loaded_tokens_total")
    assert 1.5 == registry.get_sample_value("fathom_prefill_saved_seconds_total")
    assert 3.5 == registry.get_sample_value("fathom_prefill_load_seconds_total")

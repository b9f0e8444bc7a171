"""Does a lookup over several stores find the longest prefix, and what does a lost one cost?"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import time

import pytest

from proto.kvstore_pb2 import LookupReply, LookupRequest
from proto.kvstore_pb2_grpc import KvstoreServicer, add_KvstoreServicer_to_server
from services.chassis.channel import open_channel
from services.chassis.errors import Overloaded
from services.chassis.kvstore_shards import GROUP_BLOCKS, StoreReplica, keys_of, split, without
from services.chassis.testing import free_port, serve
from services.entrypoint import lookup
from services.entrypoint.lookup import Hit, KvstoreReplicas

KEYS = [hashlib.sha256(str(n).encode()).digest() for n in range(12 * GROUP_BLOCKS)]
NAMES = ["a", "b", "c"]
RUNS = split(KEYS, 0, NAMES)
ASK = LookupRequest(fingerprint=b"f" * 32, request_id="request-1")


class Store(KvstoreServicer):
    """One replica: keeps keys, can be slow or refuse."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.pending: set[bytes] = set()
        self.pending_seconds = 0.05
        self.delay = 0.0
        self.refuses = False
        self.asked: list[LookupRequest] = []

    async def Lookup(self, request, context):
        self.asked.append(request)
        await asyncio.sleep(self.delay)
        if self.refuses:
            raise Overloaded("busy")
        found = len(list(itertools.takewhile(self.keys.__contains__, request.block_keys)))
        behind = len(list(itertools.takewhile(self.pending.__contains__, request.block_keys[found:])))
        return LookupReply(num_blocks=found, num_pending=behind, pending_seconds=self.pending_seconds if behind else 0)


class Stores:
    def __init__(self, names=NAMES):
        self.all = {name: Store() for name in names}  # type: ignore[abstract]  # serves only what is called
        self._stack = contextlib.AsyncExitStack()
        self._servers = {}

    async def __aenter__(self):
        replicas = []
        for name, store in self.all.items():
            self._servers[name] = contextlib.AsyncExitStack()
            self._stack.push_async_exit(self._servers[name])
            address = await self._servers[name].enter_async_context(
                serve(functools.partial(add_KvstoreServicer_to_server, store))
            )
            replicas.append(StoreReplica(name, address))
        channels = [open_channel(replica.address, peer="kvstore") for replica in replicas]
        for channel in channels:
            self._stack.push_async_callback(channel.close)
        by_address = dict(zip((replica.address for replica in replicas), channels, strict=True))
        self.replicas = KvstoreReplicas(replicas, by_address.__getitem__)
        return self

    async def __aexit__(self, *exc):
        await self._stack.__aexit__(*exc)

    def place(self, num_blocks=12 * GROUP_BLOCKS):
        """Each replica gets its own of the first blocks, by default of all."""
        for name, store in self.all.items():
            store.keys = set(keys_of(name, RUNS, KEYS)) & set(KEYS[:num_blocks])

    async def crash(self, name):
        await self._servers.pop(name).aclose()

    async def look_up(self, keys=KEYS, seconds=5.0):
        return await self.replicas.look_up(keys, ASK, seconds=seconds)


@pytest.mark.parametrize("num_blocks", [0, 1, GROUP_BLOCKS, 5 * GROUP_BLOCKS + 3, len(KEYS)])
async def test_the_prefix_goes_as_far_as_all_of_them_hold_it(num_blocks):
    """Each replica is asked once, for its own blocks, with everything else that was to be said."""
    async with Stores() as stores:
        stores.place(num_blocks)
        assert Hit(num_blocks, 0, 0) == await stores.look_up()

        for name, store in stores.all.items():
            assert [keys_of(name, RUNS, KEYS)] == [list(request.block_keys) for request in store.asked]
            assert ("request-1", b"f" * 32) == (store.asked[0].request_id, store.asked[0].fingerprint)


async def test_blocks_that_are_nearly_written_count():
    """The next turn comes in milliseconds; what would take long is not waited for."""
    async with Stores(["a"]) as stores:
        store = stores.all["a"]
        store.keys, store.pending = set(KEYS[:5]), set(KEYS[5:7])
        assert Hit(7, 2, 0) == await stores.look_up()

        store.pending_seconds = lookup.PENDING_SECONDS + 1
        assert Hit(5, 0, 0) == await stores.look_up()


async def test_a_lost_replica_ends_the_prefix():
    """Its blocks are nowhere else: what lies before the first of them is still a hit."""
    async with Stores() as stores:
        stores.place()
        await stores.crash("b")
        hit = await stores.look_up()

    assert Hit(next(run.first_index for run in RUNS if run.replica == "b"), 0, 1) == hit


async def test_others_answer_for_a_lost_replica():
    """With an object store behind them, or what was written while it was away: those next in order are asked."""
    async with Stores() as stores:
        stores.place()
        await stores.crash("b")
        for run in without(RUNS, "b", KEYS, ["a", "c"]):
            stores.all[run.replica].keys |= set(KEYS[run.first_index : run.first_index + run.num_blocks])

        assert Hit(len(KEYS), 0, 1) == await stores.look_up()
        assert Hit(len(KEYS), 0, 0) == await stores.look_up()  # it is passed over for a while


async def test_a_slow_replica_costs_a_bounded_time():
    """Less than the whole lookup's time, and then nothing for a while."""
    async with Stores() as stores:
        stores.place()
        stores.all["b"].delay = 30.0
        began = time.monotonic()
        await stores.look_up(seconds=1.0)
        assert time.monotonic() - began < 20

        hit = await stores.look_up()
        assert (0, 1) == (hit.num_failed, len(stores.all["b"].asked))


async def test_a_replica_that_is_back_is_asked_again(monkeypatch):
    """After the pause one request tries it."""
    monkeypatch.setattr(lookup, "AWAY_SECONDS", 0.1)
    async with Stores() as stores:
        stores.place()
        stores.all["b"].refuses = True
        assert 1 == (await stores.look_up()).num_failed
        stores.all["b"].refuses = False
        await asyncio.sleep(0.12)

        assert Hit(len(KEYS), 0, 0) == await stores.look_up()


async def test_a_single_store_that_failed_is_asked_again_at_once():
    """There is nobody else to ask."""
    async with Stores(["a"]) as stores:
        stores.all["a"].refuses = True
        assert Hit(0, 0, 1) == await stores.look_up()
        stores.all["a"].refuses, stores.all["a"].keys = False, set(KEYS)

        assert Hit(len(KEYS), 0, 0) == await stores.look_up()


async def test_no_store_answers_and_nothing_breaks():
    """All are away: nothing is stored, soon."""
    channels = []

    def channel(address):
        channels.append(open_channel(address, peer="kvstore"))
        return channels[-1]

    replicas = KvstoreReplicas([StoreReplica(name, f"127.0.0.1:{free_port()}") for name in NAMES], channel)
    began = time.monotonic()
    hit = await replicas.look_up(KEYS, ASK, seconds=0.5)
    assert 0 == hit.num_blocks
    assert time.monotonic() - began < 15
    for one in channels:
        await one.close()

"""Does a sequence give the same tokens when its KV travels from a prefill to a decode replica?

Both replicas and a KV store in this process with a tiny real model, over real gRPC; the test plays the entrypoint.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator
from proto.common_pb2 import SamplingParams
from proto.kvstore_pb2_grpc import add_KvstoreServicer_to_server
from services.chassis.channel import open_channel
from services.chassis.kvstore_client import Stores
from services.chassis.local_reads import LocalReads
from services.chassis.testing import serve
from services.decode.sampling import sampling_params
from services.decode.tests.rig import BLOCK, BOOT, collect, decode_replica, request, tokens_of
from services.decode.tests.tiny_model import write_tiny_model
from services.kvstore.local_reads import LocalReads as LocalSocket
from services.kvstore.server import Servicer as Kvstore
from services.kvstore.store import Store
from services.prefill.tests.rig import prefill_replica

pytestmark = pytest.mark.slow

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 6 * BLOCK + 1, 100, 130)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1, seed=11),
    "penalties": SamplingParams(
        temperature=0.8, top_p=1, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.4, seed=5
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The tiny model's folder."""
    return write_tiny_model(tmp_path_factory.mktemp("handoff") / "tiny")


@pytest.fixture(scope="session")
def alone(folder):
    """One process's answer to a request: the yardstick."""
    executor = Executor.load(folder, dtype="fp32", num_blocks=41, block_tokens=BLOCK, threads=1)
    generator = Generator(executor, chunk_tokens=64)

    def answer(wanted):
        asked = GenerateRequest(
            token_ids=tuple(wanted.prompt_token_ids),
            sampling=sampling_params(wanted.sampling),
            max_tokens=wanted.stop.max_tokens,
            stop_token_ids=tuple(wanted.stop.stop_token_ids),
        )
        return list(generator.generate([asked])[0].token_ids)

    return answer


class Pair:
    """One prefill and one decode replica."""

    def __init__(self, prefill, decode, decode_address):
        self.prefill, self.decode = prefill, decode
        self.prefill.decode_address = decode_address
        self.backends: Counter[str] = Counter()
        self.cached_tokens: dict[str, int] = {}

    async def answer(self, wanted, *, hit_tokens=0):
        """Play the entrypoint: submit, deliver when the last chunk starts, and follow both legs."""
        tokens, following = [], None
        wanted.fingerprint = self.prefill.fingerprint
        async with asyncio.timeout(60), await self.prefill.submit(wanted, hit_tokens=hit_tokens) as events:
            async for event in events:
                if event.HasField("last_chunk_started"):
                    following = asyncio.create_task(collect(await self.decode.submit(wanted)))
                    await self.prefill.deliver(wanted.request_id)
                elif event.HasField("first_token"):
                    tokens += event.first_token.token.token_ids
                    self.cached_tokens[wanted.request_id] = event.first_token.cached_tokens
                    if event.first_token.token.finish_reason:
                        return tokens
                elif event.HasField("handoff_done"):
                    self.backends[event.handoff_done.backend] += 1
                    break
                else:
                    raise AssertionError(event.failed)
            assert following is not None
            return tokens + tokens_of(await following)

    async def idle(self):
        await self.prefill.idle()
        await self.decode.idle()


@asynccontextmanager
async def pair(folder, shm=None, *, has_lanes=True, prefill=None, decode=None):
    """Start both replicas. prefill, decode: options of each."""
    async with (
        decode_replica(folder, shm=shm, has_lanes=has_lanes, **(decode or {})) as decode_rig,
        prefill_replica(folder, **(prefill or {})) as prefill_rig,
    ):
        whole = Pair(prefill_rig, decode_rig, decode_rig.address)
        prefill_rig.boot_id = BOOT
        yield whole
        await whole.idle()


@pytest.mark.parametrize("backend", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_same_tokens_on_all_backends(folder, tmp_path, alone, backend, sampling):
    """All lengths around block borders at once, so that they are batch mates as well."""
    async with pair(folder, tmp_path if backend == "shm" else None, has_lanes=backend != "grpc") as whole:
        wanted = [request(f"{n}-tokens", n, max_tokens=12, sampling=SAMPLINGS[sampling]) for n in LENGTHS]
        answers = await asyncio.gather(*(whole.answer(each) for each in wanted))

        assert [alone(each) for each in wanted] == answers
        assert {backend: len(wanted)} == whole.backends


async def test_same_tokens_after_preemption(folder, tmp_path, alone):
    """A decode pool far too small for all: every answer is still the one-process one."""
    async with pair(folder, tmp_path, decode={"num_blocks": 9, "recompute_tokens": 8}) as whole:
        wanted = [request(f"tight-{n}", 14 + n, max_tokens=40) for n in range(4)]
        answers = await asyncio.gather(*(whole.answer(each) for each in wanted))

        assert [alone(each) for each in wanted] == answers
        assert whole.decode.replica.engine.load.num_preemptions > 0


@pytest.mark.parametrize("way", ["files", "grpc"])
async def test_same_tokens_from_the_kv_store(folder, tmp_path, alone, way):
    """The next turn hits prompt and answer of the one before, on replicas that never saw it; counts are exact.

    Whether the store sends the blocks or lets its files be read.
    """
    store = await Store.open(tmp_path / "kv", max_bytes=64 << 20, segment_bytes=4 << 20)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        socket = LocalSocket.start(store, tmp_path / "kv", boot_id="kv") if way == "files" else None
        if socket is not None:
            stack.push_async_callback(socket.close)
        address = await stack.enter_async_context(
            serve(lambda server: add_KvstoreServicer_to_server(Kvstore(store, socket), server))
        )
        channel = open_channel(address, peer="kvstore")
        stack.push_async_callback(channel.close)
        first = request("turn", 3 * BLOCK + 5, max_tokens=2 * BLOCK)
        stores = Stores({"kvstore": channel}, {"kvstore": LocalReads(channel)})
        options = {"prefill": {"kvstore": stores}, "decode": {"kvstore": stores}}
        async with pair(folder, tmp_path, **options) as whole:
            writing = asyncio.create_task(whole.decode.writer.run())
            answer = await whole.answer(first)
            assert alone(first) == answer
            await whole.idle()
            for rig in (whole.prefill, whole.decode):
                await asyncio.wait_for(rig.writer.flush(), 10)
            writing.cancel()

        second = request("next", 1)
        second.prompt_token_ids[:] = [*first.prompt_token_ids, *answer, 9, 8, 7]
        stored = (len(first.prompt_token_ids) + len(answer) - 1) // BLOCK * BLOCK
        async with pair(folder, tmp_path, **options) as whole:
            assert alone(second) == await whole.answer(second, hit_tokens=stored)
            assert {"next": stored} == whole.cached_tokens
            assert (way == "files") == bool(store.counts.local_opens)


async def test_a_one_token_answer_never_meets_decode(folder, alone):
    """Prefill alone answers it."""
    async with pair(folder) as whole:
        wanted = request("single", 40, max_tokens=1)
        assert alone(wanted) == await whole.answer(wanted)
        assert 0 == whole.decode.replica.engine.load.num_steps


async def test_a_cancel_during_the_handoff_frees_both_sides(folder, tmp_path):
    """Whatever was reserved over there is given back."""
    async with pair(folder, tmp_path) as whole:
        for moment in ("last_chunk_started", "first_token", "handoff_done"):
            wanted = request(f"cancel-{moment}", 100, max_tokens=300)
            wanted.fingerprint = whole.prefill.fingerprint
            async with asyncio.timeout(10), await whole.prefill.submit(wanted) as events:
                async for event in events:
                    if event.HasField("last_chunk_started"):
                        answer = await whole.decode.submit(wanted)
                        await whole.prefill.deliver(wanted.request_id)
                    if event.HasField(moment):
                        break
            await whole.prefill.cancel(wanted.request_id)
            await whole.decode.cancel(wanted.request_id)
            await whole.idle()
            answer.close()
    assert [] == [each for each in tmp_path.iterdir() if each.is_file()]

"""Which blocks of an answer go to the KV store?"""

import asyncio

import pytest

from proto.common_pb2 import RETENTION_CLASS_AGENT
from services.chassis.block_keys import block_keys
from services.chassis.kvstore_writer import Origin
from services.chassis.tests.memory_kvstore import memory_kvstore
from services.decode.tests.rig import BLOCK, ROOT, decode_replica, request


@pytest.fixture
async def store():
    async with memory_kvstore() as memory:
        yield memory


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [41, 8])
async def test_blocks_that_fill_up_during_the_answer_are_written_once(folder, store, num_blocks):
    """Under the keys of prompt and answer together, so that the next turn hits; the prompt's own are prefill's.

    In the small pool the two sequences preempt each other, and still nothing is written twice.
    """
    async with decode_replica(folder, num_blocks=num_blocks, kvstore=store.stores) as rig:
        writing = asyncio.create_task(rig.writer.run())
        origin = {"tenant": "acme", "retention": RETENTION_CLASS_AGENT}
        wanted = [request(f"turn-{n}", 2 * BLOCK + 5, max_tokens=2 * BLOCK, **origin) for n in range(2)]
        answers = await asyncio.gather(*(rig.answer(each) for each in wanted))
        await rig.idle()
        await asyncio.sleep(0)
        await asyncio.wait_for(rig.writer.flush(), 20)

        expected = set()
        for each, answer in zip(wanted, answers, strict=True):
            assert rig.source.answer(each) == answer
            computed = [*each.prompt_token_ids, *answer][:-1]  # the last token is never computed
            expected |= set(block_keys(ROOT, computed, block_tokens=BLOCK)[2:])
        assert expected == set(store.blocks)
        assert {Origin("acme", RETENTION_CLASS_AGENT)} == set(store.origins.values())
        assert len(expected) == store.num_written
        assert (rig.replica.engine.load.num_preemptions > 0) == (num_blocks == 8)
        writing.cancel()

"""Does one trace show what the entrypoint did for a request, with the right parents?"""

import asyncio

import pytest

from proto.common_pb2 import StopRules
from services.chassis import telemetry
from services.chassis.testing import OtlpReceiver
from services.entrypoint.tests.world import World, eventually

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
HOPS = {"kvstore.lookup", "prefill_lb.pick", "prefill.run", "decode_lb.pick", "decode.run"}


@pytest.fixture
async def receiver():
    async with OtlpReceiver() as receiver:
        telemetry.setup("entrypoint", "entrypoint-0", receiver.endpoint)
        yield receiver
        await asyncio.to_thread(telemetry.shutdown)


async def test_every_hop_is_a_child_of_the_request_s_span(receiver):
    """And each engine is told its own hop's span as the cause of its work."""
    async with World() as world:
        await world.ask(traceparent=CALLER)
        await world.settled()
        prefill = world.prefills["prefill-0"].submitted[0].request
        decode = world.decodes["decode-0"].submitted[0].request
    spans = await receiver.wait_for(lambda came: {*HOPS, "entrypoint.generate"} <= {span.name for span in came})

    by_name = {span.name: span for span in spans}
    root = by_name["entrypoint.generate"]
    assert ("0123456789abcdef0123456789abcdef", "0123456789abcdef") == (root.trace_id, root.parent_id)
    assert dict.fromkeys(HOPS, root.span_id) == {hop: by_name[hop].parent_id for hop in HOPS}
    assert [by_name["prefill.run"].span_id, by_name["decode.run"].span_id] == [
        prefill.traceparent.split("-")[2],
        decode.traceparent.split("-")[2],
    ]
    assert "prefill-0" == by_name["prefill.run"].attributes["fathom.replica"]
    assert 4 == root.attributes["gen_ai.usage.output_tokens"]


async def test_without_an_exporter_the_caller_s_context_passes_through():
    async with World() as world:
        await world.ask(traceparent=CALLER, stop=StopRules(max_tokens=1))
        await eventually(lambda: len(world.prefills["prefill-0"].submitted) == 1)

        assert CALLER == world.prefills["prefill-0"].submitted[0].request.traceparent

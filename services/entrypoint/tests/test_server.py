"""What may a recipe's stream ask for, and what is refused?"""

import asyncio
import time

from proto.common_pb2 import FinishReason, Request, TokenEvent
from proto.entrypoint_pb2 import GenerateCommand, ListModelsRequest
from services.chassis.errors import InvalidRequest, ModelNotFound, NoReplica, Overloaded, PromptTooLong
from services.entrypoint.tests.world import World, eventually


async def test_many_requests_share_one_stream():
    async with World() as world:
        calls = await asyncio.gather(*(world.submit() for _ in range(20)))
        for call in calls:
            await call.end()
        await world.settled()

        assert [[100, 101, 102, 103]] * 20 == [call.tokens for call in calls]


async def test_a_request_id_in_use_is_refused_to_others():
    async with World() as world:
        world.stops.close("decode_2")
        first = await world.submit()
        await world.stops.reached("decode_2")
        first_recipe, first_channel = world.recipe, world.recipe_channel
        await world.connect()
        second = await world.ask(first.request)
        world.stops.open("decode_2")
        await first.end()
        await first_recipe.close()
        await first_channel.close()

        assert (InvalidRequest, "request_id") == (type(second.error), second.error.field)
        assert [100, 101, 102, 103] == first.tokens


async def test_a_request_id_in_use_on_the_same_stream_leaves_the_first_one_alone():
    """An error under the shared id would end the first one for its caller."""
    async with World() as world:
        world.stops.close("decode_2")
        call = await world.submit()
        await world.recipe.send(GenerateCommand(submit=call.request))
        await eventually(lambda: world.metric("fathom_entrypoint_requests_total", outcome="InvalidRequest"))
        world.stops.open("decode_2")
        await call.end()

        assert [100, 101, 102, 103] == call.tokens
        assert 1 == len(world.prefill_lb.picks)


async def test_an_id_is_free_again_after_its_request():
    async with World() as world:
        first = await world.ask()
        await world.settled()
        second = await world.ask(first.request)

        assert first.tokens == second.tokens


async def test_more_requests_than_allowed_are_shed_with_a_time():
    """Refused at once, also when they arrive in one turn of the loop; the others are served."""
    async with World(max_requests=2) as world:
        world.stops.close("prefill")
        calls = [await world.submit() for _ in range(3)]
        await calls[2].end()
        world.stops.open("prefill")
        for call in calls[:2]:
            await call.end()

        assert Overloaded is type(calls[2].error)
        assert calls[2].error.retry_after > 0
        assert [4, 4] == [len(call.tokens) for call in calls[:2]]


async def test_what_the_model_cannot_answer_never_reaches_a_replica():
    async with World() as world:
        unknown = await world.ask(model="huge")
        too_long = await world.ask(prompt_token_ids=[1] * 512)

        assert (ModelNotFound, PromptTooLong) == (type(unknown.error), type(too_long.error))
        assert [] == world.prefill_lb.picks


async def test_a_request_may_be_cancelled_before_it_began():
    async with World() as world:
        events: list[TokenEvent] = []
        world.requests.start(world.request(), events.append)
        world.requests.cancel("request-1", "disconnect")
        await world.settled()

        assert [FinishReason.FINISH_REASON_CANCELLED] == [event.finish_reason for event in events]


async def test_cancelling_an_unknown_request_is_ignored():
    async with World() as world:
        ended = await world.ask()
        await ended.cancel()

        assert 4 == len((await world.ask()).tokens)


async def test_a_request_without_a_deadline_gets_one():
    async with World() as world:
        await world.ask()

        deadline = world.prefills["prefill-0"].submitted[0].request.deadline_unix_seconds
        assert 590 < deadline - time.time() <= 600


async def test_only_servable_models_are_listed():
    async with World() as world:
        listed = await world.stub.ListModels(ListModelsRequest(), timeout=30)
        world.table_decode.replicas = []
        nothing = await world.stub.ListModels(ListModelsRequest(), timeout=30)
        refused = await world.ask()

        assert (["tiny"], []) == ([card.name for card in listed.models], list(nothing.models))
        assert NoReplica is type(refused.error)
        assert refused.error.retry_after > 0


async def test_draining_finishes_what_runs_and_ends_the_streams():
    async with World() as world:
        world.stops.close("decode_2")
        running = await world.submit()
        await world.stops.reached("decode_2")
        drained = asyncio.create_task(world.entrypoint.drain())
        late = await world.ask()
        world.stops.open("decode_2")
        await running.end()
        async with asyncio.timeout(30):
            await drained

        assert (4, NoReplica) == (len(running.tokens), type(late.error))
        await eventually(lambda: not world.recipe.is_open)


async def test_streams_to_replicas_that_are_gone_are_dropped():
    async with World() as world:
        await world.ask()
        await world.crash("prefill-0")
        await eventually(lambda: not any(stream.is_open for stream in world.peers._prefill.values()))
        await world.peers.drop_gone({"boot-prefill-1"})

        assert ([], ["boot-decode-0"]) == (list(world.peers._prefill), list(world.peers._decode))


async def test_a_bad_request_harms_no_neighbour():
    async with World() as world:
        call = await world.submit()
        await world.recipe.send(GenerateCommand(submit=Request()))
        await call.end()

        assert 4 == len(call.tokens)

"""What happens to a request, from admission to its last token?"""

import hashlib

import pytest

from proto.common_pb2 import FinishReason, StopRules, StreamError
from services.chassis.block_keys import block_keys, key_root
from services.chassis.errors import BlocksLost, Overloaded, PeerLost, to_stream_error
from services.entrypoint import flow, legs
from services.entrypoint.tests.doubles import BLOCK_TOKENS, CARD, FIRST_TOKEN
from services.entrypoint.tests.world import CLUSTER_KEY, PROMPT, World, eventually

LENGTH, STOP = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP


async def test_the_order_of_a_request_s_life():
    """Decode is picked late: after prefill began, before its first token."""
    async with World() as world:
        world.stops.close("decode_3")
        call = await world.submit()
        await call.receive(3)
        await world.prefill_ended()
        world.stops.open("decode_3")
        await call.end()
        await world.settled()

    assert [100, 101, 102, 103] == call.tokens
    assert LENGTH == call.events[-1].finish_reason
    steps = [s for s in world.log if s not in {"decode_submit", "handoff_done"}]  # these two run beside the others
    assert [
        "lookup", "prefill_pick", "prefill", "decode_pick", "first_token", "handoff", "decode_1", "decode_2", "decode_3",
    ] == steps  # fmt: skip
    assert [] == world.cancelled()
    assert ["decode-0"] == world.prefills["prefill-0"].deliver_log


async def test_the_first_token_does_not_wait_for_the_handoff():
    async with World() as world:
        world.stops.close("handoff")
        call = await world.submit()

        assert [FIRST_TOKEN] == list((await call.next()).token_ids)
        world.stops.open("handoff")
        await call.end()


async def test_usage_is_exact_on_first_and_last_event():
    """The entrypoint counts; what decode reports is not passed on, and the first token counts once."""
    async with World() as world:
        world.kvstore.num_blocks = 3
        world.prefills["prefill-0"].cached_tokens = 32
        call = await world.ask()

        assert (len(PROMPT), 32, 4) == call.usage
        first = call.events[0].usage
        assert (len(PROMPT), 32, 1) == (first.prompt_tokens, first.cached_tokens, first.completion_tokens)
        assert [True, False, False, True] == [event.HasField("usage") for event in call.events]
        assert 48 == world.prefill_lb.picks[0].hit_tokens == world.prefills["prefill-0"].submitted[0].hit_tokens
        assert 48 == world.metric("fathom_entrypoint_hit_tokens_total")


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_the_key_root_travels_and_the_cluster_key_does_not(tenant):
    """Whoever gets the request can name its blocks, and no others."""
    async with World() as world:
        await world.ask(tenant=tenant)

    salt = hashlib.sha256(tenant.encode()).digest() if tenant else b""
    root = key_root(CLUSTER_KEY, CARD.fingerprint, salt)
    asked = world.kvstore.asked[0]
    assert block_keys(root, PROMPT[:-1], block_tokens=BLOCK_TOKENS) == tuple(asked.block_keys)
    for submitted in (world.prefills["prefill-0"].submitted[0], world.decodes["decode-0"].submitted[0]):
        assert (root, CARD.fingerprint) == (submitted.request.key_root, submitted.request.fingerprint)
        assert CLUSTER_KEY not in submitted.SerializeToString()


async def test_a_whole_block_prompt_still_computes_its_last_token():
    """The key of a prompt's last block is not even asked for when the prompt ends with it."""
    async with World() as world:
        await world.ask(prompt_token_ids=PROMPT[: 2 * BLOCK_TOKENS])
        await world.ask(prompt_token_ids=PROMPT[:BLOCK_TOKENS])

    assert [1] == [len(asked.block_keys) for asked in world.kvstore.asked]


async def test_one_token_needs_no_decode():
    async with World() as world:
        call = await world.ask(stop=StopRules(max_tokens=1))
        await world.settled()

        assert ([FIRST_TOKEN], LENGTH, (len(PROMPT), 0, 1)) == (call.tokens, call.events[-1].finish_reason, call.usage)
        assert [] == world.decode_lb.picks
        assert [] == world.cancelled()


async def test_a_first_token_that_stops_gives_the_decode_replica_back():
    """Decode was picked and told before prefill knew; it must not wait for a handoff that never comes."""
    async with World() as world:
        world.prefills["prefill-0"].first_finish = STOP
        world.stops.close("first_token")
        call = await world.submit()
        await world.stops.reached("decode_submit")
        world.stops.open("first_token")
        await call.end()
        await world.settled()

        assert ([FIRST_TOKEN], STOP, (len(PROMPT), 0, 1)) == (call.tokens, call.events[-1].finish_reason, call.usage)
        await eventually(lambda: ["decode-0"] == world.cancelled())


async def test_prefill_s_booking_ends_with_the_first_token():
    """It stands for prompt tokens to compute, not for the answer."""
    async with World() as world:
        world.stops.close("handoff")
        call = await world.submit()
        await call.next()

        await eventually(lambda: not world.prefill_lb.booked)
        assert ["decode-0"] == list(world.decode_lb.booked.values())
        world.stops.open("handoff")
        await call.end()


@pytest.mark.parametrize("has_kvstore", [True, False], ids=["hangs", "is down"])
async def test_text_needs_no_kvstore(has_kvstore, monkeypatch):
    """A store that is away costs half a second at most, and is counted."""
    monkeypatch.setattr(flow, "LOOKUP_SECONDS", 0.05)
    async with World(has_kvstore=has_kvstore) as world:
        world.stops.close("lookup")
        call = await world.ask()

        assert 4 == len(call.tokens)
        assert 0 == world.prefill_lb.picks[0].hit_tokens
        assert 1 == world.metric("fathom_entrypoint_lookup_failures_total")


def stream_error(error) -> StreamError:
    return to_stream_error(error)


@pytest.mark.parametrize("how", ["crash", "unreachable", "reports"])
async def test_prefill_is_tried_once_elsewhere_before_any_token(how):
    """The caller has seen nothing yet, so it sees nothing of this either."""
    async with World() as world:
        if how == "reports":
            world.prefills["prefill-0"].errors["prefill"] = stream_error(Overloaded("full", retry_after=3))
            call = await world.submit()
        elif how == "unreachable":
            await world.crash("prefill-0")
            call = await world.submit()
        else:
            world.stops.close("prefill")
            call = await world.submit()
            await world.stops.reached("prefill")
            await world.crash("prefill-0")
            world.stops.open("prefill")
        await call.end()
        await world.settled()

        assert [100, 101, 102, 103] == call.tokens
        assert [[], ["prefill-0"]] == [list(pick.exclude) for pick in world.prefill_lb.picks]
        assert 1 == world.metric("fathom_entrypoint_retries_total", leg="prefill")


async def test_without_another_prefill_the_first_failure_is_the_answer():
    async with World(num_prefill=1) as world:
        world.prefills["prefill-0"].errors["prefill"] = stream_error(Overloaded("full", retry_after=3))
        call = await world.ask()
        await world.settled()

        assert (Overloaded, 3.0) == (type(call.error), call.error.retry_after)
        assert [] == call.tokens


async def test_a_decode_replica_that_refuses_early_is_replaced():
    """The KV is still with prefill, which is told the other place."""
    async with World() as world:
        world.stops.close("first_token")
        world.decodes["decode-0"].errors["decode_submit"] = stream_error(Overloaded("batch is full"))
        call = await world.submit()
        await eventually(lambda: len(world.prefills["prefill-0"].deliver_log) == 2)
        world.stops.open("first_token")
        await call.end()
        await world.settled()

        assert [100, 101, 102, 103] == call.tokens
        assert ["decode-0", "decode-1"] == world.prefills["prefill-0"].deliver_log
        assert [[], ["decode-0"]] == [list(pick.exclude) for pick in world.decode_lb.picks]
        assert 1 == world.metric("fathom_entrypoint_retries_total", leg="decode")


async def test_a_computed_prompt_waits_for_room(monkeypatch):
    """Answers end all the time; the first token waits as well, so that a refusal would still be a clean one."""
    monkeypatch.setattr(flow, "ROOM_POLL_SECONDS", 0.01)
    async with World() as world:
        world.decode_lb.refusals = [Overloaded("no room"), Overloaded("no room")]
        call = await world.ask()

        assert [100, 101, 102, 103] == call.tokens
        assert 3 == len(world.decode_lb.picks)


async def test_room_that_never_comes_is_a_clean_refusal(monkeypatch):
    monkeypatch.setattr(flow, "ROOM_SECONDS", 0.0)
    async with World() as world:
        world.decode_lb.refusals = [Overloaded("no room", retry_after=2)]
        call = await world.ask()
        await world.settled()

        assert ([], Overloaded, 2.0) == (call.tokens, type(call.error), call.error.retry_after)
        await eventually(lambda: ["prefill-0"] == world.cancelled())


async def test_a_refused_handoff_is_told_in_the_caller_s_words():
    """Blocks are decode's business; what the caller can do is come back later."""
    async with World() as world:
        refusal = Overloaded("no room for 7 blocks within 10.0 s", retry_after=2)
        world.prefills["prefill-0"].errors["handoff"] = stream_error(refusal)
        call = await world.ask()

        assert (Overloaded, 2.0) == (type(call.error), call.error.retry_after)
        assert "all decode replicas are full" == call.error.message


@pytest.mark.parametrize("held_back", ["decode_1", "decode_2"])
async def test_a_prefill_that_dies_after_the_handoff_is_not_missed(held_back, monkeypatch):
    """Its last word may get lost; tokens from decode prove that the KV arrived, also when they come a moment later."""
    monkeypatch.setattr(legs, "LAST_WORD_SECONDS", 5.0)
    async with World() as world:
        world.stops.close("handoff_done")
        world.stops.close(held_back)
        call = await world.submit()
        await world.stops.reached(held_back)
        await call.receive(1 if held_back == "decode_1" else 2)
        await world.crash("prefill-0")
        await world.prefill_ended()
        world.stops.open(held_back)
        await call.end()

        assert [100, 101, 102, 103] == call.tokens


async def test_a_prefill_that_dies_before_the_handoff_is_waited_for_no_longer_than_agreed(monkeypatch):
    monkeypatch.setattr(legs, "LAST_WORD_SECONDS", 0.05)
    async with World() as world:
        world.stops.close("handoff")
        call = await world.submit()
        await call.receive(1)
        await world.crash("prefill-0")
        await call.end(seconds=10)

        assert ([FIRST_TOKEN], PeerLost) == (call.tokens, type(call.error))


async def test_a_failed_handoff_ends_decode_s_wait():
    """Prefill says so; decode would otherwise wait for its own timeout."""
    async with World() as world:
        world.prefills["prefill-0"].errors["handoff"] = stream_error(PeerLost("decode-0 cannot be reached"))
        world.stops.close("handoff")
        call = await world.submit()
        await world.stops.reached("decode_submit")
        world.stops.open("handoff")
        await call.end()
        await world.settled()

        assert ([FIRST_TOKEN], "decode-0 cannot be reached") == (call.tokens, call.error.message)
        await eventually(lambda: ["decode-0"] == world.cancelled())
        assert [] == world.prefills["prefill-0"].cancelled


async def test_lost_blocks_are_never_shown():
    """Callers can try again; what a block is, is none of their business."""
    async with World() as world:
        world.decodes["decode-0"].errors["decode_1"] = stream_error(BlocksLost("crc of block 3"))
        call = await world.ask()

        assert PeerLost is type(call.error)
        assert "block" not in call.error.message


async def test_what_a_replica_reports_reaches_the_caller_once_tokens_have_flowed():
    async with World() as world:
        world.decodes["decode-0"].errors["decode_2"] = stream_error(PeerLost("the engine is gone"))
        call = await world.ask()
        await world.settled()

        assert ([100, 101], "the engine is gone") == (call.tokens, call.error.message)
        assert (len(PROMPT), 0, 2) == call.usage
        assert 1 == world.metric("fathom_entrypoint_requests_total", outcome="PeerLost")

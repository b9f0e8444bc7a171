"""How do prompts become KV and a first token?"""

import asyncio
import math

import pytest

from proto.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Grammar,
    ImageRef,
    LogitBias,
    SamplingParams,
)
from proto.prefill_pb2 import GetPrefillLoadRequest
from services.prefill.tests.rig import BLOCK, is_last, kinds, prefill_replica, request, until
from services.prefill.tests.tiny_model import CONTEXT


@pytest.fixture
async def rig(folder):
    async with prefill_replica(folder) as running:
        yield running
        await running.idle()


def first_of(events):
    return next(event.first_token for event in events if event.HasField("first_token"))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 100])
async def test_same_first_token_and_kv_as_one_process(rig, num_tokens):
    """Chunked and beside others, a prompt gives the bytes and the token that it gives alone."""
    wanted = request("same", num_tokens)
    mates = [rig.serve(request(f"mate-{n}", 20 + n)) for n in range(3)]
    events, *_ = await asyncio.gather(rig.serve(wanted), *mates)
    blocks, token = rig.source.prompt(wanted)
    (handed,) = [b for commit, b in rig.decode.committed if commit.ticket.request_id == "same"]

    assert ["last_chunk_started", "first_token", "handoff_done"] == kinds(events)
    assert [token] == list(first_of(events).token.token_ids)
    whole = num_tokens // BLOCK
    assert blocks[:whole] == handed[:whole]
    assert len(blocks) == len(handed)


@pytest.mark.parametrize("chunk_tokens", [7, 16, 512])
async def test_the_chunk_budget_changes_no_token(folder, chunk_tokens):
    """Whatever the step holds, the first token is the same."""
    async with prefill_replica(folder, chunk_tokens=chunk_tokens) as rig:
        wanted = request("chunks", 90)
        assert [rig.source.prompt(wanted)[1]] == list(first_of(await rig.serve(wanted)).token.token_ids)


@pytest.mark.parametrize(
    ("num_tokens", "cached"), [(BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK, 2 * BLOCK), (3 * BLOCK + 5, 3 * BLOCK)]
)
async def test_cached_tokens_are_whole_blocks_and_never_the_last_token(rig, num_tokens, cached):
    """Nothing on a cold prompt; on the second, the whole blocks of all but the last token."""
    cold = first_of(await rig.serve(request("cached", num_tokens)))
    warm = first_of(await rig.serve(request("cached", num_tokens)))

    assert (0, num_tokens) == (cold.cached_tokens, cold.computed_tokens)
    assert (cached, num_tokens - cached) == (warm.cached_tokens, warm.computed_tokens)
    assert cached == warm.token.usage.cached_tokens
    assert list(cold.token.token_ids) == list(warm.token.token_ids)


async def test_a_one_token_answer_ends_here(rig):
    """No decode replica is asked for, and the blocks are free at once."""
    events = await rig.serve(request("single", 40, max_tokens=1))

    assert ["first_token"] == kinds(events)
    assert FINISH_REASON_LENGTH == events[0].first_token.token.finish_reason
    assert (40, 1) == (
        events[0].first_token.token.usage.prompt_tokens,
        events[0].first_token.token.usage.completion_tokens,
    )


async def test_a_prompt_that_fills_the_context_has_one_token_of_answer(rig):
    """Room for one token more: that token is the whole answer."""
    events = await rig.serve(request("full", CONTEXT - 1, max_tokens=50))

    assert ["first_token"] == kinds(events)


async def test_a_stop_token_first_ends_the_answer(rig):
    """What was reserved for the rest is given back."""
    stop = rig.source.prompt(request("stop", 40))[1]
    events = await rig.serve(request("stop", 40, stop_token_ids=[stop]))
    assert FINISH_REASON_STOP == events[-1].first_token.token.finish_reason
    await rig.idle()
    await until(lambda: len(rig.decode.aborted) >= len(rig.decode.reserved))
    assert [] == rig.decode.committed


async def test_logprobs_come_with_the_first_token(rig):
    """The chosen token's logprob and the asked number of alternatives."""
    sampling = SamplingParams(temperature=0, top_p=1, repetition_penalty=1, num_logprobs=2)
    token = first_of(await rig.serve(request("logprobs", 10, sampling=sampling))).token

    assert FINISH_REASON_UNSPECIFIED == token.finish_reason
    assert token.token_ids[0] == token.logprobs[0].chosen.token_id
    assert 2 == len(token.logprobs[0].top)


async def test_prompts_wait_for_blocks_and_all_are_served(folder):
    """A pool for one prompt at a time serves four, in order."""
    async with prefill_replica(folder, num_blocks=8) as rig:
        wanted = [request(f"wait-{n}", 5 * BLOCK, max_tokens=1) for n in range(4)]
        ended = []

        async def serve(each):
            await rig.serve(each)
            ended.append(each.request_id)

        await asyncio.gather(*(serve(each) for each in wanted))
        assert [each.request_id for each in wanted] == ended
        await rig.idle()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"fingerprint": b"x" * 32}, "BlocksLost"),
        ({"grammar": Grammar(kind="x")}, "BadSchema"),
        ({"images": [ImageRef()]}, "BadImage"),
        ({"num_tokens": 0}, "InvalidRequest"),
        ({"num_tokens": CONTEXT}, "PromptTooLong"),
        ({"seconds": -1}, "DeadlinePassed"),
    ],
)
async def test_what_cannot_run_is_refused(rig, change, kind):
    """The request alone fails, with the error that says why."""
    (event,) = await rig.serve(request("bad", change.pop("num_tokens", 8), **change))

    assert kind == event.failed.kind


async def test_unusable_logits_fail_one_request_alone(rig):
    """A row that cannot be sampled is an internal error for its own request; batch mates get their tokens."""
    broken = SamplingParams(
        temperature=1, top_p=1, repetition_penalty=1, logit_bias=[LogitBias(token_id=5, bias=math.nan)]
    )
    mate = request("mate", 20)
    (event,), events = await asyncio.gather(
        rig.serve(request("broken", 1, sampling=broken, max_tokens=1)), rig.serve(mate)
    )
    assert "InternalError" == event.failed.kind
    assert [rig.source.prompt(mate)[1]] == list(first_of(events).token.token_ids)


async def test_a_prompt_longer_than_the_pool_is_refused_at_once(folder):
    """Waiting would never help."""
    async with prefill_replica(folder, num_blocks=4) as rig:
        (event,) = await rig.serve(request("long", 3 * BLOCK))
        assert "PromptTooLong" == event.failed.kind


async def test_the_queue_is_bounded(folder):
    """Beyond the bound the answer is Overloaded, with a time to come back."""
    async with prefill_replica(folder) as rig:
        rig.replica.servicer._max_prompts = 1
        first = await rig.submit(request("first", 30))
        (event,) = await rig.serve(request("second", 30))
        assert ("Overloaded", True) == (event.failed.kind, event.failed.retry_after_seconds >= 1)
        await rig.cancel("first")
        first.close()
        await rig.idle()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["queued", "computing", "undelivered", "reserving", "handing over"])
async def test_cancel_frees_everything(folder, phase):
    """In every phase a cancel gives all blocks back, here and over there."""
    async with prefill_replica(folder, num_blocks=24, chunk_tokens=4) as rig:
        rig.decode.gate.clear()
        if phase == "handing over":
            rig.decode.passing.add("Reserve")
        events = await rig.submit(request("cancel", 20 * BLOCK))
        if phase == "queued":
            await rig.submit(request("behind", 20 * BLOCK))
            await rig.cancel("behind")
        elif phase != "computing":
            async for event in events:
                if event.HasField("last_chunk_started") and phase in {"reserving", "handing over"}:
                    await rig.deliver("cancel")
                if event.HasField("first_token"):
                    break
        await until(lambda: rig.replica.engine.load.used_blocks)
        await until(lambda: len(rig.decode.held) >= (phase == "handing over"))
        await rig.cancel("cancel")
        await rig.idle()
        rig.decode.gate.set()
        # What only waits for room over there ends with its call, and has nothing to give back.
        await until(lambda: len(rig.decode.aborted) >= (phase == "handing over"))
        assert ([], phase == "handing over") == (rig.decode.committed, bool(rig.decode.held))


async def test_a_broken_stream_cancels_its_requests(rig):
    """When the entrypoint goes away, nothing it asked for is computed."""
    await rig.submit(request("broken", 400))
    await rig.submit(request("broken-too", 40))
    await rig.stream.close()

    await rig.idle()


async def test_higher_priority_is_served_first(folder):
    """A later prompt of higher priority overtakes at the next step."""
    async with prefill_replica(folder, chunk_tokens=8) as rig:
        ended = []

        async def serve(wanted):
            events = await rig.submit(wanted)
            async for event in events:
                if is_last(event):
                    ended.append(wanted.request_id)
                    return

        low = asyncio.create_task(serve(request("low", 300, max_tokens=1)))
        await asyncio.sleep(0.02)
        await serve(request("high", 30, max_tokens=1, priority=1))
        await low
        assert ["high", "low"] == ended


async def test_load_counts_what_is_here(rig):
    """Idle, everything is zero but the cached blocks."""
    await rig.serve(request("load", 3 * BLOCK))
    await rig.idle()
    load = await rig.stub.GetLoad(GetPrefillLoadRequest(), timeout=30)

    assert (40, 0, 3) == (load.total_blocks, load.used_blocks, load.cached_blocks)
    assert (0, 0, 0) == (load.queued_sequences, load.running_sequences, load.queued_tokens)

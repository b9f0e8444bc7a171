"""How do sequences grow token by token?"""

import asyncio
import math
import time

import pytest

from proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Grammar,
    ImageRef,
    LogitBias,
    SamplingParams,
)
from services.decode.tests.rig import BLOCK, collect, decode_replica, request, tokens_of
from services.decode.tests.tiny_model import CONTEXT

GREEDY = SamplingParams(temperature=0, top_p=1, repetition_penalty=1)


@pytest.fixture
async def rig(folder):
    async with decode_replica(folder) as running:
        yield running
        await running.idle()
        running.replica.engine._pool.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 40])
async def test_same_tokens_as_one_process(rig, num_tokens):
    """Around block borders, the answer is what one process alone computes."""
    wanted = request("same", num_tokens, max_tokens=20)

    assert rig.source.answer(wanted) == await rig.answer(wanted)


@pytest.mark.slow
async def test_batch_mates_change_no_token(rig):
    """Eight sequences together give the tokens of each alone; greedy and with penalties as well."""
    penalties = SamplingParams(
        temperature=0.9, top_p=1, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=9
    )
    wanted = [request(f"mate-{n}", 5 + 3 * n, max_tokens=12) for n in range(6)]
    wanted += [request("greedy", 9, sampling=GREEDY), request("penalties", 11, sampling=penalties, max_tokens=16)]
    expected = [rig.source.answer(each) for each in wanted]
    events = [await rig.submit(each) for each in wanted]
    firsts = [(await rig.hand_over(each)).first_token_id for each in wanted]
    answers = await asyncio.gather(*(collect(each) for each in events))

    assert expected == [[first, *tokens_of(answer)] for first, answer in zip(firsts, answers, strict=True)]


async def test_one_frame_per_step(rig):
    """All tokens of a step leave in one message per stream."""
    wanted = [request(f"frame-{n}", 6, max_tokens=30) for n in range(4)]
    events = [await rig.submit(each) for each in wanted]
    for each in wanted:
        await rig.hand_over(each)
    before = rig.replica.engine.load.num_steps
    frames: list[int] = []
    stream_events = rig.stream.events

    def count(frame):
        frames.append(len(frame.events))
        return stream_events(frame)

    rig.stream.events = count
    await asyncio.gather(*(collect(each) for each in events))

    assert len([size for size in frames if size]) <= rig.replica.engine.load.num_steps - before + 2


async def test_usage_and_reasons(rig):
    """Usage comes with the first and the last event, the reason with the last only; the first token counts."""
    wanted = request("usage", 20, max_tokens=5)
    events = await rig.submit(wanted)
    await rig.hand_over(wanted)
    found = await collect(events)

    assert [True, False, False, True] == [event.HasField("usage") for event in found]
    assert (20, 5) == (found[-1].usage.prompt_tokens, found[-1].usage.completion_tokens)
    assert [0, 0, 0, FINISH_REASON_LENGTH] == [event.finish_reason for event in found]


async def test_a_stop_token_ends_the_answer_and_is_reported(rig):
    """The stop token is the last one sent."""
    full = rig.source.answer(request("stop", 10, max_tokens=20))
    stop = next(token for token in full[2:] if token not in full[:2])
    wanted = request("stop", 10, max_tokens=20, stop_token_ids=[stop])
    events = await rig.submit(wanted)
    await rig.hand_over(wanted)
    found = await collect(events)

    assert FINISH_REASON_STOP == found[-1].finish_reason
    assert full[1 : full.index(stop) + 1] == tokens_of(found)


async def test_logprobs_come_with_each_token(rig):
    """The chosen token's logprob and the asked number of alternatives, likeliest first."""
    sampling = SamplingParams(temperature=0, top_p=1, repetition_penalty=1, num_logprobs=3)
    wanted = request("logprobs", 10, sampling=sampling, max_tokens=3)
    events = await rig.submit(wanted)
    await rig.hand_over(wanted)
    for event in await collect(events):
        (position,) = event.logprobs
        assert event.token_ids[0] == position.chosen.token_id == position.top[0].token_id
        assert 3 == len(position.top)
        assert position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob


async def test_the_context_ends_an_answer(folder):
    """Without room for more tokens the answer ends with LENGTH, however many were asked for."""
    async with decode_replica(folder, num_blocks=4) as rig:
        wanted = request("context", 40, max_tokens=100)
        events = await rig.submit(wanted)
        await rig.hand_over(wanted)
        found = await collect(events)

        assert FINISH_REASON_LENGTH == found[-1].finish_reason
        assert 3 * BLOCK - 40 == found[-1].usage.completion_tokens
        await rig.idle()
    assert 3 * BLOCK < CONTEXT


@pytest.mark.slow
async def test_preemption_changes_no_token(folder):
    """When blocks run out, the youngest gives its up and is recomputed; every answer stays the same."""
    async with decode_replica(folder, num_blocks=9, recompute_tokens=8) as rig:
        wanted = [request(f"tight-{n}", 14 + n, max_tokens=40) for n in range(4)]
        expected = [rig.source.answer(each) for each in wanted]
        answers = await asyncio.gather(*(rig.answer(each) for each in wanted))

        assert expected == answers
        assert rig.replica.engine.load.num_preemptions > 0
        await rig.idle()


@pytest.mark.parametrize("after_tokens", [0, 3])
async def test_cancel_frees_everything(rig, after_tokens):
    """A cancel before the handoff or in the middle of the answer gives all blocks back."""
    wanted = request("cancel", 30, max_tokens=300)
    events = await rig.submit(wanted)
    if after_tokens:
        await rig.hand_over(wanted)
        for _ in range(after_tokens):
            await anext(events)
    else:
        await rig.reserve(wanted)
    assert rig.replica.engine.load.used_blocks > 0
    await rig.cancel("cancel")

    await rig.idle()


async def test_a_broken_stream_cancels_its_requests(rig):
    """When the entrypoint goes away, nothing it asked for keeps running."""
    wanted = request("broken", 30, max_tokens=300)
    events = await rig.submit(wanted)
    await rig.hand_over(wanted)
    await anext(events)
    await rig.stream.close()

    await rig.idle()


@pytest.mark.slow
async def test_a_passed_deadline_ends_the_answer(rig):
    """Nobody waits any more: an error event, and the blocks are free."""
    wanted = request("late", 10, max_tokens=400, seconds=0.4)
    events = await rig.submit(wanted)
    found = await collect(events)

    assert (FINISH_REASON_ERROR, "DeadlinePassed") == (found[-1].finish_reason, found[-1].error.kind)
    assert time.time() < wanted.deadline_unix_seconds + 20


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"fingerprint": b"x" * 32}, "BlocksLost"),
        ({"grammar": Grammar(kind="x")}, "BadSchema"),
        ({"images": [ImageRef()]}, "BadImage"),
        ({"num_tokens": 0}, "InvalidRequest"),
        ({"num_tokens": CONTEXT}, "PromptTooLong"),
        ({"max_tokens": 0}, "InvalidRequest"),
    ],
)
async def test_what_cannot_run_is_refused(rig, change, kind):
    """The request alone fails, with the error that says why."""
    events = await rig.submit(request("bad", change.pop("num_tokens", 8), **change))
    found = await collect(events)

    assert (FINISH_REASON_ERROR, kind) == (found[-1].finish_reason, found[-1].error.kind)


@pytest.mark.slow
async def test_unusable_logits_fail_one_request_alone(rig):
    """A row that cannot be sampled is an internal error for its own request; batch mates get their tokens."""
    broken = SamplingParams(
        temperature=1, top_p=1, repetition_penalty=1, logit_bias=[LogitBias(token_id=5, bias=math.nan)]
    )
    bad, mate = request("broken", 20), request("mate", 20, max_tokens=20)
    expected = rig.source.answer(mate)
    events = await rig.submit(mate)
    await rig.hand_over(mate)
    reply = await rig.reserve(bad)
    crcs = await rig.push(reply, rig.source.prompt(bad).blocks)
    bad.sampling.CopyFrom(broken)
    bad_events = await rig.submit(bad)
    await rig.commit(bad, reply, crcs, 5)

    assert "InternalError" == (await collect(bad_events))[-1].error.kind
    assert expected[1:] == tokens_of(await collect(events))

"""Do answers obey their grammar, whatever befalls their sequence, and do batch mates not notice?"""

import asyncio
import json
import threading

import pytest

from kernels.grammar import KIND, GrammarFactory
from proto.common_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Grammar,
    SamplingParams,
)
from services.decode.grammar import Guide
from services.decode.tests.rig import collect, decode_replica, request, tokens_of
from services.decode.tests.tiny_model import EOS, VOCAB
from services.decode.tests.tiny_tokenizer import text_of, write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]?"},
}


def grammar(**body) -> Grammar:
    return Grammar(kind=KIND, body=json.dumps({"grammars": [body]}).encode())


def obeying(name, num_tokens, *, body=None, seed=7, **fields):
    sampling = SamplingParams(temperature=1, top_p=1, repetition_penalty=1, seed=seed)
    wanted = grammar(**(body or {"json_schema": SCHEMA}))
    return request(name, num_tokens, grammar=wanted, sampling=sampling, stop_token_ids=[EOS], **fields)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    made = GrammarFactory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab_size=VOCAB, eos_token_ids=[EOS])
    yield made
    made.close()


@pytest.fixture
async def rig(folder, factory):
    async with decode_replica(folder, grammars=factory) as running:
        yield running
        await running.idle()


async def answered(rig, factory, wanted):
    """All tokens, and the events after the first."""
    events = await rig.submit(wanted)
    computed = await rig.hand_over(wanted, allowed=factory.matcher(wanted.grammar.body).mask())
    found = await collect(events)
    return [computed.first_token_id, *tokens_of(found)], found


async def test_answers_obey_their_grammar_and_end_with_it(rig, factory):
    """Valid JSON at temperature 1; no end token is computed where nothing else can follow; mates keep their tokens."""
    free = [request(f"free-{n}", 9 + n, max_tokens=30) for n in range(2)]
    bound = [obeying(f"bound-{n}", 5 + n, max_tokens=80, seed=n) for n in range(3)]

    frees, answers = await asyncio.gather(
        asyncio.gather(*(rig.answer(each) for each in free)),
        asyncio.gather(*(answered(rig, factory, each) for each in bound)),
    )

    assert [rig.source.answer(each) for each in free] == list(frees)
    for wanted, (tokens, events) in zip(bound, answers, strict=True):
        assert rig.source.answer(wanted, matcher=factory.matcher(wanted.grammar.body)) == tokens
        said = json.loads(text_of(tokens))
        assert ["name", "n"] == list(said)
        assert 0 <= said["n"] <= 99
        assert (FINISH_REASON_STOP, 0) == (events[-1].finish_reason, len(events[-1].token_ids))
        assert len(tokens) == events[-1].usage.completion_tokens
        assert FINISH_REASON_UNSPECIFIED == events[-2].finish_reason


@pytest.mark.slow
async def test_a_preempted_sequence_keeps_its_place(folder, factory):
    """Too few blocks for all: some are preempted and computed again, and no token differs."""
    body = {"lark_grammar": "start: /([a-c][0-9]){30}/"}
    async with decode_replica(folder, num_blocks=9, grammars=factory) as rig:
        bound = [obeying(f"tight-{n}", 20, body=body, seed=n, max_tokens=120) for n in range(2)]
        answers = await asyncio.gather(*(answered(rig, factory, each) for each in bound))
        assert rig.replica.engine.load.num_preemptions > 0
        for wanted, (tokens, _) in zip(bound, answers, strict=True):
            assert rig.source.answer(wanted, matcher=factory.matcher(wanted.grammar.body)) == tokens
        await rig.idle()


async def test_the_end_token_is_an_answer_where_the_grammar_may_end(rig, factory):
    """As without a grammar: sampled, reported, and the last."""
    wanted = obeying("may-end", 6, body={"lark_grammar": "start: /[a-z]+/"}, max_tokens=400)

    tokens, events = await answered(rig, factory, wanted)

    assert EOS == tokens[-1]
    assert FINISH_REASON_STOP == events[-1].finish_reason
    assert text_of(tokens).islower()


async def test_the_limit_ends_an_answer_in_the_middle(rig, factory):
    """Half of the JSON, and the reason says so."""
    tokens, events = await answered(rig, factory, obeying("half", 6, max_tokens=5))

    assert 5 == len(tokens)
    assert FINISH_REASON_LENGTH == events[-1].finish_reason


async def test_prefill_s_token_may_be_the_whole_answer(rig, factory):
    """Then nothing is computed here."""
    tokens, events = await answered(rig, factory, obeying("short", 6, body={"lark_grammar": 'start: "a"'}))

    assert "a" == text_of(tokens)
    assert [(FINISH_REASON_STOP, [])] == [(event.finish_reason, list(event.token_ids)) for event in events]


@pytest.mark.parametrize(
    "wanted", [Grammar(kind="x"), Grammar(kind=KIND, body=b"{"), Grammar(kind=KIND, body=b" " * (1 << 20) + b" ")]
)
async def test_what_cannot_be_obeyed_is_refused(rig, wanted):
    """Before anything is computed."""
    found = await collect(await rig.submit(request("bad", 8, grammar=wanted)))

    assert (FINISH_REASON_ERROR, "BadSchema") == (found[-1].finish_reason, found[-1].error.kind)


async def test_another_first_token_is_noticed(rig):
    """An answer that does not begin by its grammar could not be continued by it."""
    wanted = obeying("astray", 8)
    events = await rig.submit(wanted)
    forbidden = bytes(12 - 1) + b"\x80"  # only the last id
    await rig.hand_over(wanted, allowed=forbidden)

    assert "InternalError" == (await collect(events))[-1].error.kind


async def test_a_mask_that_does_not_come_ends_its_sequence_alone(rig, factory, monkeypatch):
    """The others go on, and later grammars get threads of their own."""
    fill = GrammarFactory.start_mask

    def lose_one(self, matcher):
        filled = fill(self, matcher)
        if matcher.num_tokens == 4:
            filled.result()
            filled = self.start_matcher(b"")  # a BadGrammar
        return filled

    monkeypatch.setattr(GrammarFactory, "start_mask", lose_one)
    (_, events), free = await asyncio.gather(
        answered(rig, factory, obeying("lost", 6)), rig.answer(request("free", 9, max_tokens=30))
    )

    assert "BadSchema" == events[-1].error.kind
    assert rig.source.answer(request("free", 9, max_tokens=30)) == free


def test_threads_that_hang_are_left_behind(factory, monkeypatch):
    """What waits behind them is begun again elsewhere; what hangs itself is lost."""
    monkeypatch.setattr("services.decode.grammar.MASK_SECONDS", 0.2)
    body = grammar(lark_grammar='start: "ab"').body
    guide, hanging = Guide(factory, factory.matcher(body)), Guide(factory, factory.matcher(body))
    freed = threading.Event()
    stuck = [factory._threads.submit(freed.wait, 20) for _ in range(2)]
    hanging._mask = stuck[0]
    guide.begin()

    assert factory.matcher(body).mask() == guide.mask()
    assert (b"", True, False) == (hanging.mask(), hanging.is_lost, guide.is_lost)
    freed.set()

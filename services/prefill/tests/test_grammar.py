"""Does a first token obey its grammar?"""

import json

import pytest

from kernels.grammar import KIND, GrammarFactory
from proto.common_pb2 import FINISH_REASON_UNSPECIFIED, Grammar, SamplingParams
from services.prefill.tests.rig import prefill_replica, request
from services.prefill.tests.tiny_model import EOS, VOCAB
from services.prefill.tests.tiny_tokenizer import text_of, write_tokenizer


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    made = GrammarFactory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab_size=VOCAB, eos_token_ids=[EOS])
    yield made
    made.close()


@pytest.fixture
async def rig(folder, factory):
    async with prefill_replica(folder, grammars=factory) as running:
        yield running
        await running.idle()


def grammar(lark: str) -> Grammar:
    return Grammar(kind=KIND, body=json.dumps({"grammars": [{"lark_grammar": lark}]}).encode())


@pytest.mark.parametrize("num_tokens", [1, 40])
async def test_the_first_token_obeys(rig, num_tokens):
    """Whatever the prompt and the dice; and it ends nothing by itself: decode knows when the answer is whole."""
    for seed in range(4):
        sampling = SamplingParams(temperature=2, top_p=1, repetition_penalty=1, seed=seed)
        wanted = request(f"bound-{seed}", num_tokens, sampling=sampling, grammar=grammar("start: /[xyz]/"))

        events = await rig.serve(wanted)

        token = next(event.first_token.token for event in events if event.HasField("first_token"))
        assert text_of(list(token.token_ids)) in {"x", "y", "z"}
        assert FINISH_REASON_UNSPECIFIED == token.finish_reason


@pytest.mark.parametrize("wanted", [Grammar(kind="x"), Grammar(kind=KIND, body=b"{"), grammar("start: <[5000]>")])
async def test_what_cannot_be_obeyed_is_refused(rig, wanted):
    """Before anything is computed."""
    (event,) = await rig.serve(request("bad", 8, grammar=wanted))

    assert "BadSchema" == event.failed.kind

"""What would a model say that is held to a grammar? Any tokens that it allows, by dice: the model that knows nothing."""

import json
import random
from functools import cache

import llguidance
from tokenizers import Tokenizer

from proto.common_pb2 import Grammar, Request
from services.recipe.tests.scripted import LENGTH, STOP, Script, Step


@cache
def _vocabulary(described: str, eos: int) -> llguidance.LLTokenizer:
    """As the engines read it: added tokens are never text."""
    read = json.loads(described)
    for token in read["added_tokens"]:
        token["special"] = True
    return llguidance.LLTokenizer(json.dumps(read), eos_token=eos)


def said_by(tokenizer: Tokenizer, grammar: Grammar, seed: int, eos: int, most: int = 4000) -> list[int]:
    """The tokens of one answer; loops of free text end soon, since its end is always likely."""
    vocabulary = _vocabulary(tokenizer.to_str(), eos)
    matcher = llguidance.LLMatcher(vocabulary, grammar.body.decode(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    dice = random.Random(seed)
    said: list[int] = []
    while not matcher.is_stopped() and len(said) < most:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [id_ for id_ in range(vocabulary.vocab_size) if mask[id_ >> 3] >> (id_ & 7) & 1]
        # What closes a tag is likely, or free text would go on for thousands of tokens.
        closing = [id_ for id_ in allowed if vocabulary.is_special_token(id_) and id_ != eos]
        closing = closing or [id_ for id_ in allowed if vocabulary.decode_bytes([id_]) in {b"<", b"/"}]
        chosen = dice.choice(closing if closing and dice.random() < 0.6 else allowed)
        if eos in allowed and dice.random() < 0.05:
            chosen = eos
        matcher.consume_token(chosen)
        if chosen == eos:
            break
        said.append(chosen)
    return said


def guided(tokenizer: Tokenizer, eos: int, *, seed: int = 0, per_step: int = 3) -> Script:
    """Return a script that obeys the request's grammar and ends as the engines do: by an event without tokens."""

    def script(request: Request) -> list[Step]:
        most = min(request.stop.max_tokens, 2000)
        said = said_by(tokenizer, request.grammar, seed, eos, most)
        steps = [Step(said[at : at + per_step]) for at in range(0, len(said), per_step)]
        return [*steps, Step(finish=LENGTH if len(said) == most else STOP)]

    return script

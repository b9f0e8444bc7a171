"""Does whatever the masks let through obey the grammar, and does a place in it survive being left?"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped] # ships no types
from tokenizers import Tokenizer

from kernels.grammar import BadGrammar, GrammarFactory, Matcher

TOKENIZER = Path(__file__).parent / "golden" / "tiny-v41" / "tokenizer.json"
VOCAB, LOGITS, EOS = 320, 333, 1
SPELLING = {"json_allowed_escapes": '"\\bfnrt', "whitespace_pattern": r"[ ]?|\n[ ]{0,40}"}
SHORT = {"type": "string", "maxLength": 4}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": SHORT, "b": {"type": "integer", "minimum": -5, "maximum": 120}}, "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"], "additionalProperties": False}]},
    {"type": "object", "properties": {"d": {"type": "string", "format": "uuid"}, "p": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"}}, "required": ["d", "p"], "additionalProperties": False},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "required": ["v"], "additionalProperties": False}}},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 99},
    {"type": "object", "properties": {"t": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2}, "o": SHORT}, "required": ["t"], "additionalProperties": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def factory():
    made = GrammarFactory(TOKENIZER, vocab_size=LOGITS, eos_token_ids=[EOS])
    yield made
    made.close()


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def body_of(schema: dict[str, Any]) -> bytes:
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": SPELLING}}]}).encode()


def lark(text: str) -> bytes:
    return json.dumps({"grammars": [{"lark_grammar": text}]}).encode()


def allowed(mask: bytes) -> list[int]:
    return [id_ for id_ in range(8 * len(mask)) if mask[id_ // 8] >> (id_ % 8) & 1]


def walk(matcher: Matcher, dice: random.Random, most: int = 300) -> list[int]:
    """Sample as an engine would, any allowed token being as likely as another; without the end token."""
    taken: list[int] = []
    for _ in range(most):
        ids = allowed(matcher.mask())
        assert matcher.is_accepting == (EOS in ids)
        chosen = dice.choice(ids)
        if chosen == EOS:
            break
        matcher.accept(chosen)
        taken.append(chosen)
    return taken


@settings(max_examples=60, deadline=None)
@given(which=st.sampled_from(range(len(SCHEMAS))), seed=st.integers(0, 10**6))
def test_whatever_masks_allow_is_valid(factory: GrammarFactory, library: Tokenizer, which: int, seed: int) -> None:
    """Any tokens, each allowed by the mask before it, are JSON that the schema's own validator accepts, once whole."""
    matcher = factory.matcher(body_of(SCHEMAS[which]))

    text = library.decode(walk(matcher, random.Random(seed)), skip_special_tokens=False)

    if matcher.is_accepting:
        Draft202012Validator(SCHEMAS[which], format_checker=FormatChecker()).validate(json.loads(text))


@settings(max_examples=30, deadline=None)
@given(which=st.sampled_from(range(len(SCHEMAS))), seed=st.integers(0, 10**6), data=st.data())
def test_a_place_survives_rollback_and_replay(factory: GrammarFactory, which: int, seed: int, data: Any) -> None:
    """Drafts that were not accepted leave no trace, and a replica that replays the tokens stands where the first did."""
    body = body_of(SCHEMAS[which])
    matcher = factory.matcher(body)
    taken = walk(matcher, random.Random(seed), most=40)
    at = data.draw(st.integers(0, len(taken)))
    other = factory.matcher(body)

    matcher.rollback(len(taken) - at)
    other.replay(taken[:at])

    assert other.mask() == matcher.mask()
    matcher.replay(taken[at:])
    other.replay(taken[at:])
    assert (other.mask(), other.is_finished) == (matcher.mask(), matcher.is_finished)
    assert len(taken) == matcher.num_tokens


def test_only_text_of_the_vocabulary_is_allowed(factory: GrammarFactory) -> None:
    """No id beyond the tokenizer, no added token, whose spelling is not what is shown; only where all is said, the end."""
    added = {token["id"] for token in json.loads(TOKENIZER.read_bytes())["added_tokens"]}

    mask = factory.matcher(lark("start: /(?s:.*)/")).mask()

    assert -(-LOGITS // 8) == len(mask)
    assert set() == {id_ for id_ in allowed(mask) if id_ >= VOCAB}
    assert {EOS} == added & set(allowed(mask))


def test_a_grammar_can_name_a_control_token(factory: GrammarFactory) -> None:
    """Reasoning ends by a token, not by its spelling: dialects frame what callers ask for."""
    named = max(token["id"] for token in json.loads(TOKENIZER.read_bytes())["added_tokens"])
    matcher = factory.matcher(lark(f'start: /(?s:.*)/ <[{named}]> "1"'))

    assert named in allowed(matcher.mask())
    matcher.accept(named)
    assert named not in allowed(matcher.mask())


def test_a_finished_grammar_leaves_only_the_end(factory: GrammarFactory, library: Tokenizer) -> None:
    """The engine need not compute another token: there is one possibility."""
    matcher = factory.matcher(lark('start: "yes"'))

    matcher.replay(library.encode("yes", add_special_tokens=False).ids)

    assert matcher.is_finished
    assert [EOS] == allowed(matcher.mask())


def test_what_is_not_allowed_is_not_accepted(factory: GrammarFactory, library: Tokenizer) -> None:
    """A matcher that was led astray says so, and more than there is cannot be taken back."""
    matcher = factory.matcher(lark('start: "yes"'))

    with pytest.raises(BadGrammar, match="no place"):
        matcher.accept(library.encode("no", add_special_tokens=False).ids[0])
    with pytest.raises(ValueError, match="cannot be taken back"):
        factory.matcher(lark('start: "yes"')).rollback(1)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", lark("start: nothing"), lark("start: <[99999]>"), body_of({"not": {}})]
)
def test_what_cannot_be_read_is_refused(factory: GrammarFactory, body: bytes) -> None:
    """Nobody's bytes can harm an engine; and the text of an error is none of the caller's."""
    with pytest.raises(BadGrammar, match="cannot be obeyed"):
        factory.matcher(body)


def test_masks_of_a_batch_are_those_of_its_members(factory: GrammarFactory) -> None:
    """Side by side or one by one."""
    matchers = [factory.matcher(body_of(schema)) for schema in SCHEMAS]

    assert [matcher.mask() for matcher in matchers] == factory.fill_masks(matchers)
    assert factory.start_mask(matchers[0]).result() == matchers[0].mask()
    assert factory.start_matcher(body_of(SCHEMAS[0])).result().mask() == matchers[0].mask()

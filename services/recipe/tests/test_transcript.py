"""Promises about text: the same whatever the chunks, cut exactly, and never half a character."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proto.common_pb2 import FinishReason, PositionLogprobs, TokenEvent, TokenLogprob
from services.chassis import errors
from services.recipe.detokenize import Detokenizer
from services.recipe.dialect import PlainParser
from services.recipe.seeds import choice_seed, noise_hash
from services.recipe.stops import StopMatcher
from services.recipe.tests.tiny import make_tokenizer
from services.recipe.tokenizer import PromptTokenizer
from services.recipe.transcript import Transcript

GOLDEN = Path(__file__).parents[3].parent / "shared" / "golden" / "sampler.json"
LIBRARY = make_tokenizer()
PIECES = PromptTokenizer(make_tokenizer()).pieces
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
quick = settings(max_examples=60, deadline=None)

tokens = st.lists(st.integers(0, len(PIECES) + 3), max_size=40) | st.text("ab👍é", max_size=20).map(
    lambda text: list(LIBRARY.encode(text).ids)
)


def dealt(items: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """The items in parts whose lengths are `cuts`, then the rest."""
    parts, at = [], 0
    for cut in cuts:
        parts.append(list(items[at : at + cut]))
        at += cut
    return [*parts, list(items[at:])]


def transcribe(
    parts: Sequence[Sequence[int]], stops: Sequence[str], finish: FinishReason.ValueType, *, has_scores: bool
) -> tuple[str, list[int], list[tuple[int, int]], str | None, int]:
    """Text, ids, (token, offset) of scores, finish reason and count after these events."""
    transcript = Transcript(PlainParser(PIECES), stops, has_scores=has_scores)
    text, ids, scores = "", [], []
    for i, part in enumerate(parts):
        logprobs = [PositionLogprobs(chosen=TokenLogprob(token_id=t, logprob=-1)) for t in part] if has_scores else []
        reason = finish if i == len(parts) - 1 else FinishReason.FINISH_REASON_UNSPECIFIED
        piece = transcript.feed(TokenEvent(token_ids=part, logprobs=logprobs, finish_reason=reason))
        if piece is not None:
            assert piece.text or piece.finish_reason, "nothing empty is shown"
            text += piece.text
            ids += piece.token_ids
            scores += [(score.position.chosen.token_id, score.offset) for score in piece.scores]
        if transcript.is_cut:
            break
    return text, ids, scores, transcript.finish_reason, transcript.num_tokens


@quick
@given(
    tokens,
    st.lists(st.integers(0, 6), max_size=12),
    st.lists(st.text("ab👍é h", min_size=1, max_size=4), max_size=3),
    st.sampled_from([STOP, LENGTH]),
    st.booleans(),
)
@example([*LIBRARY.encode("ab👍c").ids], [1] * 8, ["👍"], LENGTH, True)
def test_chunks_do_not_matter(
    token_ids: list[int], cuts: list[int], stops: list[str], finish: FinishReason.ValueType, has_scores: bool
) -> None:
    """One event, or any number: same text, ids, logprobs, reason and count."""
    # The last event of a STOP holds the stop token; an empty one would be no event of an engine.
    parts = [part for part in dealt(token_ids, cuts) if part] or [token_ids]
    whole = transcribe([token_ids], stops, finish, has_scores=has_scores)

    assert whole == transcribe(parts, stops, finish, has_scores=has_scores)
    assert not any(stop in whole[0] for stop in stops)


@quick
@given(tokens)
def test_text_is_the_library_s(token_ids: list[int]) -> None:
    """Whole characters as decode has them; only a beginning of one at the very end is left out."""
    text, _ids, _scores, reason, count = transcribe([[t] for t in token_ids] or [[]], (), LENGTH, has_scores=False)
    known = [t for t in token_ids if t < len(PIECES)]
    decoded = LIBRARY.decode(known, skip_special_tokens=True)

    assert ("length", len(token_ids)) == (reason, count)
    assert decoded.startswith(text)
    assert decoded[len(text) :] in {"", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd"}


def test_no_replacement_character_comes_from_split_characters() -> None:
    """Each byte alone: nothing until the character is whole."""
    detokenizer = Detokenizer(PIECES)
    shown = [detokenizer.feed([token_id]) for token_id in LIBRARY.encode("é👍").ids]

    assert ["", "é", "", "", "", "👍"] == shown


def test_bytes_cut_off_at_the_end_are_dropped_and_counted() -> None:
    """The tokens were sampled and paid for; their half character is no text."""
    half = LIBRARY.encode("a👍").ids[:-1]

    assert ("a", half, [], "length", len(half)) == transcribe([half], (), LENGTH, has_scores=False)


@quick
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_stop_string_that_is_complete_first_wins(text: str, stops: list[str]) -> None:
    """As if the text came one character at a time; nothing of the stop string is shown."""
    ends = [(i, stop) for i in range(len(text) + 1) for stop in stops if text[:i].endswith(stop)]
    first = min((i for i, _ in ends), default=None)
    expected = text if first is None else text[: first - max(len(stop) for i, stop in ends if i == first)]
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(character) for character in text)

    assert expected == shown + matcher.rest()
    assert (first is not None) == matcher.is_cut


def test_only_what_could_become_a_stop_string_is_held() -> None:
    """Text flows on otherwise."""
    matcher = StopMatcher(["abcd"])

    assert ["x", "", "abx"] == [matcher.feed("xa"), matcher.feed("b"), matcher.feed("x")]


def test_the_ending_token_is_no_text_but_counts() -> None:
    """Even when the caller chose an ordinary token for it."""
    ids = LIBRARY.encode("ab").ids

    assert ("a", ids, [(ids[0], 0)], "stop", 2) == transcribe([ids], (), STOP, has_scores=True)


def test_logprobs_behind_a_cut_are_left_out() -> None:
    """Those whose text was shown at least in part stay."""
    ids = LIBRARY.encode("acb").ids

    assert ("a", ids, [(ids[0], 0)], "stop", 3) == transcribe([ids], ["cb"], LENGTH, has_scores=True)


def test_errors_in_events_are_raised_by_meaning() -> None:
    """And a cancelled request is an error to whoever still listens."""
    event = TokenEvent(error=errors.to_stream_error(errors.Overloaded("full", retry_after=2)))
    with pytest.raises(errors.Overloaded, match="full"):
        Transcript(PlainParser(PIECES), (), has_scores=False).feed(event)
    with pytest.raises(errors.Cancelled):
        Transcript(PlainParser(PIECES), (), has_scores=False).feed(
            TokenEvent(finish_reason=FinishReason.FINISH_REASON_CANCELLED)
        )


def test_the_first_choice_keeps_the_seed_and_others_differ() -> None:
    """Same in, same out."""
    assert 42 == choice_seed(42, 0)
    assert (1 << 64) - 1 == choice_seed(-1, 0)
    assert 16 == len({choice_seed(42, k) for k in range(16)})


def test_the_hash_is_the_sampler_s() -> None:
    """Vectors of the sampler's own definition."""
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN} is absent")
    vectors = json.loads(GOLDEN.read_text())["vectors"]

    assert [int(v["hash"], 16) for v in vectors] == [
        noise_hash(int(v["seed"]), v["position"], v["token"]) for v in vectors
    ]

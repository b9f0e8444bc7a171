"""Promises of segments: one at a time, the same however tokens come, and every move is an event in every grammar."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proto.common_pb2 import FinishReason, TokenEvent
from services.recipe import anthropic_events, responses_events
from services.recipe.deepseek_parser import DeepseekParser
from services.recipe.segments import MOVES, Segments
from services.recipe.tests.deepseek import block_of, call_of, tiny_vocabulary, value_of
from services.recipe.tests.speaking import ids_of
from services.recipe.transcript import Transcript

CALLING = "hm\n</think>\nlet me look" + block_of(
    call_of(value_of('a "b"\n👍', "city"), "weather"), call_of("", "weather")
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.booleans())
def test_segments_do_not_depend_on_frames(sizes: list[int], is_one: bool) -> None:
    """However tokens come, the same segments open, grow and close, one at a time, and no move is unknown."""
    ids = ids_of(CALLING)

    def told(parts: list[list[int]]) -> list[tuple[str, str, str]]:
        vocabulary = tiny_vocabulary()
        parser = DeepseekParser(vocabulary, thinks=True, takes_calls=True)
        transcript = Transcript(parser, (), has_scores=False, max_calls=1 if is_one else None)
        segments, moves = Segments(), set()
        for at, part in enumerate(parts):
            if transcript.is_cut:
                break
            finish = FinishReason.FINISH_REASON_LENGTH if at == len(parts) - 1 else 0
            piece = transcript.feed(TokenEvent(token_ids=part, finish_reason=FinishReason.ValueType(finish)))
            if piece is not None:
                moves |= {(change.move, change.segment.kind) for change in segments.feed(piece)}
        assert moves <= set(MOVES)
        return [(s.kind, s.name, s.text) for s in segments.all]

    parts, at = [], 0
    for size in (*sizes, len(ids)):
        if at < len(ids):
            parts.append(ids[at : at + size])
            at += size

    assert told([ids]) == told(parts)
    assert (3 if is_one else 4) == len(told(parts))


def test_every_move_has_its_events() -> None:
    """Both event grammars are tables without holes."""
    assert set(MOVES) == set(anthropic_events.EVENTS) == set(responses_events.EVENTS)

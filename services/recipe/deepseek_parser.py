"""What did a DeepSeek V4.1 model say? Sampled tokens to reasoning, text and tool calls.

Markup is what holds a control token: `</think>`, and DSML tags such as `<｜DSML｜ invoke name="f">`. The same letters
as ordinary tokens are text, so a model that quotes markup calls nothing. V4's spelling (`tool_calls`, no space) is read
too.
"""  # noqa: RUF002 - full-width bars are how these tokens are written

import json
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

import orjson

from services.recipe.deepseek_words import Mark, Vocabulary
from services.recipe.detokenize import Detokenizer
from services.recipe.dialect import CallArguments, CallBegun, Event, Reasoning, Text

MAX_TAG_CHARACTERS = 1024
"""A tag that has not ended by then is none."""

# Possessive: giving the space back would let a half-read tag end early, at a ">" in a name.
_OPENING_END = re.compile(r'\s*+(?:(?:invoke|parameter)\b.*?"\s*>|(?!invoke|parameter)[^>]*>)', re.DOTALL)
_CLOSING_END = re.compile(r"[^>]*>")
_OPENING = re.compile(
    r'\s*(?:(?P<calls>tool_calls|calls)|(?P<invoke>invoke)\s+name="(?P<tool>.*)"'
    r'|(?P<parameter>parameter)\s+name="(?P<key>.*?)"(?:\s+string="(?P<string>true|false)")?)\s*>',
    re.DOTALL,
)
_CLOSING = re.compile(r"\s*(?:(?P<calls>tool_calls|calls)|(?P<invoke>invoke)|(?P<parameter>parameter))\s*>")
_HELD_IN_TEXT = re.compile(r"\n*(?:</?)?\Z")  # newlines before a tag or </think> belong to neither side
_HELD_IN_VALUE = re.compile(r"(?:</?)?\Z")


class _State(Enum):
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()  # inside a block, between calls
    CALL = auto()  # inside a call, between parameters
    VALUE = auto()
    DONE = auto()


_SPOKEN: Final = frozenset({_State.REASONING, _State.TEXT})


class DeepseekParser:
    """Reads one answer, token by token.

    thinks: the prompt ended in <think>.  takes_calls: tools were declared; otherwise DSML is text like any other.
    Newlines at the beginning of reasoning and text, and before what ends them, are the format's and not shown. A call's
    arguments are valid JSON, whatever the model wrote, unless the answer was cut off inside them.
    """

    def __init__(self, vocabulary: Vocabulary, *, thinks: bool, takes_calls: bool) -> None:
        self._marks = vocabulary.marks
        self._pieces = vocabulary.pieces
        self._detokenizer = Detokenizer(vocabulary.pieces)
        self._takes_calls = takes_calls
        self._state = _State.REASONING if thinks else _State.TEXT
        self._has_begun = False  # anything but newlines in this state
        self._held = ""
        self._tag: str | None = None  # what came after DSML, while the tag is open
        self._is_closing = False
        self._num_calls = 0
        self._num_values = 0
        self._is_string = True
        self._raw = ""
        self._events: list[Event] = []
        self.num_reasoning_tokens = 0
        self.is_text = False

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        for token_id in token_ids:
            self._token(token_id)
        return self._taken()

    def rest(self, *, is_whole: bool) -> list[Event]:
        if self._tag is None and self._state in _SPOKEN:
            self._speak(self._held)
        elif is_whole and self._state is _State.VALUE:
            self._end_value()
            self._end_call()
        elif is_whole and self._state is _State.CALL:
            self._end_call()
        elif self._state is _State.VALUE and not self._is_string:
            self._argue(self._raw)
        self._held, self._state = "", _State.DONE
        return self._taken()

    def _token(self, token_id: int) -> None:
        before = self._state
        mark = self._marks.get(token_id)
        text = ""
        if mark is not None:
            self._see(mark)
        elif text := self._detokenizer.feed((token_id,)):
            self._hear(text)
        if before is self._state is _State.REASONING:
            self.num_reasoning_tokens += 1
        has_piece = mark is None and token_id < len(self._pieces) and bool(self._pieces[token_id])
        is_dropped = bool(text) and not self._has_begun
        self.is_text = before is self._state is _State.TEXT and has_piece and not is_dropped

    def _hear(self, text: str) -> None:
        if self._tag is None:
            self._plain(text)
            return
        self._tag += text
        end = (_CLOSING_END if self._is_closing else _OPENING_END).match(self._tag, 0, MAX_TAG_CHARACTERS)
        if end is None:
            if len(self._tag) >= MAX_TAG_CHARACTERS:
                self._give_up_tag()
            return
        rest = self._tag[end.end() :]
        self._tag = self._tag[: end.end()]
        if self._close(self._tag) if self._is_closing else self._open(self._tag):
            self._tag = None
        else:
            self._give_up_tag()
        if rest:
            self._plain(rest)

    def _see(self, mark: Mark) -> None:
        if rest := self._detokenizer.flush():
            self._hear(rest)
        if self._tag is not None:
            self._give_up_tag()
        if mark is Mark.DSML:
            self._see_dsml()
        elif self._state is _State.VALUE and mark in {Mark.THINK, Mark.THOUGHT}:
            self._plain(mark)  # a value may be about such markup; what ends reasoning cannot occur in it
        elif mark is Mark.THOUGHT and self._state is _State.REASONING:
            self._speak(self._held if self._held.strip("\n") else "")
            self._enter(_State.TEXT)

    def _see_dsml(self) -> None:
        if not self._takes_calls or not self._held.endswith(("<", "</")):
            self._plain(Mark.DSML)
        else:
            self._tag, self._is_closing = "", self._held.endswith("</")

    def _open(self, tag: str) -> bool:
        """Act on an opening tag; return whether it has a meaning here."""
        found = _OPENING.fullmatch(tag)
        if found is None or self._state in {_State.VALUE, _State.DONE}:
            return False
        if found["invoke"]:
            if self._state is _State.CALL:
                self._end_call()  # the model forgot to
            self._begin_call(found["tool"])
        elif found["calls"] and self._state in _SPOKEN:
            self._enter(_State.CALLS)
        elif found["parameter"] and self._state is _State.CALL:
            self._begin_value(found["key"], is_string=found["string"] != "false")
        else:
            return False
        return True

    def _close(self, tag: str) -> bool:
        """Act on a closing tag, and close what is still open inside; return whether it has a meaning here."""
        found = _CLOSING.fullmatch(tag)
        if found is None or self._state not in {_State.CALLS, _State.CALL, _State.VALUE}:
            return False
        if self._state is _State.VALUE:
            self._end_value()
        if self._state is _State.CALL and not found["parameter"]:
            self._end_call()
        if found["calls"]:
            self._enter(_State.DONE)
        return True

    def _give_up_tag(self) -> None:
        """Make text of a tag that is none, or has no meaning here."""
        text, self._tag = f"{Mark.DSML}{self._tag}", None
        self._plain(text)

    def _plain(self, text: str) -> None:
        """Take text that is no part of a tag."""
        state = self._state
        if state in _SPOKEN:
            text = self._held + text
            if not self._has_begun:
                text = text.lstrip("\n")
                self._has_begun = bool(text)
            holds = self._takes_calls or state is _State.REASONING
            self._held = _HELD_IN_TEXT.search(text).group() if holds else ""  # type: ignore[union-attr] # \Z matches
            self._speak(text.removesuffix(self._held))
        elif state is _State.VALUE:
            text = self._held + text
            self._held = _HELD_IN_VALUE.search(text).group()  # type: ignore[union-attr] # as above
            self._value(text.removesuffix(self._held))
        else:
            self._held = (self._held + text)[-2:]  # nothing is said between tags; it may be the beginning of one

    def _speak(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self._state is _State.REASONING else Text(text))

    def _value(self, text: str) -> None:
        if not self._is_string:
            self._raw += text
        elif text:
            self._argue(_quoted(text)[1:-1])

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def _enter(self, state: _State) -> None:
        self._state, self._held, self._has_begun = state, "", False

    def _begin_call(self, name: str) -> None:
        self._events.append(CallBegun(self._num_calls, name))
        self._num_calls += 1
        self._num_values = 0
        self._enter(_State.CALL)

    def _end_call(self) -> None:
        self._argue("}" if self._num_values else "{}")
        self._enter(_State.CALLS)

    def _begin_value(self, key: str, *, is_string: bool) -> None:
        self._argue((", " if self._num_values else "{") + _quoted(key) + (': "' if is_string else ": "))
        self._num_values += 1
        self._is_string, self._raw = is_string, ""
        self._enter(_State.VALUE)

    def _end_value(self) -> None:
        self._argue('"' if self._is_string else _as_json(self._raw))
        self._enter(_State.CALL)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(raw: str) -> str:
    """Return what the model wrote as a value; what is no JSON becomes a string, so that arguments are always valid."""
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _quoted(raw)
    return raw.strip()

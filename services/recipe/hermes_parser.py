"""What did a model say that speaks of tools as Hermes does? Text, and calls as JSON between tags."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from services.recipe.detokenize import Detokenizer
from services.recipe.dialect import CallArguments, CallBegun, Event, Text
from services.recipe.hermes import CALL_BEGIN, CALL_END, MAX_DEPTH
from services.recipe.json_object import JsonObject

MAX_HEADER_CHARACTERS = 1024
"""A call whose arguments have not begun by then is read when it is whole."""

_BEGINNINGS = "|".join(re.escape(CALL_BEGIN[:length]) for length in range(len(CALL_BEGIN) - 1, 0, -1))
_HELD = re.compile(rf"\n*(?:{_BEGINNINGS})?\Z")  # newlines before a call are not text
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class HermesParser:
    """Reads one answer.

    A call of the usual form, its name first, is told as it comes: its arguments are a JSON object whatever the model
    wrote (json_object.py), unless the token limit cut them off. What follows them up to the closing tag says nothing. A
    call of another form (arguments first, a list of calls) is told when it is whole and right, else it is text.

    names: the tools that were declared. What is no call of one of them is text, as long as no call came before.
    """

    def __init__(self, pieces: Sequence[bytes], names: Collection[str]) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._names = names
        self._held = ""
        self._call: str | None = None  # what came since the opening tag and was not told
        self._arguments: JsonObject | None = None  # of a call that is told as it comes
        self._num_calls = 0
        self.num_reasoning_tokens = 0
        self.is_text = True

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        was_text = self._call is None
        events = self._read(self._detokenizer.feed(token_ids))
        self.is_text = was_text and self._call is None and not self._num_calls
        return events

    def rest(self, *, is_whole: bool) -> list[Event]:
        """Return what was held back."""
        body, self._call = self._call, None
        if body is None:
            held, self._held = self._held, ""
            return self._say(held)
        if self._arguments is None:
            return self._told(body, "") if is_whole else self._say(CALL_BEGIN + body)
        if self._arguments.is_over:
            return []
        return self._argue(self._arguments.close() if is_whole else self._arguments.cut())

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is None:
                text = self._held + text
                before, tag, text = text.partition(CALL_BEGIN)
                if tag:
                    self._held, self._call = "", ""
                    events += self._say(before.rstrip("\n"))
                else:
                    self._held = _HELD.search(before).group()  # type: ignore[union-attr] # \Z matches
                    events += self._say(before.removesuffix(self._held))
            elif self._arguments is not None and not self._arguments.is_over:
                events += self._argue(self._arguments.feed(text))
                text = self._arguments.unread
            else:
                text = self._in_call(self._call + text, events)
        return events

    def _in_call(self, body: str, events: list[Event]) -> str:
        """Read on in a call, before or after its arguments; return what is left to be read."""
        body, tag, rest = body.partition(CALL_END)
        if self._arguments is None:
            header = _HEADER.match(body, 0, MAX_HEADER_CHARACTERS)
            if header is not None and header[1] in self._names:
                events.append(CallBegun(self._num_calls, header[1]))
                self._num_calls += 1
                self._call, self._arguments = "", JsonObject(MAX_DEPTH)
                return body[header.end() :] + tag + rest
        if not tag:
            self._call = body if self._arguments is None else body[1 - len(CALL_END) :]
            return ""
        if self._arguments is None:
            events += self._told(body, CALL_END)
        self._call = self._arguments = None
        return rest

    def _say(self, text: str) -> list[Event]:
        return [Text(text)] if text and not self._num_calls else []

    def _argue(self, text: str) -> list[Event]:
        return [CallArguments(self._num_calls - 1, text)] if text else []

    def _told(self, body: str, ending: str) -> list[Event]:
        calls = _calls(body)
        if not calls or any(name not in self._names for name, _ in calls):
            return self._say(CALL_BEGIN + body + ending)
        events: list[Event] = []
        for name, arguments in calls:
            events += [CallBegun(self._num_calls, name), CallArguments(self._num_calls, arguments)]
            self._num_calls += 1
        return events


def _calls(body: str) -> list[tuple[str, str]]:
    """Return names and arguments of the calls between two tags: one, or a list of them; none for what is no call."""
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    found = [_one(call) for call in (read if isinstance(read, list) else [read])]
    return [call for call in found if call is not None] if all(found) else []


def _one(call: Any) -> tuple[str, str] | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None

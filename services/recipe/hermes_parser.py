"""What did a model say that speaks of tools as Hermes does? Text, and calls as JSON between tags."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from services.recipe.detokenize import Detokenizer
from services.recipe.dialect import CallArguments, CallBegun, Event, Text
from services.recipe.hermes import CALL_BEGIN, CALL_END

_BEGINNINGS = "|".join(re.escape(CALL_BEGIN[:length]) for length in range(len(CALL_BEGIN) - 1, 0, -1))
_HELD = re.compile(rf"\n*(?:{_BEGINNINGS})?\Z")  # newlines before a call are not text
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class HermesParser:
    """Reads one answer. A call is told when it is whole, so its arguments are always a JSON object.

    names: the tools that were declared. What is no call of one of them is text, as long as no call came before.
    """

    def __init__(self, pieces: Sequence[bytes], names: Collection[str]) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._names = names
        self._held = ""
        self._call: str | None = None  # what came since the opening tag
        self._num_calls = 0
        self.num_reasoning_tokens = 0
        self.is_text = True

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        was_text = self._call is None
        events = self._read(self._detokenizer.feed(token_ids))
        self.is_text = was_text and self._call is None and not self._num_calls
        return events

    def rest(self, *, is_whole: bool) -> list[Event]:
        """Return what was held back; of a call that was cut off, its beginning."""
        if self._call is None:
            held, self._held = self._held, ""
            return self._say(held)
        body, self._call = self._call, None
        if is_whole:
            return self._told(body, "")
        header = _HEADER.match(body)
        if header is None or header[1] not in self._names:
            return self._say(CALL_BEGIN + body)
        return [CallBegun(self._num_calls, header[1]), CallArguments(self._num_calls, body[header.end() :])]

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
            else:
                body, tag, rest = (self._call + text).partition(CALL_END)
                self._call, text = (None, rest) if tag else (body, "")
                if tag:
                    events += self._told(body, CALL_END)
        return events

    def _say(self, text: str) -> list[Event]:
        return [Text(text)] if text and not self._num_calls else []

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

"""Which characters of a message could be taken for a chat template's markup, and how are they kept from it?

A template's output is one string, in which the spelling of a control token means that token. A message may contain the
same spelling, and must then mean the plain text. So before rendering, the first character of every such spelling in a
message is replaced by a stand-in, a private-use character that occurs nowhere else; after the output was cut at its
control tokens, the stand-ins become what they were (tokenizer.marked_ids).

Why a character, and not markers around the message or a str subclass that remembers where it came from: templates trim,
compare, slice and split messages. Markers at the ends break `| trim` and `== ""`; a subclass loses its memory in any
filter written without it in mind, and then the message is trusted. A character survives every string operation, the
length stays the same, and whatever a template does, its output holds no control spelling that a message brought along.
What a template cannot do any more is find control spellings in a message. That is meant: they are not there.

Messages without such spellings, nearly all, are rendered exactly as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.recipe.refusals import refuse

_PRIVATE_USE = ((0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Disguised:
    """Messages that are safe to render, and how to undo it. `originals` maps stand-in code points to characters."""

    messages: tuple[dict[str, object], ...]
    originals: dict[int, str]


class Disguise:
    """Finds and hides control spellings in messages.

    spellings: of all control tokens.  literals: the strings a template is made of. A spelling can also come about at a
    seam, half from a message and half from what follows or precedes it, so a message's end is checked for the first
    half of one; its beginning is checked for the second half only if some literal of the template ends in a first half.
    """

    def __init__(self, spellings: Sequence[str], literals: Sequence[str]) -> None:
        self._spellings = tuple(spellings)
        self._beginnings = frozenset(s[:k] for s in spellings for k in range(1, len(s)))
        self._longest = max((len(s) for s in spellings), default=0)
        self._literals = tuple(literals)
        self._template_opens = any(self._ends_in_beginning(literal) for literal in literals)

    def cover(self, messages: Sequence[Message]) -> Disguised:
        """Return the messages with every risky character replaced. Roles are ours, everything else is the caller's."""
        risky = [
            {
                key: at
                for key, value in message.items()
                if key != "role" and isinstance(value, str) and (at := self._find(value))
            }
            for message in messages
        ]
        if not any(risky):
            return Disguised(tuple(dict(message) for message in messages), {})
        hidden = {
            str(message[key])[i]
            for message, places in zip(messages, risky, strict=True)
            for key, at in places.items()
            for i in at
        }
        texts = [value for message in messages for value in message.values() if isinstance(value, str)]
        free = free_characters((*self._spellings, *self._literals, *texts))
        stand_ins = dict(zip(sorted(hidden), free, strict=False))
        if len(stand_ins) < len(hidden):
            raise refuse("messages", "all private-use characters of Unicode are taken; none is left to mark spellings")
        covered = tuple(
            {key: _replace(value, places.get(key, ()), stand_ins) for key, value in message.items()}
            for message, places in zip(messages, risky, strict=True)
        )
        return Disguised(covered, {ord(stand_in): original for original, stand_in in stand_ins.items()})

    def _find(self, text: str) -> list[int]:
        """Return the positions to hide, ascending."""
        found: set[int] = set()
        for spelling in self._spellings:
            at = text.find(spelling)
            while at >= 0:
                found.add(at)
                at = text.find(spelling, at + 1)
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        # Both as it stands and as a template sees it after `| trim`.
        found.update(*(self._seam_at_end(text, stop) for stop in {end, len(text)}))
        if self._template_opens:
            found.update(i for i in {0, start} if i < end and self._continues(text[i:], text[i:end]))
        return sorted(found)

    def _seam_at_end(self, text: str, end: int) -> Iterator[int]:
        for k in range(1, min(self._longest, end + 1)):
            if text[end - k : end] in self._beginnings:
                yield end - k

    def _continues(self, text: str, trimmed: str) -> bool:
        """Return whether the text begins with the end of a spelling, or is all from the middle of one."""
        return any(
            trimmed in spelling or any(text.startswith(spelling[k:]) for k in range(1, len(spelling)))
            for spelling in self._spellings
        )

    def _ends_in_beginning(self, literal: str) -> bool:
        return any(literal.endswith(beginning) for beginning in self._beginnings)


def free_characters(texts: Iterable[str]) -> Iterator[str]:
    """Yield the private-use characters that occur in none of the texts."""
    taken: set[str] = set().union(*texts)
    for first, last in _PRIVATE_USE:
        yield from (chr(i) for i in range(first, last + 1) if chr(i) not in taken)


def _replace(value: object, at: Sequence[int], stand_ins: Mapping[str, str]) -> object:
    if not at:
        return value
    characters = list(str(value))
    for i in at:
        characters[i] = stand_ins[characters[i]]
    return "".join(characters)

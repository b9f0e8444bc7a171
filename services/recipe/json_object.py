"""How much of a JSON object that is still being written can be shown, and what would make it whole?

Shown text is only ever added to, so nothing is shown that a later character could make wrong: a member's name waits for
its value to begin, a comma for what follows it, numbers, words and escapes for their ends. What was shown can therefore
be closed at any time, and is a JSON object then.

What models get wrong and is plain all the same is mended: raw line breaks and tabs in strings, escapes that JSON does
not have (a backslash before anything stands for itself), half surrogate pairs (U+FFFD), commas before a closing
bracket. Anything else ends the object where it was last right.
"""

import math
import re
from typing import Final

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OF_NUMBERS = frozenset("0123456789+-.eE")
_WORDS: Final = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrt')
_CLOSED_BY: Final = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")
_REPLACEMENT = "\\ufffd"
# What the next character outside strings may be.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END = range(6)


class JsonObject:
    """Reads one object, from its opening brace, however its text is dealt out.

    max_depth: levels of objects and lists; what would be deeper is wrong.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._stack: list[str] = []
        self._want = _VALUE
        self._held = ""  # of a member or element whose value has not begun
        self._scalar = ""  # a number or word that may go on
        self._escape = ""
        self._high = ""  # the escape of a high surrogate, which needs another one
        self._is_in_string = False
        self._is_key = False
        self._out: list[str] = []
        self.is_over = False
        """Whether the object has ended, by its own end or where it was last right."""
        self.unread = ""
        """What came after the object, in the call that ended it."""

    def feed(self, text: str) -> str:
        """Return what can be shown now."""
        at = 0
        while at < len(text) and not self.is_over:
            at = self._string(text, at) if self._is_in_string else self._structure(text, at)
        self.unread = text[at:]
        return self._taken()

    def close(self) -> str:
        """Return what makes the shown text whole; nothing more will come, or nothing more was right."""
        if self._is_in_string and not self._is_key:
            self._end_escape()
            self._out.append('"')
        elif self._scalar and not self._is_in_string:
            self._end_scalar()
        self._out += [_CLOSED_BY[opened] for opened in reversed(self._stack)]
        self._stack.clear()
        self.is_over = True
        return self._taken()

    def cut(self) -> str:
        """Return what was held back, as it was written; the answer was cut off here."""
        self.is_over = True
        return self._held + self._scalar + self._high + self._escape

    def _taken(self) -> str:
        taken, self._out = "".join(self._out), []
        return taken

    def _string(self, text: str, at: int) -> int:
        """Read some of a string; return where to go on."""
        if self._escape:
            return self._escaped(text, at)
        run = _RUN.match(text, at)
        if run is not None:
            self._say(run.group())
            return run.end()
        c = text[at]
        if c == "\\":
            self._escape = c
        elif c == '"':
            self._say(c)
            self._is_in_string = False
            self._want = _COLON if self._is_key else _COMMA_OR_END
        else:
            self._say(f"\\u{ord(c):04x}")
        return at + 1

    def _say(self, text: str) -> None:
        """Add to the string."""
        if self._high:
            self._high, text = "", _REPLACEMENT + text
        if self._is_key:
            self._held += text
        else:
            self._out.append(text)

    def _escaped(self, text: str, at: int) -> int:
        c = text[at]
        if len(self._escape) == 1 and c in _ESCAPES:
            self._escape = ""
            self._say(f"\\{c}")
        elif (len(self._escape) == 1 and c == "u") or (len(self._escape) > 1 and c in _HEX):
            self._escape += c
            if len(self._escape) == 6:
                self._end_unit()
        else:
            self._end_escape()
            return at  # it is none, so the character is an ordinary one
        return at + 1

    def _end_unit(self) -> None:
        escape, self._escape = self._escape, ""
        unit = int(escape[2:], 16)  # noqa: FURB166 - what is cut off is a backslash and u, no prefix
        if 0xDC00 <= unit < 0xE000:
            high, self._high = self._high, ""
            self._say(high + escape if high else _REPLACEMENT)
        elif 0xD800 <= unit < 0xDC00:
            if self._high:
                self._say("")
            self._high = escape
        else:
            self._say(escape)

    def _end_escape(self) -> None:
        """Say what began like an escape and is none."""
        escape, self._escape = self._escape, ""
        if escape or self._high:
            self._say(f"\\{escape}" if escape else "")

    def _structure(self, text: str, at: int) -> int:
        """Read a character outside of strings; return where to go on."""
        c = text[at]
        if self._scalar:
            if self._goes_on(c):
                self._scalar += c
                return at + 1
            if not self._end_scalar():
                return self._break(at)
        if c in _SPACE:
            self._held += c
        elif not (self._ends(c) if c in "}]" else self._continues(c)):
            return self._break(at)
        return at + 1

    def _continues(self, c: str) -> bool:
        """Take what is neither space nor a closing bracket; return whether it may stand here."""
        if self._want in {_VALUE, _VALUE_OR_END}:
            return self._begins(c)
        if self._want in {_KEY, _KEY_OR_END} and c == '"':
            self._is_in_string = self._is_key = True
        elif (self._want == _COLON and c == ":") or (self._want == _COMMA_OR_END and c == ","):
            self._want = _KEY if c == "," and self._stack[-1] == "{" else _VALUE
        else:
            return False
        self._held += c
        return True

    def _begins(self, c: str) -> bool:
        """Begin a value with this character; return whether one can."""
        if not self._stack and c != "{":
            return False
        if c in _CLOSED_BY:
            if len(self._stack) == self._max_depth:
                return False
            self._stack.append(c)
            self._show(c)
            self._want = _KEY_OR_END if c == "{" else _VALUE_OR_END
        elif c == '"':
            self._show(c)
            self._is_in_string, self._is_key = True, False
        elif c in "-0123456789tfn":
            self._scalar = c
        else:
            return False
        return True

    def _goes_on(self, c: str) -> bool:
        if self._scalar[0] in "tfn":
            return any(word.startswith(self._scalar + c) for word in _WORDS)
        return c in _OF_NUMBERS

    def _end_scalar(self) -> bool:
        """Show the number or word if it is one; return whether it was."""
        scalar, self._scalar = self._scalar, ""
        is_number = _NUMBER.fullmatch(scalar) is not None and math.isfinite(float(scalar))
        if not is_number and scalar not in _WORDS:
            return False
        self._show(scalar)
        self._want = _COMMA_OR_END
        return True

    def _ends(self, c: str) -> bool:
        """End an object or list with this bracket; return whether it is one to be ended."""
        if not self._stack or _CLOSED_BY[self._stack[-1]] != c:
            return False
        if self._want == _COLON or (self._want == _VALUE and c == "}"):  # after a name
            return False
        self._stack.pop()
        self._held = self._held.replace(",", "")
        self._show(c)
        self._want = _COMMA_OR_END
        self.is_over = not self._stack
        return True

    def _show(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _break(self, at: int) -> int:
        """End the object where it was last right; return where what is wrong begins."""
        self._held = self._scalar = ""
        closed = self.close()
        self._out.append(closed)
        return at

"""Which ids spell a text, and which bytes does an id stand for?

Ordinary text never becomes a control token here: the library runs with its control tokens switched off, and only
`marked_ids`, which is given a chat template's output, puts them in, by literal spelling.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, pre_tokenizers

from services.recipe.refusals import ModelFolderError, refuse
from services.recipe.token_floor import TokenFloor

LONG_CHARACTERS = 4096
"""Texts from this length on are encoded without holding the interpreter, which costs short ones more than it gives."""

SHORT_CHARACTERS = 128
"""Stretches up to this length are remembered: a template's own, between one control token and the next."""
NUM_SHORT = 512

_SPACE_MARK = "\u2581"  # sentencepiece's stand-in for a space
_WORD = re.compile(r"\w")


class PromptTokenizer:
    """A tokenizer.json, seen from the service: plain text in, marked text in, bytes out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        controls = {id_: token for id_, token in added.items() if _is_control(token)}
        # Tokens such as <think> are not "special" in every model's file, yet no message may spell one into being. The
        # library skips special ones only, so they are made special first (which changes nothing else in encoding).
        tokenizer.add_special_tokens([_as_special(token) for token in controls.values()])
        tokenizer.encode_special_tokens = True
        self._prepends_first = _stop_prepending(tokenizer)
        self._tokenizer = tokenizer
        self._short_ids = lru_cache(NUM_SHORT)(self.plain_ids)
        self._controls = {token.content: (id_, token) for id_, token in controls.items()}
        self.spellings = tuple(sorted(self._controls, key=len, reverse=True))
        """How control tokens are written, longest first."""

        self._control_ids = frozenset(controls)
        # Leftmost, then longest, as the library finds them. Without groups, so that the regex engine scans by literal.
        self._marks = re.compile("|".join(map(re.escape, self.spellings)) or r"(?!)")

        hidden = {id_ for id_, token in added.items() if token.special}
        self.pieces = _pieces(tokenizer, added, hidden)
        """What each id adds to the text, as bytes, by id; empty for special tokens, which are never shown."""

        self.floor = TokenFloor(
            self.pieces,
            self.spellings,
            is_byte_level="ByteLevel" in _decoder_kinds(tokenizer),
            is_normalized=tokenizer.normalizer is not None,
            is_stripping=any(token.lstrip or token.rstrip for token in added.values()),
        )
        """How few tokens a text can be, without encoding it."""

    @classmethod
    def load(cls, folder: Path) -> "PromptTokenizer":
        """Read `folder`/tokenizer.json; raise ModelFolderError when it is absent or of an unknown kind."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFolderError(f"{path} is missing: the recipe needs the model's tokenizer.json")
        return cls(Tokenizer.from_file(str(path)))

    @property
    def num_tokens(self) -> int:
        """Ids from 0 up to this have a meaning; a model's logits may be wider."""
        return len(self.pieces)

    def plain_ids(self, text: str, *, is_whole_prompt: bool = False) -> list[int]:
        """Return the ids of ordinary text; control spellings in it are text.

        Characters for whose bytes the vocabulary has no token encode to nothing, as in the library: in SmolLM2 six
        ASCII control characters and the unassigned planes from U+40000 on.
        is_whole_prompt: also add what the model expects around a bare prompt (Llama's BOS; nothing for many models).
        """
        if is_whole_prompt and self._prepends_first:
            text = _with_space_mark(text)
        ids = self._ids(text, adds_special=is_whole_prompt)
        if self._control_ids.isdisjoint(ids):
            return ids
        # Controls that the text spelled (not those the model wants around a prompt) have a span in it: some
        # vocabularies hold them as ordinary entries too. Cutting inside each spelling keeps them from being found.
        [encoded] = self._tokenizer.encode_batch([text], add_special_tokens=is_whole_prompt)
        spans = zip(ids, encoded.offsets, strict=True)
        if any(id_ in self._control_ids and start < end for id_, (start, end) in spans):
            return self._cut_ids(text)
        return ids

    def marked_ids(self, text: str, originals: dict[int, str] | None = None) -> list[int]:
        """Return the ids of a template's output, whose literal control spellings are control tokens.

        originals: stand-in character -> what the message had there (see disguise.py); put back between controls.
        Equal to the library's ordinary encode when there are no stand-ins: it, too, splits at added tokens first.
        """
        ids: list[int] = []
        at = 0
        for mark in self._marks.finditer(text):
            control_id, token = self._controls[mark.group()]
            start, end = mark.span()
            if token.single_word and _is_inside_word(text, start, end):
                continue
            stretch = text[at:start]
            ids += self._stretch_ids(stretch.rstrip() if token.lstrip else stretch, originals, is_first=at == 0)
            ids.append(control_id)
            at = _skip_spaces(text, end) if token.rstrip else end
        ids += self._stretch_ids(text[at:], originals, is_first=at == 0)
        return ids

    def control_id(self, spelling: str) -> int | None:
        """Return the id of the control token that is written so; None when there is none."""
        found = self._controls.get(spelling)
        return found[0] if found else None

    def spelling(self, token_id: int) -> str:
        r"""Return how an id looks in logprobs: its text, with bytes that are no whole character escaped as \xf0."""
        if token_id >= len(self.pieces):
            return ""
        shown = self.pieces[token_id] or str(self._tokenizer.id_to_token(token_id) or "").encode()
        return shown.decode("utf-8", "backslashreplace")

    def _stretch_ids(self, text: str, originals: dict[int, str] | None, *, is_first: bool) -> Sequence[int]:
        if not text:
            return []
        if originals:
            text = text.translate(originals)
        if is_first and self._prepends_first:
            text = _with_space_mark(text)
        return self._short_ids(text) if len(text) <= SHORT_CHARACTERS else self.plain_ids(text)

    def _ids(self, text: str, *, adds_special: bool) -> list[int]:
        encoding: Encoding
        if len(text) < LONG_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=adds_special)
        else:
            # Without offsets, which cost half as much as the ids. Only the batch calls let other threads run meanwhile:
            # the event loop, above all.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0]
        return encoding.ids

    def _cut_ids(self, text: str) -> list[int]:
        cuts = [0, *(mark.start() + 1 for mark in self._marks.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        ids = [id_ for part in parts for id_ in self._ids(part, adds_special=False)]
        if not self._control_ids.isdisjoint(ids):
            raise refuse("", "the text cannot be told from control tokens by this model's vocabulary")
        return ids


def _is_control(token: AddedToken) -> bool:
    """Tell markup (<think>, [TOOL_CALLS]) from ordinary words and runs of spaces that were added as tokens."""
    words = token.content.split()
    return bool(token.special) or any(not word.isalnum() for word in words)


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _is_inside_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.match(text[start - 1 : start]) or _WORD.match(text[end : end + 1]))


def _stop_prepending(tokenizer: Tokenizer) -> bool:
    """Switch off Metaspace's "mark the first piece" and return whether it was on.

    The library marks the piece at offset 0 of a text; we encode stretches one by one, and only the first is at 0.
    """
    found = tokenizer.pre_tokenizer
    if found is None:
        return False
    if isinstance(found, pre_tokenizers.Metaspace):
        parts: list[Any] = [found]
    elif isinstance(found, pre_tokenizers.Sequence):
        parts = [found[i] for i in range(len(_state(found)["pretokenizers"]))]
    else:
        return False
    marking = [part for part in parts if isinstance(part, pre_tokenizers.Metaspace) and part.prepend_scheme == "first"]
    for part in marking:
        part.prepend_scheme = "never"
    return bool(marking)


def _with_space_mark(text: str) -> str:
    return text if not text or text[0] in {" ", _SPACE_MARK} else " " + text


def _state(part: Any) -> dict[str, Any]:
    """Return a tokenizers object's description; the library gives no other way to look inside."""
    described: dict[str, Any] = json.loads(part.__getstate__())
    return described


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder = tokenizer.decoder
    if decoder is None:
        return set()
    state = _state(decoder)
    return {part["type"] for part in state.get("decoders", [state])}


def _pieces(tokenizer: Tokenizer, added: dict[int, AddedToken], hidden: set[int]) -> tuple[bytes, ...]:
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        to_bytes = _byte_fallback
    else:
        raise ModelFolderError(f"tokenizer.json decodes by {sorted(kinds)}; byte-level and byte-fallback are known")
    size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    pieces = []
    for id_ in range(size):
        token = tokenizer.id_to_token(id_)
        if token is None or id_ in hidden:
            pieces.append(b"")
        else:
            pieces.append(token.encode() if id_ in added else to_bytes(token))
    return tuple(pieces)


def _byte_level_table() -> dict[int, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others are moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in table]
    return table | {0x100 + i: byte for i, byte in enumerate(moved)}


_BYTE_LEVEL = _byte_level_table()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # a token that was put into the vocabulary as it reads


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE_MARK, " ").encode()

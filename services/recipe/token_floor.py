"""How few tokens can a text be, known without encoding it?

Encoding megabytes takes the better part of a minute, counting bytes takes milliseconds: so what cannot fit the context
is refused by its bytes. The count errs on the caller's side alone, since a text that would fit must never be refused.
"""

from collections.abc import Iterable, Sequence

from services.recipe.refusals import too_long

# Normalizers shrink UTF-8 by 4 at most: a mathematical letter (4 bytes) becomes an ASCII one, three Hangul jamo (9) one
# syllable (3), a letter with combining marks less. Those that delete delete spaces, which `_is_loose` leaves out.
_NORMALIZED_SHRINKS = 4


class TokenFloor:
    """Counts the bytes that a vocabulary must spell, in units of its longest piece.

    pieces: bytes of each id.  spellings: of control tokens, each of which may be one token in a template's output.
    is_byte_level: bytes are spelled one by one; otherwise a character the vocabulary lacks becomes one "unknown" token,
    or part of its neighbour's.  is_normalized: texts are rewritten before they are cut.  is_stripping: some token takes
    the spaces beside it along.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        spellings: Sequence[str],
        *,
        is_byte_level: bool,
        is_normalized: bool,
        is_stripping: bool,
    ) -> None:
        alone = {piece[0] for piece in pieces if len(piece) == 1}
        skipped = set(range(256)) - alone  # encode to nothing: 21 byte values in SmolLM2
        if skipped and not is_byte_level:
            skipped |= set(range(128, 256))
        self._skipped = bytes(sorted(skipped))
        longest = max((len(spelled) for spelled in (*pieces, *map(str.encode, spellings))), default=1)
        self._bytes_per_token = longest * (_NORMALIZED_SHRINKS if is_normalized else 1)
        self._is_loose = is_normalized or is_stripping

    def at_least(self, text: str, stand_ins: Iterable[int] = ()) -> int:
        """Return a number of tokens that no encoding of `text` stays below.

        stand_ins: code points that stand for others (see disguise.py) and so tell nothing.
        """
        if self._is_loose:
            text = "".join(text.split())
        num_bytes = len(text.encode().translate(None, self._skipped))
        for stand_in in map(chr, stand_ins):
            num_bytes -= text.count(stand_in) * len(stand_in.encode())
        return -(-num_bytes // self._bytes_per_token)


def refuse_hopeless(
    floor: TokenFloor, field: str, texts: Iterable[str], context_tokens: int | None, stand_ins: Iterable[int] = ()
) -> None:
    """Raise a 400 on `field` when the texts cannot fit context_tokens (None: everything fits), whatever their tokens.

    texts: stretches that are encoded one by one.  stand_ins: as for `at_least`.
    """
    if context_tokens is None:
        return
    fewest = sum(floor.at_least(text, stand_ins) for text in texts)
    if fewest >= context_tokens:
        raise too_long(field, context_tokens, f"at least {fewest}", "at least 1")

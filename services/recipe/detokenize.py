"""What text do tokens add, when a character may be spread over several of them?"""

import codecs
from collections.abc import Iterable, Sequence


class Detokenizer:
    """Turns token ids into text as they come; constant work per token.

    The text is the same however the tokens are dealt out over calls. Bytes that may still become a character are held
    back. Bytes that cannot (a model may emit anything) become U+FFFD, as in every tokenizer's own decode. Bytes still
    held at the end are dropped: they are the beginning of a character that the token limit cut off.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" when they only begin a character."""
        pieces = self._pieces
        num_pieces = len(pieces)
        # A model's logits may be wider than its vocabulary; such ids have no text.
        return self._decoder.decode(b"".join([pieces[i] for i in token_ids if i < num_pieces]))

    def flush(self) -> str:
        """Return U+FFFD for the beginning of a character that nothing will complete: markup came instead."""
        return self._decoder.decode(b"", final=True)

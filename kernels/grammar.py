"""Which tokens may come next? A grammar's place in one answer, as a bitmask over the vocabulary.

Everything here is about text, not tensors: it runs on the CPU while the device computes. llguidance releases the GIL
while it compiles and fills, so the masks of a batch are filled side by side in threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

KIND = "llguidance/1"
"""Bodies that are read here: llguidance's own {"grammars": [...]}, UTF-8 JSON."""
LIMITS: dict[str, Any] = {
    "max_grammar_size": 20_000,
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "step_lexer_fuel": 200_000,  # about 15 ms
    "step_max_items": 50_000,
    "verbose_errors": False,  # errors travel; they must not quote the caller's text
}
"""What one grammar may cost, above what whoever compiles ahead lets pass."""


class BadGrammar(Exception):  # noqa: N818 - named by meaning, like the service errors
    """A grammar cannot be read or obeyed, or has no place for a token. The message is safe to show."""


class GrammarFactory:
    """Grammars over one model's vocabulary. Reading the tokenizer takes seconds, once, in a thread of its own."""

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 2
    ) -> None:
        """vocab_size: width of the logits; ids at and beyond the tokenizer's own are never allowed.

        eos_token_ids: allowed where an answer may end, and nowhere else.
        """
        self._mask_bytes = -(-vocab_size // 8)
        self._num_threads = num_threads
        self._threads = self._new_threads()
        self._compiler = self._threads.submit(_Compiler, tokenizer_file, vocab_size, tuple(eos_token_ids))

    def matcher(self, body: bytes) -> Matcher:
        """Return a grammar at its beginning.  Blocks for milliseconds, the first time for longer.

        Raises BadGrammar, also for a tokenizer that cannot be read.
        """
        return Matcher(self._compiler.result().compile(body), self._mask_bytes)

    def start_matcher(self, body: bytes) -> Future[Matcher]:
        """Begin to build a matcher in a thread."""
        return self._threads.submit(self.matcher, body)

    def start_mask(self, matcher: Matcher) -> Future[bytes]:
        """Begin to fill the matcher's mask in a thread; until that is done, nothing else may be asked of it."""
        return self._threads.submit(matcher.mask)

    def fill_masks(self, matchers: Sequence[Matcher]) -> list[bytes]:
        """Return the masks of different matchers, filled side by side.  Raises BadGrammar if one of them does."""
        if len(matchers) == 1:
            return [matchers[0].mask()]
        return [filled.result() for filled in [self.start_mask(matcher) for matcher in matchers]]

    def abandon(self) -> None:
        """Go on with new threads: one of the old seems to compute without end, which nothing can stop.

        The old ones finish what they have and end with it: nobody holds them any more.
        """
        self._threads = self._new_threads()

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Compiler:
    """llguidance, with its tokenizer and limits; imported late, for engines may run without grammars."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        import llguidance

        self._new_matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**LIMITS)
        try:
            described = _without_added_text(tokenizer_file)
            self._tokenizer = llguidance.LLTokenizer(described, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (OSError, ValueError) as exc:
            raise BadGrammar(f"{tokenizer_file.name} cannot be read for grammars: {exc}") from exc

    def compile(self, body: bytes) -> Any:  # llguidance.LLMatcher
        matcher = self._new_matcher(self._tokenizer, body.decode("utf-8", "replace"), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadGrammar("the grammar cannot be obeyed by this model's engine, or is too complex")
        return matcher


class Matcher:
    """One answer's place in its grammar. One thread at a time may use it.

    Any sequence of tokens, each allowed by the mask before it, is the beginning of an answer that the grammar
    describes. The same tokens lead to the same place, however they were dealt out or taken back.
    """

    def __init__(self, matcher: Any, mask_bytes: int) -> None:  # llguidance.LLMatcher, which is imported late
        """`GrammarFactory.matcher` is the way in."""
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self.num_tokens = 0
        """Tokens that were accepted."""

    def mask(self) -> bytes:
        """Return the tokens that may come next: bit 0 of byte 0 is token 0, [ceil(vocab_size / 8)] bytes.

        Once the grammar is finished only the ends of answer are left.  Raises BadGrammar.
        """
        filled: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise BadGrammar("the grammar has become too complex to obey")
        return filled[: self._mask_bytes]

    def accept(self, token_id: int) -> None:
        """Go on by one token.  Raises BadGrammar, for good, for one that the mask did not allow."""
        if not self._matcher.consume_token(token_id):
            raise BadGrammar(f"the grammar has no place for token {token_id} after {self.num_tokens} tokens")
        self.num_tokens += 1

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were sampled earlier, or elsewhere.  Raises BadGrammar as `accept` does."""
        for token_id in token_ids:
            self.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back.  Raises ValueError for more than there are."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens cannot be taken back of {self.num_tokens}")
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise BadGrammar("the grammar cannot go back")
        self.num_tokens -= num_tokens

    @property
    def is_accepting(self) -> bool:
        """Whether the answer is whole as it stands."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole and nothing but its end can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def _without_added_text(tokenizer_file: Path) -> str:
    """Return tokenizer.json with all added tokens marked special.

    They are markup, shown differently from what they spell or not at all, so no text may be spelled with them; only a
    grammar that names their ids has a place for them.
    """
    described = json.loads(tokenizer_file.read_bytes())
    for token in described.get("added_tokens", ()):
        token["special"] = True
    return json.dumps(described)

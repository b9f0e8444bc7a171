"""How does an answer keep to its grammar, step by step?"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from concurrent.futures import TimeoutError as MaskTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.grammar import BadGrammar
from services.chassis.errors import BadSchema, InternalError

if TYPE_CHECKING:
    from kernels.grammar import GrammarFactory, Matcher
    from proto.common_pb2 import Grammar

BUILD_SECONDS = 10.0
"""Longest wait for a matcher: the first one waits for the tokenizer."""
MASK_SECONDS = 1.0
"""Longest a step waits for a mask. They take less than a millisecond, and are filled while the device computes."""
NOTHING = b""
"""The mask of a sequence that cannot go on: no token is allowed."""


@dataclass(slots=True, eq=False)
class Guide:
    """One answer's place in its grammar, and the mask of its next token. The engine thread alone uses it once it runs.

    It stays with the sequence when that loses its blocks: what was said is still said.
    """

    factory: GrammarFactory
    matcher: Matcher
    is_lost: bool = False
    """Which tokens may follow could not be found out."""
    _mask: Future[bytes] | None = None

    def begin(self) -> None:
        """Start to fill the next token's mask."""
        self._mask = self.factory.start_mask(self.matcher)

    def mask(self) -> bytes:
        """Return the next token's mask, NOTHING when it cannot be had in time."""
        assert self._mask is not None, "begin comes first"
        try:
            try:
                return self._mask.result(MASK_SECONDS)
            except MaskTimeoutError:
                self.factory.abandon()
                if not self._mask.cancel():  # it was not waiting: it is the one that takes so long
                    raise
                self.begin()
                return self._mask.result(MASK_SECONDS)
        except (MaskTimeoutError, BadGrammar):  # the sequence ends, its batch mates go on
            self.is_lost = True
            return NOTHING

    def accept(self, token_id: int) -> bool:
        """Take the sampled token in; return whether the answer is whole and nothing can follow."""
        self.matcher.accept(token_id)
        return self.matcher.is_finished


async def open_guide(factory: GrammarFactory, grammar: Grammar) -> Guide:
    """Compile a grammar, in a thread. Raises BadSchema for one that this engine cannot obey."""
    try:
        async with asyncio.timeout(BUILD_SECONDS):
            return Guide(factory, await asyncio.wrap_future(factory.start_matcher(grammar.body)))
    except TimeoutError:
        factory.abandon()
        raise BadSchema("the grammar takes too long to compile", field="response_format") from None
    except BadGrammar as error:
        raise BadSchema(str(error), field="response_format") from error


def replay_first(guide: Guide, token_id: int) -> None:
    """Take in the token that prefill sampled under the same grammar. Raises InternalError when it was another one."""
    try:
        guide.matcher.accept(token_id)
    except BadGrammar as error:
        raise InternalError(f"prefill's first token: {error}") from error

"""Which first tokens does a request's grammar allow?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernels.grammar import BadGrammar
from services.chassis.errors import BadSchema

if TYPE_CHECKING:
    from kernels.grammar import GrammarFactory
    from proto.common_pb2 import Grammar

COMPILE_SECONDS = 10.0
"""Longest wait: the first grammar waits for the tokenizer."""


async def first_mask(factory: GrammarFactory, grammar: Grammar) -> bytes:
    """Return the allowed tokens at the beginning of an answer, as a bitmask; worked out in a thread.

    Raises BadSchema for a grammar that this engine cannot obey.
    """
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            matcher = await asyncio.wrap_future(factory.start_matcher(grammar.body))
            return await asyncio.wrap_future(factory.start_mask(matcher))
    except TimeoutError:
        factory.abandon()
        raise BadSchema("the grammar takes too long to compile", field="response_format") from None
    except BadGrammar as error:
        raise BadSchema(str(error), field="response_format") from error

"""After a prefix hit, which tokens are computed, and what may they look at?

Found blocks hold what queries select from afar; what they see nearby lives in window states. Three modes:
`off` computes every window exactly, so the answer is the one without the hit, in every bit. `mask` and `compact` are
bounded replay: they rebuild windows from one window's worth of tokens, an approximation the model was trained for.
Positions are absolute, counted in tokens.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from kernels.batch import NO_REPLAY, Replay
from kernels.kv.window import WindowSpec

Mode = Literal["off", "mask", "compact"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt can reuse."""

    block_tokens: int
    """Leading tokens whose blocks are used as they are found."""
    compute_from: int
    """First token that is computed; what the caller reports as cached."""
    state_position: int | None
    """Window state to start from; None starts with empty windows."""
    replay: Replay


def plan_hit(
    num_tokens: int,
    matched_tokens: int,
    *,
    block_tokens: int,
    window: WindowSpec | None,
    states: Container[int],
    mode: Mode = "off",
) -> Hit:
    """Decide for a sequence of `num_tokens` known tokens of which the blocks of `matched_tokens` were found.

    At least the last token is computed: its logits are wanted.  states: positions (whole blocks) for which a window
    state is at hand, of the kind the mode needs (whole for off, encoder part for the others).
    """
    if window is None:
        hit = min(matched_tokens, num_tokens - 1) // block_tokens * block_tokens
        return Hit(hit, hit, None, NO_REPLAY)
    cap = num_tokens - (window.window_tokens + window.backtrack_tokens)
    hit = max(min(matched_tokens, cap), 0) // block_tokens * block_tokens
    if mode == "off":
        return _exact(hit, block_tokens, window, states)
    keep_from = max(num_tokens - (window.window_tokens + window.backtrack_tokens), 0)
    return _bounded(hit, block_tokens, states, keep_from=keep_from, compact=mode == "compact")


def saved_positions(num_tokens: int, *, block_tokens: int, window: WindowSpec | None) -> tuple[int, ...]:
    """Where prefill saves window states of a prompt, ascending; a chunk ends at each.

    The newest position a later prompt with the same beginning can start from, and the last whole block, from which the
    next turn of this conversation starts.
    """
    if window is None:
        return ()
    reach = window.window_tokens + window.backtrack_tokens
    positions = {(num_tokens - reach) // block_tokens * block_tokens, num_tokens // block_tokens * block_tokens}
    return tuple(sorted(position for position in positions if position > 0))


def _exact(hit: int, block_tokens: int, window: WindowSpec, states: Container[int]) -> Hit:
    """Start from the newest state, or far enough back that every layer's window is exact at the end of the hit."""
    for position in range(hit, 0, -block_tokens):
        if hit - position >= window.exact_tokens:
            break
        if position in states:
            return Hit(hit, position, position, Replay(write_from=hit))
    start = hit - window.exact_tokens
    if start <= 0:
        return Hit(0, 0, None, NO_REPLAY)
    return Hit(hit, start, None, Replay(window_from=start, write_from=hit))


def _bounded(hit: int, block_tokens: int, states: Container[int], *, keep_from: int, compact: bool) -> Hit:
    if hit in states:
        return Hit(hit, hit, hit, Replay(write_from=hit, keep_from=keep_from, compact=compact))
    start = hit - block_tokens
    if hit <= block_tokens:  # nothing would be left of it
        return Hit(0, 0, None, Replay(keep_from=keep_from, compact=compact))
    return Hit(hit, start, None, Replay(window_from=start, write_from=hit, keep_from=keep_from, compact=compact))

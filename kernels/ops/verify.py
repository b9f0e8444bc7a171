"""Which drafts does a verify step accept?

The product uses `accepted` alone: a draft is accepted iff it is the token our sampler gives at that position, so
speculation cannot change a token (see gumbel.py for the noise that makes the sampler's choice a function of seed and
position). Everything else here is DeepInfer's rule, rejection sampling against the draft's distribution: it exists for
parity tests and as the reference of a kernel, and its tokens depend on how many drafts were verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

DRAFT_SEED_OFFSET = 1_000_000_007
"""Added to the seed for draft draws, so that they do not repeat the target's numbers."""
_ROW_STRIDE = 10_000_019
"""Positions between two rows of a verify step."""
_GREEDY_TEMPERATURE = 1e-5
"""Lower ones become this one: both rows are then one-hot but for ties, and the same rule compares tokens."""
_DRAFT_SHRINK = math.exp(-5e-5)
"""Shrinks the draft's probabilities in the residual, which is then never empty when both rows are equal."""


def accepted(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading drafts are what the sampler chose at their positions.

    choices[i] is the choice where drafts[i] was put; one more, after the last draft, may follow.  With k accepted the
    step's tokens are choices[:k + 1]: choices[k] was sampled after accepted tokens only.
    """
    if len(choices) < len(drafts):
        raise ValueError(f"{len(drafts)} drafts have {len(choices)} choices to compare with")
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return count


class Use(IntEnum):
    """What a number is drawn for; part of its hash. For parity tests."""

    DRAW = 0
    RESIDUAL = 1
    ACCEPT = 2


def uniform(seed: int, position: int, use: Use) -> float:
    """DeepInfer's number in [0, 1) for a sample position: a hash, in steps of 2^-53. For parity tests.

    seed: unsigned 64 bit.  position: signed 32 bit.
    """
    spread = (position * 3 + use) * _GOLDEN & _MASK
    key = seed ^ spread if use is Use.ACCEPT else seed + (spread ^ (spread << 13 & _MASK)) & _MASK
    return (_splitmix64(key) >> 11) * 2.0**-53


def row_position(base: int, row: int) -> int:
    """Sample position of a verify step's row: wraps like a signed 32 bit number. For parity tests.

    base: context length before the step plus 1.
    """
    return (base + row * _ROW_STRIDE + 2**31) % 2**32 - 2**31


def transformed(logits: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Log-probabilities after temperature, then top-p, then top-k (-1 is off); -inf where cut. For parity tests.

    logits: [rows, vocab] fp32.  Returns the same shape.
    """
    if temperature < _GREEDY_TEMPERATURE:
        temperature, top_p, top_k = _GREEDY_TEMPERATURE, 1.0, -1
    scores = logits / temperature
    if top_p < 1.0:
        ranked, order = torch.sort(torch.softmax(scores, dim=-1), dim=-1, descending=True, stable=True)
        mass_before = ranked.cumsum(dim=-1) - ranked
        scores = scores.masked_fill(~_scattered(order, mass_before <= top_p), -math.inf)
    if 0 < top_k < scores.shape[-1]:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
        scores = scores.masked_fill(~_scattered(order, ranks < top_k), -math.inf)
    return torch.log_softmax(scores, dim=-1)


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """What DeepInfer's rule decides for one row. For parity tests."""

    is_accepted: bool
    """The fresh row, which verifies nothing, counts as accepted."""
    token: int
    """The draft if accepted, else a draw from the residual; the fresh row's own draw."""
    accept_prob: float = 1.0
    """Chance that this draft is accepted."""
    accept_estimate: float = 1.0
    """Chance that a draft drawn from the draft's distribution is accepted; what the confidence head learns."""


def verify_row(target: Tensor, draft: Tensor, token: int, *, seed: int, position: int) -> VerifiedRow:
    """Accept the draft with probability min(1, target / draft), else draw from what the draft left out.

    target, draft: [vocab] log-probabilities of `transformed`.  For parity tests.
    """
    ratio = float(torch.exp(torch.clamp(target[token] - draft[token], max=0.0)))
    residual = torch.relu(target.exp() - draft.exp() * _DRAFT_SHRINK)
    estimate = max(1.0 - float(residual.sum()), 0.0)
    if uniform(seed, position, Use.ACCEPT) < ratio:
        return VerifiedRow(True, token, ratio, estimate)
    return VerifiedRow(False, draw(residual, uniform(seed, position, Use.RESIDUAL)), ratio, estimate)


def verify(target: Tensor, draft: Tensor, tokens: Sequence[int], *, seed: int, base: int) -> list[VerifiedRow]:
    """Every row of one request's verify step, the fresh one last; rows after the first rejection are void.

    target: [drafts + 1, vocab], draft: [drafts, vocab], both of `transformed`.  For parity tests.
    """
    rows = [
        verify_row(target[row], draft[row], token, seed=seed, position=row_position(base, row))
        for row, token in enumerate(tokens)
    ]
    fresh = len(tokens)
    number = uniform(seed, row_position(base, fresh), Use.DRAW)
    return [*rows, VerifiedRow(True, draw(target[fresh].exp(), number))]


def draw(weights: Tensor, number: float) -> int:
    """First index whose running sum of weights exceeds number * total; fp64. For parity tests.

    weights: [vocab], not all 0.
    """
    sums = weights.double().cumsum(dim=-1)
    index = int(torch.searchsorted(sums, number * sums[-1:], right=True))
    return min(index, len(weights) - 1)


def _splitmix64(x: int) -> int:
    x = x + _GOLDEN & _MASK
    x = (x ^ x >> 30) * _MIX[0] & _MASK
    x = (x ^ x >> 27) * _MIX[1] & _MASK
    return x ^ x >> 31


def _scattered(order: Tensor, kept: Tensor) -> Tensor:
    """A mask over ranks as a mask over tokens."""
    return torch.zeros_like(kept).scatter(-1, order, kept)

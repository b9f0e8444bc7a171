"""Which compressed entries does each query read? Scores of all it may see, the best of them, and the best blocks.

Products have one shape always: TOKENS queries of one sequence, those of equal position / TOKENS, each in the slot of
its position, times UNIT entries. So a query's scores do not depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 8
"""Queries per product, aligned to positions."""
UNIT = 128
"""Entries per product."""
_BF16_MAX = torch.finfo(torch.bfloat16).max


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor, *, position: int, out: Tensor) -> None:
    """Sum over heads of weight * relu(query . key), for one sequence's consecutive tokens.

    queries: [tokens, heads, size] fp32.  weights: [tokens, heads] fp32.  keys: [units * UNIT, size] fp32, finite.
    position: of the first token.  out: [tokens, some units * UNIT] fp32.
    """
    tokens, heads, size = queries.shape
    first = position % TOKENS
    # Zero queries before and behind them, up to whole groups.
    slots = torch.nn.functional.pad(queries, (0, 0, 0, 0, first, -(first + tokens) % TOKENS))
    factors = weights.unsqueeze(2)
    units = keys.view(-1, UNIT, size)[: out.shape[1] // UNIT].unbind(0)
    for group in range(0, slots.shape[0], TOKENS):
        rows = slots[group : group + TOKENS].view(TOKENS * heads, size)
        low, high = max(group - first, 0), min(group + TOKENS - first, tokens)
        skipped = max(first - group, 0)
        for index, unit in enumerate(units):
            product = torch.mm(rows, unit.mT).view(TOKENS, heads, UNIT)[skipped : skipped + high - low]
            summed = _sum_heads(product.relu_().mul_(factors[low:high]))
            out[low:high, index * UNIT : (index + 1) * UNIT] = summed


def best(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest of each row; of equal ones the lower index. -inf is never marked, NaN counts as highest.

    scores: [rows, n] fp32.  Returns [rows, n] bool.
    """
    ranked = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    if scores.shape[1] <= count:
        return ranked > float("-inf")
    threshold = ranked.topk(count, dim=1, sorted=True).values[:, -1:]
    above = ranked > threshold
    level = (ranked == threshold) & (ranked > float("-inf"))
    room = count - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= room))


def listed(marked: Tensor, width: int) -> Tensor:
    """Indices of each row's marks, ascending, then -1: [rows, n] bool -> [rows, width] int64. At most width a row."""
    out = torch.full((len(marked), width), -1, dtype=torch.int64, device=marked.device)
    rows, columns = marked.nonzero(as_tuple=True)
    out[rows, (marked.cumsum(dim=1) - 1)[rows, columns]] = columns
    return out


def best_blocks(scores: Tensor, valid: Tensor, *, size: int, count: int) -> Tensor:
    """Mark the `count` blocks of `size` entries with the highest scores; the newest, maybe partial one, always.

    scores: [rows, n] fp32, n a multiple of size; only the first `valid` (int64 [rows]) of a row count.
    Returns [rows, n / size] bool.
    """
    blocks = torch.arange(scores.shape[1] // size, device=scores.device)
    entries = torch.arange(scores.shape[1], device=scores.device)
    visible = scores.masked_fill(entries >= valid[:, None], float("-inf"))
    highest = visible.view(len(scores), -1, size).amax(dim=-1)
    highest = torch.where(highest > _BF16_MAX, _BF16_MAX, highest)
    return best(highest.masked_fill(blocks == (valid[:, None] - 1) // size, float("inf")), count)


def _sum_heads(scores: Tensor) -> Tensor:
    """[tokens, heads, n] -> [tokens, n]: halves are added to halves, so that each sum has one order everywhere."""
    while (heads := scores.shape[1]) > 1:
        half = (heads + 1) // 2
        folded = scores[:, :half]
        folded[:, : heads - half] += scores[:, half:]
        scores = folded
    return scores[:, 0]

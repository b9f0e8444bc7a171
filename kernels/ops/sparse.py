"""How much does each query take from the keys that were chosen for it? Keys are values; every head has a sink.

Every token has its own list of keys of one fixed length, so a matrix product has the same shape whatever the batch and
the context: always TOKENS tokens, the missing ones inert.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kernels.ops.elementwise import row_sum

TOKENS = 8
"""Per product. A library may take another inner loop for another number of them."""


def attend(queries: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor, *, scale: float) -> Tensor:
    """Softmax attention in which `exp(sink)` joins the denominator of each head and carries no value.

    queries: [tokens, heads, size] fp32.  keys: [tokens, length, size] fp32, finite everywhere; also the values.
    mask: [tokens, length] fp32, 0 or -inf.  sinks: [heads] fp32.  Returns [tokens, heads, size] fp32, new.
    """
    tokens = len(queries)
    padding = -tokens % TOKENS
    out = queries.new_empty(tokens + padding, *queries.shape[1:])
    for start in range(0, tokens, TOKENS):
        mine = slice(start, min(start + TOKENS, tokens))
        missing = padding if start + TOKENS > tokens else 0
        own, theirs, hidden = (_padded(part[mine], missing) for part in (queries, keys, mask))
        _attend(own, theirs, hidden, sinks, scale=scale, out=out[start : start + TOKENS])
    return out[:tokens]


def prove(*, heads: int, size: int, length: int, device: torch.device) -> tuple[bool, bytes]:
    """Does a token get the same bits in every slot, with any mates?  Returns that, and SHA-256 of what it computes."""
    generator = torch.Generator().manual_seed(20240229)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    queries, keys, sinks = draw(2 * TOKENS, heads, size), draw(2 * TOKENS, length, size), draw(heads)
    mask = torch.where(draw(2 * TOKENS, length) < 1.0, 0.0, float("-inf"))

    def part(start: int, end: int) -> Tensor:
        return attend(queries[start:end], keys[start:end], mask[start:end], sinks, scale=size**-0.5)

    whole = part(0, 2 * TOKENS)
    cuts = ((0, 1), (1, 2), (3, 7), (5, 16), (9, 10), (15, 16))
    same = all(torch.equal(whole[start:end], part(start, end)) for start, end in cuts)
    return same, hashlib.sha256(whole.cpu().numpy().tobytes()).digest()


def _attend(queries: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor, *, scale: float, out: Tensor) -> None:
    """One product of TOKENS tokens."""
    scores = torch.bmm(queries, keys.mT).mul_(scale).add_(mask[:, None, :])
    sink = sinks[None, :, None]
    largest = scores.amax(dim=-1, keepdim=True).maximum(sink)
    weights = scores.sub_(largest).exp_()
    total = row_sum(weights).unsqueeze(-1).add_((sink - largest).exp_())
    torch.div(torch.bmm(weights, keys), total, out=out)


def _padded(part: Tensor, padding: int) -> Tensor:
    return torch.cat([part, part.new_zeros(padding, *part.shape[1:])]) if padding else part

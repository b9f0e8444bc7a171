"""Which rows of the n-gram tables belong to a token, and how much of them do its streams take?

The last four tokens, under a vocabulary in which spellings that read alike share an id, are hashed into tables of
prime size: one for each length of 2 to 4 and each head. Formulas: DeepInfer's V4.1 and the public Engram code.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.ops.elementwise import row_length, row_sum

_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile(r"[ \t\r\n]+")
_WHITESPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space: str.strip() also takes the four separator controls, which the source keeps."""
_SEED_STEP = 10007
_LEAST_GATE = 1e-6


def compress_vocabulary(spellings: Sequence[str]) -> Tensor:
    """Token id -> compressed id, [len(spellings)] int64: tokens that read alike share one, numbered as they appear.

    spellings: each token as the tokenizer file spells it, a character for a byte (GPT-2's byte-level alphabet); the
    model's loader reads them from tokenizer.json.  "" for an id without a token.
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(_reading(spelling), len(numbers)) for spelling in spellings])


def _reading(spelling: str) -> str:
    """What a token reads as: decoded, without accents, case and surplus space."""
    text = _decode(spelling)
    if _UNDECODABLE in text:
        return spelling
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Character by character: str.lower() would write a sigma at the end of a word in its final form.
    lowered = "".join(each.lower() for each in plain if not unicodedata.category(each).startswith("M"))
    collapsed = _SPACES.sub(" ", lowered)
    return collapsed if collapsed == " " else collapsed.strip(_WHITESPACE) or text


def _decode(spelling: str) -> str:
    try:
        spelled = bytes(_BYTES[each] for each in spelling)
    except KeyError:
        return spelling  # a special token is spelled as it is
    return spelled.decode("utf-8", errors="replace")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, GPT-2's: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class HashTables:
    """How one layer hashes windows into rows of its table."""

    primes: tuple[tuple[int, ...], ...]
    """[length - 2][head]: rows of each part of the table."""
    offsets: tuple[int, ...]
    """[(length - 2) * heads + head]: first row of each part."""
    multipliers: tuple[int, ...]
    """One for each token of a window, the newest first."""

    @property
    def num_rows(self) -> int:
        return sum(map(sum, self.primes))


def hash_tables(
    layers: Sequence[int], *, vocab_size: int, heads: int, max_ngram: int, compressed_vocab_size: int
) -> dict[int, HashTables]:
    """The tables of every n-gram layer.

    vocab_size: what no part of a table may be smaller than.  Each part takes the least prime from there on that no
    part before it has, over all layers, in the order of `layers`, length, head.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    candidate, tables = vocab_size - 1, {}
    for layer in layers:
        sizes = []
        for _ in range((max_ngram - 1) * heads):
            candidate = _next_prime(candidate)
            sizes.append(candidate)
        drawn = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram)
        tables[layer] = HashTables(
            primes=tuple(tuple(sizes[start : start + heads]) for start in range(0, len(sizes), heads)),
            offsets=(0, *accumulate(sizes[:-1])),
            multipliers=tuple(int(each) * 2 + 1 for each in drawn),
        )
    return tables


def _next_prime(number: int) -> int:
    """The least prime above a number."""
    number += 1
    while number < 2 or any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def compress(raw: Tensor, compressed_ids: Tensor, *, pad_token_id: int) -> Tensor:
    """Windows of token ids -> windows of compressed ids, [tokens, size] int64.

    raw: [tokens, size] int64, the newest first, -1 before the start.  An image's id (one outside the
    vocabulary) and all that is older, like what would stand before the start, is the compressed padding id.
    """
    is_text = (raw >= 0) & (raw < len(compressed_ids))
    reachable = is_text.long().cumprod(dim=1).bool()
    return torch.where(reachable, compressed_ids[raw.clamp(0, len(compressed_ids) - 1)], compressed_ids[pad_token_id])


def table_rows(compressed: Tensor, tables: HashTables) -> Tensor:
    """Rows of a layer's table for each window: [tokens, size] -> [tokens, (size - 1) * heads] int64."""
    device = compressed.device
    parts = compressed * torch.tensor(tables.multipliers, device=device)  # below 2^63 by the multipliers' bound
    hashed, rows = parts[:, 0], []
    for length, primes in enumerate(tables.primes, start=1):
        hashed = hashed ^ parts[:, length]
        rows.append(hashed.unsqueeze(1) % torch.tensor(primes, device=device))
    return torch.cat(rows, dim=1) + torch.tensor(tables.offsets, device=device)


def gate(streams: Tensor, keys: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """How much of the memory each stream takes: [tokens, 4] fp32.

    streams, keys: [tokens, 4, hidden] fp32.  weight: [4, hidden], query weight times key weight.  eps: of both norms.
    """
    hidden = streams.shape[-1]
    # Lengths with their eps: the definition's two means, without dividing by the size twice and rooting it again.
    lengths = _length(streams, eps * hidden).mul_(_length(keys, eps * hidden))
    score = row_sum((streams * weight).mul_(keys)).div_(lengths).mul_(math.sqrt(hidden))
    rooted = score.abs().clamp_min_(_LEAST_GATE).sqrt_().mul_(score.sign())
    return rooted.neg_().exp_().add_(1.0).reciprocal_()


def _length(x: Tensor, added: float) -> Tensor:
    """Root of each row's sum of squares and `added`: [..., size] -> [...]."""
    return row_length(x).squeeze(-1).square_().add_(added).sqrt_()

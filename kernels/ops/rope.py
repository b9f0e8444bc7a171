"""How do positions turn the last dims of a head? Interleaved pairs, plain or YaRN-stretched angles, and back again."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE_POSITIONS = 4096
"""Angles are made in pages of this many positions: one loop for all, so bits do not depend on a step."""


def plain_frequencies(dims: int, theta: float) -> NDArray[np.float32]:
    """Radians per position of each pair: [dims / 2]."""
    powers = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return (np.float32(1.0) / np.float32(theta) ** powers).astype(np.float32)


def yarn_frequencies(
    dims: int, *, theta: float, factor: float, beta_fast: float, beta_slow: float, original_tokens: int
) -> NDArray[np.float32]:
    """`plain_frequencies` with slow pairs slowed down by `factor` (YaRN, arXiv:2309.00071, without its mscale).

    Pairs that turn more than beta_fast times over the original length stay, those under beta_slow times are slowed.
    """

    def pair_of(turns: float) -> float:
        return dims * math.log(original_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(beta_fast)), 0), min(math.ceil(pair_of(beta_slow)), dims - 1)
    width = max(high - low, 0.001)
    slowed = np.clip((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    plain = plain_frequencies(dims, theta)
    return np.asarray(plain / np.float32(factor) * slowed + plain * (np.float32(1.0) - slowed), np.float32)


class RopeTable:
    """Cosines and sines by position, made when a position is first met."""

    def __init__(self, frequencies: NDArray[np.float32], device: torch.device) -> None:
        self._frequencies = frequencies
        self._device = device
        self._cos = torch.empty(0, len(frequencies), device=device)
        self._sin = self._cos

    def at(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """positions: [n] int64, none beyond `last`.  Returns cosine and sine, [n, dims / 2] fp32."""
        while len(self._cos) <= last:
            self._grow()
        return self._cos[positions], self._sin[positions]

    def _grow(self) -> None:
        """Angles are rounded to fp32 as the reference does; their cosines are taken in fp64."""
        first = len(self._cos)
        angles = np.arange(first, first + PAGE_POSITIONS, dtype=np.float32)[:, None] * self._frequencies[None, :]
        wide = angles.astype(np.float64)
        cos, sin = (torch.from_numpy(turn(wide).astype(np.float32)).to(self._device) for turn in (np.cos, np.sin))
        self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last dims of each row in place: elements 2i and 2i+1 are a pair.

    x: [tokens, ..., size] fp32, size >= 2 * pairs.  cos, sin: [tokens, pairs].  inverse: turn back.  Returns x.
    """
    tokens, pairs = cos.shape
    if x.dim() > 2:
        shape = (tokens, *(1,) * (x.dim() - 2), pairs)
        cos, sin = cos.view(shape), sin.view(shape)
    first = x.shape[-1] - 2 * pairs
    even, odd = x[..., first::2], x[..., first + 1 :: 2]
    even_sin, odd_sin = even * sin, odd * sin
    even.mul_(cos)
    odd.mul_(cos)
    if inverse:
        even.add_(odd_sin)
        odd.sub_(even_sin)
    else:
        even.sub_(odd_sin)
        odd.add_(even_sin)
    return x

"""Which noise does a token get, and which token wins with it?

The noise of (seed, position, token) is a pure function: no generator state, so batch mates, preemption, migration and
speculation cannot change it. It is a hash, then fp64 arithmetic:

    key = seed + (s xor (s << 13)), s = position * 3 * 0x9E3779B97F4A7C15         all mod 2^64
    h   = splitmix64(key xor (token + 1) * 0xD1B54A32D192ED03)
    u   = ((h >> 40) + 0.5) * 2^-24                                               exact in fp64
    g   = -ln(-ln u)

fp64, because in fp32 the largest u rounds to 1 and its noise is infinite: with 49,152 tokens one row in 340 would get
an arbitrary token.

Array code only narrows the field, by bounds with slack; the last few tokens are compared with `math.log` in Python
floats, so no vector library takes part in the decision.
"""

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
TokenIds = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOKEN_FACTOR = 0xD1B54A32D192ED03
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_U_BITS = 24


def noise_key(seed: int, position: int) -> int:
    """The part of the hash that all tokens at one position share; unsigned 64 bit."""
    s = position * 3 * _GOLDEN & _MASK
    return (seed + (s ^ (s << 13 & _MASK))) & _MASK


def token_hash(key: int, token: int) -> int:
    """splitmix64 of key and token; unsigned 64 bit."""
    x = (key ^ ((token + 1) * _TOKEN_FACTOR & _MASK)) + _GOLDEN & _MASK
    x = (x ^ x >> 30) * _MIX[0] & _MASK
    x = (x ^ x >> 27) * _MIX[1] & _MASK
    return x ^ x >> 31


def uniform(hashed: int) -> float:
    """A hash as a number strictly between 0 and 1, in steps of 2^-24."""
    return ((hashed >> 64 - _U_BITS) + 0.5) * 2.0**-_U_BITS


def gumbel(u: float) -> float:
    """Standard Gumbel noise of a uniform number."""
    return -math.log(-math.log(u))


MAX_NOISE = gumbel(1 - 0.5 * 2.0**-_U_BITS)
"""17.3: no token can gain more, so one this far below a sure score can never win."""

_RARE_NOISE = 4.0
_RARE_STEPS = int(math.exp(-math.exp(-_RARE_NOISE)) * 2**_U_BITS) - 1
"""Noise above _RARE_NOISE needs at least this many steps of u; one token in 55 has it."""


def winner(scores: Scores, token_ids: TokenIds, key: int) -> int:
    """The token with the largest score plus noise; the lower id if two are equal.

    scores: [n] logit / temperature, none NaN, the largest finite.  token_ids: [n], ascending.
    """
    likeliest = int(scores.argmax())
    sure = float(scores[likeliest]) + _noise(key, int(token_ids[likeliest]))
    slack = 1e-9 + 1e-12 * abs(sure)  # far above the rounding of a few fp64 operations

    # 1. Tokens that even the largest noise cannot lift to `sure` need no hash.
    near = np.flatnonzero(scores >= sure - MAX_NOISE - slack)
    scores, token_ids = scores[near], token_ids[near]
    # 2. Those that need rare noise and have a common hash need no logarithm.
    steps = hash_steps(key, token_ids)
    hopeful = np.flatnonzero((scores >= sure - _RARE_NOISE + slack) | (steps >= _RARE_STEPS))
    scores, token_ids = scores[hopeful], token_ids[hopeful]
    noisy = scores + noise_of_steps(steps[hopeful])
    # 3. What is within rounding of the best is settled exactly.
    last = np.flatnonzero(noisy >= noisy.max() - slack)
    exact = {
        t: score + _noise(key, t) for t, score in zip(token_ids[last].tolist(), scores[last].tolist(), strict=True)
    }
    best = max(exact.values())
    return min(int(token) for token, value in exact.items() if value == best)


def hash_steps(key: int, token_ids: TokenIds) -> NDArray[np.uint64]:
    """The upper 24 bits of each token's hash."""
    x = token_ids.astype(np.uint64)
    x += 1
    x *= _TOKEN_FACTOR
    x ^= key
    x += _GOLDEN
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x ^= x >> shift
        x *= factor
    x ^= x >> 31
    x >>= 64 - _U_BITS
    return x


def noise_of_steps(steps: NDArray[np.uint64]) -> Scores:
    """Noise of hash_steps, within a few roundings of `gumbel`."""
    u = (steps.astype(np.float64) + 0.5) * 2.0**-_U_BITS
    noise: Scores = -np.log(-np.log(u))
    return noise


def _noise(key: int, token: int) -> float:
    return gumbel(uniform(token_hash(key, token)))

"""Which seed does each choice of one request sample with?"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOKEN_FACTOR = 0xD1B54A32D192ED03


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice number `choice`: the caller's own for the first, a hash of both for the others.

    So a request with n=1 samples with exactly the seed it named, and choice k is the same whatever n is.
    """
    seed &= _MASK
    return seed if choice == 0 else noise_hash(seed, choice, 0)


def noise_hash(seed: int, position: int, token: int) -> int:
    """Return the sampler's 64-bit hash of (seed, position, token): the counter-based noise of the engines."""
    s = position * 3 * _GOLDEN & _MASK
    key = seed + (s ^ (s << 13)) & _MASK
    return _splitmix64(key ^ (token + 1) * _TOKEN_FACTOR & _MASK)


def _splitmix64(x: int) -> int:
    x = x + _GOLDEN & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31

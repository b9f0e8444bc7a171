"""Noise is a pure function of (seed, position, token), and narrowing the field never changes who wins."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops.gumbel import MAX_NOISE, gumbel, hash_steps, noise_key, noise_of_steps, token_hash, uniform, winner

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "sampler.json"
U64 = st.integers(0, 2**64 - 1)


def test_golden_vectors() -> None:
    """Hash to the bit; u and noise to fp32, which is what the vectors were recorded in."""
    if not GOLDEN.exists():
        pytest.skip(f"no golden vectors at {GOLDEN}")
    for vector in json.loads(GOLDEN.read_text())["vectors"]:
        hashed = token_hash(noise_key(int(vector["seed"]), vector["position"]), vector["token"])

        assert vector["hash"] == f"{hashed:016x}"
        assert np.float32(vector["u"]) == np.float32(uniform(hashed))
        assert vector["gumbel"] == pytest.approx(gumbel(uniform(hashed)), abs=1e-6)


def test_known_values_without_the_golden_file() -> None:
    """Two vectors kept here, so that a checkout alone can tell if the noise changed."""
    assert 0x2D0F28C7E7E786B2 == token_hash(noise_key(0, 0), 0)
    assert 0xA58D40869BCCF588 == token_hash(noise_key(0, 131072), 129279)
    assert -0.5522746236318488 == pytest.approx(gumbel(uniform(0x2D0F28C7E7E786B2)), abs=1e-15)


@given(seed=U64, position=st.integers(0, 2**40), tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_arrays_and_integers_give_the_same_noise(seed, position, tokens) -> None:
    """The vectorised hash is exact, its logarithms are within rounding."""
    key = noise_key(seed, position)
    steps = hash_steps(key, np.array(tokens))

    assert [token_hash(key, token) >> 40 for token in tokens] == steps.tolist()
    exact = [gumbel(uniform(token_hash(key, token))) for token in tokens]
    np.testing.assert_allclose(exact, noise_of_steps(steps), rtol=0, atol=1e-13)


def test_the_largest_and_smallest_noise_are_finite_and_bound_all_others() -> None:
    """In fp32 the largest would be infinite and its token would win whatever the model said."""
    extremes = noise_of_steps(np.array([0, 2**24 - 1], dtype=np.uint64))

    assert [-2.8524, 17.3287] == pytest.approx(extremes.tolist(), abs=1e-4)
    assert math.isclose(extremes[1], MAX_NOISE, rel_tol=1e-12)


@given(
    seed=U64,
    size=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 20.0, 300.0]),
    levels=st.sampled_from([0, 1, 4]),
    shape=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_the_winner_is_the_plain_argmax(seed, size, spread, levels, shape) -> None:
    """Bounds and shortcuts change the work, never the result; flat, peaked and tied rows alike."""
    rng = np.random.default_rng(shape)
    scores = rng.standard_normal(size) * spread
    if levels:
        scores = np.round(scores * levels) / levels
    ids = np.sort(rng.choice(200_000, size, replace=False))
    key = noise_key(seed, 7)
    plain = [
        score + gumbel(uniform(token_hash(key, t))) for score, t in zip(scores.tolist(), ids.tolist(), strict=True)
    ]

    assert ids[int(np.argmax(plain))] == winner(scores, ids, key)


def test_equal_totals_go_to_the_lower_id() -> None:
    """Found by search: two tokens whose hashes share their upper bits, with equal scores above all others."""
    key = noise_key(3, 11)
    steps = hash_steps(key, np.arange(20_000))
    order = np.argsort(steps, kind="stable")
    twins = np.flatnonzero(np.diff(steps[order].astype(np.int64)) == 0)
    assert twins.size
    for at in twins:
        pair = np.sort(order[at : at + 2])
        assert pair[0] == winner(np.array([1.5, 1.5]), pair, key)

"""A token depends on its own row, its seed and its position, and on nothing else."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.batch import SamplingParams
from kernels.ops.gumbel import gumbel, noise_key, token_hash, uniform
from kernels.ops.sampler import Choice, Draw, UnusableLogits, _nucleus, sample

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "sampler.json"
GREEDY = SamplingParams(temperature=0.0)


def one(logits: list[float] | torch.Tensor, params: SamplingParams = GREEDY, position: int = 5, **draw) -> Choice:
    row = torch.as_tensor(logits)
    return sample(row[None], [Draw(params, position, **draw)])[0]


def mask(allowed: set[int], vocabulary: int) -> bytes:
    bits = [token in allowed for token in range(vocabulary)]
    return np.packbits(bits, bitorder="little").tobytes()


def plainly(logits: list[float], params: SamplingParams, position: int) -> int:
    """The definition, word for word: sort everything, cut, add noise to all that is left."""
    scores = [logit / params.temperature for logit in logits]
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    peak = scores[ranked[0]]
    mass = [math.exp(scores[token] - peak) for token in ranked]
    if params.top_p < 1:
        needed = params.top_p * math.fsum(mass)
        reached = [math.fsum(mass[: n + 1]) for n in range(len(mass))]
        assume(all(abs(value - needed) > 1e-9 for value in reached))  # a cut within rounding may fall on either side
        ranked = ranked[: 1 + sum(value < needed for value in reached)]
    ranked = [token for token in ranked if params.min_p == 0 or scores[token] >= peak + math.log(params.min_p)]
    key = noise_key(params.seed, position)
    return max(ranked, key=lambda token: (scores[token] + gumbel(uniform(token_hash(key, token))), -token))


LOGITS = st.lists(
    st.sampled_from([-9.0, -1.5, 0.0, 0.25, 1.0, 2.0, 2.5, 6.0]) | st.floats(-12, 12, width=32), min_size=1, max_size=40
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.5, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.slow
@given(logits=LOGITS, params=PARAMS, position=st.integers(0, 2**20))
@settings(max_examples=300, deadline=None)
def test_the_token_is_the_one_the_definition_gives(logits, params, position) -> None:
    """Ties, truncations and extreme temperatures included."""
    assert plainly(logits, params, position) == one(logits, params, position).token_id


def test_golden_choices() -> None:
    """The same token as the recorded choices."""
    if not GOLDEN.exists():
        pytest.skip(f"no golden vectors at {GOLDEN}")
    for case in json.loads(GOLDEN.read_text())["choices"]:
        params = SamplingParams(temperature=case["temperature"], seed=int(case["seed"]))

        assert case["token"] == one(case["logits"], params, case["position"]).token_id


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 4.0, 300.0])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_keeps_the_smallest_leading_set(spread, top_p) -> None:
    """Found without sorting, whether the set is one token, a handful or most of the vocabulary; ties by id."""
    scores = np.random.default_rng(1).standard_normal(20_000).round(3) * spread
    order = np.argsort(-scores, kind="stable")
    mass = np.exp(scores[order] - scores.max())
    leading = order[: 1 + int((np.cumsum(mass) < top_p * mass.sum() * (1 - 1e-12)).sum())]

    assert sorted(leading.tolist()) == _nucleus(scores, top_p).tolist()


def test_batch_mates_and_their_order_change_nothing() -> None:
    """Rows of every kind give alone what they give together, in any order, logprobs included."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 3000, generator=generator) * 3
    kinds = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0.8, top_p=0.95),
        SamplingParams(seed=2, top_k=40, num_logprobs=3),
        SamplingParams(seed=3, min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, num_logprobs=0),
        SamplingParams(seed=2**64 - 1, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(seed=4, logit_bias=((7, 5.0),)),
    ]
    draws = [Draw(params, 100 + i, history=[5, 6, 7, 5], num_prompt_tokens=1) for i, params in enumerate(kinds)]
    alone = [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(8)]
    order = [3, 1, 7, 0, 6, 2, 5, 4]

    assert alone == sample(logits, draws)
    assert [alone[i] for i in order] == sample(logits[order], [draws[i] for i in order])
    assert alone[:3] == sample(logits[:3], draws[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_of_logits_is_taken_at_its_value(dtype) -> None:
    """A bf16 row gives the same token as that row widened, and is left as it was."""
    row = (torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    kept = row.clone()
    params = SamplingParams(seed=9, logit_bias=((1, 2.0),), num_logprobs=2)

    assert one(row.double(), params) == one(row, params)
    assert torch.equal(kept, row)


def test_top_k_of_one_is_greedy() -> None:
    """Whatever the temperature and the noise; ties go to the lower id."""
    for seed in range(50):
        row = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(seed)).float()

        expected = int(row.argmax())
        assert expected == one(row).token_id
        assert expected == one(row, SamplingParams(temperature=2.0, top_k=1, seed=seed)).token_id
        assert expected == one(row, SamplingParams(temperature=2.0, top_p=1e-9, seed=seed)).token_id


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=5.0), SamplingParams(top_p=0.5, top_k=3)]
)
def test_only_allowed_tokens_are_given(params) -> None:
    """However unlikely they are, and even when there is one only; padding bits of the mask mean nothing."""
    row = torch.linspace(10, -10, 100)
    for allowed in ({99}, {3, 50, 98}, {0}):
        for position in range(20):
            assert one(row, params, position, allowed_mask=mask(allowed, 100) + b"\xff").token_id in allowed


@pytest.mark.slow
def test_chances_are_those_of_the_softmax() -> None:
    """Chi-square over 4,000 seeds and over 4,000 positions, 7 degrees of freedom, p = 0.001."""
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.25]
    temperature = 0.7
    weights = np.exp(np.array(logits) / temperature)
    expected = 4000 * weights / weights.sum()
    rows = torch.tensor(logits).repeat(4000, 1)
    by_seed = [Draw(SamplingParams(temperature=temperature, seed=i), 3) for i in range(4000)]
    by_position = [Draw(SamplingParams(temperature=temperature, seed=42), i) for i in range(4000)]
    for draws in (by_seed, by_position):
        times = Counter(choice.token_id for choice in sample(rows, draws))
        observed = np.array([times[token] for token in range(8)])

        assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_logprobs_are_of_the_untruncated_softmax_at_temperature_one() -> None:
    """The chosen token's, and alternatives by logprob, ties by id; impossible tokens are not listed."""
    logits = [1.0, 3.0, 3.0, 0.0]
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(0).tolist()
    choice = one(logits, SamplingParams(temperature=2.0, top_k=1, num_logprobs=3))

    assert 1 == choice.token_id
    assert expected[1] == pytest.approx(choice.logprob, abs=1e-12)
    assert [1, 2, 0] == [token for token, _ in choice.top]
    assert [expected[1], expected[2], expected[0]] == pytest.approx([value for _, value in choice.top], abs=1e-12)
    assert () == one(logits, SamplingParams(num_logprobs=0)).top
    assert one(logits).logprob is None
    only = one(logits, SamplingParams(temperature=0.0, num_logprobs=4), allowed_mask=mask({3}, 4))
    assert (3, 0.0, ((3, 0.0),)) == (only.token_id, only.logprob, only.top)


def test_penalties_and_bias_change_the_logits_as_documented() -> None:
    """Bias is added first; repetition divides or multiplies; presence and frequency count the answer alone."""
    history = [0, 1, 1, 2, 2, 2]  # prompt: 0 1, answer: 1 2 2 2
    params = SamplingParams(
        temperature=0.0, num_logprobs=4, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias=((3, 1.0), (3, 1.0), (0, -1.0)),
    )  # fmt: skip
    choice = one([3.0, 2.0, -2.0, 0.0], params, history=[*history, 99], num_prompt_tokens=2)
    adjusted = torch.tensor([2.0 / 2, 2.0 / 2 - 0.75, -2.0 * 2 - 1.25, 2.0], dtype=torch.float64)

    assert 3 == choice.token_id
    assert dict(enumerate(adjusted.log_softmax(0).tolist())) == pytest.approx(dict(choice.top), abs=1e-12)


def test_rows_that_cannot_be_sampled_are_named_and_the_rest_still_can() -> None:
    """Never a made-up token: NaN, infinity, nothing allowed, a short mask, a bias outside the vocabulary."""
    logits = torch.zeros(7, 16)
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    draws = [
        Draw(GREEDY, 0),
        Draw(SamplingParams(), 0),
        Draw(GREEDY, 0),
        Draw(GREEDY, 0, allowed_mask=bytes(2)),
        Draw(GREEDY, 0, allowed_mask=b"\xff"),
        Draw(SamplingParams(logit_bias=((16, 1.0),)), 0),
        Draw(SamplingParams(), 0),
    ]
    with pytest.raises(UnusableLogits, match=r"row 0: the largest logit is nan.*row 4: .* covers 8 of 16") as raised:
        sample(logits, draws)

    assert list(range(6)) == list(raised.value.reasons)
    assert 1 == len(sample(logits[6:], draws[6:]))


def test_nothing_is_sampled_from_nothing() -> None:
    """An empty step is fine; a step whose rows and draws differ in number is not."""
    assert [] == sample(torch.zeros(0, 5), [])
    with pytest.raises(ValueError, match=r"not \[1, vocab\]"):
        sample(torch.zeros(2, 5), [Draw(GREEDY, 0)])

"""The GPU's sampler picks the tokens that the host's picks."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

import triton
import triton.language as tl

from kernels.batch import SamplingParams
from kernels.ops.gpu_gumbel import gumbel, hash_steps
from kernels.ops.gpu_sampler import INFINITE, NAN, NOTHING_LEFT, Adjustments, Features, adjust, draw
from kernels.ops.gumbel import hash_steps as host_steps
from kernels.ops.gumbel import noise_key
from kernels.ops.sampler import Draw, sample


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Where there is one; elsewhere Triton interprets."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def asked_of(params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    """What the kernels read."""
    floats = [
        [each.temperature for each in params],
        [each.top_p for each in params],
        [math.log(each.min_p) if each.min_p else -math.inf for each in params],
    ]
    keys = [noise_key(each.seed, at) for each, at in zip(params, positions, strict=True)]
    counts = [-1 if each.num_logprobs is None else each.num_logprobs for each in params]
    return torch.tensor(
        np.concatenate(
            [
                np.array(floats, np.float64).view(np.int64),
                np.array([keys], np.uint64).view(np.int64),
                np.array([[each.top_k for each in params], counts], np.int64),
            ]
        )
    )


def features_of(params: list[SamplingParams]) -> Features:
    return Features(
        noise=any(each.temperature > 0 for each in params),
        top_k=any(each.top_k for each in params),
        top_p=any(each.top_p < 1 for each in params),
        min_p=any(each.min_p for each in params),
        num_top=max((-1 if each.num_logprobs is None else each.num_logprobs) for each in params),
    )


@triton.jit
def _steps_kernel(key, out, noise, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK)
    steps = hash_steps(tl.load(key).to(tl.uint64, bitcast=True), token)
    tl.store(out + token, steps.to(tl.int64))
    tl.store(noise + token, gumbel(steps))


def test_noise_has_the_same_integers() -> None:
    """Bit for bit, for seeds and positions at the edges; its fp64 value to the last digits."""
    for seed, position in ((0, 0), (7, 1), (2**64 - 1, 131_071), (2**63, 5)):
        key = noise_key(seed, position)
        out, noise = torch.empty(256, dtype=torch.int64), torch.empty(256, dtype=torch.float64)
        _steps_kernel[(1,)](torch.tensor([key - 2**64 if key >= 2**63 else key]), out, noise, BLOCK=256)
        expected = host_steps(key, np.arange(256))
        assert expected.astype(np.int64).tolist() == out.tolist()
        assert np.allclose(-np.log(-np.log((expected + 0.5) * 2.0**-24)), noise.cpu().numpy(), rtol=1e-12, atol=0)


WAYS = {
    "greedy": SamplingParams(temperature=0.0, num_logprobs=0),
    "plain": SamplingParams(temperature=0.7, seed=3),
    "top_k": SamplingParams(temperature=1.0, top_k=7, seed=2**64 - 1),
    "top_k of ties": SamplingParams(temperature=1.5, top_k=40, seed=5, num_logprobs=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.6, seed=11),
    "top_p all": SamplingParams(temperature=2.0, top_p=0.999, seed=11),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2, seed=1),
    "everything": SamplingParams(temperature=0.8, top_k=100, top_p=0.9, min_p=0.01, seed=9, num_logprobs=3),
}


@pytest.mark.parametrize(
    "vocabulary", [pytest.param(321, marks=pytest.mark.slow), pytest.param(9001, marks=pytest.mark.slow)]
)
def test_every_way_to_sample_picks_the_hosts_token(vocabulary: int) -> None:
    """In one batch, logits with many ties among them; logprobs too."""
    params = (
        list(WAYS.values())
        if vocabulary < 1000 or torch.cuda.is_available()
        else [WAYS["everything"], WAYS["top_k of ties"]]
    )
    logits = torch.randn(len(params), vocabulary) * 2
    logits[1] = logits[1].mul(2).round() / 2
    logits[-1, ::3] = -math.inf
    positions = [int(at) for at in torch.randint(0, 100_000, (len(params),))]
    drawn = draw(logits, asked_of(params, positions), features_of(params))
    chosen = sample(logits, [Draw(each, at) for each, at in zip(params, positions, strict=True)])

    assert [each.token_id for each in chosen] == drawn.token_ids.tolist()
    assert not drawn.problems.any()
    for row, choice in enumerate(chosen):
        if choice.logprob is None:
            continue
        assert choice.logprob == pytest.approx(float(drawn.logprobs[row, 0]), abs=1e-5)
        assert [token for token, _ in choice.top] == drawn.top_ids[row, : len(choice.top)].tolist()
        assert [each for _, each in choice.top] == pytest.approx(
            drawn.logprobs[row, 1 : 1 + len(choice.top)].tolist(), abs=1e-5
        )


def test_plain_ways_to_sample_pick_the_hosts_token() -> None:
    """Greedy, with noise, and with min-p: no threshold is searched."""
    params = [WAYS[name] for name in ("greedy", "plain", "min_p")]
    logits = torch.randn(3, 500)
    drawn = draw(logits, asked_of(params, [5, 6, 7]), features_of(params))
    chosen = sample(logits, [Draw(each, at) for each, at in zip(params, (5, 6, 7), strict=True)])
    assert [each.token_id for each in chosen] == drawn.token_ids.tolist()


def test_rows_without_usable_logits_say_so_and_harm_no_mate() -> None:
    """NaN, infinity, nothing allowed."""
    params = [SamplingParams(temperature=1.0, seed=4)] * 4
    logits = torch.randn(4, 300)
    logits[0, 17], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    drawn = draw(logits, asked_of(params, [1, 2, 3, 4]), features_of(params))
    assert [NAN, INFINITE, NOTHING_LEFT, 0] == drawn.problems.tolist()
    assert sample(logits[3:], [Draw(params[3], 4)])[0].token_id == int(drawn.token_ids[3])


@pytest.mark.slow
def test_penalties_biases_and_masks_change_logits_as_the_host_does() -> None:
    """A token of the answer that is still to come counts as if it were known."""
    vocabulary, history, prompt = 400, [3, 9, 9, 200, 201, 201, 7], 3
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.3,
        logit_bias=((9, 2.0), (350, -1.0)),
        num_logprobs=20,
    )
    mask = bytearray(b"\xff" * 50)
    mask[0] = 0b11110101
    logits = torch.randn(3, vocabulary)
    draws = [Draw(params, 9, [*history, newest], prompt, bytes(mask)) for newest in (200, 55)]
    expected = sample(logits[:2], draws)
    told = {3: (0.0, 1), 9: (2.0, 1), 200: (0.0, 2), 201: (0.0, 3), 7: (0.0, 2), 350: (-1.0, 0)}
    n = len(told)
    changes = Adjustments(
        starts=torch.tensor([0, n, 2 * n, 2 * n], dtype=torch.int32),
        token_ids=torch.tensor([*told, *told], dtype=torch.int32),
        bias=torch.tensor([each[0] for each in told.values()] * 2, dtype=torch.float64),
        seen=torch.tensor([each[1] for each in told.values()] * 2, dtype=torch.int32),
        penalties=torch.tensor([[1.3, 0.25, 0.5]] * 2 + [[1.0, 0.0, 0.0]], dtype=torch.float64),
        coming=torch.tensor([0, 1, -1], dtype=torch.int32),
        mask_rows=torch.tensor([0, 0, -1], dtype=torch.int32),
        masks=torch.tensor(list(mask), dtype=torch.uint8)[None],
    )
    untouched = logits[2].clone()
    adjust(logits, torch.tensor([200, 55], dtype=torch.int32), changes)
    drawn = draw(logits, asked_of([params] * 3, [9] * 3), features_of([params] * 3))
    assert torch.equal(untouched, logits[2])
    for row, choice in enumerate(expected):
        assert choice.token_id == int(drawn.token_ids[row])
        assert [token for token, _ in choice.top] == drawn.top_ids[row].tolist()
        assert [each for _, each in choice.top] == pytest.approx(drawn.logprobs[row, 1:].tolist(), abs=1e-5)

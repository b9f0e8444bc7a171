"""One process answers the same, however its work is scheduled."""

import pytest

from kernels.batch import SamplingParams
from kernels.executor import Executor
from kernels.generate import GenerateRequest, Generator
from kernels.tests.tiny_models import write_tiny

PROMPTS = [
    [(seed * 53 + index * 37) % 320 for index in range(length)]
    for seed, length in enumerate((5, 127, 128, 129, 40, 260))
]


def requests(temperature: float) -> list[GenerateRequest]:
    return [
        GenerateRequest(prompt, SamplingParams(temperature=temperature, top_p=0.95, seed=seed), max_tokens=12)
        for seed, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def executor(folder) -> Executor:
    return Executor.load(folder, dtype="fp32", threads=1, num_blocks=70, block_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scheduling_changes_no_token(executor, temperature) -> None:
    """Alone, together, in small chunks, with a small batch: the same tokens."""
    alone = Generator(executor)
    expected = [alone.generate([request])[0].token_ids for request in requests(temperature)]

    for settings in ({}, {"chunk_tokens": 48}, {"chunk_tokens": 7, "max_batch": 3}):
        generator = Generator(executor, **settings)
        got = generator.generate(requests(temperature))
        assert expected == [result.token_ids for result in got]
        assert ["length"] * len(PROMPTS) == [result.finish for result in got]
        assert 0 == generator._pool.used_blocks


def test_preemption_changes_no_token(executor, folder) -> None:
    """A pool too small for all sequences preempts some, and their answers stay the same."""
    expected = [result.token_ids for result in Generator(executor).generate(requests(0.8))]
    small = Generator(Executor.load(folder, dtype="fp32", threads=1, num_blocks=22, block_tokens=16), chunk_tokens=64)

    assert expected == [result.token_ids for result in small.generate(requests(0.8))]
    assert small.num_preemptions > 0
    small._pool.check_integrity()


def test_stop_token_ends_the_answer_and_is_part_of_it(executor) -> None:
    """The stop token is reported; logprobs come where asked for."""
    free = Generator(executor).generate([GenerateRequest(PROMPTS[0], SamplingParams(temperature=0.0), max_tokens=8)])[0]
    stop = free.token_ids[3]
    at = free.token_ids.index(stop)
    sampling = SamplingParams(temperature=0.0, num_logprobs=0)
    result = Generator(executor).generate(
        [GenerateRequest(PROMPTS[0], sampling, max_tokens=8, stop_token_ids=(stop,))]
    )[0]

    assert ("stop", free.token_ids[: at + 1]) == (result.finish, result.token_ids)
    assert all(logprob is not None and logprob <= 0.0 for logprob in result.logprobs)
    assert (None,) * 8 == free.logprobs


def test_requests_that_can_never_fit_are_refused(executor) -> None:
    """Too long for the pool or empty: refused before anything runs."""
    with pytest.raises(ValueError, match="at most 1024"):
        Generator(executor).generate([GenerateRequest([1] * 1020, max_tokens=5)])
    with pytest.raises(ValueError, match="at least one"):
        Generator(executor).generate([GenerateRequest([])])

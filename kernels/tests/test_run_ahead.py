"""A step can be launched before the last one's tokens are known, on a host that computes at once as well."""

from dataclasses import replace

import pytest
import torch

from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.model import BadBatch
from kernels.tests.tiny_models import write_tiny

IDS = [(index * 37 + 11) % 320 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5, num_logprobs=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3),
]
PROMPTS = [IDS[:5], IDS[7:30], IDS[3:12]]
MASK = bytes([0b01010101]) * 40
"""Even tokens only."""


@pytest.fixture(scope="module")
def executor(tmp_path_factory) -> Executor:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return Executor.load(folder, dtype="fp32", threads=1, num_blocks=8, run_ahead=True)


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.slow)])
def either(request, executor, tmp_path):
    """The plain model as one that runs ahead, and the GPU's: without a GPU through its kernels' twins."""
    if request.param == "host":
        return executor
    pytest.importorskip("triton", reason="Triton is not installed: its kernels' twins are not there either")
    from kernels.models.gpu.dense import OpenedGpuDense

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = OpenedGpuDense(write_tiny("llama", tmp_path), block_tokens=128, device=device, progress=lambda *_: None)
    with torch.inference_mode():
        model = opened.build(num_blocks=8, num_windows=0)
        digest = opened.weights_digest()
        return Executor(
            model, model_dir=tmp_path, num_blocks=8, num_windows=0, replay="off", threads=1, weights_digest=digest
        )


def row(index, token_ids, position, known):
    return Row(index, token_ids, position, (index + 1,), PARAMS[index], list(known), len(PROMPTS[index]))


def answers_of(executor, *, ahead, masked=()):
    """Four tokens of three prompts; with `ahead`, each step is launched before the one before is collected."""
    known = [list(prompt) for prompt in PROMPTS]
    found = []

    def take(step):
        sampled = executor.collect(step)
        found.append(sampled)
        for tokens, each in zip(known, sampled, strict=True):
            tokens.append(each.token_id)

    def launch(rows):
        step = executor.launch(Batch(tuple(rows)), masks_follow=bool(masked))
        return executor.draw(step, dict.fromkeys(masked, MASK)) if masked else step

    running = launch(row(index, prompt, 0, prompt) for index, prompt in enumerate(PROMPTS))
    for number in range(3):
        if not ahead:
            take(running)
        positions = [len(prompt) + number for prompt in PROMPTS]
        rows = [
            row(index, (PENDING,) if ahead else tokens[-1:], at, tokens)
            for index, (tokens, at) in enumerate(zip(known, positions, strict=True))
        ]
        launched = launch(rows)
        if ahead:
            take(running)
        running = launched
    take(running)
    return found


@pytest.mark.parametrize("masked", [(), (0, 2)])
def test_the_tokens_are_those_of_the_loop_that_waits(either, masked) -> None:
    """Logprobs and penalties as well, and with masks that are brought after the launch."""
    expected = answers_of(either, ahead=False, masked=masked)

    assert expected == answers_of(either, ahead=True, masked=masked)
    assert all(each.token_id % 2 == 0 for step in expected for each in step if each.sequence in masked)


def test_a_token_that_nobody_draws_cannot_be_waited_for(executor) -> None:
    """Nor more than one at a time, nor before its step's masks are there."""
    executor.launch(Batch((Row(1, IDS[:3], 0, (1,)), Row(2, IDS[:3], 0, (2,), GREEDY))))
    for wrong in (Row(1, (PENDING,), 3, (1,)), Row(2, (PENDING, PENDING), 3, (2,)), Row(3, (PENDING,), 3, (2,))):
        with pytest.raises(BadBatch, match="samples no token"):
            executor.launch(Batch((wrong,)))
    step = executor.launch(Batch((Row(2, IDS[:3], 0, (2,), GREEDY),)), masks_follow=True)
    with pytest.raises(BadBatch, match="not drawn"):
        executor.launch(Batch((Row(2, (PENDING,), 3, (2,)),)))

    assert 1 == len(executor.collect(step))


def test_a_row_without_a_token_has_no_harmful_next_step(executor) -> None:
    """It is launched like the others, and what it gives is dropped; its mate gets its tokens."""
    nothing = replace(row(1, PROMPTS[1], 0, PROMPTS[1]), allowed_mask=bytes(40))
    step = executor.launch(Batch((row(0, PROMPTS[0], 0, PROMPTS[0]), nothing)))
    extra = executor.launch(Batch(tuple(row(at, (PENDING,), len(PROMPTS[at]), PROMPTS[at]) for at in (0, 1))))
    fine, broken = executor.collect(step)
    expected = answers_of(executor, ahead=False)

    assert broken.problem
    assert [expected[0][0], expected[1][0]] == [fine, executor.collect(extra)[0]]


def test_who_runs_ahead_says_so(executor, tmp_path) -> None:
    """A CPU does not unless it is told to: it has nothing to gain."""
    plain = Executor.load(write_tiny("llama", tmp_path), dtype="fp32", threads=1, num_blocks=4)

    assert [True, False] == [executor.runs_ahead, plain.runs_ahead]

"""The GPU's model class plans, launches and draws like the plain one; here its kernels' twins compute on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.batch import PENDING, Batch, Row, SamplingParams
from kernels.executor import Executor
from kernels.models.gpu.dense import OpenedGpuDense
from kernels.models.gpu.tables import TableRows
from kernels.models.model import BadBatch
from kernels.ops.ranges import profiled
from kernels.tests.tiny_models import FAMILIES, plain_forward, write_tiny

GREEDY = SamplingParams(temperature=0.0)
IDS = [(index * 37 + 11) % 320 for index in range(300)]


def load(folder: Path, *, num_blocks: int = 40, block_tokens: int = 16) -> Executor:
    """The GPU's model on whatever device there is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = OpenedGpuDense(folder, block_tokens=block_tokens, device=device, progress=lambda *_: None)
    with torch.inference_mode():
        return Executor(
            opened.build(num_blocks=num_blocks, num_windows=0),
            model_dir=folder,
            num_blocks=num_blocks,
            num_windows=0,
            replay="off",
            threads=1,
            weights_digest=opened.weights_digest(),
        )


@pytest.fixture(scope="module")
def executor(tmp_path_factory) -> Executor:
    return load(write_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_gives_the_logits_of_a_plain_forward(family: str, tmp_path: Path) -> None:
    """Biases, query and key norms, tied heads; a chunk, then single tokens."""
    folder = write_tiny(family, tmp_path)
    device = load(folder)
    expected = plain_forward(folder, IDS[:40])
    table = list(range(1, 4))
    chunk = device.logits(Batch((Row(0, IDS[:38], 0, table),)))
    singles = [device.logits(Batch((Row(0, IDS[at : at + 1], at, table),))) for at in (38, 39)]
    got = torch.cat([chunk, *singles]).cpu()
    error = (expected[37:] - got).norm() / expected[37:].norm()
    assert error < 0.03


def test_greedy_tokens_are_those_of_fp32_on_a_cpu(tmp_path: Path) -> None:
    """Wherever the two likeliest tokens are not closer than bf16 can tell apart; the answer goes on with fp32's."""
    folder = write_tiny("mistral", tmp_path)
    gpu, cpu = load(folder), Executor.load(folder, dtype="fp32", threads=1, num_blocks=8, device="cpu")
    tokens, told_apart = IDS[:30], 0
    gpu_row, cpu_row = Row(0, tokens, 0, list(range(1, 5)), GREEDY), Row(0, tokens, 0, (1,), GREEDY)
    for _ in range(24):
        (sampled,) = gpu.collect(gpu.launch(Batch((gpu_row,))))
        logits = cpu.logits(Batch((cpu_row,)))[0]
        (best, second), (expected, _) = (each.tolist() for each in logits.topk(2))
        if best - second > 0.05:
            told_apart += 1
            assert expected == sampled.token_id
        tokens = [*tokens, expected]
        gpu_row = Row(0, tokens[-1:], len(tokens) - 1, list(range(1, 5)), GREEDY)
        cpu_row = Row(0, tokens[-1:], len(tokens) - 1, (1,), GREEDY)
    assert told_apart > 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the twins on a CPU are not batch-invariant")
def test_the_whole_model_proof_holds(executor: Executor) -> None:
    """Whole, in chunks, beside a mate, and one token at a time: the same bits and blocks."""
    executor.warm_up()


@pytest.mark.slow
def test_a_step_can_be_launched_before_the_last_ones_tokens_are_known(executor: Executor) -> None:
    """Tokens equal those of the loop that waits; finished sequences' extra step is dropped."""
    params = [
        GREEDY,
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3),
    ]
    prompts = [IDS[:5], IDS[7:30], IDS[3:12]]
    tables = [list(range(1 + 3 * index, 4 + 3 * index)) for index in range(3)]

    def prefill(base: int) -> Batch:
        return Batch(
            tuple(
                Row(base + index, prompt, 0, tables[index], params[index], prompt, len(prompt))
                for index, prompt in enumerate(prompts)
            )
        )

    answers = [list(prompt) for prompt in prompts]
    sampled = executor.collect(executor.launch(prefill(100)))
    for _ in range(4):
        for answer, each in zip(answers, sampled, strict=True):
            answer.append(each.token_id)
        rows = tuple(
            Row(100 + index, answer[-1:], len(answer) - 1, tables[index], params[index], answer, len(prompts[index]))
            for index, answer in enumerate(answers)
        )
        sampled = executor.collect(executor.launch(Batch(rows)))

    ahead = [list(prompt) for prompt in prompts]
    running = executor.launch(prefill(200))
    for step in range(4):
        rows = tuple(
            Row(
                200 + index,
                (PENDING,),
                len(prompts[index]) + step,
                tables[index],
                params[index],
                list(known),
                len(prompts[index]),
            )
            for index, known in enumerate(ahead)
        )
        launched = executor.launch(Batch(rows))
        for known, each in zip(ahead, executor.collect(running), strict=True):
            known.append(each.token_id)
        running = launched
    assert answers == ahead
    assert [each.token_id for each in sampled] == [each.token_id for each in executor.collect(running)]


def test_a_token_that_nobody_draws_cannot_be_waited_for(executor: Executor) -> None:
    """Nor more than one at a time."""
    executor.launch(Batch((Row(1, IDS[:3], 0, (1,)), Row(2, IDS[:3], 0, (2,), GREEDY))))
    for row in (Row(1, (PENDING,), 3, (1,)), Row(2, (PENDING, PENDING), 3, (2,)), Row(3, (PENDING,), 3, (2,))):
        with pytest.raises(BadBatch):
            executor.launch(Batch((row,)))


def test_masks_that_come_late_and_scores_are_heeded(executor: Executor) -> None:
    """A mask filled while the step runs; targets' logprobs beside a sampled row."""
    mask = bytearray(40)
    mask[5] = 0b100
    step = executor.launch(Batch((Row(1, IDS[:9], 0, (1,), GREEDY), Row(2, IDS[:3], 0, (2,), GREEDY))))
    free = executor.collect(step)
    masked = executor.collect(step.with_masks({1: bytes(mask)}))
    assert (42, free[1].token_id) == (masked[0].token_id, masked[1].token_id)
    rows = (Row(1, IDS[:9], 0, (1,), replace(GREEDY, num_logprobs=2)), Row(4, IDS[:6], 0, (3,), targets=IDS[1:6]))
    step = executor.launch(Batch(rows))
    (sampled,) = executor.collect(step)
    assert free[0].token_id == sampled.token_id == sampled.top[0][0]
    assert 2 == len(sampled.top)
    assert IDS[1:6] == [each.token_id for each in executor.score(step)[4]]


@pytest.mark.slow
def test_a_profiler_sees_steps_and_groups_of_layers(executor: Executor) -> None:
    """When one wants to; the same tokens as without."""
    batch = Batch((Row(50, IDS[:9], 0, (1,), GREEDY),))
    expected = executor.collect(executor.launch(batch))
    with profile(activities=[ProfilerActivity.CPU]) as seen, profiled():
        got = executor.collect(executor.launch(batch))

    assert expected == got
    if not torch.cuda.is_available():  # there NVTX has them
        assert {"mixed step", "layers 0..1", "draw"} <= {each.key for each in seen.key_averages()}


def test_the_device_is_told_only_what_changed() -> None:
    """New blocks of a growing sequence, a whole table after preemption, and nothing otherwise; the oldest gives way."""
    rows = TableRows(num_rows=3, num_blocks=50, block_tokens=16, vocab_size=9, max_position_tokens=64)

    def tell(*batch: Row) -> list[list[int]]:
        changes: list[list[int]] = rows.place(batch, rows.check(batch))[1].tolist()
        return changes

    first = Row(7, [1] * 20, 0, [5, 6])
    told = tell(first)
    start = told[0][0]
    assert [[start, 5], [start + 1, 6]] == told
    assert [] == tell(Row(7, [1], 20, [5, 6]))
    assert [[start + 2, 9]] == tell(Row(7, [1], 32, [5, 6, 9]))
    assert [[start, 3]] == tell(Row(7, [1] * 40, 0, [3, 6, 9]))
    tell(Row(8, [1], 0, [1]))
    tell(Row(9, [1], 0, [2]))
    assert [3, 6, 9] == [block for _, block in tell(Row(7, [1] * 40, 0, [3, 6, 9]))]
    with pytest.raises(BadBatch, match="one row in a batch"):
        rows.check((first, first))
    with pytest.raises(BadBatch, match="keeps tables of 2"):
        rows.check((first, Row(8, [1], 0, [1]), Row(9, [1], 0, [2])))

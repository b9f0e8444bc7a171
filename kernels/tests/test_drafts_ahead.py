"""A step with drafts can be launched before anyone knows how many of the last step's were right, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.batch import PENDING, Batch, Row, Sampled, SamplingParams
from kernels.executor import Executor
from kernels.models.deepseek_v41 import OpenedV41
from kernels.models.model import BadBatch, OpenedModel
from kernels.ops.gumbel import noise_key
from kernels.ops.numerics import QUANT
from kernels.tests.shallow_v41 import shallow_v41
from kernels.tests.tiny_models import write_tiny
from kernels.tests.v41_rig import BLOCKS_EACH, WINDOWS, blocks_of, model_of, start

IDS = [(index * 37 + 11) % 320 for index in range(300)]
GREEDY = SamplingParams(temperature=0.0)
PARAMS = (GREEDY, SamplingParams(temperature=0.9, seed=5), SamplingParams(repetition_penalty=1.2, seed=3))
PROMPTS = (IDS[:15], IDS[7:40], IDS[3:6])
SCRIPT = (((3, 1), (5, 5), (0, 0)), ((4, 0), (2, 1), (0, 0)), ((0, 0), (5, 2), (0, 0)), ((5, 4), (1, 0), (0, 0)),
          ((2, 2), (0, 0), (0, 0)), ((1, 0), (3, 3), (0, 0)))  # fmt: skip
"""Drafts of each sequence, step by step, and how many of them are right; with penalties there are none."""


@dataclass(frozen=True)
class Rig:
    """An executor, and how its sequences are made empty."""

    executor: Executor
    begin: Callable[[], None]
    is_plain: bool
    """Computed by torch operations, whose bits do not depend on the batch."""
    answers: Callable[[], list[list[int]]]
    """Prompts and their plain answers; on a host that computes them faster than kernels' twins, about the same."""


def records(device: Executor) -> list[bytes]:
    """What its sequences have left."""
    slots = (1, 2, 3) if device.window else ()
    blocks = [block for sequence in (1, 2, 3) for block in blocks_of(sequence)[:5]]
    return [device.read_block(block) for block in blocks] + [device.read_window(slot) for slot in slots]


def run_by(model, folder: Path, *, windows: int = 0) -> Executor:
    return Executor(
        model,
        model_dir=folder,
        num_blocks=1 + WINDOWS * BLOCKS_EACH,
        num_windows=windows,
        replay="off",
        threads=1,
        weights_digest=bytes(32),
        run_ahead=True,
    )


def emptied(device: Executor) -> None:
    for sequence in (1, 2, 3):
        if device.window:
            device.reset_window(sequence)
        for block in blocks_of(sequence):
            device.write_block(block, bytes(device.layout.block_bytes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu", "v41", "v41 gpu"))])
def rig(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rig]:
    """Host and device, a model without windows and one with: without a GPU the device's kernels' twins compute."""
    kind = request.param
    if "gpu" in kind:
        pytest.importorskip("triton", reason="Triton is not installed: its kernels' twins are not there either")
    llama = Executor.load(
        folder,
        dtype="fp32",
        threads=1,
        num_blocks=1 + WINDOWS * BLOCKS_EACH,
        block_tokens=16,
        run_ahead=True,
        device="cpu",
    )
    if kind == "llama":
        plain = device = llama
    elif kind == "gpu":
        plain = llama
        from kernels.models.gpu.dense import OpenedGpuDense

        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        opened = OpenedGpuDense(folder, block_tokens=16, device=where, progress=lambda *_: None)
        with torch.inference_mode():
            device = run_by(opened.build(num_blocks=1 + WINDOWS * BLOCKS_EACH, num_windows=0), folder)
    elif kind == "v41":
        plain = device = run_by(model_of("shallow quant"), folder, windows=1 + WINDOWS)
    else:
        plain = run_by(model_of("shallow quant"), folder, windows=1 + WINDOWS)
        from kernels.tests.gpu_v41_rig import gpu_model

        with torch.inference_mode():
            device = run_by(gpu_model(), folder, windows=1 + WINDOWS)
    yield Rig(device, lambda: emptied(device), plain is device, lambda: plainly(plain, 24))
    for sequence in (1, 2, 3) if "v41" in kind else ():
        start("shallow quant", sequence)


def row(index: int, token_ids: Sequence[int], position: int, known: Sequence[int], *, drafts: int = 0) -> Row:
    """known: tokens before the row, some of them maybe PENDING."""
    return Row(
        index + 1,
        token_ids,
        position,
        blocks_of(index + 1),
        PARAMS[index],
        [*known, *token_ids] if index == 2 and PENDING not in token_ids else known if index == 2 else (),
        len(PROMPTS[index]),
        window=index + 1,
        preceding=known[-3:],
        num_drafts=drafts,
    )


def plainly(device: Executor, tokens: int) -> list[list[int]]:
    """Prompts and answers, one token at a time in the loop that waits."""
    emptied(device)
    known = [list(prompt) for prompt in PROMPTS]
    batch = Batch(tuple(row(index, prompt, 0, ()) for index, prompt in enumerate(PROMPTS)))
    for _ in range(tokens):
        for so_far, sampled in zip(known, device.collect(device.launch(batch)), strict=True):
            so_far.append(sampled.token_id)
        batch = Batch(tuple(row(at, so_far[-1:], len(so_far) - 1, so_far[:-1]) for at, so_far in enumerate(known)))
    return known


def waiting(rig: Rig, truth: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Tokens of the loop that waits for every step, and the drafts it verified: as many right ones as the script says."""
    rig.begin()
    device, known = rig.executor, [list(prompt) for prompt in PROMPTS]
    batch = Batch(tuple(row(index, prompt, 0, ()) for index, prompt in enumerate(PROMPTS)))
    for so_far, sampled in zip(known, device.collect(device.launch(batch)), strict=True):
        so_far.append(sampled.token_id)
    given = []
    for step in SCRIPT if rig.is_plain else SCRIPT[:3]:
        drafts = []
        for so_far, answer, (count, right) in zip(known, truth, step, strict=True):
            ahead = answer[len(so_far) : len(so_far) + count]
            drafts.append([*ahead[:right], *((token + 1) % 320 for token in ahead[right:])])
        given.append(drafts)
        rows = [
            row(at, [so_far[-1], *guess], len(so_far) - 1, so_far[:-1], drafts=len(guess))
            for at, (so_far, guess) in enumerate(zip(known, drafts, strict=True))
        ]
        for so_far, sampled in zip(known, device.collect(device.launch(Batch(tuple(rows)))), strict=True):
            so_far += [*sampled.accepted, sampled.token_id]
    return known, given


def ahead(rig: Rig, given: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The same when each step is planned as if all drafts of the one before were right."""
    rig.begin()
    device, known = rig.executor, [list(prompt) for prompt in PROMPTS]
    running = device.launch(Batch(tuple(row(index, prompt, 0, ()) for index, prompt in enumerate(PROMPTS))))
    verified = [0, 0, 0]
    for drafts in given:
        rows = []
        for at, (so_far, guess) in enumerate(zip(known, drafts, strict=True)):
            # Known are the tokens up to the step in flight; it adds its drafts, if they are right, and one more.
            assumed = [*so_far, *[PENDING] * verified[at]]
            rows.append(row(at, [PENDING, *guess], len(assumed), assumed, drafts=len(guess)))
        launched = device.launch(Batch(tuple(rows)))
        for so_far, sampled in zip(known, device.collect(running), strict=True):
            so_far += [*sampled.accepted, sampled.token_id]
        running, verified = launched, [len(guess) for guess in drafts]
    for so_far, sampled in zip(known, device.collect(running), strict=True):
        so_far += [*sampled.accepted, sampled.token_id]
    return known


def test_the_tokens_are_those_of_the_loop_that_waits(rig: Rig) -> None:
    """Whatever was right of the drafts before: tokens, blocks and windows; and those of a loop without any drafts."""
    truth = rig.answers()
    expected, given = waiting(rig, truth)
    kept = records(rig.executor)

    assert expected == ahead(rig, given)
    assert kept == records(rig.executor)
    gained = [len(tokens) - len(prompt) - 1 - len(given) for tokens, prompt in zip(expected, PROMPTS, strict=True)]
    # The device's twins do not sum in one order for one row and for several: there a tie may end in another token.
    if rig.is_plain:
        assert truth == [each + other[len(each) :] for each, other in zip(expected, truth, strict=True)]
        assert [sum(right for _, right in by_step) for by_step in zip(*SCRIPT, strict=True)] == gained
    if (
        rig.is_plain or not torch.cuda.is_available()
    ):  # a GPU may go on otherwise, and the script's drafts are wrong then
        assert min(gained[:2]) > 0
    assert 0 == gained[2]


DEPTHS = (5, 3, 0)
"""Drafts that each sequence verifies in a step: all of them, the nearest, none (its penalties forbid it)."""


def drafting(device: Executor, *, is_ahead: bool, steps: int) -> list[list[Sampled]]:
    """Answers whose drafts are the model's own. Ahead of them, a row names neither its tokens nor where it really is."""
    emptied(device)
    known, found = [list(prompt) for prompt in PROMPTS], []
    rows = [row(index, prompt, 0, ()) for index, prompt in enumerate(PROMPTS)]
    running = device.launch(Batch(tuple(replace(each, wants_drafts=True) for each in rows)))
    verified = [0, 0, 0]
    for _ in range(steps):
        if is_ahead:
            rows = []
            for at, (so_far, depth) in enumerate(zip(known, DEPTHS, strict=True)):
                assumed = [*so_far, *[PENDING] * verified[at]]
                rows.append(row(at, [PENDING] * (1 + depth), len(assumed), assumed, drafts=depth))
            launched = device.launch(Batch(tuple(replace(each, wants_drafts=True) for each in rows)))
        found.append(list(device.collect(running)))
        for so_far, sampled in zip(known, found[-1], strict=True):
            so_far += [*sampled.accepted, sampled.token_id]
        if not is_ahead:
            rows = [
                row(at, [so_far[-1], *each.drafts[:depth]], len(so_far) - 1, so_far[:-1], drafts=depth)
                for at, (so_far, depth, each) in enumerate(zip(known, DEPTHS, found[-1], strict=True))
            ]
            launched = device.launch(Batch(tuple(replace(each, wants_drafts=True) for each in rows)))
        running, verified = launched, list(DEPTHS)
    found.append(list(device.collect(running)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v41", "v41 gpu"])
def test_the_models_own_drafts_stay_on_the_device(kind: str, folder: Path) -> None:
    """Tokens, drafts, confidences and records are those of the loop that hands drafts back and waits for every step."""
    named: dict[str, Any] = {"block_tokens": None, "progress": lambda *_: None, "drafts": True}
    opened: OpenedModel
    if kind == "v41":
        opened = OpenedV41(shallow_v41(), numerics=QUANT, device=torch.device("cpu"), **named)
    else:
        pytest.importorskip("triton", reason="Triton is not installed: its kernels' twins are not there either")
        from kernels.models.gpu.v41.opened import OpenedGpuV41

        opened = OpenedGpuV41(
            shallow_v41(), device=torch.device("cuda" if torch.cuda.is_available() else "cpu"), **named
        )
    with torch.inference_mode():
        model = opened.build(num_blocks=1 + WINDOWS * BLOCKS_EACH, num_windows=1 + WINDOWS)
        device = run_by(model, folder, windows=1 + WINDOWS)
    steps = 4 if kind == "v41" else 2
    expected = drafting(device, is_ahead=False, steps=steps)
    kept = records(device)

    assert expected == drafting(device, is_ahead=True, steps=steps)
    assert kept == records(device)
    for each in (each for step in expected for each in step):
        assert 5 == len(each.drafts) == len(each.confidences)
        assert all(0 < chance < 1 for chance in each.confidences)
    if kind == "v41":
        plain = plainly(device, steps + 1)
        for at, prompt in enumerate(PROMPTS):
            answer = [token for step in expected for token in (*step[at].accepted, step[at].token_id)]
            assert plain[at][len(prompt) :] == answer[: steps + 1]


def test_drafts_that_cannot_be_verified_are_refused(rig: Rig) -> None:
    """Before anything changes, and by name."""
    rig.begin()
    device = rig.executor
    fine = row(0, IDS[:6], 0, (), drafts=2)
    wrong = {
        "follow a token of the row": replace(fine, num_drafts=6),
        "it must want a token": replace(fine, sampling=None),
        "neither scores": replace(fine, targets=IDS[1:3]),
        "nor a mask": replace(fine, allowed_mask=bytes(40)),
        "logprobs": replace(fine, sampling=replace(GREEDY, num_logprobs=1)),
        "penalties none are": replace(fine, sampling=replace(GREEDY, frequency_penalty=0.1)),
    }
    for message, each in wrong.items():
        with pytest.raises(BadBatch, match=message):
            device.launch(Batch((each,)))
    if device.window:
        with pytest.raises(BadBatch, match="at most 6 can be taken back"):
            device.launch(Batch((row(0, IDS[:9], 0, (), drafts=7),)))
    device.collect(device.launch(Batch((fine,))))
    for message, each in {
        "nobody drafts": row(0, [PENDING, PENDING], 6, IDS[:6], drafts=1),
        "samples no token|token ids lie": row(0, [PENDING, 3], 6, IDS[:6]),
    }.items():
        with pytest.raises(BadBatch, match=message):
            device.launch(Batch((each,)))


def test_keys_are_those_of_the_places_that_tokens_really_have() -> None:
    """Sequences that go on from drafts are moved back by those that were rejected; all others stay. The kernels' too."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")
    from kernels.ops.gpu_launch import interpreted
    from kernels.ops.gpu_step import move_back, noise_keys

    seeds, positions, places = [5, 2**63 + 7, 11], [40, 131_072, 7], [1, -1, 0]
    rejected = torch.tensor([3, 2], dtype=torch.int32)
    told = torch.zeros(8, 3, dtype=torch.int64)
    told[0], told[5] = torch.tensor([9, 8, 7]), torch.tensor([1, 2, 3])
    told[3] = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])
    told[6], told[7] = torch.tensor(positions), torch.tensor(places)
    ends, before = torch.tensor([40, 9, 7], dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3)
    earlier = torch.tensor(places, dtype=torch.int32)
    twins = noise_keys(told, rejected)
    twin_ends, twin_preceding = ends.clone(), torch.full((3, 3), 99, dtype=torch.int32)
    move_back(twin_ends, twin_preceding, earlier, rejected, before)
    got_ends, preceding = ends.clone(), torch.full((3, 3), 99, dtype=torch.int32)
    with interpreted():
        keys = noise_keys(told, rejected)
        move_back(got_ends, preceding, earlier, rejected, before)

    expected = [noise_key(seed, at) for seed, at in zip(seeds, (38, 131_072, 4), strict=True)]
    assert expected == [key % 2**64 for key in twins[3].tolist()]
    assert torch.equal(twins, keys)
    assert torch.equal(told[[0, 1, 2, 4, 5]], keys[[0, 1, 2, 4, 5]])
    assert [38, 9, 4] == twin_ends.tolist() == got_ends.tolist()
    assert [[3, 4, 5], [99] * 3, [0, 1, 2]] == twin_preceding.tolist() == preceding.tolist()


def test_drafts_are_right_up_to_the_first_that_was_not_drawn() -> None:
    """None, some, all; none at all; and none beyond logits that nothing can be drawn from."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")
    from kernels.ops.gpu_launch import interpreted
    from kernels.ops.gpu_verify import Standing, accept

    tokens = [7, 20, 21, 22, 30, 31, 40, 50, 51]  # the token before the drafts, then the drafts
    reach = [[token, token + 100, token + 200, token + 300] for token in tokens]
    choices = torch.tensor([[20, 21, 9, 5, 31, 6, 8, 51, 4], [0] * 7 + [2, 0]], dtype=torch.int32)
    rows = torch.tensor([[0, 4, 6, 7], [4, 2, 1, 2], [0, 4, 6, 7]], dtype=torch.int32)
    made = []
    for is_kernel in (False, True):
        newest, problems, rejected = torch.full((3, 5), -7, dtype=torch.int32)
        out = Standing(newest, problems, rejected, torch.zeros(5, 3, dtype=torch.int32))
        if is_kernel:
            with interpreted():
                accept(choices, torch.tensor(reach), rows, out)
        else:
            accept(choices, torch.tensor(reach), rows, out)
        made.append([each.tolist() for each in (out.newest, out.problems, out.rejected, out.before)])

    assert [
        [9, 6, 8, 51, -7],
        [0, 0, 0, 2, -7],
        [1, 0, 0, 1, -7],
        [[221, 121, 21], [231, 131, 31], [240, 140, 40], [250, 150, 50], [0] * 3],
    ] == made[0]
    assert made[0] == made[1]

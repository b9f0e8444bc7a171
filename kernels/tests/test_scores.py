"""The logprob of a given token is the plain forward's, however the prompt was cut and whoever was in the batch."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor

from kernels.batch import Batch, Row, SamplingParams, Scored
from kernels.executor import Executor
from kernels.ops.sampler import UnusableLogits, score
from kernels.tests.golden_files import tiny_v41
from kernels.tests.tiny_models import write_tiny

NUM_TOKENS = {"dense": 150, "v41": 40}
GREEDY = SamplingParams(temperature=0.0)


@cache
def executor_of(kind: str) -> Executor:
    if kind == "v41":
        return Executor.load(tiny_v41(), dtype="bf16", threads=1, num_blocks=60, num_windows=4)
    folder = write_tiny("llama", Path(mkdtemp(prefix="fathom-tiny-")), dtype=torch.bfloat16)
    return Executor.load(folder, dtype="fp32", threads=1, num_blocks=60, block_tokens=16)


class Prompt:
    """A prompt on an executor; computed as sequence 0 or as its mate, 1."""

    def __init__(self, kind: str) -> None:
        self.executor = executor_of(kind)
        self.ids = [(index * 37 + 11) % 320 for index in range(NUM_TOKENS[kind])]

    def row(self, which: int, start: int, end: int, *, num_top: int | None) -> Row:
        """Tokens [start, end), of which the prompt's last one gives a token; scored if num_top is not None."""
        executor, ids = self.executor, self.ids
        per = -(-len(ids) // executor.layout.block_tokens)
        return Row(
            which,
            ids[start:end],
            start,
            range(1 + which * per, 1 + (which + 1) * per),
            sampling=GREEDY if end == len(ids) else None,
            window=which + 1 if executor.window else 0,
            preceding=ids[max(start - executor.preceding_tokens, 0) : start],
            targets=ids[start + 1 : end + 1] if num_top is not None else (),
            num_target_logprobs=num_top or 0,
        )

    def plain(self) -> list[Tensor]:
        """Logits after every token but the last, one forward each."""
        self.executor.reset_window(1)
        rows = (self.row(0, at, at + 1, num_top=None) for at in range(len(self.ids) - 1))
        return [self.executor.logits(Batch((row,)))[0] for row in rows]


def scored(prompt: Prompt, splits: list[int], *, mate: bool) -> tuple[list[Scored], int]:
    """Every token's score, and the token that follows, computed in pieces; a mate is scored or only sampled."""
    executor, end_of_all = prompt.executor, len(prompt.ids)
    found: list[Scored] = []
    token = -1
    executor.reset_window(1)
    for start, end in zip(splits, [*splits[1:], end_of_all], strict=True):
        executor.reset_window(2)
        mates = (prompt.row(1, 0, end_of_all, num_top=None if start else 3),) if mate else ()
        step = executor.launch(Batch((*mates, prompt.row(0, start, end, num_top=2))))
        found += executor.score(step).get(0, ())
        token = {sampled.sequence: sampled.token_id for sampled in executor.collect(step)}.get(0, token)
    return found, token


@pytest.mark.parametrize("kind", ["dense", pytest.param("v41", marks=pytest.mark.slow)])
def test_scores_are_the_plain_forward_s(kind: str) -> None:
    """Bit for bit: whole, in pieces, beside a mate; the sum is the text's likelihood, and the next token stays."""
    prompt = Prompt(kind)
    logits, ids = prompt.plain(), prompt.ids
    likely = sum(float(torch.log_softmax(x.double(), 0)[token]) for x, token in zip(logits, ids[1:], strict=True))
    whole, token = scored(prompt, [0], mate=False)

    assert ids[1:] == [each.token_id for each in whole]
    assert likely == pytest.approx(sum(each.logprob for each in whole), abs=1e-9)
    for each, x in zip(whole, logits, strict=True):
        assert int(x.argmax()) == each.top[0][0]
        assert 2 == len(each.top)
    assert (whole, token) == scored(prompt, [0, 1, 17, len(ids) - 1], mate=False)
    assert (whole, token) == scored(prompt, [0, 37], mate=True)


def test_unusable_logits_are_named() -> None:
    """A row with NaN says so; no target, no row."""
    logits = torch.zeros(2, 8)
    logits[1, 3] = float("nan")

    with pytest.raises(UnusableLogits, match="row 1"):
        score(logits, [0, 1], num_top=0)
    assert [] == score(logits[:0], [], num_top=3)

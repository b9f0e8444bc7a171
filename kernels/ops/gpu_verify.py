"""How many drafts of each sequence are right, and what follows from that for its next step, without asking the host?

A draft is accepted iff it is the token that was drawn in its place, and all drafts before it are (verify.accepted).
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_launch import check, power_of_two, runs_kernels

MOST_LINES = 8
"""Of a row: seven drafts."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far each drawn row has got: [places] int32 each, in the order in which rows were drawn."""

    newest: Tensor
    """The token that follows what was accepted."""
    problems: Tensor
    """Why there is none; 0 otherwise."""
    rejected: Tensor
    """Drafts that were not accepted."""
    before: Tensor
    """[places, reach]: the tokens before `newest`, the newest last."""


def accept(choices: Tensor, history: Tensor, rows: Tensor, out: Standing) -> None:
    """Compare every row's drafts with what was drawn in their places.

    choices: [2, lines] int32, tokens and problems, as `gpu_sampler.draw` leaves them: for each row one line after the
    token before its drafts and one after each draft.  history: [tokens, reach + 1] int64, each token of the step and
    those before it, the newest first.  rows: [3, rows] int32: first line, number of lines, and token of the step after
    which the first line was drawn.  out: written for as many places as there are rows; a draft that was drawn out of
    unusable logits is not accepted.
    """
    count, reach = rows.shape[1], out.before.shape[1]
    check(history.is_contiguous() and history.shape[1] == reach + 1, "history reaches as far as what is kept of it")
    check(choices.stride(1) == 1 and rows.is_contiguous(), "choices and rows lie end to end")
    if not count:
        return
    if not runs_kernels(choices):
        _twin(choices, history, rows, out)
        return
    _accept_kernel[(count,)](
        choices,
        choices.stride(0),
        history,
        rows,
        count,
        out.newest,
        out.problems,
        out.rejected,
        out.before,
        reach,
        LINES=MOST_LINES,
        REACH=power_of_two(max(reach, 1)),
        num_warps=1,
    )


def _twin(choices: Tensor, history: Tensor, rows: Tensor, out: Standing) -> None:
    reach = out.before.shape[1]
    for place, (start, lines, token) in enumerate(rows.T.tolist()):
        tokens, problems = choices[:, start : start + lines].tolist()
        drafts = history[token + 1 : token + lines, 0].tolist()
        right = 0
        while right < lines - 1 and not problems[right] and tokens[right] == drafts[right]:
            right += 1
        out.newest[place], out.problems[place] = tokens[right], problems[right]
        out.rejected[place] = lines - 1 - right
        out.before[place] = history[token + right, :reach].flip(0).int()


@triton.jit
def _accept_kernel(
    choices: tl.tensor,
    stride: tl.tensor,
    history: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    newest: tl.tensor,
    problems: tl.tensor,
    rejected: tl.tensor,
    before: tl.tensor,
    reach: tl.tensor,
    LINES: tl.constexpr,
    REACH: tl.constexpr,
) -> None:
    place = tl.program_id(0)
    start = tl.load(rows + place)
    lines = tl.load(rows + count + place)
    token = tl.load(rows + 2 * count + place).to(tl.int64)
    width = reach + 1
    line = tl.arange(0, LINES)
    inside = line < lines
    drawn = tl.load(choices + start + line, mask=inside, other=0)
    problem = tl.load(choices + stride + start + line, mask=inside, other=1)
    is_draft = line < lines - 1
    draft = tl.load(history + (token + 1 + line) * width, mask=is_draft, other=-1)
    is_right = is_draft & (problem == 0) & (drawn.to(tl.int64) == draft)
    right = tl.min(tl.where(is_right, LINES, line), 0)
    tl.store(newest + place, tl.sum(tl.where(line == right, drawn, 0), 0))
    tl.store(problems + place, tl.sum(tl.where(line == right, problem, 0), 0))
    tl.store(rejected + place, lines - 1 - right)
    at = tl.arange(0, REACH)
    kept = tl.load(history + (token + right) * width + reach - 1 - at, mask=at < reach, other=0)
    tl.store(before + place * reach + at, kept.to(tl.int32), mask=at < reach)

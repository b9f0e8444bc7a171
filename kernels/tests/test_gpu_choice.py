"""The choice that reads words: the same indices as its twin, interpreted."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels here, is not installed")

from kernels.ops import gpu_choice, gpu_index
from kernels.ops.gpu_choice import select_by_words, takes
from kernels.ops.gpu_index import select, select_by_counting
from kernels.ops.gpu_launch import interpreted

STEP = 16


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few groups that a row takes several."""
    monkeypatch.setattr(gpu_choice, "STEP", STEP)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_chosen(scores: torch.Tensor, seen: torch.Tensor, count: int) -> None:
    expected = select(scores, seen, count=count)
    with interpreted():
        got = select_by_words(scores, seen, count=count)

    assert torch.equal(expected, got), count


@pytest.mark.slow
def test_a_choice_by_words_is_the_choice() -> None:
    """Ties within, across and at the edge of groups, more level groups than are listed, and rows that see little.

    NaN of both signs, infinity, both zeros, denormals, and what lies behind the last score that is seen.
    """
    scores = (draw(10, 200, seed=3) * 2).round().bfloat16()
    scores[0], scores[1], scores[1, 70:] = 1.0, float("-inf"), -2.0
    scores[2, :8], scores[2, 24:32] = -9.0, -9.0
    scores[2, 5], scores[3], scores[4] = float("nan"), -0.0, draw(200, seed=4).bfloat16()
    scores[3, ::2], scores[5], scores[5, 7::8] = 0.0, -1.0, 3.0
    scores.view(torch.int16)[2, 30] = -1
    scores[2, 100:], scores[6, 9:], scores[8, 17] = float("nan"), float("inf"), float("inf")
    scores[9] = (draw(200, seed=5) * 1e-39).bfloat16()
    seen = torch.tensor([200, 200, 83, 200, 193, 200, 9, 0, 199, 200]).int()
    for rows, count in ((10, 20), (3, 3)):
        assert_chosen(scores[:rows], seen[:rows], count)


@pytest.mark.slow
def test_wherever_a_row_ends_only_what_is_seen_is_chosen() -> None:
    """Every end within two groups and at the edges of a turn; rows as wide as one turn, and wider than it."""
    for width in (STEP * 8, STEP * 8 + 8):
        ends = torch.tensor([*range(18), STEP * 8 - 1, STEP * 8, width - 3, width, width + 5, -1]).int()
        scores = draw(len(ends), width, seed=width).bfloat16()
        scores.masked_fill_(torch.arange(width) >= ends[:, None], float("inf"))  # nobody wrote them
        for count in (1, 4):
            assert_chosen(scores, ends, count)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_any_spread_are_chosen(seed: int) -> None:
    """From all nearly equal to many binades apart: thresholds are sought between the lowest and the highest only."""
    spread = torch.logspace(-3, 3, 6)[:, None] * draw(6, 400, seed=seed)
    scores = (torch.exp(spread).clamp(1e-30, 1e30) * draw(6, 400, seed=seed + 9).sign()).bfloat16()
    seen = torch.tensor([400, 399, 390, 161, 120, 96]).int()
    assert_chosen(scores, seen, 11)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "count", "is_by_words"), [(256, 40, True), (260, 40, False), (2056, 1025, False)])
def test_rows_of_whole_groups_are_chosen_from_by_words(
    width: int, count: int, is_by_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any others by counting, and so are those of which very many are chosen; it makes the same of all of them."""
    taken = []

    def noted(scores: torch.Tensor, seen: torch.Tensor, *, count: int) -> torch.Tensor:
        taken.append(count)
        return select_by_words(scores, seen, count=count)

    monkeypatch.setattr(gpu_index, "select_by_words", noted)
    scores, seen = (draw(3, width) * 2).round().bfloat16(), torch.tensor([width, width - 9, 30]).int()
    expected = select(scores, seen, count=count)
    with interpreted():
        got, counted = (choose(scores, seen, count=count) for choose in (select, select_by_counting))

    assert is_by_words == takes(width, count) == bool(taken)
    assert torch.equal(expected, got)
    assert torch.equal(expected, counted)


def test_more_than_registers_hold_are_not_chosen_by_words() -> None:
    with pytest.raises(ValueError, match="at most 1024"):
        select_by_words(draw(1, 4096).bfloat16(), torch.tensor([4096]).int(), count=1025)

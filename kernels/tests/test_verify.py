"""Accepting drafts: our rule, and DeepInfer's numbers, rows and decisions."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.ops.verify import (
    DRAFT_SEED_OFFSET,
    Use,
    VerifiedRow,
    accepted,
    draw,
    row_position,
    transformed,
    uniform,
    verify,
)
from kernels.tests.golden_files import golden, golden_json

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(drafts=TOKENS, choices=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_accepted_drafts_are_the_choices_up_to_the_first_difference(drafts: list[int], choices: list[int]) -> None:
    """What a step emits is what the sampler chose, and the first refused draft is indeed another token."""
    count = accepted(drafts, choices)

    assert drafts[:count] == choices[:count]
    assert count == len(drafts) or drafts[count] != choices[count]


def test_every_draft_needs_a_choice() -> None:
    """A draft that no row verified cannot be accepted by accident."""
    with pytest.raises(ValueError, match="2 drafts have 1 choices"):
        accepted([1, 2], [1])


def test_rollback_accepts_the_golden_counts() -> None:
    """Greedy verification accepts exactly as many of the given drafts, and emits plain greedy decoding."""
    rollback = golden_json("dspark/rollback.exact")
    answer = rollback["greedy"][1:]
    for step in rollback["steps"]:
        count = accepted(step["drafts"], answer)
        assert step["accepted"] == count
        assert step["emitted"] == answer[: count + 1]
        answer = answer[count + 1 :]


def test_numbers_are_the_golden_ones() -> None:
    """All seeds up to 2^64 - 1 and both ends of the 32 bit positions, in every bit."""
    for case in golden_json("dspark/rng"):
        assert case["u"] == uniform(case["seed"], case["position"], Use(case["case"]))


@pytest.mark.parametrize("case", range(24))
def test_verify_steps_are_the_golden_ones(case: int) -> None:
    """Positions that wrap, acceptance, residual and fresh tokens, with and without truncation, greedy too."""
    step = golden_json("dspark/verify_cases")[case]
    target, draft = (
        transformed(
            golden(f"verify.{case}.{name}"),
            temperature=step["temperature"],
            top_p=step["top_p"],
            top_k=step["top_k"],
        )
        for name in ("target", "draft")
    )

    rows = verify(target, draft, step["draft_tokens"], seed=step["seed"], base=step["sample_position"])

    for index, (wanted, row) in enumerate(zip(step["rows"], rows, strict=True)):
        assert wanted["pos"] == row_position(step["sample_position"], index)
        assert_row(wanted, row)
    count = next((index for index, row in enumerate(rows) if not row.is_accepted), len(step["draft_tokens"]))
    assert step["accepted"] == count
    assert step["emitted"] == [row.token for row in rows[: count + 1]]


@pytest.mark.parametrize("name", ["exact.t0_n17", "exact.t1_n17", "exact.t1_n48", "exact.t07_n48"])
def test_whole_answers_are_the_golden_ones(name: str) -> None:
    """From the golden logits: drafts drawn, verified and emitted step by step are the reference's."""
    answer = golden_json(f"dspark/dspark.{name}")
    cut = {key: answer[key] for key in ("temperature", "top_p", "top_k")}
    draft: torch.Tensor | None = None
    drafted: list[int] = []
    for index, step in enumerate(answer["steps"]):
        target = transformed(golden(f"dspark.{name}.step{index}.target_logits"), **cut)
        shown = target[:0] if draft is None else draft

        rows = verify(target, shown, drafted, seed=answer["seed"], base=step["sample_position"])

        count = next((row for row, each in enumerate(rows) if not each.is_accepted), len(drafted))
        assert step["emitted"] == [row.token for row in rows[: count + 1]]
        draft = transformed(golden(f"dspark.{name}.step{index}.draft_logits"), **cut)
        seed = (answer["seed"] + DRAFT_SEED_OFFSET) % 2**64
        first = step["sample_position"] + count + 1
        drafted = [draw(row.exp(), uniform(seed, first + place, Use.DRAW)) for place, row in enumerate(draft)]
        assert step["draft_sample_positions"] == [first + place for place in range(len(drafted))]
        assert step["drafted"] == drafted


def assert_row(wanted: dict[str, Any], row: VerifiedRow) -> None:
    assert (wanted["accept"], wanted["token"]) == (row.is_accepted, row.token)
    # fp32 softmax of another library version: a few roundings.
    assert wanted.get("accept_prob_token", 1.0) == pytest.approx(row.accept_prob, abs=2e-6)
    assert wanted.get("accept_estimate", 1.0) == pytest.approx(row.accept_estimate, abs=2e-6)


def test_truncation_keeps_at_least_the_likeliest_token() -> None:
    """Top-p 0 and top-k 1 are greedy; of equal logits, however many, the lowest id stays."""
    logits = torch.tensor([[0.0] + [2.0] * 999])

    for top_p, top_k in ((0.0, -1), (1.0, 1)):
        kept = transformed(logits, temperature=1.0, top_p=top_p, top_k=top_k)
        assert [1] == kept[0].isfinite().nonzero().flatten().tolist()


def test_a_draw_never_names_a_token_of_no_weight() -> None:
    """Neither the smallest number nor one next to 1 falls on a token that was cut."""
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])

    assert 1 == draw(weights, 0.0)
    assert 3 == draw(weights, 1.0 - 2.0**-53)

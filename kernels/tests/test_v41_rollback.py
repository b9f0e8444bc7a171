"""Rejected drafts leave no trace: up to the backtrack of 6 tokens may be taken back, 7 are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.batch import Replay, Row
from kernels.models.model import BadBatch
from kernels.tests.golden_files import golden, golden_json
from kernels.tests.v41_rig import IDS, all_logits, blocks_of, caches, prefill, row_of, run, start

QUICK = ((37, 6), (64, 3))
OFTEN = ((37, 1), (64, 1), (64, 6))
SHALLOW = "shallow kvq"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Caches made in inference mode are written in it only."""
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("numerics", ["exact", pytest.param("quant", marks=pytest.mark.slow)])
def test_greedy_verification_accepts_what_the_reference_accepts(numerics) -> None:
    """Six steps with given drafts, of which 5, 2, 0, 4, 1 and 3 are accepted: the emitted tokens are plain greedy's."""
    case = golden_json(f"dspark/rollback.{numerics}")
    tokens = golden(f"seq.{case['prompt']}.ids").tolist()
    start(numerics)
    tokens.append(int(run(numerics, row_of(tokens, 0, len(tokens)))[0].argmax()))
    for step in case["steps"]:
        position = len(tokens) - 1
        drafted = [*tokens, *step["drafts"]]
        choices = all_logits(numerics, row_of(drafted, position, len(drafted))).argmax(dim=1).tolist()
        accepted = next((n for n, draft in enumerate(step["drafts"]) if draft != choices[n]), len(step["drafts"]))
        assert (step["accepted"], step["emitted"]) == (accepted, choices[: accepted + 1])
        tokens += choices[: accepted + 1]
    assert case["greedy"][: len(tokens) - 17] == tokens[17:]


@pytest.mark.parametrize(
    ("position", "depth"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OFTEN),
        *(
            pytest.param(at, n, marks=pytest.mark.long)
            for at in (37, 64)
            for n in range(1, 7)
            if (at, n) not in (*QUICK, *OFTEN)
        ),
    ],
)
def test_any_depth_up_to_six_leaves_no_trace(depth, position) -> None:
    """Wrong tokens, then the right ones in their place: logits, blocks and window as if they had never been."""
    expected = prefill(SHALLOW, IDS[: position + 8], sequence=2)
    wrong = [*IDS[:position], *((IDS[position + n] + 1) % 320 for n in range(depth))]
    prefill(SHALLOW, IDS[:position])
    run(SHALLOW, row_of(wrong, position, position + depth))
    logits = run(SHALLOW, row_of(IDS, position, position + 8))[0]

    assert torch.equal(expected, logits)
    assert caches(SHALLOW, position + 8, 2)[:-1] == caches(SHALLOW, position + 8)[:-1]
    continued = [run(SHALLOW, row_of(IDS, position + 8, position + 30, sequence=sequence))[0] for sequence in (1, 2)]
    assert torch.equal(*continued)


@pytest.mark.slow
def test_a_prompts_own_tokens_can_be_taken_back() -> None:
    """All six of a prompt computed whole: its rings keep the keys from before them, which nobody else wrote."""
    expected = prefill(SHALLOW, IDS[:48], sequence=2)
    prefill(SHALLOW, [*IDS[:34], *(token + 1 for token in IDS[:6])])

    assert torch.equal(expected, run(SHALLOW, row_of(IDS, 34, 48))[0])
    assert caches(SHALLOW, 48, 2)[:-1] == caches(SHALLOW, 48)[:-1]


def test_seven_tokens_cannot_be_taken_back() -> None:
    """Their slots in the rings hold what came after: the row is refused before anything changes."""
    prefill(SHALLOW, IDS[:40])
    before = caches(SHALLOW, 40)
    with pytest.raises(BadBatch, match="at most 6 tokens"):
        run(SHALLOW, row_of(IDS, 33, 41))
    assert before == caches(SHALLOW, 40)
    run(SHALLOW, row_of(IDS, 34, 41))


@pytest.mark.slow
def test_depth_counts_from_the_newest_token_ever_seen() -> None:
    """Going back twice does not go back further: what the rejected tokens overwrote is gone."""
    prefill(SHALLOW, IDS[:40])
    run(SHALLOW, row_of(IDS, 35, 37))
    with pytest.raises(BadBatch, match="at most 6 tokens"):
        run(SHALLOW, row_of(IDS, 33, 41))
    with pytest.raises(BadBatch, match="its window ends at 37"):
        run(SHALLOW, row_of(IDS, 38, 41))
    run(SHALLOW, row_of(IDS, 34, 41))


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("window slots", Row(1, [1], 0, (1,))),
        ("window slots", Row(1, [1], 0, (1,), window=99)),
        ("its table has 1", Row(1, IDS[:17], 0, (1,), window=1)),
        ("block ids", Row(1, [1], 0, (0,), window=1)),
        ("token ids", Row(1, [320], 0, (1,), window=1)),
        ("token ids", Row(1, [-1], 0, (1,), window=1)),
        ("stand where its images do", Row(1, [322], 0, (1,), window=1)),
        ("at least one token", Row(1, [], 0, (1,), window=1)),
        ("tokens before it", Row(1, [5], 40, blocks_of(1), window=1, preceding=(3,), replay=Replay(window_from=40))),
    ],
)
def test_bad_rows_are_refused_by_name(message, row) -> None:
    """Before anything changes, in words that name the rule."""
    start(SHALLOW)
    before = caches(SHALLOW, 40)
    with pytest.raises(BadBatch, match=message):
        run(SHALLOW, row)
    assert before == caches(SHALLOW, 40)


def test_one_window_serves_one_row_of_a_batch() -> None:
    """Two rows on one state would race."""
    start(SHALLOW)
    with pytest.raises(BadBatch, match="another row"):
        run(SHALLOW, row_of(IDS, 0, 3), row_of(IDS, 0, 3))

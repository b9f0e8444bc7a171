"""What the device's sampler is told, in how much memory, and that what is captured serves every request."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.batch import Batch, Row, SamplingParams
from kernels.models.gpu import draws
from kernels.models.gpu.asking import LEVELS, features_of, level_of
from kernels.models.gpu.draws import Drawer, Seen
from kernels.models.gpu.staging import Staging, TableUpdates
from kernels.models.host_draws import draw_rows
from kernels.ops.gpu_sampler import Features

VOCABULARY = 320
GREEDY = SamplingParams(temperature=0.0)
EVEN = bytes([0b01010101]) * 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stagings_of(drawer: Drawer) -> list[int]:
    """Where its buffers are."""
    return [each.on_device.data_ptr() for each in vars(drawer).values() if isinstance(each, Staging)]


def rows() -> tuple[Row, ...]:
    """Every kind of row that is drawn for, some of them with drafts."""
    history = [(index * 31 + 7) % VOCABULARY for index in range(90)]
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.1)
    biased = SamplingParams(temperature=0.8, seed=4, logit_bias=((5, 9.0), (200, 8.5)))
    plain = Row(1, (3,), 40, (1,), SamplingParams(temperature=0.7, seed=9))
    return (
        plain,
        replace(plain, sequence=2, sampling=penalised, history=history, num_prompt_tokens=30),
        replace(plain, sequence=3, token_ids=(3, 17, 18), sampling=GREEDY, num_drafts=2),
        replace(plain, sequence=4, sampling=biased, allowed_mask=EVEN),
        replace(plain, sequence=5, sampling=penalised, history=history[:50], num_prompt_tokens=9),
        replace(plain, sequence=6, sampling=replace(GREEDY, num_logprobs=2)),
        replace(plain, sequence=7, allowed_mask=bytes(3)),
        replace(plain, sequence=8, token_ids=(3, 90), sampling=GREEDY, num_drafts=1),
        replace(plain, sequence=9, allowed_mask=bytes(40)),
    )


@pytest.mark.slow
def test_what_changes_logits_is_told_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, logprobs, accepted drafts and refusals are the host's, however few lines are adjusted at a time."""
    monkeypatch.setattr(draws, "GROUP_LINES", 5)
    batch = rows()
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    logits[2, 17], logits[3, 18], logits[8, 90] = 20.0, -20.0, -20.0
    drawer = Drawer(VOCABULARY, 16, DEVICE, reach=1, verifies=True)
    before = stagings_of(drawer)
    history = torch.tensor([[token, 0] for row in batch for token in row.token_ids], device=DEVICE)
    got = drawer.draw(batch, logits.to(DEVICE), seen=Seen(history, batch)).wait()
    expected = draw_rows(Batch(batch), logits)

    assert [each.token_id for each in expected] == [each.token_id for each in got]
    assert [(), (17,), ()] == [got[at].accepted for at in (0, 2, 7)]
    assert [each.accepted for each in expected] == [each.accepted for each in got]
    assert [token for token, _ in expected[5].top] == [token for token, _ in got[5].top]
    assert expected[5].logprob == pytest.approx(got[5].logprob, abs=1e-5)
    assert "covers 24 of 320" in str(got[6].problem)
    assert "no token is left" in str(got[8].problem)
    assert before == stagings_of(drawer)


def test_the_most_that_a_row_can_ask_fits_what_is_allocated() -> None:
    """Penalties that name the whole vocabulary, and a mask, in every row: sent in pieces, nothing grows."""
    drawer = Drawer(VOCABULARY, 64, DEVICE)
    drawer._most_bytes = drawer._asking.most_row_bytes - 64 * 8
    drawer._staging = Staging(DEVICE, drawer._asking.most_row_bytes)
    before = stagings_of(drawer)
    params = SamplingParams(temperature=0.0, presence_penalty=0.5)
    everything = list(range(VOCABULARY))
    batch = tuple(Row(at, (3,), 400, (1,), params, everything, 0, allowed_mask=EVEN) for at in range(3))
    got = drawer.draw(batch, torch.randn(3, VOCABULARY, device=DEVICE)).wait()

    assert all(each.problem is None and each.token_id % 2 == 0 for each in got)
    assert before == stagings_of(drawer)


def test_tables_are_told_in_pieces() -> None:
    """However much changes at a time: in order, and without a larger buffer."""
    tables = torch.zeros(3, 70_000, dtype=torch.int32, device=DEVICE)
    updates = TableUpdates(tables)
    where = updates._staging.on_device.data_ptr()
    flat = torch.arange(3 * 70_000, dtype=torch.int32)
    updates.tell(torch.stack([flat, flat + 5], 1).numpy())

    assert torch.equal((flat + 5).view(3, 70_000), tables.cpu())
    assert where == updates._staging.on_device.data_ptr()


def test_what_is_captured_serves_all_that_rows_can_ask() -> None:
    """Every set of features has a level with all of them; logprobs, whose number is open, are drawn without a graph."""
    for noise, top_k, top_p, min_p in product((False, True), repeat=4):
        level = level_of(Features(noise=noise, top_k=top_k, top_p=top_p, min_p=min_p))
        assert level in LEVELS
        assert (level.noise, level.top_k, level.top_p, level.min_p) >= (noise, False, False, False)
        assert all(
            getattr(level, name) or not asked
            for name, asked in (("noise", noise), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
        )
    assert Features() == level_of(Features())
    assert level_of(Features(num_top=0)) is None


@pytest.mark.slow
def test_a_row_is_drawn_alike_at_every_level_that_serves_it() -> None:
    """What a request does not ask for cuts nothing off."""
    drawer = Drawer(VOCABULARY, 4, DEVICE)
    asked = [SamplingParams(temperature=0.9, seed=3), SamplingParams(temperature=1.1, top_p=0.7, seed=8), GREEDY]
    batch = tuple(Row(at, (3,), 40, (1,), params) for at, params in enumerate(asked))
    logits = torch.randn(3, VOCABULARY) * 2
    expected = [each.token_id for each in draw_rows(Batch(batch), logits)]
    told = [drawer._asking.of(row) for row in batch]
    assert features_of(told) == LEVELS[2]
    keyed = drawer._keyed(drawer._asking.told(batch, told, torch.ones(3).long().numpy(), drawer._earlier))
    drawer._launch(logits.to(DEVICE), keyed, LEVELS[3], drawer._results)

    assert expected == drawer.sampled[:3].tolist()

"""Bounded replay gives what the reference gives, `mask` is the oracle of `compact`, and shared blocks stay as they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.batch import Image, Replay
from kernels.models.model import BadBatch
from kernels.tests.golden_files import golden
from kernels.tests.v41_rig import IDS, all_logits, blocks_of, caches, model_of, prefill, row_of, run, start

BLOCK = 16
KEEP = 22
MODES = [("exact", 1e-4), pytest.param("quant", 0.25, marks=pytest.mark.slow)]


def rel(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Caches made in inference mode are written in it only."""
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("numerics", "most"), MODES)
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("n48", 22),
        pytest.param("n72", 30, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("n48", 30), ("n72", 22))),
    ],
)
def test_decoder_replay_equals_the_reference_and_its_mask(numerics, most, name, keep) -> None:
    """The kept rows' logits, and every byte of blocks and window: compact == mask == compact in odd chunks."""
    ids = golden(f"replay.{name}.ids").tolist()
    size = len(ids)
    mask, compact = Replay(keep_from=size - keep), Replay(keep_from=size - keep, compact=True)
    start(numerics)
    masked = all_logits(numerics, row_of(ids, 0, size, replay=mask))[-keep:]
    kept = caches(numerics, size)
    start(numerics)
    expected = golden(f"replay.{numerics}.{name}.keep{keep}")
    compacted = all_logits(numerics, row_of(ids, 0, size, replay=compact))

    assert rel(compacted, expected) < most
    assert torch.equal(masked, compacted)
    assert kept == caches(numerics, size)
    assert torch.equal(compacted[-1], prefill(numerics, ids, (7, 20, size - 25, size - 11), replay=compact))
    assert kept == caches(numerics, size)


@pytest.mark.slow
def test_what_decoder_replay_hides_is_not_stored_either() -> None:
    """Also when fewer tokens are kept than a ring has slots: those below leave every decoder ring as it was."""
    size, keep_from = 48, 38
    masked = prefill("kvq", IDS[:size], replay=Replay(keep_from=keep_from))
    kept = caches("kvq", size)
    compacted = prefill("kvq", IDS[:size], (7, 20, 39), replay=Replay(keep_from=keep_from, compact=True))

    assert torch.equal(masked, compacted)
    assert kept == caches("kvq", size)


@pytest.mark.slow
def test_images_stay_images_where_others_skip_the_decoder() -> None:
    """Beside batch mates, in chunks: `mask` is the oracle of `compact` for prompts with images too."""
    rows = [index % 7 / 7 - 0.5 for index in range(5 * 128)]
    image = Image(29, 5, struct.pack(f"<{len(rows)}f", *rows))
    ids = [*IDS[:29], 322, 321, 321, 321, 321, *IDS[34:48]]

    def logits(*, compact: bool) -> Tensor:
        replay = Replay(keep_from=26, compact=compact)
        mate = row_of(ids, 0, 40, sequence=2, replay=Replay(keep_from=18, compact=compact), images=(image,))
        return prefill("kvq", ids, (20,), mates=(mate,), replay=replay, images=(image,))

    masked = logits(compact=False)
    kept = caches("kvq", 48), caches("kvq", 40, 2)
    assert torch.equal(masked, logits(compact=True))
    assert kept == (caches("kvq", 48), caches("kvq", 40, 2))


@pytest.mark.slow
def test_decoder_layers_see_no_window_below_where_it_begins() -> None:
    """Whatever decoder replay keeps: an empty ring's zeros are not keys."""
    prefill("kvq", IDS[:64])
    model = model_of("kvq")
    blocks = [model.read_block(block) for block in blocks_of(1)[:4]]

    def logits(keep_from: int) -> Tensor:
        start("kvq")
        for block, payload in zip(blocks_of(1), blocks, strict=False):
            model.write_block(block, payload)
        return run("kvq", row_of(IDS, 48, 64, replay=Replay(window_from=48, write_from=64, keep_from=keep_from)))

    assert torch.equal(logits(48), logits(20))


def test_half_an_entry_is_not_written() -> None:
    """A window that begins between the two tokens of an entry lacks the first: the entry stays what it was."""
    model = model_of("kvq")
    prefill("kvq", IDS[:32])
    stream = model.layout.stream(2, "main.fp8-fp4")
    record = slice(stream.offset, stream.offset + stream.shape[1])
    block = blocks_of(1)[1]
    found = model.read_block(block)
    model.reset_window(1)
    run("kvq", row_of(IDS, 17, 32, replay=Replay(window_from=17)))

    assert found[record] == model.read_block(block)[record]


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "most"), MODES)
def test_hits_equal_the_reference(numerics, most) -> None:
    """90 tokens of which 80 were found: with a window state, without one, and rewriting or keeping the block before."""
    ids = golden("replay.n90.ids").tolist()
    size, model = len(ids), model_of(numerics)
    keep_from = size - KEEP
    start(numerics)
    run(numerics, row_of(ids, 0, 64, replay=Replay(keep_from=keep_from, compact=True)))
    state = model.read_window(1, encoder_only=True)
    blocks = [model.read_block(block) for block in blocks_of(1)[:4]]
    cold = all_logits(numerics, row_of(ids, 64, size, replay=Replay(keep_from=keep_from, compact=True)))
    assert rel(cold[-KEEP:], golden(f"hit.{numerics}.cold")) < most

    def warm(position: int, *, window: bytes = b"", **found: int) -> Tensor:
        start(numerics)
        for block, payload in zip(blocks_of(1), blocks, strict=False):
            model.write_block(block, payload)
        if window:
            model.write_window(1, window)
        return all_logits(
            numerics, row_of(ids, position, size, replay=Replay(keep_from=keep_from, compact=True, **found))
        )

    assert torch.equal(cold, warm(64, window=state, write_from=64))
    kept = warm(48, window_from=48, write_from=64)
    assert rel(kept[-KEEP:], golden(f"hit.{numerics}.nowindow_keep_cached")) < most
    assert blocks == [model.read_block(block) for block in blocks_of(1)[:4]]
    rewritten = warm(48, window_from=48)
    assert rel(rewritten[-KEEP:], golden(f"hit.{numerics}.nowindow")) < most
    assert blocks != [model.read_block(block) for block in blocks_of(1)[:4]]


@pytest.mark.parametrize("numerics", ["shallow kvq", pytest.param("shallow quant", marks=pytest.mark.slow)])
def test_an_exact_hit_gives_the_bits_of_a_cold_run(numerics) -> None:
    """Replay off: from a whole state, or from layers x (window - 1) tokens before the hit with an empty window."""
    model = model_of(numerics)
    ids, hit, size = IDS[:134], 112, 134
    expected = prefill(numerics, ids, (hit,))
    kept = caches(numerics, size)
    start(numerics, 2)
    for here, there in zip(blocks_of(1)[: hit // BLOCK], blocks_of(2), strict=False):
        model.write_block(there, model.read_block(here))
    begin = hit - model.spec.exact_tokens
    replay = Replay(window_from=begin, write_from=hit)

    run(numerics, row_of(ids, begin, begin + 33, sequence=2, replay=replay))
    logits = run(numerics, row_of(ids, begin + 33, size, sequence=2, replay=replay))[0]

    assert torch.equal(expected, logits)
    assert kept == caches(numerics, size, 2)


@pytest.mark.slow
def test_a_whole_state_continues_elsewhere_with_the_same_bits() -> None:
    """What a handoff relies on: blocks and one window state are all that a sequence is."""
    model = model_of("kvq")
    expected = prefill("kvq", IDS[:70], (49,))
    prefill("kvq", IDS[:49])
    state = model.read_window(1, encoder_only=False)
    assert model.spec.state_bytes == len(state)
    assert state[: model.spec.encoder_bytes] == model.read_window(1, encoder_only=True)
    start("kvq", 2)
    for here, there in zip(blocks_of(1)[:4], blocks_of(2), strict=False):
        model.write_block(there, memoryview(model.read_block(here)))
    model.write_window(2, memoryview(state))

    assert torch.equal(expected, run("kvq", row_of(IDS, 49, 70, sequence=2))[0])


@pytest.mark.parametrize(
    ("rule", "position", "replay"),
    [
        ("empty window", 16, Replay()),
        ("empty window", 16, Replay(window_from=8)),
        ("window_from", 16, Replay(window_from=17)),
        ("write_from", 0, Replay(write_from=8)),
    ],
)
def test_a_row_that_would_read_what_is_not_there_is_refused(rule, position, replay) -> None:
    """By a name the caller can act on, and with nothing changed."""
    start("kvq")
    before = caches("kvq", 32)
    with pytest.raises(BadBatch, match=rule):
        run("kvq", row_of(IDS, position, 32, replay=replay))
    assert before == caches("kvq", 32)


@pytest.mark.slow
def test_an_encoder_state_needs_decoder_replay_at_a_blocks_end() -> None:
    """Its decoder part is empty, so a row may start there only where decoder layers look at nothing before it."""
    prefill("kvq", IDS[:32])
    model = model_of("kvq")
    state = model.read_window(1, encoder_only=True)
    model.write_window(1, state)
    assert not any(model.read_window(1, encoder_only=False)[len(state) :]), "nothing of the sequence before is left"
    for position, replay in ((32, Replay()), (34, Replay(keep_from=38))):
        with pytest.raises(BadBatch, match="encoder state"):
            run("kvq", row_of(IDS, position, 40, replay=replay))
    run("kvq", row_of(IDS, 32, 60, replay=Replay(keep_from=38, compact=True)))

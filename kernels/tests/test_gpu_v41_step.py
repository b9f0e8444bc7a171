"""A V4.1 step as a GPU runs it, here by its kernels' twins, leaves the logits and records of the CPU's model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be interpreted")

from kernels.batch import Image, Replay
from kernels.models.gpu.v41 import planner
from kernels.models.gpu.v41.planner import extent_of
from kernels.tests.gpu_v41_rig import (
    PLAIN,
    SAME,
    SAME_BYTES,
    assert_same_layers,
    assert_same_step,
    begin,
    both,
    compute,
    gpu_model,
    records,
    rel,
    share,
)
from kernels.tests.v41_rig import IDS, Watcher, blocks_of, model_of, overlapping, row_of, run


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Caches made in inference mode are written in it only."""
    with torch.inference_mode():
        yield


def test_a_prompt_and_the_next_token_are_the_cpus() -> None:
    """A chunk that ends inside a pair and a block, then one token: logits, blocks, every ring."""
    begin(1)
    assert_same_step(row_of(IDS, 0, 17))
    assert_same_step(row_of(IDS, 17, 18))


@pytest.mark.slow
def test_chunks_of_any_length_are_the_cpus() -> None:
    """Rings wrap several times, entries outnumber those that may be chosen, candidate blocks those that are kept."""
    begin(1)
    for low, high in pairwise((0, 1, 7, 64, 101, 102, 160)):
        assert_same_step(row_of(IDS, low, high))


@pytest.mark.slow
def test_mixed_batches_are_the_cpus() -> None:
    """Single tokens of short and long sequences, drafts, and chunks, in one step; then again in another order."""
    begin(1, 2, 3, 4)
    assert_same_step(
        row_of(IDS, 0, 90, sequence=1), row_of(IDS[5:], 0, 3, sequence=2), row_of(IDS[9:], 0, 34, sequence=3)
    )
    rows = (
        row_of(IDS, 90, 91, sequence=1),
        row_of(IDS[5:], 3, 4, sequence=2),
        row_of(IDS[9:], 34, 39, sequence=3),
        row_of(IDS[2:], 0, 21, sequence=4),
    )
    assert_same_step(*rows)
    assert_same_step(
        row_of(IDS[2:], 21, 22, sequence=4), row_of(IDS[5:], 4, 60, sequence=2), row_of(IDS, 91, 92, sequence=1)
    )


@pytest.mark.slow
def test_rejected_drafts_leave_no_trace() -> None:
    """Six tokens are taken back and computed again, as others."""
    begin(1)
    wrong = [*IDS[:40], *(token + 1 for token in IDS[40:46])]
    both(row_of(IDS, 0, 40))
    both(row_of(wrong, 40, 46))
    assert_same_step(row_of(IDS, 40, 48))
    assert_same_step(row_of(IDS, 48, 49))


@pytest.mark.slow
@pytest.mark.parametrize("compact", [False, True])
def test_decoder_replay_is_the_cpus(compact: bool) -> None:
    """In odd chunks, beside a mate that replays nothing; what is hidden is not stored."""
    begin(1, 2)
    replay = Replay(keep_from=38, compact=compact)
    for low, high in ((0, 39), (39, 48)):
        assert_same_step(row_of(IDS, low, high, replay=replay), row_of(IDS[3:], low, high, sequence=2))
    assert_same_step(row_of(IDS, 48, 49, replay=replay))


@pytest.mark.slow
def test_a_prefix_hit_without_a_window_is_the_cpus() -> None:
    """Windows begin at the hit, blocks before it are read and never written."""
    begin(1, 2)
    both(row_of(IDS, 0, 64))
    kept = [gpu_model().read_block(block) for block in blocks_of(1)[:4]]
    for model in (model_of(PLAIN), gpu_model()):
        for block, payload in zip(blocks_of(2), kept, strict=False):
            model.write_block(block, payload)
    replay = Replay(window_from=48, write_from=64, keep_from=50, compact=True)
    assert_same_step(row_of(IDS, 48, 70, sequence=2, replay=replay))
    assert kept == [gpu_model().read_block(block) for block in blocks_of(2)[:4]]
    assert_same_step(row_of(IDS, 70, 71, sequence=2, replay=replay))


@pytest.mark.slow
def test_a_windows_state_moves_between_the_two() -> None:
    """Prefilled by the CPU's model, continued by the GPU's: bytes are the contract."""
    begin(1)
    run(PLAIN, row_of(IDS, 0, 48))
    plain, model = model_of(PLAIN), gpu_model()
    for block in blocks_of(1)[:3]:
        model.write_block(block, plain.read_block(block))
    model.write_window(1, plain.read_window(1, encoder_only=False))
    assert_same_step(row_of(IDS, 48, 60))


@pytest.mark.slow
@pytest.mark.parametrize("compact", [False, True])
def test_images_are_the_cpus(compact: bool) -> None:
    """Embeddings instead of tokens, their own routing, no n-gram memory; also where some skip the decoder."""
    begin(1, 2)
    values = [index % 7 / 7 - 0.5 for index in range(5 * 128)]
    image = Image(29, 5, struct.pack(f"<{len(values)}f", *values))
    ids = [*IDS[:29], 322, 321, 321, 321, 321, *IDS[34:48]]
    replay = Replay(keep_from=26, compact=compact)
    for low, high in ((0, 20), (20, 33), (33, 34), (34, 48)):
        row = row_of(ids, low, high, replay=replay, images=overlapping((image,), low, high))
        assert_same_step(row, row_of(IDS, low, high, sequence=2))


@pytest.mark.slow
def test_padding_is_inert() -> None:
    """A captured step's left-over tokens are poisoned throughout: real ones keep every bit, nobody's slots stay zero."""
    model, rows = gpu_model(), (row_of(IDS, 30, 31), row_of(IDS[40:], 30, 34, sequence=2))
    embedding = model._weights.embedding
    assert 0 not in {token for row in rows for token in row.token_ids}
    outcomes = []
    for poison in (0.0, float("nan"), 3e38):
        begin(1, 2)
        compute(row_of(IDS, 0, 30), row_of(IDS[40:], 0, 30, sequence=2))
        before = embedding[0].clone()
        embedding[0] = poison
        logits = compute(*rows)
        embedding[0] = before
        outcomes.append((logits, records(1, 31), records(2, 34)))
    assert outcomes[0][0].isfinite().all()
    for logits, *kept in outcomes[1:]:
        assert torch.equal(outcomes[0][0], logits)
        assert list(outcomes[0][1:]) == kept
    assert not model.cache.blocks[0].any()
    assert not model.cache.windows[0].any()


@pytest.mark.slow
def test_a_step_walked_is_the_step_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps in fixed sizes, and kernel by kernel with scores in slabs of a few tokens: the same records."""
    rows = (row_of(IDS, 80, 93), row_of(IDS[7:], 70, 71, sequence=2))
    outcomes = []
    for slab in (None, 93 * 4):
        begin(1, 2)
        compute(row_of(IDS, 0, 80), row_of(IDS[7:], 0, 70, sequence=2))
        if slab:
            monkeypatch.setattr(planner, "_SLAB_SCORES", slab)
            monkeypatch.setattr(gpu_model()._graphs, "takes", lambda _: False)
        outcomes.append((compute(*rows), records(1, 93), records(2, 71)))
    assert rel(outcomes[1][0], outcomes[0][0]) < SAME
    for theirs, ours in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        assert all(share(a, b) >= SAME_BYTES for a, b in zip(theirs[:-1], ours[:-1], strict=True))


@pytest.mark.parametrize(("counts", "ends"), [((1,), (1,)), ((13, 1, 4), (93, 70, 1000)), ((5,) * 9, (50,) * 9)])
def test_slabs_cover_a_step(counts: tuple[int, ...], ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token and every tile once, in order; no slab sees less than its tokens do."""
    monkeypatch.setattr(planner, "_SLAB_SCORES", 4 * max(ends))
    slabs = extent_of(counts, ends).slabs
    assert (0, sum(counts)) == (slabs[0].tokens.start, slabs[-1].tokens.stop)
    assert (0, sum(-(-count // 4) for count in counts)) == (slabs[0].tiles.start, slabs[-1].tiles.stop)
    for slab, after in pairwise(slabs):
        assert (slab.tokens.stop, slab.tiles.stop) == (after.tokens.start, after.tiles.start)
    seen = [end - count + 1 + at for count, end in zip(counts, ends, strict=True) for at in range(count)]
    assert all(max(seen[slab.tokens]) <= slab.end for slab in slabs)


@pytest.mark.slow
def test_the_kernels_do_what_their_twins_do() -> None:
    """The first layers of a step, interpreted: n-gram memory, a KV source with its index, experts, rings."""
    begin(1)
    both(row_of(IDS, 0, 38))
    watch, row = Watcher(), row_of(IDS, 38, 40)
    run(PLAIN, row, watch=watch)
    assert_same_layers(3, row, watch)


@pytest.mark.long
def test_a_whole_step_of_kernels_is_the_cpus() -> None:
    """Interpreted: two tokens of which the second closes a pair and a candidate block, then one alone."""
    for low, high in ((38, 40), (40, 41)):
        begin(1)
        both(row_of(IDS, 0, low))
        assert_same_step(row_of(IDS, low, high), interpreting=True)

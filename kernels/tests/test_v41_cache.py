"""V4.1's blocks and windows have the published sizes, cost what is read of them, and keep sequences apart."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from kernels.batch import Batch, Row
from kernels.kv.window import WindowSpec
from kernels.models.deepseek_v41 import OpenedV41
from kernels.models.v41.cache import V41Cache
from kernels.models.v41.config import V41Config, read_v41_config
from kernels.models.v41.layout import v41_layout, window_spec
from kernels.ops.numerics import EXACT, KVQ, QUANT
from kernels.tests.golden_files import golden, golden_names, tiny_v41
from kernels.tests.v41_rig import IDS, Watcher, blocks_of, model_of, prefill, row_of, run, start

CPU = torch.device("cpu")


def real_config() -> V41Config:
    """V4.1-Flash's sizes, as far as bytes depend on them."""
    tiny = read_v41_config(tiny_v41())
    return replace(
        tiny,
        num_layers=40,
        head_dim=512,
        index_dim=128,
        window_tokens=128,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20),
        kv_sources=(2, 8, 14, 20),
        index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
    )


def test_bytes_of_the_real_model() -> None:
    """113,920 a block, 1,415,040 of encoder windows, 3,042,336 + 86,016 a state."""
    config = real_config()
    layout = v41_layout(config, KVQ)

    assert (128, 113_920) == (layout.block_tokens, layout.block_bytes)
    assert WindowSpec(128, 6, 40, 20, 3_042_336 + 86_016, 1_415_040) == window_spec(config, layout)


def test_layouts_of_other_codecs_have_other_digests() -> None:
    """Processes whose records differ must not exchange them; the two real settings store the same bytes."""
    config = read_v41_config(tiny_v41())
    digests = [v41_layout(config, numerics).digest() for numerics in (EXACT, KVQ, QUANT)]
    assert (2, digests[1]) == (len(set(digests)), digests[2])
    assert 2_272 == v41_layout(config, KVQ).block_bytes


def test_reading_costs_the_same_in_a_large_pool() -> None:
    """An index into the pool copies the records it names: no more in 40,000 blocks than in 40."""
    config = read_v41_config(tiny_v41())
    layout = v41_layout(config, KVQ)
    blocks, places = torch.arange(1, 33), torch.zeros(32, dtype=torch.int64)
    keys = torch.randn(32, config.head_dim)

    def seconds(num_blocks: int) -> float:
        cache = V41Cache(config, layout, KVQ, num_blocks=num_blocks, num_windows=3, device=CPU)
        entries = cache.entries[2]
        best = 1.0
        for _ in range(20):
            begin = time.process_time()
            entries.write(blocks, places, keys, keys[:, : config.index_dim])
            entries.main(blocks, places)
            entries.index_keys(blocks)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(40_000) < 20 * seconds(40)  # 1,000 times the pool


@pytest.mark.slow
def test_poisoned_records_harm_no_batch_mate() -> None:
    """NaN in one sequence's blocks and window gives that row NaN, and its mate the usual bits."""
    prefill("kvq", IDS[:40], sequence=1)
    expected = run("kvq", row_of(IDS, 40, 41, sequence=1))
    prefill("kvq", IDS[:40], sequence=1)
    prefill("kvq", IDS[3:43], sequence=2)
    model = model_of("kvq")
    with torch.inference_mode():
        for block in blocks_of(2)[:3]:
            model.write_block(block, b"\xff" * model.layout.block_bytes)
        model.write_window(2, b"\xff" * model.layout.window_bytes)
    poisoned, mate = run("kvq", row_of(IDS[3:], 40, 41, sequence=2), row_of(IDS, 40, 41, sequence=1))

    assert torch.equal(expected[0], mate)
    assert poisoned.isnan().all()
    assert torch.equal(expected[0], prefill("kvq", IDS[:41], sequence=2))


def test_wrong_payloads_and_slots_are_refused() -> None:
    """Sizes and slots are checked at the door."""
    model = model_of("kvq")
    with pytest.raises(ValueError, match="a block has 2272 bytes"):
        model.write_block(1, b"")
    with pytest.raises(ValueError, match="block 0"):
        model.read_block(0)
    with pytest.raises(ValueError, match="window 0"):
        model.reset_window(0)
    with pytest.raises(ValueError, match="its encoder part"):
        model.write_window(1, bytes(5))


@pytest.mark.slow
def test_a_window_of_128_equals_the_reference(tmp_path) -> None:
    """The same weights with the real window and block length."""
    if not golden_names("w128.exact.logits"):
        pytest.skip("w128.exact.logits is only in the full golden folder")
    for file in tiny_v41().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text((tiny_v41() / "config_window128.json").read_text())
    assert 128 == json.loads((tmp_path / "config.json").read_text())["text_config"]["sliding_window"]
    opened = OpenedV41(tmp_path, numerics=EXACT, block_tokens=128, device=CPU, progress=lambda *_: None)
    ids = golden("seq.n200.ids").tolist()
    watch = Watcher()
    with torch.inference_mode():
        model = opened.build(num_blocks=4, num_windows=2)
        model.forward(Batch((Row(0, ids, 0, (1, 2), window=1),)), every_row=True, watch=watch)
        logits = model.weights.head.run(watch.seen["stream_final"], watch.seen["pre_final"])
    assert (golden("w128.exact.logits") - logits).abs().max() < 1e-3


def test_other_block_lengths_are_refused() -> None:
    """A block is as long as the window: saved states stand at its ends."""
    with pytest.raises(ValueError, match="blocks have 16 tokens"):
        OpenedV41(tiny_v41(), numerics=KVQ, block_tokens=128, device=CPU, progress=lambda *_: None)
    start("kvq")

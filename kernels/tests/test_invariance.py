"""A token's bits do not depend on how the work was cut, nor on what else was in the batch."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from kernels.batch import Batch, Row
from kernels.executor import Executor
from kernels.models.dense import DenseModel
from kernels.models.model import Dtype
from kernels.models.weights import BadWeights
from kernels.ops.row_tiles import NotInvariant
from kernels.tests.tiny_models import write_tiny

IDS = [(index * 37 + 11) % 320 for index in range(420)]
BOUNDARIES = (1, 2, 127, 128, 129, 255, 256, 257)
SETTINGS = [("fp32", 16), ("fp32", 128), ("bf16", 128), ("bf16", 16), ("int8", 16)]


@cache
def executor_of(dtype: Dtype, block_tokens: int) -> Executor:
    folder = write_tiny("llama", Path(mkdtemp(prefix="fathom-tiny-")), dtype=torch.bfloat16)
    return Executor.load(folder, dtype=dtype, threads=1, num_blocks=64 * 128 // block_tokens, block_tokens=block_tokens)


def table(executor: Executor, which: int, tokens: int = 420) -> range:
    per = -(-tokens // executor.layout.block_tokens)
    return range(1 + which * per, 1 + (which + 1) * per)


def compute(executor: Executor, ids, splits, which: int = 0, mates=()):
    """Logits of the last token, computed in pieces that start at `splits`."""
    logits = None
    for start, end in zip(splits, [*splits[1:], len(ids)], strict=True):
        row = Row(0, ids[start:end], start, table(executor, which))
        logits = executor.logits(Batch((*mates, row)))[-1]
    return logits


@pytest.mark.parametrize(("dtype", "block_tokens"), SETTINGS)
@pytest.mark.parametrize("tokens", BOUNDARIES)
def test_decode_token_equals_the_same_token_in_a_prefill(dtype, block_tokens, tokens) -> None:
    """Around every unit boundary, the last token alone gets the bits it gets at the end of a whole prompt."""
    executor = executor_of(dtype, block_tokens)
    ids = IDS[: tokens + 1]

    assert torch.equal(compute(executor, ids, [0]), compute(executor, ids, [0, tokens], which=1))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "block_tokens"), SETTINGS)
@pytest.mark.parametrize("splits", [[0, 1], [0, 100, 200, 300], [0, 128, 256, 384], [0, 63, 64, 65, 193, 419]])
def test_chunking_changes_nothing(dtype, block_tokens, splits) -> None:
    """However a prompt is cut, its last logits and its stored KV are the same bytes."""
    executor = executor_of(dtype, block_tokens)

    assert torch.equal(compute(executor, IDS, [0]), compute(executor, IDS, splits, which=1))
    for whole, cut in zip(table(executor, 0), table(executor, 1), strict=True):
        assert executor.read_block(whole) == executor.read_block(cut)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "block_tokens"), SETTINGS)
def test_batch_mates_change_nothing(dtype, block_tokens) -> None:
    """Seven decoding mates of other lengths, then a prefilling one, leave a row's bits alone."""
    executor = executor_of(dtype, block_tokens)
    lengths = (3, 50, 127, 128, 200, 300, 410)
    for which, length in enumerate(lengths, start=2):
        compute(executor, IDS[:length], [0], which=which)
    mates = tuple(Row(which, [7], length, table(executor, which)) for which, length in enumerate(lengths, start=2))
    prefilling = Row(9, IDS[40:], 0, table(executor, 9))

    alone = compute(executor, IDS[:301], [0])
    assert torch.equal(alone, compute(executor, IDS[:301], [0, 300], which=1, mates=mates))
    assert torch.equal(alone, compute(executor, IDS[:301], [0, 150, 300], which=1, mates=(*mates, prefilling)))
    decoded = executor.logits(Batch((mates[5],)))[0]
    assert torch.equal(decoded, executor.logits(Batch((prefilling, *mates)))[6])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_block_length_is_no_part_of_the_arithmetic(dtype) -> None:
    """Blocks of 16 and of 128 tokens give the same logits: the unit of attention is 128 keys either way."""
    assert torch.equal(compute(executor_of(dtype, 16), IDS, [0]), compute(executor_of(dtype, 128), IDS, [0, 77]))


@pytest.mark.slow
def test_thread_count_changes_nothing_here() -> None:
    """Prefill and decode may run with other thread counts; where that changed a bit the fingerprints would differ."""
    folder = write_tiny("qwen3", Path(mkdtemp(prefix="fathom-tiny-")))
    one = Executor.load(folder, dtype="bf16", num_blocks=40, threads=1)
    expected = compute(one, IDS, [0, 200])
    two = Executor.load(folder, dtype="bf16", num_blocks=40, threads=2)
    if one.fingerprint != two.fingerprint:
        pytest.skip(f"this machine computes other bits with two threads: {one.recipe} / {two.recipe}")

    assert torch.equal(expected, compute(two, IDS, [0]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_warm_up_proves_the_whole_model(dtype) -> None:
    """The start-up proof passes on a sound model and leaves the blocks zero."""
    executor = executor_of(dtype, 128)
    executor.warm_up()

    assert bytes(executor.layout.block_bytes) == executor.read_block(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_warm_up_refuses_weights_that_are_not_numbers(tmp_path, value) -> None:
    """By their name: every request would end without a token."""
    executor = Executor.load(write_tiny("mistral", tmp_path), dtype="fp32", threads=1, num_blocks=20)
    model = executor._model
    assert isinstance(model, DenseModel)
    down = model._model.layers[0].down.linear
    sound = down.apply
    down.apply = lambda rows: sound(rows) * value

    with pytest.raises(BadWeights, match="not finite"):
        executor.warm_up()


def test_warm_up_refuses_a_kernel_that_is_not_invariant(tmp_path) -> None:
    """A kernel whose bits depend on the row count is caught before it serves."""
    executor = Executor.load(write_tiny("mistral", tmp_path), dtype="fp32", threads=1, num_blocks=20)
    model = executor._model
    assert isinstance(model, DenseModel)
    down = model._model.layers[0].down.linear
    sound = down.apply
    down.apply = lambda rows: sound(rows) * (1.0 + 1e-6 * len(rows))

    with pytest.raises(NotInvariant, match="whole and in chunks"):
        executor.warm_up()
